import math

from kernel_specs import Spec
from kernel_specs.residual import pointers

STRIDES = tuple(f"{name}_{dim}" for name in "qkv" for dim in "bns")
INTEGERS = (
    "rows",
    "size",
    "slots",
    "most",
    "skipped",
    "last",
    "groups",
    "sample_positions",
    "rows_each",
)


def spec(
    dtype: str, half: int, rest: int, biased: bool, given: bool = False, scaled: bool = False
) -> Spec:
    types = pointers(dtype, "dq", "dk", "dv", "out")
    constants = {}
    for name, kind, there in (
        ("partial_ptr", "*fp32", biased),
        ("positions_ptr", "*i64", given),
        ("frequencies_ptr", "*fp64", scaled),
    ):
        if there:
            types[name] = kind
        else:
            constants[name] = None
    pairs = 1 << (max(half, 1) - 1).bit_length()
    cols = 1 << (max(rest, 1) - 1).bit_length()
    constants |= {
        "HALF": half,
        "REST": rest,
        "STEP": -math.log2(1e4) / max(half, 1),
        "MAGNITUDE": 1.2 if scaled else 1.0,
        "PAIRS": pairs,
        "COLS": cols,
        "ROWS": 1024 // max(pairs, cols),
        "STAGES": 3,
    }
    return Spec(
        {**types, **dict.fromkeys((*STRIDES, *INTEGERS), "i32")},
        constants,
        divisible=STRIDES,
        most_registers=128,
    )


SPECS = {
    "pack_kernel": [
        spec("bf16", 0, 128, True),
        spec("bf16", 64, 0, True),
        spec("bf16", 8, 48, False, True),
        spec("fp32", 0, 80, True),
        spec("fp16", 40, 0, False),
        spec("bf16", 0, 64, True),
        spec("fp32", 32, 0, True, True),
        spec("bf16", 128, 0, False),
        spec("bf16", 64, 0, True, scaled=True),
        spec("bf16", 48, 32, False, True, scaled=True),
    ]
}

import math

from kernel_specs import Spec
from kernel_specs.residual import pointers

INTEGERS = (
    "heads",
    "size",
    "x_sample",
    "x_head",
    "x_position",
    "offset",
    "sample_positions",
    "blocks",
    "groups",
)


def spec(dtype: str, half: int, given: bool, back: bool, scaled: bool = False) -> Spec:
    types, constants = ({"positions_ptr": "*i64"}, {}) if given else ({}, {"positions_ptr": None})
    if scaled:
        types["frequencies_ptr"] = "*fp64"
    else:
        constants["frequencies_ptr"] = None
    cols = 1 << (half - 1).bit_length()
    constants |= {
        "half": half,
        "STEP": -math.log2(1e4) / half,
        "MAGNITUDE": 1.2 if scaled else 1.0,
        "BACK": back,
        "HEADS": 8,
        "ROWS": 1024 // cols,
        "COLS": cols,
    }
    return Spec(
        {**pointers(dtype, "x", "y"), **types, **dict.fromkeys(INTEGERS, "i32")},
        constants,
        divisible=("x_sample", "x_head", "x_position"),
        most_registers=64,
    )


SPECS = {
    "rotary_kernel": [
        spec(t, half, given, back)
        for t in ("fp32", "fp16", "bf16")
        for half, given, back in (
            (32, False, False),
            (40, True, True),
            (64, True, True),
            (128, False, True),
        )
    ]
    + [spec("bf16", 64, given, given, scaled=True) for given in (False, True)]
}

from kernel_specs import Spec
from kernel_specs.residual import dropping, pointers

COLS = (16, 256, 1024, 4096, 8192)
SIZES = dict.fromkeys(("rows", "cols"), "i32")


def tile(cols: int, of_thread: int) -> tuple[dict[str, object], int]:
    return {"ROWS": max(1, 128 * of_thread // cols), "COLS": cols}, min(
        32, max(4, cols // (32 * of_thread))
    )


def forward(
    dtype: str, cols: int, adds: bool, drop: int = 0, centre: bool = True, newer: bool = True
) -> Spec:
    """newer: on all GPUs; else on those before Blackwell, where the widest rows are loaded in
    another order."""
    constants, warps = tile(cols, 16)
    absent = (*(() if adds else ("bias_of_x", "residual", "sum")), *(() if centre else ("bias",)))
    present = [
        n for n in ("x", "bias_of_x", "residual", "weight", "bias", "sum", "y") if n not in absent
    ]
    constants |= {f"{name}_ptr": None for name in absent} | {"CENTRE": centre}
    widest = dtype == "fp32" and not adds and cols > 8192
    constants |= {"EARLY": dtype != "fp32" or (widest and not newer)}
    types = {**pointers(dtype, *present), "stats_ptr": "*fp32", **SIZES, "eps": "fp32"}
    gpus = ((100, 120) if newer else (80, 90)) if widest else (80, 90, 100, 120)
    return Spec(
        **dropping(drop, types, constants),
        num_warps=warps,
        divisible=("cols",),
        most_registers=80 if drop else 64,
        capabilities=gpus,
    )


def backward(
    dtype: str,
    cols: int,
    adds: bool,
    with_bias: bool = False,
    drop: int = 0,
    centre: bool = True,
    stages: int = 0,
    capabilities: tuple[int, ...] = (),
) -> Spec:
    constants, warps = tile(cols, 16 if cols > 4096 else 8)
    absent = (*(() if adds else ("dsum",)), *(() if drop else ("dropped",)))
    present = [n for n in ("dy", "dsum", "x", "weight", "dx", "dropped") if n not in absent]
    constants |= {f"{name}_ptr": None for name in absent} | {
        "CENTRE": centre,
        "WITH_BIAS": with_bias,
    }
    constants |= {"STAGES": stages or (4 if cols <= 4096 else 2)}
    types = {
        **pointers(dtype, *present),
        **pointers("fp32", "stats", "partial"),
        **SIZES,
        "rows_each": "i32",
    }
    # 4 tiles of three tensors of 4096 float32 columns are more than an RTX card's shared memory
    gpus = (80, 90, 100) if (dtype, cols, adds) == ("fp32", 4096, True) else (80, 90, 100, 120)
    return Spec(
        **dropping(drop, types, constants),
        num_warps=warps,
        divisible=("cols",),
        most_registers=128,
        capabilities=capabilities or gpus,
    )


TYPES = ("fp32", "bf16")
RTX = (89, 120)
"""GPUs with 99 KiB of shared memory, in which 4 stages of the widest float32 rows would not fit."""
SPECS = {
    "norm_kernel": [
        *(
            forward(t, cols, adds, int(adds))
            for t in TYPES
            for cols in (*COLS, 16384)
            for adds in (False, True)
        ),
        forward("fp16", 1024, True, 1),
        forward("bf16", 4096, False, centre=False),
        forward("fp32", 16384, False, newer=False),
    ],
    "norm_backward_kernel": [
        *(backward(t, cols, False) for t in TYPES for cols in COLS),
        *(backward(t, cols, True, True, 1) for t in TYPES for cols in COLS[:-1]),
        *(backward(t, 8192, True, centre=centre) for t in TYPES for centre in (False, True)),
        backward("fp16", 1024, True, True, 1),
        backward("fp32", 4096, True, True, 1, stages=2, capabilities=RTX),
        backward("fp32", 8192, True, capabilities=RTX),
    ],
}

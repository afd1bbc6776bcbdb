from kernel_specs import Spec
from kernel_specs.residual import FULL, pointers

SIZES = dict.fromkeys(("rows", "cols", "blocks"), "i32")
WIDTHS = [(dtype, cols, True) for dtype in ("fp32", "bf16") for cols in (16, 1024)] + [
    ("fp16", 1024, False)
]


def forward(dtype: str, cols: int, biased: bool) -> Spec:
    types = pointers(dtype, "x", "y", *(("bias",) if biased else ()))
    constants = {} if biased else {"bias_ptr": None}
    return Spec(
        {**types, **SIZES},
        {**constants, "ROWS": 2048 // cols, "COLS": cols},
        divisible=("cols",),
        most_registers=FULL,
    )


def backward(dtype: str, cols: int, biased: bool) -> Spec:
    types = pointers(dtype, "dy", "x", "dx", *(("bias",) if biased else ()))
    extra = {"partial_ptr": "*fp32"} if biased else {}
    constants = {} if biased else {"bias_ptr": None, "partial_ptr": None}
    return Spec(
        {**types, **extra, **SIZES, "rows_each": "i32"},
        {**constants, "ROWS": 1024 // cols, "COLS": cols},
        divisible=("cols",),
        most_registers=128,
    )


SPECS = {
    "gelu_kernel": [forward(*kind) for kind in WIDTHS],
    "gelu_backward_kernel": [backward(*kind) for kind in WIDTHS],
    "swiglu_kernel": [forward(*kind) for kind in WIDTHS],
    "swiglu_backward_kernel": [backward(*kind) for kind in WIDTHS],
    "geglu_kernel": [forward(*kind) for kind in WIDTHS],
    "geglu_backward_kernel": [backward(*kind) for kind in WIDTHS],
}

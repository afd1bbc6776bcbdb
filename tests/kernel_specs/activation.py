from kernel_specs import Spec
from kernel_specs.residual import FULL, pointers

SIZES = dict.fromkeys(("rows", "cols", "blocks"), "i32")
TILES = [{"ROWS": 1024 // cols, "COLS": cols} for cols in (16, 512)]
KINDS = [(t, tile, True) for t in ("fp32", "bf16") for tile in TILES] + [("fp16", TILES[1], False)]


def forward(dtype: str, tile: dict[str, int], biased: bool) -> Spec:
    types, constants = pointers(dtype, "x", "y", *(("bias",) if biased else ())), {} if biased else {"bias_ptr": None}
    return Spec({**types, **SIZES}, {**constants, **tile}, divisible=("cols",), most_registers=FULL)


def backward(dtype: str, tile: dict[str, int], biased: bool) -> Spec:
    types = pointers(dtype, "dy", "x", "dx", *(("bias",) if biased else ()))
    extra = {"partial_ptr": "*fp32"} if biased else {}
    constants = {} if biased else {"bias_ptr": None, "partial_ptr": None}
    return Spec({**types, **extra, **SIZES, "rows_each": "i32"}, {**constants, **tile}, divisible=("cols",),
                most_registers=128)


SPECS = {
    "gelu_kernel": [forward(*kind) for kind in KINDS],
    "gelu_backward_kernel": [backward(*kind) for kind in KINDS],
    "swiglu_kernel": [forward(*kind) for kind in KINDS],
    "swiglu_backward_kernel": [backward(*kind) for kind in KINDS],
}

from kernel_specs import Spec
from kernel_specs.residual import pointers

SIZES = {**dict.fromkeys(("rows", "keys", "queries", "sample_rows"), "i32"), "scale": "fp32"}
WHOLE = [({"ROWS": max(1, 2048 // keys), "COLS": keys}, min(32, max(4, keys // 512)))
         for keys in (16, 256, 1024, 4096, 16384)]
WIDE = [({"ROWS": 1, "COLS": 2048}, 8)]


def forward(dtype: str, tile: dict[str, int], warps: int, causal: bool, padded: bool) -> Spec:
    types, constants = ({"real_ptr": "*i1"}, {}) if padded else ({}, {"real_ptr": None})
    return Spec({**pointers(dtype, "x", "y"), **types, **SIZES}, {**constants, "CAUSAL": causal, **tile}, warps,
                divisible=("keys",), most_registers=64)


def backward(dtype: str, tile: dict[str, int], warps: int, causal: bool) -> Spec:
    return Spec({**pointers(dtype, "dy", "y", "dx"), **SIZES}, {"CAUSAL": causal, **tile}, warps,
                divisible=("keys",), most_registers=64)


def all_of(make, tiles, *flags):
    return [make(t, *tile, *flag) for t in ("fp32", "bf16") for tile in tiles for flag in flags]


MASKS = [(False, True), (True, False)]
SPECS = {
    "softmax_kernel": [*all_of(forward, WHOLE, *MASKS), forward("fp16", *WHOLE[2], True, True)],
    "wide_softmax_kernel": all_of(forward, WIDE, *MASKS),
    "softmax_backward_kernel": [*all_of(backward, WHOLE, (True,)), backward("fp16", *WHOLE[2], False)],
    "wide_softmax_backward_kernel": all_of(backward, WIDE, (True,), (False,)),
}

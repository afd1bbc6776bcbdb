from kernel_specs import Spec
from kernel_specs.residual import pointers

BLOCK = {"COLS": 4096}
SUMS = {"stats_ptr": "*fp32", "partial_ptr": "*fp32", **dict.fromkeys(("rows", "cols", "blocks", "rows_each"), "i32")}


def wide(types: dict[str, str], centre: bool) -> Spec:
    return Spec({**types, "stats_ptr": "*fp32", "cols": "i32"}, {"CENTRE": centre, **BLOCK}, 8, divisible=("cols",),
                most_registers=128)


CASES = [(t, centre) for t in ("fp32", "bf16") for centre in (False, True)]
SPECS = {
    "wide_norm_kernel": [wide({**pointers(t, "x", "weight", "bias", "y"), "eps": "fp32"}, c) for t, c in CASES],
    "wide_backward_kernel": [wide(pointers(t, "dy", "dsum", "x", "weight", "dx"), c) for t, c in CASES],
    "columns_kernel": [Spec({**pointers(t, "dy", "x"), **SUMS}, {"CENTRE": c, "ROWS": 4, "COLS": 512},
                            divisible=("cols",), most_registers=128) for t, c in CASES],
}

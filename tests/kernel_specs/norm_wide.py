from kernel_specs import Spec
from kernel_specs.residual import pointers

BLOCK = {"COLS": 4096}
SUMS = {
    "stats_ptr": "*fp32",
    "partial_ptr": "*fp32",
    **dict.fromkeys(("rows", "cols", "blocks", "rows_each"), "i32"),
}


def wide(
    types: dict[str, str], centre: bool, capabilities: tuple[int, ...] = (80, 90, 100, 120)
) -> Spec:
    return Spec(
        {**types, "stats_ptr": "*fp32", "cols": "i32"},
        {"CENTRE": centre, **BLOCK},
        8,
        divisible=("cols",),
        most_registers=128,
        capabilities=capabilities,
    )


CASES = [(t, centre) for t in ("fp32", "bf16") for centre in (False, True)]
SPECS = {
    "wide_norm_kernel": [
        wide({**pointers(t, "x", "weight", "bias", "y"), "eps": "fp32"}, c) for t, c in CASES
    ],
    # float32 with centring spills 16 bytes on sm_120: a rare use of such a GPU, with rows wider
    # than 8192
    "wide_backward_kernel": [
        wide(
            pointers(t, "dy", "dsum", "x", "weight", "dx"),
            c,
            (80, 90, 100) if (t, c) == ("fp32", True) else (80, 90, 100, 120),
        )
        for t, c in CASES
    ],
    "columns_kernel": [
        Spec(
            {**pointers(t, "dy", "x"), **SUMS},
            {"CENTRE": c, "ROWS": 4, "COLS": 512},
            divisible=("cols",),
            most_registers=128,
        )
        for t, c in CASES
    ],
}

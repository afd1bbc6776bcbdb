from kernel_specs import Spec

WORDS = {
    **dict.fromkeys(("key0", "key1", "threshold", "sample_rows", "stride", "start"), "i32"),
    "scale": "fp32",
}
SIZES = dict.fromkeys(("rows", "cols", "blocks"), "i32")
FULL = 64  # registers of a thread that keep half of an SM's threads busy
NARROW = [{"ROWS": 1024 // cols, "COLS": cols} for cols in (16, 512)]
TILES = [(cols, {"ROWS": 2048 // cols, "COLS": cols}) for cols in (16, 512)]


def pointers(dtype: str, *names: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{dtype}" for name in names}


def dropping(drop: int, types: dict[str, str], constants: dict[str, object]) -> dict[str, dict]:
    """The arguments of a kernel with dropout of such a kind (see residual.dropout_words)."""
    if drop:
        types = {**types, "counter_ptr": "*i64"}
    else:
        constants = {**constants, "counter_ptr": None}
    return {"types": {**types, **WORDS}, "constants": {**constants, "DROP": drop}}


SPECS = {
    "add_kernel": [
        Spec(
            **dropping(drop, {**pointers(t, "x", "bias", "residual", "sum"), **SIZES}, tile),
            divisible=("cols",),
            most_registers=FULL,
        )
        for t in ("fp32", "bf16")
        for drop in (0, 1)
        for _, tile in TILES
    ]
    + [
        Spec(
            **dropping(
                2,
                {**pointers("bf16", "x", "residual", "sum"), **SIZES},
                {"bias_ptr": None, "ROWS": 4, "COLS": 512},
            )
        ),
    ],
    "drop_kernel": [
        Spec(
            **dropping(
                drop,
                {
                    **pointers(t, "dsum", "dropped"),
                    "partial_ptr": "*fp32",
                    **SIZES,
                    "rows_each": "i32",
                },
                tile,
            ),
            divisible=("cols",),
            most_registers=FULL,
        )
        for t in ("fp32", "bf16")
        for drop in (0, 1)
        for tile in NARROW
    ]
    + [
        Spec(
            **dropping(
                2,
                {**pointers("bf16", "dsum", "dropped"), **SIZES, "rows_each": "i32"},
                {"partial_ptr": None, "ROWS": 2, "COLS": 512},
            )
        ),
    ],
}

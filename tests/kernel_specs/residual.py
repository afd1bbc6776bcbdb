from kernel_specs import Spec

WORDS = {**dict.fromkeys(("key0", "key1", "step", "sample", "threshold"), "i32"), "scale": "fp32",
         "sample_rows": "i32", "stride": "i32", "start": "i32"}
SIZES = dict.fromkeys(("rows", "cols", "blocks"), "i32")
FULL = 64  # registers of a thread that keep half of an SM's threads busy
NARROW = [{"ROWS": 1024 // cols, "COLS": cols} for cols in (16, 512)]
TILES = [(cols, {"ROWS": 2048 // cols, "COLS": cols}) for cols in (16, 512)]


def pointers(dtype: str, *names: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{dtype}" for name in names}


SPECS = {
    "add_kernel": [
        Spec({**pointers(t, "x", "bias", "residual", "sum"), **SIZES, **WORDS}, {"DROP": drop, **tile},
             divisible=("cols",), most_registers=FULL)
        for t in ("fp32", "bf16") for drop in (0, 1) for _, tile in TILES
    ] + [
        Spec({**pointers("bf16", "x", "residual", "sum"), **SIZES, **WORDS},
             {"bias_ptr": None, "DROP": 2, "ROWS": 4, "COLS": 512}),
    ],
    "drop_kernel": [
        Spec({**pointers(t, "dsum", "dropped"), "partial_ptr": "*fp32", **SIZES, "rows_each": "i32", **WORDS},
             {"DROP": drop, **tile}, divisible=("cols",), most_registers=FULL)
        for t in ("fp32", "bf16") for drop in (0, 1) for tile in NARROW
    ] + [
        Spec({**pointers("bf16", "dsum", "dropped"), **SIZES, "rows_each": "i32", **WORDS},
             {"partial_ptr": None, "DROP": 2, "ROWS": 2, "COLS": 512}),
    ],
}

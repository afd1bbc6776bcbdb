from kernel_specs import Spec

SIZES = dict.fromkeys(("count", "rows", "cols", "blocks"), "i32")
FULL = 64  # registers of a thread that keep half of an SM's threads busy
TYPES = [
    ("fp32", "fp32", "fp32"),
    ("bf16", "fp32", "fp32"),
    ("bf16", "bf16", "fp32"),
    ("fp64", "fp64", "fp64"),
]


def pointers(**types: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{dtype}" for name, dtype in types.items()}


SPECS = {
    "rows_kernel": [
        Spec(
            {**pointers(ids="i64", weight=t, out=t), **SIZES, "start": "i32"},
            {"ROWS": 2048 // cols, "COLS": cols},
            divisible=("cols",),
            most_registers=FULL,
        )
        for t in ("fp32", "bf16")
        for cols in (16, 1024)
    ],
    "add_runs_kernel": [
        Spec(
            {**pointers(keys="i32", order=order, dy=dy, gradient=gradient, partial=wide), **SIZES},
            {"ROWS": 16, "COLS": 1024},
            divisible=divisible,
            most_registers=128 if wide == "fp32" else None,
        )
        for dy, gradient, wide in TYPES
        for order, divisible in (("i32", ("cols",)), ("i64", ()))
    ],
    "rank_kernel": [
        Spec(
            {
                **pointers(ids="i64", keys="i32", order="i32"),
                "count": "i32",
                "rows": "i32",
                "start": "i32",
            },
            {"ROWS": 16, "COLS": 128},
            most_registers=128,
        )
    ],
    "add_pieces_kernel": [
        Spec(
            {**pointers(keys="i32", gradient=gradient, partial=wide), **SIZES, "parts": "i32"},
            {"ROWS": 8, "COLS": 64, "PIECES": 16},
            divisible=("cols",),
            most_registers=FULL,
        )
        for _, gradient, wide in TYPES
    ],
}

from kernel_specs import Spec

INTEGERS = dict.fromkeys(("programs", "cols", "blocks"), "i32")
FULL = 64  # registers of a thread that keep half of an SM's threads busy

SPECS = {
    "sum_kernel": [
        Spec(
            {
                "partial_ptr": "*fp32",
                **dict.fromkeys(("first_ptr", "second_ptr", "third_ptr"), f"*{t}"),
                **INTEGERS,
            },
            {"SUMS": 2, "ROWS": rows, "COLS": 8192 // rows},
            8,
            divisible=("cols",),
            most_registers=FULL,
        )
        for t in ("fp32", "bf16")
        for rows in (1, 64, 512)
    ],
}

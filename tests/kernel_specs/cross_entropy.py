from kernel_specs import Spec
from kernel_specs.residual import FULL

SIZES = dict.fromkeys(("rows", "cols", "num_real"), "i32")
GRADIENT = [{"ROWS": 1, "COLS": 2048}, {"ROWS": 8, "COLS": 256}]
TYPES = ("fp32", "bf16", "fp16")

SPECS = {
    "statistics_kernel": [
        Spec(
            {"logits_ptr": f"*{t}", "column_ptr": "*i64", "out_ptr": "*fp32", **SIZES},
            {"WITH_SUM": with_sum, "LANES": 128, "VECTOR": 4 if t == "fp32" else 8},
            divisible=("cols",),
            most_registers=128,
        )
        for t in TYPES
        for with_sum in (False, True)
    ],
    "gradient_kernel": [
        Spec(
            {
                "gradient_ptr": f"*{t}",
                "logits_ptr": f"*{t}",
                "column_ptr": "*i64",
                "numbers_ptr": "*fp32",
                **SIZES,
                "blocks": "i32",
            },
            tile,
            divisible=("cols",),
            most_registers=FULL,
        )
        for t in TYPES
        for tile in GRADIENT
    ],
}

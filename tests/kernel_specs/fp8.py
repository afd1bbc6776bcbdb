from kernel_specs import Spec

CAPABILITIES = (
    90,
    100,
    120,
)  # e4m3 has instructions since 8.9, and rows with scales have products since 9.0
ROWS = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scale_ptr": "*fp32", "rows": "i32", "cols": "i32"}
SIZES = dict.fromkeys(("o", "i", "across"), "i32")
SPECS = {
    "quantize_rows_kernel": [
        Spec(
            ROWS,
            {"ROWS": rows, "COLS": cols, "WHOLE": whole},
            warps,
            divisible=("cols",),
            most_registers=64,
            capabilities=CAPABILITIES,
        )
        for rows, cols, whole, warps in (
            (1, 2048, True, 4),
            (1, 8192, True, 16),
            (1, 16384, True, 32),
            (1, 16384, False, 32),
            (128, 16, True, 4),
        )
    ],
    "weight_maxima_kernel": [
        Spec(
            {"weight_ptr": "*bf16", "maxima_ptr": "*i32", **SIZES},
            {"TILE": 128},
            8,
            divisible=("o", "i"),
            most_registers=128,
            capabilities=CAPABILITIES,
        )
    ],
    "quantize_weight_kernel": [
        Spec(
            {
                "weight_ptr": "*bf16",
                "maxima_ptr": "*i32",
                "rows_ptr": "*u8",
                "row_scale_ptr": "*fp32",
                "columns_ptr": "*u8",
                "column_scale_ptr": "*fp32",
                **SIZES,
            },
            {"TILE": 128},
            8,
            divisible=("o", "i"),
            most_registers=128,
            capabilities=CAPABILITIES,
        )
    ],
}

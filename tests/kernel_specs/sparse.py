from kernel_specs import Spec

BITS = {"ROWS": 256, "COLS": 8, "WIDTH": 8}
BYTES = {"ROWS": 8, "COLS": 256, "WIDTH": 255}
MESSAGE = {
    "x_ptr": "*fp32",
    "places_ptr": "*u8",
    "ends_ptr": "*i64",
    **dict.fromkeys(("n", "count", "rows"), "i32"),
}
FORMS = [("*fp32", {"ROUNDED": False, **BITS}), ("*i16", {"ROUNDED": True, **BYTES})]
SPECS = {
    "digits_kernel": [
        Spec(
            {
                "x_ptr": "*fp32",
                "found_ptr": "*i32",
                "partial_ptr": "*i32",
                "n": "i32",
                "shift": "i32",
            },
            {"SPAN": 16384, "BLOCK": 1024},
            most_registers=64,
        )
    ],
    "count_kernel": [
        Spec(
            {
                "x_ptr": "*fp32",
                "threshold_ptr": "*fp32",
                "counts_ptr": "*i64",
                "n": "i32",
                "piece": "i32",
            },
            {"BLOCK": 1024},
            most_registers=64,
        )
    ],
    "places_kernel": [
        Spec(
            {"places_ptr": "*u8", "counts_ptr": "*i64", "rows": "i32"},
            {"BITS": True, "ROWS": 256},
            most_registers=64,
        )
    ],
    "pack_kernel": [
        Spec(
            {**MESSAGE, "threshold_ptr": "*fp32", "values_ptr": values},
            form,
            num_warps=8,
            most_registers=80,
        )
        for values, form in FORMS
    ],
    "add_kernel": [
        Spec({**MESSAGE, "values_ptr": values}, form, num_warps=8, most_registers=64)
        for values, form in FORMS
    ],
}

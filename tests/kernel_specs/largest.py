from kernel_specs import Spec

CONSTANTS = [
    ("fp32", {"ITEM": 4, "ROUNDED": False, "COLS": 1024}, 8),
    ("fp16", {"ITEM": 2, "ROUNDED": True, "COLS": 256}, 2),
]
ARGUMENTS = {
    "largest_kernel": ({"message_ptr": "*u8"}, ("cols", "k", "row_bytes")),
    "pick_kernel": ({"values_ptr": "*u8", "places_ptr": "*u8"}, ("cols", "k", "places_stride")),
    "spread_kernel": (
        {"values_ptr": "*u8", "places_ptr": "*u8"},
        ("cols", "k", "values_stride", "places_stride"),
    ),
}
SPECS = {
    kernel: [
        Spec(
            {"x_ptr": f"*{dtype}", **pointers, **dict.fromkeys(sizes, "i32")},
            constants,
            num_warps,
            num_stages=1,
            divisible=("cols",),
            most_registers=96,
        )
        for dtype, constants, num_warps in CONSTANTS
    ]
    for kernel, (pointers, sizes) in ARGUMENTS.items()
}

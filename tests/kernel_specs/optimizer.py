import triton.language as tl

from kernel_specs import Spec

TABLE = {"chunks_ptr": "*i32", "addresses_ptr": "*i64", "sizes_ptr": "*i64"}
SIZES = {"CHUNK": 8192, "BLOCK": 512}
# registers of a thread that keep half, a quarter of an SM's threads busy
FULL = 64
HALF = 128
COPIES = {tl.float32: (None, tl.float32, tl.bfloat16, tl.float16), tl.float64: (None, tl.float64)}
WAYS = [
    (wide, copy, aligned)
    for wide, copies in COPIES.items()
    for copy in copies
    for aligned in (True, False)
    if aligned or copy in (None, tl.bfloat16)
]


def elementwise(
    wide: tl.dtype, copy: tl.dtype | None, aligned: bool, numbers: bool = True, **constants: bool
) -> Spec:
    types = {**TABLE, **({"numbers_ptr": "*fp64"} if numbers else {}), "count": "i32"}
    return Spec(
        types,
        {"TYPE": wide, "COPY": copy, "ALIGNED": aligned, **constants, **SIZES},
        most_registers=FULL if wide == tl.float32 and aligned else HALF,
    )


SPECS = {
    "adam_kernel": [
        *(elementwise(*way, PREDICTED=False, NESTEROV=False) for way in WAYS),
        *(
            elementwise(tl.float32, copy, True, PREDICTED=True, NESTEROV=True)
            for copy in (tl.float32, tl.bfloat16)
        ),
        elementwise(tl.float64, tl.float64, True, PREDICTED=True, NESTEROV=True),
    ],
    "move_kernel": [
        *(elementwise(*way, PREDICTED=False) for way in WAYS),
        elementwise(tl.float32, tl.bfloat16, True, PREDICTED=True),
    ],
    "extrapolate_kernel": [elementwise(*way, numbers=False, PREDICTED=False) for way in WAYS],
    "squares_kernel": [
        Spec(
            {**TABLE, "partial_ptr": "*fp64"},
            {"TYPE": wide, "ALIGNED": aligned, "CHUNK": 8192, "BLOCK": 1024},
            most_registers=FULL,
        )
        for wide in COPIES
        for aligned in (True, False)
    ],
    "add_squares_kernel": [
        Spec(
            {"firsts_ptr": "*i64", "partial_ptr": "*fp64", "out_ptr": "*fp64"},
            {"BLOCK": 1024},
            most_registers=FULL,
        )
    ],
}

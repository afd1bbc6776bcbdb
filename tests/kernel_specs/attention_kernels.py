from collections.abc import Iterator

from hybridpar.kernels.tiles import Tile, tiles_of
from kernel_specs import Spec

# compute capability, d, elements, causal, padding, dropout (1: a counter for 4 keys, 2: for one),
# grouped heads, by the copy engine
USES = [
    (90, 64, "bf16", True, False, 0, False, True),
    (80, 128, "bf16", True, False, 0, False, False),
    (90, 128, "bf16", True, False, 0, False, True),
    (80, 32, "fp16", False, True, 2, True, False),
    (90, 80, "bf16", False, True, 1, True, False),
    (80, 256, "bf16", True, True, 0, False, False),
    (90, 128, "bf16", True, True, 0, True, True),
    (90, 128, "bf16", True, False, 0, False, False),
    (90, 64, "bf16", True, False, 0, False, False),
    (90, 128, "bf16", True, False, 1, False, True),
    (90, 64, "fp32", True, False, 1, False, False),
]
LIMITS = [
    ((80, 64, "bf16", True, False, 0, False, False), ("first",)),
    ((90, 128, "bf16", True, False, 0, False, True), ("first",)),
    ((90, 128, "bf16", True, False, 0, True, True), ("window",)),
    ((80, 128, "bf16", True, False, 1, False, False), ("first", "window")),
    ((90, 64, "bf16", True, False, 0, False, True), ("first", "position", "window")),
    ((80, 128, "bf16", True, False, 1, True, False), ("first", "position", "mask_row")),
    ((90, 64, "bf16", True, False, 2, False, True), ("position", "mask_row")),
    ((90, 128, "bf16", True, False, 1, False, True), ("first", "position", "mask_row")),
    ((90, 128, "bf16", True, False, 0, True, True), ("window", "softcap")),
    ((80, 256, "bf16", True, False, 0, True, False), ("window", "softcap")),
]
"""Cases with first keys, positions of queries, rows of dropout's mask, a window, a soft-cap."""
SOFTCAPS = [
    (80, 64, "bf16", True, False, 0, False, False),
    (90, 128, "bf16", True, False, 0, False, True),
    (90, 256, "bf16", True, False, 0, True, False),
]
GPUS = (80, 89, 90, 100, 120)
"""A GPU of each group of tiles_of, and of those with 99 KiB one without and one with a copy
engine."""
CANDIDATES = [
    (gpu, d, "bf16", True, False, dropout, False, gpu >= 90)
    for gpu in GPUS
    for d in (64, 128)
    for dropout in (0, 1)
]
"""All tiles of these are compiled."""
INPUTS = ("q", "k", "v")
COUNTERS = dict.fromkeys(("key0", "key1", "threshold"), "i32")
POINTERS = {
    "forward_kernel": ("out", "lse"),
    "dq_kernel": ("dout", "out", "lse", "delta", "dq"),
    "dkdv_kernel": ("dout", "lse", "delta", "dk", "dv"),
}


Use = tuple[int, int, str, bool, bool, int, bool, bool]


def specs(kernel: str) -> Iterator[Spec]:
    for use in USES:
        yield spec(kernel, use, tiles(kernel, use)[0])
    for use, limits in LIMITS:
        yield spec(kernel, use, tiles(kernel, use, limited=True)[0], limits)
    for use in SOFTCAPS:
        yield spec(kernel, use, tiles(kernel, use)[0], ("softcap",))
    for use in CANDIDATES:
        for tile in tiles(kernel, use):
            yield spec(kernel, use, tile)


def tiles(kernel: str, use: Use, *, limited: bool = False) -> tuple[Tile, ...]:
    capability, d, element, _, padded, dropout, grouped, engine = use
    pointers = (
        limited
        or padded
        or (grouped and kernel == "dkdv_kernel")
        or (capability >= 90 and not engine)
    )
    return tiles_of(
        kernel,
        1 << (d - 1).bit_length(),
        4 if element == "fp32" else 2,
        capability,
        2 if dropout else int(pointers),
    )


def spec(kernel: str, use: Use, tile: Tile, limits: tuple[str, ...] = ()) -> Spec:
    inputs = INPUTS if kernel == "forward_kernel" else (*INPUTS, "dout")
    capability, d, element, causal, padded, dropout, grouped, engine = use
    elements = {f"{name}_ptr": f"*{element}" for name in (*INPUTS, *POINTERS[kernel])}
    types = {
        **elements,
        **{n: "*fp32" for n in ("lse_ptr", "delta_ptr") if n in elements},
        "table_ptr": "*i32",
        **{f"{name}_{dim}": "i32" for name in inputs for dim in "bns"},
        "heads": "i32",
        "queries": "i32",
        "s": "i32",
        "window": "i32",
        "scale": "fp32",
        "softcap": "fp32",
        **COUNTERS,
        "keep_scale": "fp32",
        "start": "i64",
        "mask_keys": "i32",
    }
    D = 1 << (d - 1).bit_length()
    constants = {
        "HEAD": d,
        "D": D,
        "CAUSAL": causal,
        "WINDOW": "window" in limits,
        "SOFTCAP": "softcap" in limits,
        "DROPOUT": dropout,
        "UNIT": 4 if element == "fp32" else 8,
    }
    if dropout:
        types["counter_ptr"] = "*i64"
    else:
        constants["counter_ptr"] = None
    if padded:
        types["real_ptr"] = "*u8"
    else:
        constants["real_ptr"] = None
    for name in ("first", "position", "mask_row"):
        if name in limits:
            types[f"{name}_ptr"] = "*i32"
        else:
            constants[f"{name}_ptr"] = None
    if kernel == "dkdv_kernel":
        types["kv_heads"], constants["GROUPED"] = "i32", grouped
    loaded, count = (
        (("q", "dout"), tile.rows) if kernel == "dkdv_kernel" else (("k", "v"), tile.keys)
    )
    for name in loaded:
        if engine:
            types[f"{name}_matrix"] = f"tensordesc<{element}[{count}, {D}]>"
        else:
            constants[f"{name}_matrix"] = None
    return Spec(
        types,
        {**constants, "ROWS": tile.rows, "KEYS": tile.keys},
        tile.num_warps,
        tile.num_stages,
        capabilities=(capability,),
    )


SPECS = {kernel: list(specs(kernel)) for kernel in POINTERS}

"""Tiles of a head: how many positions a kernel takes at a time, and how a tile is read and stored.

If the tiles of 16-bit tensors form a matrix (s a multiple of 128, d a power of two), the copy
engine of an H100 reads them for the loops: no registers for addresses and masks.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST_TILE = 128  # positions


class Tile(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def has_copy_engine(major: int) -> bool:
    return major >= 9


def is_matrix(x: Tensor, D: int) -> bool:
    """Whether the tiles of [b, n, s, D] form a matrix that the copy engine can read, each in one
    head."""
    b, n, s, _ = x.stride()
    samples, heads, positions, d = x.shape
    return (
        x.element_size() == 2
        and d == D <= s
        and positions % _MOST_TILE == 0
        and (samples == 1 or b % s == 0)
        and (heads == 1 or n % s == 0 or n * heads <= s)
        and x.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in (b, n, s))
    )


def matrix(x: Tensor, count: int) -> TensorDescriptor:
    """Tiles [count, d]; a position's row is where it lies / the stride of positions, its column
    what is left over."""
    _, n, _, d = x.shape
    stride = x.stride(2)
    rows = (
        sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) // stride + 1
    )
    width = (n - 1) * x.stride(1) + d if n > 1 and x.stride(1) < stride else d
    return TensorDescriptor(x, [rows, width], [stride, 1], [count, d])


def tiles_of(kernel: str, D: int, itemsize: int, capability: int, use: int) -> tuple[Tile, ...]:
    """Return the tiles that a kernel may be launched with, the default first.

    Args:
        D: features of a head, rounded up to a power of two.
        itemsize: bytes of an element.
        capability: compute capability of the GPU, ten times the major number plus the minor one; 0:
            the interpreter.
        use: 0: plain, by the copy engine where there is one. 1: with padding or grouped heads, or
            by pointers. 2: with dropout.
    """
    if D > 256:
        return (Tile(16, 16, 8, 1),)
    group, size = _GROUPS.get(capability, _SMALL_GROUP), 0 if D <= 64 else 1 if D <= 128 else 2
    uses = _TILES.get((group, itemsize), _SMALL[itemsize])[kernel][size]
    default = Tile(*uses[min(use, len(uses) - 1)])
    if itemsize != 2 or size == 2:
        return (default,)
    others = _OTHERS[group][kernel][size][0 if use == 0 else 1]
    return (default, *(Tile(*other) for other in others if other != default))


_SMALL_GROUP = 0
_GROUPS = {80: 80, 87: 80, 90: 90, 100: 100, 103: 100, 110: 100}
"""Groups of GPUs that have the same tiles, by compute capability.

They have 163 KiB of shared memory and Ampere's products, 227 KiB and Hopper's, 227 KiB and
Blackwell's. Any other GPU belongs to _SMALL_GROUP: 99 KiB, like RTX cards.
"""


# Found by compiling: wide tiles, for d to 64, 128 and 256, that need no more registers than there
# are, in each use (the last one given is that of the others, too). On an H100 128 rows are two
# groups of four warps, 64 rows each, which is what its tensor cores multiply; where four warps do,
# two programs share an SM, and one computes exponentials while the other multiplies.
_TILES: dict[tuple[int, int], dict[str, tuple[tuple[tuple[int, int, int, int], ...], ...]]] = {
    (90, 2): {
        "forward_kernel": (
            ((64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3)),
            ((64, 64, 4, 3), (128, 64, 8, 3)),
            ((128, 32, 8, 2),),
        ),
        "dq_kernel": (
            ((64, 64, 4, 3), (128, 64, 8, 2)),
            ((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2)),
            ((64, 32, 8, 2), (64, 16, 8, 2)),
        ),
        "dkdv_kernel": (
            ((64, 64, 4, 3), (64, 128, 8, 2), (64, 64, 8, 3)),
            ((32, 64, 4, 2), (32, 64, 8, 2), (16, 64, 8, 2)),
            ((32, 32, 8, 2),),
        ),
    },
    (80, 2): {
        "forward_kernel": (
            ((128, 64, 8, 3),),
            ((128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
            ((64, 32, 8, 2),),
        ),
        "dq_kernel": (((64, 32, 4, 2),), ((64, 64, 8, 2),), ((64, 32, 8, 2),)),
        "dkdv_kernel": (((32, 32, 4, 2),), ((64, 64, 8, 2),), ((32, 32, 8, 2),)),
    },
    (90, 4): {
        "forward_kernel": (((64, 32, 8, 2),), ((64, 32, 8, 2),), ((32, 32, 8, 2),)),
        "dq_kernel": (
            ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
            ((32, 32, 8, 2),),
            ((32, 16, 8, 1),),
        ),
        "dkdv_kernel": (((32, 32, 8, 2),), ((32, 32, 8, 2),), ((16, 16, 8, 1),)),
    },
    (80, 4): {
        "forward_kernel": (((64, 32, 8, 2),), ((64, 32, 8, 2),), ((32, 32, 8, 2),)),
        "dq_kernel": (((64, 32, 8, 2),), ((32, 32, 8, 2),), ((32, 16, 8, 1),)),
        "dkdv_kernel": (((32, 32, 8, 2),), ((32, 32, 8, 2),), ((16, 16, 8, 1),)),
    },
}
_SMALL = {
    itemsize: dict.fromkeys(("forward_kernel", "dq_kernel", "dkdv_kernel"), sizes)
    for itemsize, sizes in (
        (2, (((64, 32, 4, 2),), ((64, 32, 8, 1),), ((32, 32, 8, 1),))),
        (4, (((64, 32, 8, 1),), ((32, 32, 8, 1),), ((16, 16, 8, 1),))),
    )
}
_SMALL[2]["forward_kernel"] = (
    ((64, 32, 4, 2),),
    ((64, 32, 4, 2),),
    ((32, 32, 8, 1),),
)  # 8 warps spill on sm_120
"""Tiles for any other GPU, and for the interpreter: they fit 99 KB of shared memory."""
_Sizes = tuple[tuple[int, int, int, int], ...]
_OTHERS: dict[int, dict[str, tuple[tuple[_Sizes, _Sizes], tuple[_Sizes, _Sizes]]]] = {
    80: {
        "forward_kernel": (
            (((64, 64, 4, 3), (128, 64, 4, 3)), ((64, 64, 4, 3), (64, 32, 4, 2))),
            (((64, 64, 4, 3), (64, 32, 4, 2)), ((64, 64, 8, 2), (64, 32, 4, 2))),
        ),
        "dq_kernel": (
            (((128, 64, 8, 2), (64, 64, 4, 3)), ((128, 32, 8, 2), (64, 64, 8, 2))),
            (((64, 32, 4, 2), (64, 32, 8, 1)), ((64, 32, 4, 2), (64, 32, 8, 1))),
        ),
        "dkdv_kernel": (
            (((64, 32, 4, 2), (32, 128, 8, 2)), ((64, 32, 4, 2), (32, 128, 8, 2))),
            (((32, 64, 8, 2), (32, 32, 4, 2)), ((32, 64, 8, 2), (32, 32, 4, 2))),
        ),
    },
    90: {
        "forward_kernel": (
            (((128, 64, 8, 3), (128, 128, 8, 2)), ((64, 64, 4, 3), (128, 64, 8, 3))),
            (((128, 64, 8, 3), (128, 128, 8, 2)), ((64, 64, 4, 3), (128, 64, 8, 2))),
        ),
        "dq_kernel": (
            (((128, 64, 8, 2),), ((64, 64, 4, 2),)),
            (((64, 64, 4, 2),), ((64, 64, 8, 2),)),
        ),
        "dkdv_kernel": (
            (((64, 128, 8, 2),), ((64, 128, 8, 1),)),
            (((32, 64, 8, 2), (64, 64, 8, 2)), ()),
        ),
    },
    100: {
        "forward_kernel": (
            (((64, 64, 4, 3), (128, 64, 8, 3)), ((64, 64, 4, 3), (128, 64, 8, 3))),
            (((64, 64, 4, 3), (128, 64, 8, 2)), ((64, 32, 8, 1),)),
        ),
        "dq_kernel": (
            (((64, 64, 4, 3), (128, 64, 8, 2)), ()),
            (((64, 32, 4, 2), (64, 64, 8, 2)), ((64, 32, 4, 2),)),
        ),
        "dkdv_kernel": (
            (((32, 64, 4, 2), (32, 32, 4, 2)), ((32, 64, 4, 2), (32, 32, 4, 2))),
            (((64, 64, 8, 2), (32, 64, 8, 2)), ((64, 64, 8, 2), (32, 32, 4, 2))),
        ),
    },
    _SMALL_GROUP: {
        "forward_kernel": (
            (((64, 64, 4, 3), (128, 64, 8, 3)), ((64, 64, 4, 3), (128, 64, 8, 3))),
            (((128, 64, 8, 2),), ((64, 32, 8, 1),)),
        ),
        "dq_kernel": (
            ((), ()),
            (((64, 32, 4, 2), (64, 64, 8, 2)), ((64, 32, 4, 2), (64, 64, 8, 2))),
        ),
        "dkdv_kernel": (
            (((32, 64, 4, 2), (32, 32, 4, 2)), ((32, 64, 4, 2), (32, 32, 4, 2))),
            (((32, 32, 4, 2), (64, 64, 8, 2)), ((32, 32, 4, 2), (64, 64, 8, 2))),
        ),
    },
}
"""Tiles of 16-bit elements besides the default, which training times: by group of GPUs and kernel,
for d to 64 and 128, plain or in another use. Each compiles without spills. Other types and d have
the default alone, as they are rare."""


@triton.jit
def _corner(matrix, at, stride, UNIT: tl.constexpr):
    """The row and column where a head begins in the matrix of its tensor."""
    if matrix is not None:
        row, col = (at // stride).to(tl.int32), (at % stride * UNIT).to(tl.int32)
    else:
        row, col = 0, 0
    return row, col


@triton.jit
def _tile(
    matrix,
    first_row,
    first_col,
    ptr,
    first,
    stride,
    s,
    COUNT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """[COUNT, D] of a head from position `first`, by the copy engine where there is a matrix.
    WHOLE: all inside."""
    if matrix is not None:
        x = matrix.load([first_row + first, first_col])
    else:
        x = _load(ptr, first, stride, s, COUNT, HEAD, D, WHOLE)
    return x


@triton.jit
def _load(
    ptr,
    first,
    stride,
    s,
    COUNT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """[COUNT, D] of a head's [s, HEAD], from position `first`; zeros outside."""
    position, col = tl.arange(0, COUNT), tl.arange(0, D)
    at = (ptr + tl.cast(first, tl.int64) * stride + position.to(tl.int64) * stride)[:, None] + col[
        None, :
    ]
    if WHOLE and HEAD == D:
        x = tl.load(at)
    elif WHOLE:
        x = tl.load(at, mask=(col < HEAD)[None, :], other=0.0)
    else:
        x = tl.load(at, mask=(first + position < s)[:, None] & (col < HEAD)[None, :], other=0.0)
    return x


@triton.jit
def _store(ptr, x, first, stride, s, COUNT: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr):
    position, col = tl.arange(0, COUNT), tl.arange(0, D)
    at = (ptr + tl.cast(first, tl.int64) * stride + position.to(tl.int64) * stride)[:, None] + col[
        None, :
    ]
    # Not written as in _load: the compiler would keep that comparison in registers from there to
    # here.
    inside = (position < s - first)[:, None] & (col < HEAD)[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)

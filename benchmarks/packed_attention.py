"""Claim: attention over a packed row of eight equal documents takes at most 0.35 of the time over
one document as long as the row, forward and backward, and less than torch's SDPA with a mask.

    python -m benchmarks.packed_attention

One thread. A row of 2,048 tokens by default; the ideal is 1/8 of the pairs, and what is left is
products that do not fill a block, and the layout of keys and values. Sides: ours is the packed row;
`long` is our attention over one document, `window` over one with a window as long as each of the
eight; `SDPA with a mask` is torch's kernel on the packed row, with its block-diagonal mask. Outputs
and gradients of the two packed sides are compared before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import OURS, arguments, case, parse, race, report
from benchmarks.ops import DTYPES, ROUND_S, TOLERANCE, Function, compute, gradients_for, step
from hybridpar import ops
from hybridpar.ops.attention import AttentionMask

MASKED = "SDPA with a mask"


@dataclass(frozen=True)
class Row:
    """A row of equal documents, and the heads of a layer."""

    length: int
    documents: int = 8
    heads: int = 8
    head_dim: int = 64


ROWS = {str(length): Row(length) for length in (256, 1024, 2048, 4096)}


def sides(row: Row) -> dict[str, Function]:
    """Return attention of each side, as a function of q, k and v [1, heads, length, d]."""
    size = row.length // row.documents
    places = torch.arange(row.length, dtype=torch.int32)
    starts = (places // size * size)[None]
    mask = (places[None, :] <= places[:, None]) & (places[None, :] >= starts[0][:, None])

    def ours(**limits: Any) -> Function:
        return lambda q, k, v: ops.masked_attention(q, k, v, AttentionMask(True, **limits))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    return {
        OURS: ours(first_key=starts),
        "long": ours(),
        "window": ours(window=size),
        MASKED: sdpa,
    }


def measure(name: str, dtype_name: str, rounds: int) -> Iterator[dict[str, Any]]:
    row = ROWS[name]
    functions = sides(row)
    tensors = [
        torch.randn(1, row.length, row.heads, row.head_dim, dtype=DTYPES[dtype_name])
        .transpose(1, 2)
        .requires_grad_()
        for _ in "qkv"
    ]
    gradients = gradients_for(functions[OURS], tensors)
    packed, masked = (compute(functions[side], tensors, gradients) for side in (OURS, MASKED))
    for a, b in zip(packed, masked, strict=True):
        difference = (a - b).abs().max().item() / b.abs().max().item()
        assert difference <= TOLERANCE[dtype_name], difference
    steps = {side: step(function, tensors, gradients) for side, function in functions.items()}
    start = time.perf_counter()
    steps[OURS]()
    repeat = max(1, round(ROUND_S / (time.perf_counter() - start)))
    result = race(steps, rounds, tolerance=0.0, repeat=repeat)
    yield case(f"{name} {dtype_name}", result, row.length, shape=name, dtype=dtype_name)


def main() -> None:
    parser = arguments(__doc__, rounds=11, shapes=[])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["1024", "2048", "4096"])
    args = parse(parser)
    torch.set_num_threads(1)
    cases = (
        one
        for name, dtype in product(args.rows, args.dtypes)
        for one in measure(name, dtype, args.rounds)
    )
    report("packed_attention", cases, args, shapes=ROWS)


if __name__ == "__main__":
    main()

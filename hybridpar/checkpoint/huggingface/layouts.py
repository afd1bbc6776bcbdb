"""Layout of a hybridpar parameter as transformers' tensors, and back. Pure permutations: no bit
changes.

Each works on a weight [out, in] and on a bias [out] alike.

    same            one tensor
    conv1d          one tensor, [in, out]: GPT-2's linear layers
    qkv_conv1d      one tensor, [in, (all queries, all keys, all values)]: GPT-2's attention
    qkv_rows        one tensor, [(all queries, all keys, all values), in]: Phi-3's attention
    qkv             three tensors: queries, keys, values, each [heads * head dim, in]
    gate_up         two tensors: gate, up

hybridpar's qkv is ordered by group of heads (nn.attention.HeadLayout): its queries, its key, its
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar.nn.attention import HeadLayout


class Layout(NamedTuple):
    """`join`: from their tensors to our parameter. `split`: from our parameter to their tensors,
    which may be views; it also works on the meta device."""

    join: Callable[[Sequence[Tensor], HeadLayout], Tensor]
    split: Callable[[Tensor, HeadLayout], list[Tensor]]


def _rows(heads: HeadLayout) -> list[Tensor]:
    """Return the rows of our parameter that hold all queries, all keys, all values."""
    return [torch.cat([torch.arange(a, b) for a, b in ranges]) for ranges in heads.qkv_matrices()]


def _join_qkv(parts: Sequence[Tensor], heads: HeadLayout) -> Tensor:
    whole = parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
    for part, rows in zip(parts, _rows(heads), strict=True):
        whole[rows] = part
    return whole


def _split_qkv(whole: Tensor, heads: HeadLayout) -> list[Tensor]:
    return [whole.index_select(0, rows.to(whole.device)) for rows in _rows(heads)]


def _join_fused(parts: Sequence[Tensor], heads: HeadLayout) -> Tensor:
    return _join_qkv(_sections(parts[0].t(), heads), heads)


def _sections(joined: Tensor, heads: HeadLayout) -> Sequence[Tensor]:
    """Return all queries, all keys, all values of a tensor that has them in this order."""
    return joined.split([len(rows) for rows in _rows(heads)])


LAYOUTS = {
    "same": Layout(lambda parts, heads: parts[0], lambda whole, heads: [whole]),
    "conv1d": Layout(lambda parts, heads: parts[0].t(), lambda whole, heads: [whole.t()]),
    "qkv_conv1d": Layout(
        _join_fused, lambda whole, heads: [torch.cat(_split_qkv(whole, heads)).t()]
    ),
    "qkv_rows": Layout(
        lambda parts, heads: _join_qkv(_sections(parts[0], heads), heads),
        lambda whole, heads: [torch.cat(_split_qkv(whole, heads))],
    ),
    "qkv": Layout(_join_qkv, _split_qkv),
    "gate_up": Layout(
        lambda parts, heads: torch.cat(list(parts)), lambda whole, heads: list(whole.chunk(2))
    ),
}

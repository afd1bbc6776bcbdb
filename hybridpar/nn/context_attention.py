"""Attention whose queries, keys and values are spread over the ranks of cp, in three ways.

all_gather    every rank gathers the keys and values of all, in the order of their positions, and
              keeps them up to the backward pass
ring          keys and values travel from rank to rank; each rank adds what its queries get from
              those that it has, while the next ones arrive. In the backward pass they travel
              again, and their gradients with them, until these are home
ulysses       ranks exchange tokens for heads: each has all tokens of 1 / c of the heads, and
              exchanges them back afterwards

    ring, c = 3      step 0    step 1    step 2
    rank 0            kv 0      kv 2      kv 1
    rank 1            kv 1      kv 0      kv 2
    rank 2            kv 2      kv 1      kv 0

b samples, n query heads, n_kv key and value heads, d head dimension, L tokens of a rank, s of all
Sources: gathered keys: Llama 3, arXiv 2407.21783, section 3.3.2; ring: arXiv 2310.01889;
ulysses: arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar import ops
from hybridpar.autograd import once_differentiable
from hybridpar.comm import all_gather, all_to_all, exchange
from hybridpar.errors import config_error
from hybridpar.nn.context import Context, travelling
from hybridpar.nn.placement import Range, split_ranges
from hybridpar.ops.attention import AttentionMask, AttentionOptions, SavedAttention, key_heads
from hybridpar.ops.backends.libraries import wide_type
from hybridpar.ops.partial_attention import PartialAttention, merge


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: AttentionOptions,
    context: Context,
    *,
    backend: str = "auto",
) -> Tensor:
    """Return the causal attention of this rank's queries over the keys of all ranks.

    Args:
        mask: For this rank's queries: their first keys, positions and window.

    Shapes: q [b, n, L, d]; k, v [b, n_kv, L, d] -> [b, n, L, d].
    Collectives: all_gather: see Context.gather.
    ring: forward c - 1 transfers of 2 b n_kv L d elements to the next rank, backward as many, and c
    of the gradients in float32 at least. ulysses: two all-to-alls, forward and backward, and with
    first keys one all-gather of b L numbers.
    """
    if context.comm == "ring":
        partial = PartialAttention(context.own, context.length, mask, options, backend)
        return _RingAttention.apply(q, k, v, partial, context)
    if context.comm == "ulysses":
        heads = key_heads(options.kv_index, q.shape[1], k.shape[1])
        split = HeadSplit.of(heads, k.shape[1], context.axis.size)
        mask = _mask_of_all_tokens(mask, context)
        options = _options_of_heads(options, heads, split, context.axis.rank)
        q, k, v = _HeadsForTokens.apply(q, k, v, split, context)
        y = ops.masked_attention(q, k, v, mask, options, backend=backend)
        return _TokensForHeads.apply(y, split, context)
    k, v = context.gather(k, v)
    return ops.masked_attention(q, k, v, mask, options, backend=backend)


def require_heads(context: Context, num_kv_heads: int) -> None:
    """Check that every rank of cp gets a key head, if ranks exchange tokens for heads.

    Raises: ConfigError.
    """
    if context.is_split and context.comm == "ulysses" and num_kv_heads < context.axis.size:
        rule = (
            f"requires a key head for each of the {context.axis.size} ranks of parallel.cp, and a "
            f"rank of tp has {num_kv_heads}"
        )
        raise config_error("parallel.cp_comm", "ulysses", rule, '"ring" or "all_gather"')


# -- ring


class _RingAttention(Function):
    """Keeps this rank's q, k, v and output, and a number for each query."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        partial: PartialAttention,
        context: Context,
    ) -> Tensor:
        out = lse = None
        for owner, (key, value) in travelling(torch.stack((k, v)), context):
            start, more, more_lse = partial.forward(q, key, value, context.ranges[owner])
            if out is None or lse is None:  # this rank's own keys, of which each query sees one
                out = more.to(wide_type(q))
                lse = more_lse
            elif more.numel():
                merge(out[:, start:], lse[:, :, start:], more.to(out.dtype), more_lse)
        assert out is not None
        out = out.to(q.dtype)
        mask = partial.mask
        ctx.save_for_backward(q, k, v, out, lse, mask.first_key, mask.positions)
        # saved tensors are checked for changes in place, and freed after the backward pass
        ctx.partial = replace(partial, mask=replace(mask, first_key=None, positions=None))
        ctx.context = context
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, first_key, positions = ctx.saved_tensors
        context = ctx.context
        mask = replace(ctx.partial.mask, first_key=first_key, positions=positions)
        partial = replace(ctx.partial, mask=mask)
        axis = context.axis
        b, n, tokens, d = q.shape
        n_kv = k.shape[1]
        dq = torch.zeros(b, tokens, n, d, dtype=wide_type(q), device=q.device)
        arriving = None
        buffer = q.new_empty(0)
        for owner, (key, value) in travelling(torch.stack((k, v)), context):
            saved = SavedAttention(q, key, value, out, lse)
            start, dq_part, *of_keys = partial.backward(dout, saved, context.ranges[owner])
            if dq_part is not None:
                dq[:, start:] += dq_part
            gradients = torch.stack(of_keys)
            if arriving is not None:  # what earlier ranks have added up for the same keys
                arriving.wait()
                gradients += buffer
            size = context.sizes[(owner - 1) % axis.size]
            buffer = gradients.new_empty(2, b, size, n_kv, d)
            arriving = exchange(gradients, context.next, buffer, context.previous, axis)
        assert arriving is not None
        arriving.wait()
        dk, dv = (x.transpose(1, 2).to(k.dtype) for x in buffer)
        return dq.transpose(1, 2).to(q.dtype), dk, dv, None, None


# -- ulysses


@dataclass(frozen=True)
class HeadSplit:
    """The heads of each rank of cp, out of the local ones of a rank of tp.

    Attributes:
        queries: Query heads of each rank.
        keys: Key and value heads of each rank.
    """

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]

    @staticmethod
    def of(kv_index: Sequence[int], n_kv: int, size: int) -> HeadSplit:
        """Split key heads as evenly as they allow, with the query heads that take them."""
        keys = split_ranges(n_kv, size)
        counts = [sum(start <= g < stop for g in kv_index) for start, stop in keys]
        ends = (0, *accumulate(counts))
        return HeadSplit(tuple(pairwise(ends)), keys)


def _mask_of_all_tokens(mask: AttentionMask, context: Context) -> AttentionMask:
    """Return the mask of all queries, from the mask of this rank's."""
    first_key = None if mask.first_key is None else _all_tokens(mask.first_key, context)
    return AttentionMask(True, window=mask.window, first_key=first_key)


def _options_of_heads(
    options: AttentionOptions, heads: Sequence[int], split: HeadSplit, rank: int
) -> AttentionOptions:
    """Return the options of a rank's heads; `heads` are the key heads of all query heads."""
    first, last = split.queries[rank]
    first_kv = split.keys[rank][0]
    return replace(
        options,
        kv_index=[g - first_kv for g in heads[first:last]],
        head_start=options.head_start + first,
    )


def _all_tokens(x: Tensor, context: Context) -> Tensor:
    """Return the numbers of all tokens of the samples. Shapes: [b, L] -> [b, s]."""
    return _in_order(all_gather(x, context.axis, 1, context.sizes), context, 1)


def _in_order(by_rank: Tensor, context: Context, dim: int) -> Tensor:
    """Return tokens that are ordered by ranks in the order of their positions."""
    x = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
    for start, at, length in context.pieces():
        x.narrow(dim, start, length).copy_(by_rank.narrow(dim, at, length))
    return x


def _by_rank(x: Tensor, context: Context, dim: int) -> list[Tensor]:
    """Return the tokens of each rank, which are ordered by positions in x."""
    return [
        torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        for ranges in context.ranges
    ]


def _gather_tokens(
    tensors: Sequence[Tensor], splits: Sequence[tuple[Range, ...]], context: Context
) -> list[Tensor]:
    """Exchange the other ranks' heads of this rank's tokens for this rank's heads of all tokens.

    Shapes: [b, n, L, d] -> [b, heads of this rank, s, d]. Collectives: one all-to-all.
    """
    size = context.axis.size
    rank = context.axis.rank
    b, _, tokens, d = tensors[0].shape
    each = [split[rank][1] - split[rank][0] for split in splits]
    sent = [
        torch.cat(
            [x[:, slice(*split[to])].reshape(-1) for x, split in zip(tensors, splits, strict=True)]
        )
        for to in range(size)
    ]
    received_sizes = [b * sum(each) * length * d for length in context.sizes]
    flat = all_to_all(torch.cat(sent), context.axis, [len(x) for x in sent], received_sizes)
    by_tensor: list[list[Tensor]] = [[] for _ in tensors]
    for length, part in zip(context.sizes, flat.split(received_sizes), strict=True):
        pieces = part.split([b * heads * length * d for heads in each])
        for found, heads, piece in zip(by_tensor, each, pieces, strict=True):
            found.append(piece.view(b, heads, length, d))
    assert tokens == context.sizes[rank]
    return [_in_order(torch.cat(found, 2), context, 2) for found in by_tensor]


def _scatter_tokens(
    tensors: Sequence[Tensor], splits: Sequence[tuple[Range, ...]], context: Context
) -> list[Tensor]:
    """Undo `_gather_tokens`. Shapes: [b, heads of this rank, s, d] -> [b, n, L, d].

    Collectives: one all-to-all.
    """
    size = context.axis.size
    tokens = context.sizes[context.axis.rank]
    b, _, _, d = tensors[0].shape
    by_rank = [_by_rank(x, context, 2) for x in tensors]
    sent = [torch.cat([parts[to].reshape(-1) for parts in by_rank]) for to in range(size)]
    heads = [[split[source][1] - split[source][0] for split in splits] for source in range(size)]
    received_sizes = [b * sum(counts) * tokens * d for counts in heads]
    flat = all_to_all(torch.cat(sent), context.axis, [len(x) for x in sent], received_sizes)
    by_tensor: list[list[Tensor]] = [[] for _ in tensors]
    for counts, part in zip(heads, flat.split(received_sizes), strict=True):
        pieces = part.split([b * count * tokens * d for count in counts])
        for found, count, piece in zip(by_tensor, counts, pieces, strict=True):
            found.append(piece.view(b, count, tokens, d))
    return [torch.cat(found, 1) for found in by_tensor]


class _HeadsForTokens(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, context: Context
    ) -> tuple[Tensor, ...]:
        ctx.splits = split.queries, split.keys, split.keys
        ctx.context = context
        return tuple(_gather_tokens((q, k, v), ctx.splits, context))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_scatter_tokens(gradients, ctx.splits, ctx.context), None, None


class _TokensForHeads(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, split: HeadSplit, context: Context) -> Tensor:
        ctx.split = split
        ctx.context = context
        return _scatter_tokens((y,), (split.queries,), context)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gather_tokens((gradient,), (ctx.split.queries,), ctx.context)[0], None, None

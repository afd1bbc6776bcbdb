"""Attention of queries over some of the keys that they see, and the merge of such results, for ring
attention.

For queries of which each has seen some blocks of keys, (out, lse) is their attention over those
keys alone: out is normalised by exp(lse), the sum of exponentials. Merging two disjoint blocks:

    lse = log(exp(lse_1) + exp(lse_2))      out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

in float32 at least. The backward pass of a block takes lse and out of all blocks, so that its
probabilities equal the full softmax's.

b samples, s queries, n query heads, n_kv key and value heads, d head dimension
Source: arXiv 2310.01889 (ring attention).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridpar.ops.attention import (
    AttentionCall,
    AttentionMask,
    AttentionOptions,
    AttentionPasses,
    LibraryPasses,
    SavedAttention,
    attention_class,
    attention_fused,
    key_heads,
)
from hybridpar.ops.backends.libraries import wide_type
from hybridpar.ops.backends.registry import resolve, select
from hybridpar.ops.dropout import drop, make_mask

Ranges = tuple[tuple[int, int], ...]
"""Positions as ascending half-open ranges."""


def count_before(x: Tensor, ranges: Ranges) -> Tensor:
    """Return how many of the positions in `ranges` are smaller than each number of x."""
    counts = [(x - start).clamp(0, stop - start) for start, stop in ranges]
    return functools.reduce(torch.add, counts)


@dataclass(frozen=True, eq=False)
class PartialAttention:
    """The causal attention of some queries of a sample over blocks of its keys.

    Attributes:
        queries: Positions of the queries.
        length: Number of keys of a sample.
        mask: Its window, the first keys of the queries, and their positions, the same as in
            `queries`.
        options: Settings of the layer's attention. Dropout's mask goes by positions.
        backend: Name of a backend of attention. Dropout is computed by torch's operators.
    """

    queries: Ranges
    length: int
    mask: AttentionMask
    options: AttentionOptions
    backend: str = "auto"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Ranges) -> tuple[int, Tensor, Tensor]:
        """Return the attention over keys at these positions.

        Queries before all of the keys see none of them, and are left out.

        Shapes: q [b, n, s, d]; k, v [b, n_kv, keys, d].
        Returns: the first query that is not left out, out [b, rest, n, d] and lse [b, n, rest] of
            it and those behind it, in the type of the pass; lse is -infinity where no key is seen.
        """
        start = self._first(keys)
        outs = []
        lses = []
        for part in self._parts(start, k.shape[2]):
            passes = self._passes(q, k, part, keys)
            call = self._call(q, k, part, keys)
            out, lse = passes.forward(q[:, :, part], k, v, call)
            outs.append(out)
            lses.append(lse.masked_fill(lse == float("inf"), float("-inf")))
        if not outs:
            return start, q.new_empty(0), q.new_empty(0)
        return start, torch.cat(outs, 1), torch.cat(lses, 2)

    def backward(
        self, dout: Tensor, saved: SavedAttention, keys: Ranges
    ) -> tuple[int, Tensor | None, Tensor, Tensor]:
        """Return the gradients that go through the keys at these positions.

        Args:
            dout: [b, n, s, d].
            saved: q, these keys and values, and out and lse over all keys.

        Returns: the first query that is not left out, the gradient of it and those behind it
            [b, rest, n, d] (None if there are none), and the gradients of k and v, [b, keys, n_kv, d], in
            float32 at least.
        """
        q, k, v, out, lse = saved
        start = self._first(keys)
        b, n_kv, num_keys, d = k.shape
        dk = torch.zeros(b, num_keys, n_kv, d, dtype=wide_type(q), device=q.device)
        dv = torch.zeros_like(dk)
        dqs = []
        for part in self._parts(start, num_keys):
            passes = self._passes(q, k, part, keys)
            of_part = SavedAttention(
                q[:, :, part], k, v, out[:, part].contiguous(), lse[:, :, part].contiguous()
            )
            call = self._call(q, k, part, keys)
            dq, dk_part, dv_part = passes.backward(dout[:, :, part].contiguous(), of_part, call)
            dqs.append(dq)
            dk += dk_part
            dv += dv_part
        return start, torch.cat(dqs, 1) if dqs else None, dk, dv

    def _first(self, keys: Ranges) -> int:
        """Return how many queries are before all of the keys."""
        first = keys[0][0]
        return sum(min(max(first - start, 0), stop - start) for start, stop in self.queries)

    def _parts(self, start: int, num_keys: int) -> list[slice]:
        """Return the queries from `start` on in parts of at most as many as there are keys, which
        is what kernels take."""
        count = sum(stop - start for start, stop in self.queries)
        return [slice(i, min(i + num_keys, count)) for i in range(start, count, num_keys)]

    def _call(self, q: Tensor, k: Tensor, part: slice, keys: Ranges) -> AttentionCall:
        """Return the call of a backend, in which positions are indices of these keys."""
        assert self.mask.positions is not None
        rows = self.mask.positions[part]
        first_key = None if self.mask.first_key is None else self.mask.first_key[:, part]
        if self.mask.window is not None:
            in_window = rows - self.mask.window + 1
            first_key = in_window if first_key is None else torch.maximum(first_key, in_window)
            first_key = first_key.expand(q.shape[0], -1)
        mask = AttentionMask(
            True,
            first_key=None if first_key is None else count_before(first_key, keys).contiguous(),
            positions=count_before(rows + 1, keys) - 1,
        )
        heads = key_heads(self.options.kv_index, q.shape[1], k.shape[1])
        return AttentionCall(mask, heads, scale=self.options.scale, softcap=self.options.softcap)

    def _passes(self, q: Tensor, k: Tensor, part: slice, keys: Ranges) -> AttentionPasses:
        dropout = self.options.dropout
        if dropout.p > 0 and dropout.key is not None:
            return TorchPasses(self._kept(q, part, keys))
        d = q.shape[3]
        shape = attention_class(d, grouped=q.shape[1] != k.shape[1])
        names = [select("attention", self.backend, q.device.type, q.dtype, shape).name]
        names += ["triton"] * q.is_cuda  # fused kernels of libraries do not return lse
        for name in names:
            code = resolve("attention", name, q, shape)
            if isinstance(code, functools.partial) and code.func is attention_fused:
                return LibraryPasses(*code.args)
        return TorchPasses()

    def _kept(self, q: Tensor, part: slice, keys: Ranges) -> Tensor:
        """Return dropout's factors, which are 0 or 1 / (1 - p). Shapes: [b, n, queries, keys]."""
        b, n, _, _ = q.shape
        ones = q.new_ones(b, self.length, dtype=wide_type(q))
        heads = []
        for head in range(n):
            first = (self.options.head_start + head) * self.length
            blocks = [
                torch.cat([self._kept_block(ones, first, rows, cols) for cols in keys], 2)
                for rows in self.queries
            ]
            heads.append(torch.cat(blocks, 1)[:, part])
        return torch.stack(heads, 1)

    def _kept_block(
        self, ones: Tensor, first: int, rows: tuple[int, int], cols: tuple[int, int]
    ) -> Tensor:
        """Return dropout's factors of one head, for queries and keys that are neighbours.

        Args:
            ones: [b, length].
            first: Row of the head's first query among all heads' queries.
        """
        spec = replace(
            self.options.dropout,
            inner_size=self.length,
            inner_start=cols[0],
            first_row=first + rows[0],
        )
        shape = ones.shape[0], rows[1] - rows[0], cols[1] - cols[0]
        block = ones[:, None, : shape[2]].expand(shape)
        return drop(block, make_mask(spec, shape, ones.device))


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge the attention over more keys into `out` and `lse`, in place.

    Every query has seen a key in `out`, so that lse is finite.
    Shapes: out, more [b, s, n, d]; lse, more_lse [b, n, s].
    """
    share = torch.sigmoid(more_lse - lse).transpose(1, 2).unsqueeze(-1)
    out += share * (more - out)
    lse.copy_(torch.logaddexp(lse, more_lse))


@dataclass(frozen=True, eq=False)
class TorchPasses:
    """The passes of attention in torch's operators, with the full matrix of probabilities.

    Attributes:
        kept: Dropout's factors, [b, n, queries, keys].
    """

    kept: Tensor | None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """See AttentionPasses."""
        scores, _ = self._scores(q, k, call)
        lse = scores.logsumexp(-1)
        blind = lse == float("-inf")
        probabilities = (scores - lse.masked_fill(blind, 0.0).unsqueeze(-1)).exp()
        values = _expand(v, call.kv_index).to(scores.dtype)
        out = self._drop(probabilities) @ values
        return out.to(q.dtype).transpose(1, 2), lse.masked_fill(blind, float("inf"))

    def backward(
        self, dout: Tensor, saved: SavedAttention, call: AttentionCall
    ) -> tuple[Tensor, ...]:
        """See AttentionPasses."""
        q, k, v, out, lse = saved
        scores, capped = self._scores(q, k, call)
        wide = scores.dtype
        dout = dout.to(wide)
        probabilities = (scores - lse.unsqueeze(-1)).exp()
        dv = self._drop(probabilities).transpose(-1, -2) @ dout
        dp = self._drop(dout @ _expand(v, call.kv_index).to(wide).transpose(-1, -2))
        delta = (dout * out.transpose(1, 2).to(wide)).sum(-1, keepdim=True)
        ds = probabilities * (dp - delta) * call.scale_of(q)
        if capped is not None:
            ds = ds * (1 - (capped / call.softcap) ** 2)
        dq = ds @ _expand(k, call.kv_index).to(wide)
        dk = ds.transpose(-1, -2) @ q.to(wide)
        sums = [_sum_groups(x, call.kv_index, k.shape[1]) for x in (dk, dv)]
        return tuple(x.transpose(1, 2) for x in (dq, *sums))

    def _scores(self, q: Tensor, k: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Return the scores, -infinity for keys that a query does not see; and before that, if
        they have a limit."""
        wide = wide_type(q)
        scores = q.to(wide) @ _expand(k, call.kv_index).to(wide).transpose(-1, -2)
        scores = scores * call.scale_of(q)
        capped = None
        if call.softcap:
            scores = capped = (scores / call.softcap).tanh() * call.softcap
        mask = call.mask
        assert mask.positions is not None
        key = torch.arange(k.shape[2], device=q.device, dtype=torch.int32)
        hidden = key > mask.positions[:, None]
        if mask.first_key is not None:
            hidden = hidden | (key < mask.first_key[:, None, :, None])
        return scores.masked_fill(hidden, float("-inf")), capped

    def _drop(self, x: Tensor) -> Tensor:
        return x if self.kept is None else x * self.kept


def _expand(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Return the key or value head of each query head. Shapes: [b, n_kv, keys, d] -> [b, n, ..]."""
    return x[:, list(heads)]


def _sum_groups(x: Tensor, heads: Sequence[int], n_kv: int) -> Tensor:
    """Return the sums over the query heads of each key head. Shapes: [b, n, ..] -> [b, n_kv, ..]."""
    groups = [[i for i, g in enumerate(heads) if g == group] for group in range(n_kv)]
    return torch.stack([x[:, group].sum(1) for group in groups], 1)

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar.ops.attention import (
    AttentionCall,
    AttentionMask,
    AttentionOptions,
    AttentionPasses,
    LibraryPasses,
    SavedAttention,
    arguments_of,
    attention_class,
    attention_fused,
    key_heads,
)
from hybridpar.ops.backends.libraries import wide_type
from hybridpar.ops.backends.registry import backends, resolve, select
from hybridpar.ops.dropout import DropoutMask, drop, make_mask

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
        backend: Name of a backend of attention. On GPUs Triton's kernels replace the libraries',
            which do not return lse.
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
        if start == q.shape[2]:
            return start, q.new_empty(0), q.new_empty(0)
        total = None
        for some, at, most in self._blocks(q, k, keys):
            outs = []
            lses = []
            for part in self._parts(start, most):
                passes = self._passes(q, k, part, some)
                call = self._call(q, k, part, some)
                out, lse = passes.forward(q[:, :, part], k[:, :, at], v[:, :, at], call)
                outs.append(out)
                lses.append(lse.masked_fill(lse == float("inf"), float("-inf")))
            more = torch.cat(outs, 1), torch.cat(lses, 2)
            total = more if total is None else _sum_of(total, more)
        assert total is not None
        return start, *total

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
        if start == q.shape[2]:
            return start, None, dk, dv
        total = None
        for some, at, most in self._blocks(q, k, keys):
            dqs = []
            for part in self._parts(start, most):
                passes = self._passes(q, k, part, some)
                of_part = SavedAttention(
                    q[:, :, part],
                    k[:, :, at],
                    v[:, :, at],
                    out[:, part].contiguous(),
                    lse[:, :, part].contiguous(),
                )
                call = self._call(q, k, part, some)
                dq, dk_part, dv_part = passes.backward(dout[:, :, part].contiguous(), of_part, call)
                dqs.append(dq)
                dk[:, at] += dk_part
                dv[:, at] += dv_part
            dq = torch.cat(dqs, 1)
            total = dq if total is None else total + dq
        return start, total, dk, dv

    def _first(self, keys: Ranges) -> int:
        """Return how many queries are before all of the keys."""
        first = keys[0][0]
        return sum(min(max(first - start, 0), stop - start) for start, stop in self.queries)

    def _blocks(self, q: Tensor, k: Tensor, keys: Ranges) -> Iterator[tuple[Ranges, slice, int]]:
        """Yield the keys that a kernel takes at once, their indices among the keys, and how many
        queries it takes at most: all keys, or with dropout in a kernel neighbours."""
        if not self._drops or self._library(q, k) is None:
            yield keys, slice(0, k.shape[2]), k.shape[2]
            return
        at = 0
        for start, stop in keys:
            yield ((start, stop),), slice(at, at + stop - start), q.shape[2]
            at += stop - start

    def _parts(self, start: int, most: int) -> list[slice]:
        """Return the queries from `start` on in parts of so many at most."""
        count = sum(stop - start for start, stop in self.queries)
        return [slice(i, min(i + most, count)) for i in range(start, count, most)]

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
        library = self._library(q, k)
        if self._drops and library is None:
            return TorchPasses(self._kept(q, part, keys))
        if library is None:
            return TorchPasses()
        if not self._drops:
            return LibraryPasses(library)
        assert self.mask.positions is not None
        ((first, _),) = keys
        spec = replace(
            self.options.dropout,
            inner_start=self.options.head_start * self.length * self.length + first,
        )
        b, n, _, _ = q.shape
        dropout = make_mask(spec, (b, n, self.length, self.length), q.device)
        rows = self.mask.positions[part].contiguous()
        return DroppingPasses(library, dropout, rows, self.length)

    @property
    def _drops(self) -> bool:
        dropout = self.options.dropout
        return dropout.p > 0 and dropout.key is not None

    def _library(self, q: Tensor, k: Tensor) -> Any:
        """Return the library whose kernels run on such tensors; None if torch's operators do."""
        shape = attention_class(q.shape[3], grouped=q.shape[1] != k.shape[1])
        rows = [select("attention", self.backend, q.device.type, q.dtype, shape)]
        if q.is_cuda:  # fused kernels of libraries do not return lse
            triton = next(row for row in backends("attention") if row.name == "triton")
            rows += [triton] * (triton.unsupported("cuda", q.dtype) is None)
        for row in rows:
            code = resolve("attention", row.name, q, shape)
            if isinstance(code, functools.partial) and code.func is attention_fused:
                (library,) = code.args
                return library
        return None

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


def _sum_of(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the attention over the keys of both. A query may see none of the keys of either.

    Shapes: out [b, s, n, d] and lse [b, n, s] of each.
    """
    lse = torch.logaddexp(one[1], other[1])
    blind = lse == float("-inf")
    finite = lse.masked_fill(blind, 0.0)
    out = None
    for part, of_part in (one, other):
        share = (of_part - finite).exp().transpose(1, 2).unsqueeze(-1)
        summand = share * part.to(share.dtype)
        out = summand if out is None else out + summand
    assert out is not None
    return out.to(one[0].dtype), lse


class DroppingPasses(NamedTuple):
    """The passes of a library of operators, with the dropout of a full sample.

    Attributes:
        library: The operators.
        dropout: The mask of the sample's probabilities, from this block's first key on.
        rows: Positions of the queries in the sample.
        length: Number of keys of the sample.
    """

    library: Any
    dropout: DropoutMask
    rows: Tensor
    length: int

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """See AttentionPasses."""
        found: tuple[Tensor, Tensor] = self.library.attention(q, k, v, *self._arguments(q, call))
        return found

    def backward(
        self, dout: Tensor, saved: SavedAttention, call: AttentionCall
    ) -> tuple[Tensor, ...]:
        """See AttentionPasses."""
        arguments = self._arguments(saved.q, call)
        found: tuple[Tensor, ...] = self.library.attention_backward(dout, *saved, *arguments)
        return found

    def _arguments(self, q: Tensor, call: AttentionCall) -> tuple[Any, ...]:
        return *arguments_of(q, replace(call, dropout=self.dropout)), self.rows, self.length


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

"""Multi-head attention split over the tp axis by heads, with grouped key and value heads.

Letters: b samples, s sequence, h hidden, n local query heads, g local groups (key and value heads),
d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor

from hybridpar import ops
from hybridpar.config import AUTO, KernelsConfig
from hybridpar.errors import config_error
from hybridpar.grid import Axis
from hybridpar.nn.cache import KeyValueCache
from hybridpar.nn.context import ALONE, Context
from hybridpar.nn.context_attention import context_attention, require_heads
from hybridpar.nn.linear import ColumnParallelLinear, Device, RowParallelLinear
from hybridpar.nn.norm import RMSNorm
from hybridpar.nn.placement import Matrices, ParallelModule, Range, Shard, split_ranges
from hybridpar.nn.qk_norm import HeadWeights, full_qk_norm
from hybridpar.nn.recomputable import HiddenStates, value_of
from hybridpar.nn.rotary import UNSCALED, RotaryScaling
from hybridpar.ops.attention import AttentionMask, AttentionOptions
from hybridpar.ops.dropout import DropoutSpec
from hybridpar.ops.generation import NextToken, has_kernels
from hybridpar.ops.split_qkv import RotarySettings, sums_bias, turn_heads
from hybridpar.random import RandomKey, site


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The heads of each rank, and their rows in the fused qkv weight.

    The weight is ordered [group, q_per_group + 2, head_dim]: a group's query heads, then its key
    and its value. A rank holds a contiguous, balanced range of query heads and the keys and values
    of their groups; a group whose query heads are spread over several ranks has its key and value
    on
    each of them.

    Attributes:
        head_dim: Features of a head; 0: hidden / num_heads.

    Raises:
        ConfigError: Counts do not fit; it names each.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    num_ranks: int
    head_dim: int = 0

    def __post_init__(self) -> None:
        if self.num_heads < 1 or (not self.head_dim and self.hidden % self.num_heads):
            raise config_error(
                "num_heads",
                self.num_heads,
                f"must divide the hidden size {self.hidden}",
                _divisors(self.hidden),
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise config_error(
                "num_kv_heads",
                self.num_kv_heads,
                f"must divide num_heads {self.num_heads}",
                _divisors(self.num_heads),
            )
        if self.num_ranks > self.num_heads:
            raise config_error(
                "parallel.tp",
                self.num_ranks,
                f"must be at most num_heads = {self.num_heads}: every rank needs at least one head",
                str(self.num_heads),
            )
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.num_heads)

    @property
    def q_per_group(self) -> int:
        """Query heads that share a key and a value."""
        return self.num_heads // self.num_kv_heads

    @property
    def heads(self) -> tuple[Range, ...]:
        """The query heads of each rank."""
        return split_ranges(self.num_heads, self.num_ranks)

    def group_heads(self, rank: int) -> dict[int, Range]:
        """Return the groups that `rank` takes part in, and which of its query heads belong to
        each."""
        start, stop = self.heads[rank]
        m = self.q_per_group
        return {
            g: (max(start, g * m), min(stop, (g + 1) * m))
            for g in range(start // m, (stop - 1) // m + 1)
        }

    def qkv_shard(self) -> Shard:
        """Return the rows of the qkv weight that each rank holds."""
        return Shard(0, tuple(self._qkv_ranges(r) for r in range(self.num_ranks)))

    def _qkv_ranges(self, rank: int) -> tuple[Range, ...]:
        m = self.q_per_group
        d = self.head_dim
        rows: list[Range] = []
        for g, (start, stop) in self.group_heads(rank).items():
            # query head i of group g is slot g * (m + 2) + i - g * m; its key and value are the
            # group's last two slots
            for a, b in ((start + 2 * g, stop + 2 * g), (g * (m + 2) + m, (g + 1) * (m + 2))):
                if rows and rows[-1][1] == a * d:
                    rows[-1] = (rows[-1][0], b * d)
                else:
                    rows.append((a * d, b * d))
        return tuple(rows)

    def qkv_matrices(self) -> Matrices:
        """Return the rows of all queries, of all keys and of all values: three projections of
        one input."""
        m = self.q_per_group
        d = self.head_dim
        groups = [g * (m + 2) * d for g in range(self.num_kv_heads)]
        return tuple(
            tuple((g + a * d, g + b * d) for g in groups)
            for a, b in ((0, m), (m, m + 1), (m + 1, m + 2))
        )

    def group_range(self, rank: int) -> Range:
        """Return the groups that `rank` takes part in."""
        groups = self.group_heads(rank)
        return min(groups), max(groups) + 1

    def feature_shard(self, *, of_keys: bool) -> Shard:
        """Return each rank's features of all queries, or of all keys, in the order of heads."""
        d = self.head_dim
        ranges = (
            [self.group_range(rank) for rank in range(self.num_ranks)] if of_keys else self.heads
        )
        return Shard(0, tuple(((a * d, b * d),) for a, b in ranges))

    def out_shard(self) -> Shard:
        """Return the columns of the output weight that each rank holds, which its query heads
        produce."""
        d = self.head_dim
        return Shard(1, tuple(((a * d, b * d),) for a, b in self.heads))


def rotary_features(head_dim: int, fraction: float) -> int:
    """Return how many features of a head rotary positions turn.

    Raises:
        ConfigError: The features are no pairs.
    """
    features = int(head_dim * fraction) if 0 < fraction <= 1 else 0
    if features % 2 or not features:
        even = features // 2 * 2 or 2
        rule = (
            f"rotary embeddings need an even number of features; of a head's {head_dim} "
            f"(hidden_size / num_heads) this takes {features}"
        )
        works = f"{min(1, (even + 0.5) / head_dim):.3g}" if head_dim > 1 else "a larger hidden_size"
        raise config_error("model.rotary_fraction", fraction, rule, works)
    return features


@dataclass(frozen=True, slots=True)
class QKNorm:
    """The RMSNorm of queries and keys, before rotary positions.

    Attributes:
        kind: 'head': over the features of each head, with one weight for all heads. 'full': over
            the features of all heads (nn.qk_norm).
        eps: Added to the mean square.
        zero_centered: Whether it multiplies by 1 + weight.
    """

    kind: Literal["head", "full"]
    eps: float = 1e-6
    zero_centered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Facts about the tokens of a call, besides their hidden states.

    Attributes:
        padding_mask: bool [b, keys], True = real. None: all tokens are real.
        first_key: int32 [b, s], the first position that each token attends to. None: the first of
            its sample.
        positions: int64 [s] or [b, s], the positions for rotary embeddings; with a cache, where the
            tokens belong in it. None: 0 to s - 1.
        rows: int32 [s], the place of each token in its sample, ascending, if ranks share samples
            (see ParallelAttention, `context`).
        sizes: Rows of every tp rank with sequence parallelism (see column_linear).
        context: The layer's context with the cut of the micro-batch. None: it has none of its own.
    """

    padding_mask: Tensor | None = None
    first_key: Tensor | None = None
    positions: Tensor | None = None
    rows: Tensor | None = None
    sizes: Sequence[int] | None = None
    context: Context | None = None


NO_METADATA = AttentionMetadata()


class ParallelAttention(ParallelModule):
    """Self-attention whose heads are split over the axis.

    With `num_kv_heads` < `num_heads` groups of query heads share a key and a value. Heads may split
    unevenly and tp may exceed `num_kv_heads`; then some rows of qkv are on several ranks and their
    gradients are partial: see `placement.reduce_shared_gradients`.

    With a cache, x holds new positions, which also see the positions in the cache: `positions`
    says which they are (see KeyValueCache.extend), and the padding mask covers all positions up to
    the last.

    Args:
        rotary_base: Base of the rotary position embedding, commonly 10000; None: no such embedding.
        rotary_fraction: Share of a head's features that it turns, the first ones.
        window: Most positions that a token attends to, its own included (sliding window); requires
            causal. None: no limit.
        rotary_scaling: How its frequencies are scaled.
        head_dim: Features of a head; None: hidden / num_heads.
        qk_norm: Norm of queries and keys; None: there is none.
        scale: Factor of the products of queries and keys; None: 1 / sqrt(head_dim).
        softcap: Scores become softcap * tanh(score / softcap); 0: they do not.
        qkv_bias: Whether `qkv` has a bias; None: `bias`.
        out_bias: Whether `out` has a bias; None: `bias`.
        name: Tells the dropout of one layer from another's.
        out_init_std: Standard deviation of `out` at the start; None: init_std.
        sequence: Whether calls have `sizes` (see column_linear).
        context: The ranks that share the tokens of each sample (context parallelism; causal only).
            Calls have `rows` then, the place of each of this rank's tokens in its sample.

    Shapes: x [b, s, h] replicated, padding_mask [b, s] bool (True = real), first_key [b, s] int32
    (the first position that each token attends to) -> [b, s, h] replicated.
    Collectives: forward one all-reduce, backward one. With `sizes`: see column_linear and
    row_linear. With a full qk_norm: see full_qk_norm. With a context: see context_attention.
    Raises: ConfigError if counts do not fit (see HeadLayout), or for an odd number of rotary
    features.
    Source: arXiv 1909.08053 section 3 (split), 2305.13245 (grouped queries), 2104.09864 (rotary).
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        axis: Axis,
        *,
        num_kv_heads: int | None = None,
        causal: bool = True,
        window: int | None = None,
        rotary_base: float | None = None,
        rotary_fraction: float = 1.0,
        rotary_scaling: RotaryScaling = UNSCALED,
        head_dim: int | None = None,
        qk_norm: QKNorm | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        attention_dropout: float = 0.0,
        kernels: KernelsConfig = AUTO,
        bias: bool = True,
        qkv_bias: bool | None = None,
        out_bias: bool | None = None,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        name: str = "attention",
        sequence: bool = False,
        context: Context = ALONE,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(axis)
        assert causal or not context.is_split, "context parallelism is for causal attention"
        self.context = context
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.layout = layout = HeadLayout(hidden, num_heads, num_kv_heads, axis.size, head_dim or 0)
        self.rotary_dim = (
            0 if rotary_base is None else rotary_features(layout.head_dim, rotary_fraction)
        )
        self.causal = causal
        self.window = window
        self.dropout = attention_dropout
        self.kernels = kernels
        self.rotary_base = rotary_base
        self.rotary_scaling = rotary_scaling
        self.qk_norm = qk_norm
        self.scale = scale
        self._scale = layout.head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.site = site(f"{name}.dropout")
        self.head_start = layout.heads[axis.rank][0]
        self.group_sizes = [
            b - a for a, b in layout.group_heads(axis.rank).values()
        ]  # query heads in each local group
        require_heads(context, len(self.group_sizes))
        uneven = len(set(self.group_sizes)) > 1
        self.kv_index = (
            [g for g, m in enumerate(self.group_sizes) for _ in range(m)] if uneven else None
        )
        qkv_rows = layout.head_dim * (num_heads + 2 * num_kv_heads)
        self.qkv = ColumnParallelLinear(
            hidden,
            qkv_rows,
            axis,
            bias=bias if qkv_bias is None else qkv_bias,
            shard=layout.qkv_shard(),
            init_std=init_std,
            matrices=layout.qkv_matrices(),
            device=device,
            dtype=dtype,
        )
        self.out = RowParallelLinear(
            num_heads * layout.head_dim,
            hidden,
            axis,
            bias=bias if out_bias is None else out_bias,
            shard=layout.out_shard(),
            init_std=init_std if out_init_std is None else out_init_std,
            matrices=(((0, hidden),),),
            sequence=sequence,
            device=device,
            dtype=dtype,
        )
        if qk_norm is not None:
            self.q_norm = self._norm(qk_norm, of_keys=False, device=device, dtype=dtype)
            self.k_norm = self._norm(qk_norm, of_keys=True, device=device, dtype=dtype)

    def _norm(self, spec: QKNorm, *, of_keys: bool, **factory: Any) -> RMSNorm | HeadWeights:
        """Build the norm of the queries or of the keys."""
        layout = self.layout
        if spec.kind == "head":
            return RMSNorm(
                layout.head_dim,
                self.axis,
                eps=spec.eps,
                kernels=self.kernels,
                sequence=True,  # each rank has its own heads: its gradient is a partial sum
                zero_centered=spec.zero_centered,
                **factory,
            )
        return HeadWeights(
            layout.num_kv_heads if of_keys else layout.num_heads,
            layout.head_dim,
            self.axis,
            layout.feature_shard(of_keys=of_keys),
            zero_centered=spec.zero_centered,
            **factory,
        )

    def forward(
        self,
        x: HiddenStates,
        padding_mask: Tensor | None = None,
        key: RandomKey | None = None,
        sizes: Sequence[int] | None = None,
        first_key: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        positions = None if rows is None else rows.long()
        tokens = AttentionMetadata(padding_mask, first_key, positions, rows, sizes)
        y, bias = self.without_bias(x, tokens, key)
        return y if bias is None else y + bias

    def without_bias(
        self,
        x: HiddenStates,
        tokens: AttentionMetadata = NO_METADATA,
        key: RandomKey | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output without the bias of `out`, and that bias.

        The caller adds it in another operator.
        """
        has_rows = tokens.rows is not None
        assert has_rows or not self.context.is_split, "a rank's tokens need their rows"
        turn = self._turn(x, cache, tokens.sizes)
        if cache is not None and self._has_next_token_kernel(value_of(x), cache, key):
            assert cache.kept is not None
            assert tokens.positions is not None
            how = NextToken(
                tuple(self.group_sizes), self.window or 0, self._scale, self.softcap, turn
            )
            qkv = self.qkv(x)
            if self.qk_norm is not None:
                self._norm_heads_of(qkv)
            y = ops.next_token_attention(qkv, *cache.kept, tokens.positions, how)
            return self.out.without_bias(y), self.out.bias
        q, k, v = self._heads(x, turn, tokens)
        mask = AttentionMask(
            self.causal, tokens.padding_mask, self.window, tokens.first_key, tokens.rows
        )
        if cache is not None:
            assert tokens.positions is not None
            k, v = cache.extend(k, v, tokens.positions)
            mask = self._window_of_positions(mask, tokens.positions, num_texts=q.shape[0])
        options = self._options(key)
        backend = self.kernels.attention
        if self.context.is_split:
            context = tokens.context or self.context
            y = context_attention(q, k, v, mask, options, context, backend=backend)
        else:
            y = ops.masked_attention(q, k, v, mask, options, backend=backend)
        y = rearrange(y, "b n s d -> b s (n d)")
        return self.out.without_bias(y, tokens.sizes), self.out.bias

    def _options(self, key: RandomKey | None) -> AttentionOptions:
        """Return the settings of attention for a micro-batch with this key of dropout."""
        return AttentionOptions(
            self.kv_index,
            DropoutSpec(self.dropout, key, self.site),
            self.head_start,
            self.scale,
            self.softcap,
        )

    def _window_of_positions(
        self, mask: AttentionMask, positions: Tensor, num_texts: int
    ) -> AttentionMask:
        """Express a window by first keys, as cached texts of several lengths end at different
        positions."""
        if self.window is None:
            return mask
        first_key = (positions - self.window + 1).to(torch.int32).expand(num_texts, -1)
        return replace(mask, window=None, first_key=first_key)

    def _has_next_token_kernel(
        self, x: Tensor, cache: KeyValueCache, key: RandomKey | None
    ) -> bool:
        """Whether a kernel attends from one new token of each text to the cache."""
        is_plain = key is None and not self.context.is_split
        can_norm = self.qk_norm is None or self.kv_index is None
        is_next = cache.kept is not None and x.shape[1] == 1
        return is_plain and can_norm and is_next and has_kernels(x, self.kernels.attention)

    def _turn(
        self, x: HiddenStates, cache: KeyValueCache | None, sizes: Sequence[int] | None
    ) -> RotarySettings | None:
        """Return the rotary positions of queries and keys; with a cache for texts that fill it."""
        if self.rotary_base is None:
            return None
        length = self.context.full_length(value_of(x).shape[1] if sizes is None else sum(sizes))
        if cache is not None:
            length = cache.capacity
        return RotarySettings(
            self.rotary_base,
            self.rotary_dim,
            self.kernels.rotary,
            self.rotary_scaling.frequencies(self.rotary_base, self.rotary_dim, length),
        )

    def _heads(
        self,
        x: HiddenStates,
        turn: RotarySettings | None,
        tokens: AttentionMetadata,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the local heads at their positions.

        The gradient of the qkv bias comes from the split, in which a kernel sums it on the way.
        Shapes: [b, s, h] -> q [b, n, s, d], k and v [b, g, s, d].
        """
        backend = self.kernels.split_qkv
        bias = None
        if self.qkv.bias is not None and sums_bias(value_of(x), backend):
            qkv = self.qkv.with_detached_bias(x, tokens.sizes)
            bias = self.qkv.bias
        else:
            qkv = self.qkv(x, tokens.sizes)
        is_normed = self.qk_norm is not None
        q, k, v = ops.split_qkv(
            qkv,
            self.group_sizes,
            bias=bias,
            turn=None if is_normed else turn,
            positions=tokens.positions,
            backend=backend,
        )
        if is_normed:
            q, k = self._normed(q, k)
            if turn is not None:
                q = turn_heads(q, turn, tokens.positions)
                k = turn_heads(k, turn, tokens.positions)
        return q, k, v

    def _norm_heads_of(self, qkv: Tensor) -> None:
        """Normalize the queries and keys of a new token of each text, in place; groups must have
        equally many queries. Shapes: [b, 1, (n + 2 g) d]."""
        b = len(qkv)
        heads = qkv.view(b, len(self.group_sizes), -1, self.layout.head_dim)
        q = heads[:, :, :-2]
        k = heads[:, :, -2:-1]
        normed_q, normed_k = self._normed(q.flatten(1, 2)[:, :, None], k)
        q.copy_(normed_q.view(q.shape))
        k.copy_(normed_k)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms of queries and keys. Shapes: the same."""
        if isinstance(self.q_norm, HeadWeights):
            assert isinstance(self.k_norm, HeadWeights)
            assert self.qk_norm is not None
            return full_qk_norm(q, k, self.q_norm, self.k_norm, self.qk_norm.eps)
        assert isinstance(self.k_norm, RMSNorm)
        return self.q_norm.normalize(q), self.k_norm.normalize(k)


def _divisors(n: int) -> str:
    return ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)

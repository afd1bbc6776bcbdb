"""The blocks that GPT and BERT are sequences of: embedding and transformer layer (heads: heads.py).

Every block is called as `block(x, batch, key)`: x [b, s, h] (None for the embedding), batch the
tensors of a micro-batch, key the RandomKey of its dropout (None: no dropout). A model of any depth
is a list of blocks, so splitting it into stages is slicing the list. To generate text, a layer also
takes a KeyValueCache; x then has new tokens alone, and batch["positions"] ([s] or [b, s] int64)
holds their positions in their texts.

With `sequence` (over tp) the x between blocks holds this rank's rows of every sample, [b, s_local,
h]; batch has all rows. At tp 1 that is the same.

Context parallelism (over cp): batch has this rank's tokens alone, as Context.cut leaves them, and
so has x; `sequence` divides these. Only attention receives anything of the others.

Packed documents (data.packing): batch["document_start"] ([b, s] int32) holds the first position
that each token attends to, and batch["positions"] ([b, s] int64) each token's place in its
document.

Legend: b samples, s sequence, h hidden, v vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from hybridpar.config import ModelConfig
from hybridpar.grid import Axis
from hybridpar.models.custom_blocks import Build
from hybridpar.nn import (
    Dropout,
    KeyValueCache,
    LayerNorm,
    LearnedPositionEmbedding,
    MixtureOfExperts,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    VocabParallelEmbedding,
)
from hybridpar.nn.attention import AttentionMetadata, QKNorm
from hybridpar.nn.context import ALONE
from hybridpar.nn.moe import ExpertOptions, RouterOptions, SequenceShares
from hybridpar.nn.placement import Init, ParallelModule, Placement
from hybridpar.nn.recomputable import HiddenStates, value_of
from hybridpar.nn.rotary import UNSCALED, RotaryScaling
from hybridpar.nn.sequence import SequencePart
from hybridpar.random import RandomKey

MicroBatch = Mapping[str, Tensor]
Losses = dict[str, Tensor]

TIED = "word_embeddings"
IGNORE_INDEX = -100


def make_norm(model: ModelConfig, build: Build, *, sequence: bool) -> LayerNorm | RMSNorm:
    """Build the norm over hidden_size that a configuration names."""
    norms: dict[str, type[LayerNorm | RMSNorm]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
    return norms[model.norm](
        model.hidden_size,
        build.axis,
        eps=model.norm_epsilon,
        kernels=build.kernels,
        zero_centered=model.norm_zero_centered,
        sequence=sequence,
        **build.factory,
    )


def rotary_scaling(model: ModelConfig) -> RotaryScaling:
    """Return how a model scales its rotary frequencies."""
    names = (field.name for field in dataclasses.fields(RotaryScaling) if field.name != "kind")
    settings = {name: getattr(model, f"rotary_{name}") for name in names}
    return RotaryScaling(model.rotary_scaling, **settings)


def attention_of(
    model: ModelConfig, build: Build, layer: int, out_init_std: float
) -> ParallelAttention:
    """Build the attention of a layer, counted from 0."""
    window = model.layer_window(layer)
    has_own_base = window > 0 and model.window_rotary_base > 0
    base = model.window_rotary_base if has_own_base else model.rotary_base
    qk_norm = None
    if model.qk_norm != "none":
        qk_norm = QKNorm(model.qk_norm, model.norm_epsilon, model.norm_zero_centered)
    return ParallelAttention(
        model.hidden_size,
        model.num_heads,
        build.axis,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        causal=model.kind == "gpt",
        rotary_base=base if model.layer_rotates(layer) else None,
        rotary_fraction=model.rotary_fraction,
        rotary_scaling=UNSCALED if has_own_base else rotary_scaling(model),
        window=window or None,
        qk_norm=qk_norm,
        scale=model.attention_scale or None,
        softcap=model.attention_softcap,
        attention_dropout=model.attention_dropout,
        kernels=build.kernels,
        bias=model.bias,
        qkv_bias=model.has_qkv_bias,
        out_bias=model.has_out_bias,
        init_std=model.init_std,
        out_init_std=out_init_std,
        name=f"{build.name}.attention",
        sequence=build.sequence,
        context=build.context,
        **build.factory,
    )


def mlp_of(
    model: ModelConfig, build: Build, layer: int, out_init_std: float
) -> ParallelMLP | MixtureOfExperts:
    """Build the MLP of a layer, counted from 0, or the experts of it that this rank holds."""
    if not model.layer_has_experts(layer):
        return ParallelMLP(
            model.hidden_size,
            model.ffn_size,
            build.axis,
            activation=model.activation,
            bias=model.bias,
            init_std=model.init_std,
            out_init_std=out_init_std,
            kernels=build.kernels,
            sequence=build.sequence,
            **build.factory,
        )
    router = RouterOptions(
        model.router_topk,
        model.router_score,
        model.router_normalize,
        model.router_scale,
        model.router_balance_loss,
        model.router_z_loss,
        model.router_bias_rate,
    )
    experts = ExpertOptions(
        model.hidden_size,
        model.num_experts,
        model.expert_ffn_size,
        model.shared_expert_ffn_hidden_size,
        router,
        model.activation,
        model.init_std,
        out_init_std,
        build.kernels,
        build.expert_load,
    )
    return MixtureOfExperts(
        build.axis,
        experts,
        ep=build.ep,
        sequence=build.sequence,
        **build.factory,
    )


def with_sequences(batch: MicroBatch) -> dict[str, Tensor]:
    """Return a micro-batch with a description of its sequences, which `sequence_shares` reads.

    A sequence is a sample, or a document of a packed row. A token counts if a label depends on it:
    in GPT the last label that counts is its own or a later one, in BERT it is no padding. Ranks of
    cp need the description of whole samples, so it is made before they are cut.

    Shapes: `token_sequence` (the number of each token's sequence) and `token_counts` [b, s];
    `sequence_length` (tokens that count) and `sequence_targets` (labels that count) [sequences].
    """
    labels = batch["labels"]
    b, s = labels.shape
    sequence = torch.arange(b, device=labels.device)[:, None].expand(b, s)
    num_sequences = b
    if (start := batch.get("document_start")) is not None:
        found, sequence = torch.unique(sequence * s + start, return_inverse=True)
        num_sequences = len(found)
    numbers = sequence.flatten()
    labelled = labels != IGNORE_INDEX
    none = torch.zeros(num_sequences, dtype=torch.int64, device=labels.device)
    counts = batch.get("padding_mask")
    if counts is None:
        place = torch.arange(s, device=labels.device).expand(b, s)
        last_label = torch.where(labelled, place, -1).flatten()
        last = (none - 1).scatter_reduce(0, numbers, last_label, "amax")
        counts = place <= last[sequence]
    return {
        **batch,
        "token_sequence": sequence.contiguous(),
        "token_counts": counts,
        "sequence_length": none.scatter_add(0, numbers, counts.flatten().long()),
        "sequence_targets": none.scatter_add(0, numbers, labelled.flatten().long()),
    }


def sequence_shares(batch: MicroBatch, cp: Axis = ALONE.axis) -> SequenceShares:
    """Return the tokens that auxiliary losses count, and the share of each of their sequences.

    The share of a sequence is its part of the labels of the whole batch that count.

    Args:
        batch: A micro-batch, with a description of its sequences if ranks of cp share them.
        cp: The ranks that share each sequence.
    """
    described = batch if "token_sequence" in batch else with_sequences(batch)
    return SequenceShares(
        described["token_sequence"].flatten(),
        described["token_counts"].flatten(),
        described["sequence_length"],
        described["sequence_targets"] / batch["num_targets"],
        cp,
    )


def part_of(batch: MicroBatch, axis: Axis, sequence: bool) -> SequencePart:
    """Return the rows of each sample that this rank holds between blocks."""
    return SequencePart.of(batch["tokens"].shape[1], axis, sequence)


class Embedding(nn.Module):
    """Token, position (learned) and segment (BERT) embeddings.

    BERT normalises their sum (arXiv 1810.04805, A.2).
    Shapes: tokens, token_types [b, s] -> [b, s, h], replicated.
    Collectives: forward one all-reduce over tp, backward none. With `sequence`: one reduce_scatter,
    one all-gather.
    Raises: DataError for an id outside the vocabulary, on the CPU; ConfigError for more positions
    than the table has.
    """

    def __init__(self, model: ModelConfig, build: Build):
        super().__init__()
        self.axis = build.axis
        self.sequence = build.sequence
        self.context = build.context
        self.scale = model.embedding_scale
        self.tokens = VocabParallelEmbedding(
            model.vocab_size,
            model.hidden_size,
            build.axis,
            init_std=model.init_std,
            tied=TIED if model.tie_embeddings else "",
            kernels=build.kernels,
            **build.factory,
        )
        self.positions: LearnedPositionEmbedding | None = None
        if model.position == "learned":
            self.positions = LearnedPositionEmbedding(
                model.num_positions,
                model.hidden_size,
                build.axis,
                init_std=model.init_std,
                sequence=build.sequence,
                **build.factory,
            )
        self.segments: SegmentEmbedding | None = None
        self.norm: LayerNorm | RMSNorm | None = None
        if model.kind == "bert":
            self.segments = SegmentEmbedding(model, build)
            self.norm = make_norm(model, build, sequence=build.sequence)
        self.dropout = Dropout(model.dropout, f"{build.name}.dropout", build.kernels)

    def forward(self, x: None, batch: MicroBatch, key: RandomKey | None) -> Tensor:
        part = part_of(batch, self.axis, self.sequence)
        out = self.tokens(batch["tokens"], part.sizes)
        if self.scale != 1:
            out = out * self.scale
        if self.positions is not None:
            if (at := batch.get("positions")) is None:
                out = out + self.positions(part.length, part.start)
            else:
                out = out + self.positions.at(at.narrow(-1, part.start, part.length))
        if self.segments is not None:
            out = out + self.segments(batch["token_types"].narrow(1, part.start, part.length))
        if self.norm is not None:
            out = value_of(self.norm(out))
        return self.dropout(out, key, self.context.of(batch).rows_of(part))


class SegmentEmbedding(ParallelModule):
    """A vector for each of BERT's two segments, replicated. Shapes: ids [b, s] -> [b, s, h]."""

    weight: Tensor

    def __init__(self, model: ModelConfig, build: Build):
        super().__init__(build.axis, build.sequence)
        placement = Placement((2, model.hidden_size), Init("normal", model.init_std))
        self.add_parameter("weight", placement, **build.factory)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class TransformerLayer(nn.Module):
    """Attention and MLP, each with a residual connection.

    Pre-norm normalises the input of either (GPT-2), post-norm the sum after it (BERT, arXiv
    1810.04805). Output norms normalise what either adds to the residual stream (OLMo 2, arXiv
    2501.00656), sandwich norms its input and that (Gemma 2, arXiv 2408.00118). With
    `parallel_residual` both read the layer's input, each through its own norm (pre-norm; GPT-NeoX,
    arXiv 2204.06745).

    Args:
        layer: Number of the layer, from 0, which decides about its positions.

    Shapes: x [b, s, h], padding_mask [b, s] bool (True = real), document_start [b, s] int32 (packed
    documents: the first token that each attends to) -> [b, s, h], all replicated.
    Collectives: two all-reduces over tp forward, two backward. With `sequence`: forward two all-
    gathers and two reduce_scatters, backward four and two.
    """

    def __init__(self, model: ModelConfig, build: Build, layer: int):
        super().__init__()
        self.axis = build.axis
        self.sequence = build.sequence
        self.context = build.context
        self.post_norm = model.post_norm
        self.has_input_norms = model.norm_position != "output"
        self.has_output_norms = model.norm_position in ("output", "sandwich")
        self.parallel_residual = model.parallel_residual
        # GPT-2: projections onto the residual stream start smaller, by the number of residual
        # additions
        out_std = (
            model.init_std if self.post_norm else model.init_std / (2 * model.num_layers) ** 0.5
        )
        self.attention = attention_of(model, build, layer, out_std)
        self.mlp = mlp_of(model, build, layer, out_std)
        norm = partial(make_norm, model, build, sequence=build.sequence)
        if self.has_input_norms:
            self.attention_norm = norm()
            self.mlp_norm = norm()
        if self.has_output_norms:
            self.attention_output_norm = norm()
            self.mlp_output_norm = norm()
        name = build.name
        self.attention_dropout = Dropout(model.dropout, f"{name}.attention_dropout", build.kernels)
        self.mlp_dropout = Dropout(model.dropout, f"{name}.mlp_dropout", build.kernels)

    def recompute(self) -> None:
        """From now on recompute outputs of norms and of the activation in the backward pass."""
        if self.has_input_norms:  # nothing keeps the results of the others
            self.attention_norm.recompute()
            self.mlp_norm.recompute()
        self.mlp.recompute()

    def forward(
        self,
        x: HiddenStates,
        batch: MicroBatch,
        key: RandomKey | None,
        cache: KeyValueCache | None = None,
    ) -> HiddenStates:
        part = part_of(batch, self.axis, self.sequence)
        tokens = self._metadata(batch, part)
        context = tokens.context or self.context
        rows = context.rows_of(part)
        if self.post_norm:
            x, _ = self.attention_norm.add(
                *self.attention.without_bias(x, tokens, key, cache),
                value_of(x),
                self.attention_dropout,
                key,
                rows,
            )
            return self.mlp_norm.add(
                *self._feed_forward(x, batch, part.sizes),
                value_of(x),
                self.mlp_dropout,
                key,
                rows,
            )[0]
        x = value_of(x)
        attended = self._attend(x, tokens, key, cache)
        if self.parallel_residual:
            fed = self._feed_forward(self.mlp_norm(x), batch, part.sizes)
            return self.mlp_dropout.add(
                *fed, self.attention_dropout.add(*attended, x, key, rows), key, rows
            )
        if self.has_input_norms:
            inner, x = self.mlp_norm.add(*attended, x, self.attention_dropout, key, rows)
        else:
            inner = x = self.attention_dropout.add(*attended, x, key, rows)
        fed = self._feed_forward(inner, batch, part.sizes)
        if self.has_output_norms:
            fed = self._output(self.mlp_output_norm, *fed)
        return self.mlp_dropout.add(*fed, x, key, rows)

    def _attend(
        self,
        x: Tensor,
        tokens: AttentionMetadata,
        key: RandomKey | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of attention between its norms, without its bias, and that bias."""
        inner = self.attention_norm(x) if self.has_input_norms else x
        attended = self.attention.without_bias(inner, tokens, key, cache)
        if self.has_output_norms:
            return self._output(self.attention_output_norm, *attended)
        return attended

    def _metadata(self, batch: MicroBatch, part: SequencePart) -> AttentionMetadata:
        """Return what attention needs to know of a micro-batch's tokens."""
        return AttentionMetadata(
            batch.get("padding_mask"),
            batch.get("document_start"),
            batch.get("positions"),
            batch.get("rows") if self.context.is_split else None,
            part.sizes,
            self.context.of(batch),
        )

    def _feed_forward(
        self, x: HiddenStates, batch: MicroBatch, sizes: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the MLP or of the experts without its bias, and that bias."""
        if isinstance(self.mlp, ParallelMLP):
            return self.mlp.without_bias(x, sizes)
        shares = None
        if torch.is_grad_enabled():
            shares = sequence_shares(batch, self.context.axis)
        return self.mlp(x, sizes, shares), None

    @staticmethod
    def _output(norm: LayerNorm | RMSNorm, y: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
        """Return the norm of a sublayer's output, and the bias that is left to add: none.

        Shapes: [b, s, h] -> the same.
        """
        return norm.normalize(y if bias is None else y + bias), None

"""The output heads of GPT and BERT, the last blocks of their models.

A head projects hidden states to the vocabulary, whose rows are split over tp, and returns its
partial losses by name. See blocks.py for the arguments of a block.

Legend: b samples, s sequence, h hidden, v vocabulary.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from hybridpar.comm import all_reduce, gather_from
from hybridpar.config import ModelConfig
from hybridpar.models.blocks import IGNORE_INDEX, TIED, Losses, MicroBatch, make_norm, part_of
from hybridpar.models.custom_blocks import Build
from hybridpar.models.metrics import LossesAndMetrics
from hybridpar.nn import ColumnParallelLinear, vocab_parallel_linear_cross_entropy
from hybridpar.nn.cross_entropy import (
    CrossEntropySpec,
    LogitTransform,
    VocabProjection,
    split_cross_entropy,
)
from hybridpar.nn.mlp import activation_function
from hybridpar.nn.placement import Init, ParallelModule, Placement, split_ranges, split_sizes
from hybridpar.nn.recomputable import HiddenStates, value_of
from hybridpar.random import RandomKey

LABELLED = {"gpt": 1.0, "bert": 0.15}
"""Share of the positions that the head projects to the vocabulary."""
WANTS_ACCURACY = "wants_accuracy"
"""Entry of a micro-batch of an evaluation whose head also returns the accuracy."""
ACCURACY = "accuracy"


class LanguageModelHead(nn.Module):
    """Projection to the vocabulary and its cross-entropy, split by vocabulary rows.

    Collectives: forward three small all-reduces over tp (see vocab_parallel_cross_entropy),
    backward one of the gradient of x. With `sizes` column_linear's collectives replace the latter.
    """

    def __init__(self, model: ModelConfig, build: Build, *, bias: bool):
        super().__init__()
        self.label_smoothing = model.label_smoothing
        self.transform = LogitTransform(model.logit_scale, model.logit_softcap)
        self.logits_chunk = model.logits_chunk
        self.kernels = build.kernels
        self.projection = ColumnParallelLinear(
            model.hidden_size,
            model.vocab_size,
            build.axis,
            bias=bias,
            init_std=model.init_std,
            tied=TIED if model.tie_embeddings else "",
            **build.factory,
        )
        self.axis = build.axis
        self.vocab_size = model.vocab_size
        self.vocab_start, _ = split_ranges(model.vocab_size, self.axis.size)[self.axis.rank]

    def forward(
        self,
        x: HiddenStates,
        batch: MicroBatch,
        key: RandomKey | None,
        sizes: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return the summed loss of the labels that count, divided by their number in the whole
        batch.

        Evaluations have no label smoothing.
        Shapes: x [.., h], labels [..] -> 0-d; with `sizes` x is this rank's part of the sequence,
        [b, sizes[rank], h].
        """
        spec = CrossEntropySpec(
            self.axis,
            self.vocab_start,
            self.vocab_size,
            0.0 if key is None else self.label_smoothing,
            IGNORE_INDEX,
            self.kernels.cross_entropy,
            self.transform,
        )
        labels = batch["labels"]
        if self.logits_chunk:
            projection = VocabProjection(
                self.projection.weight,
                self.projection.bias,
                self.projection.binding("weight").consumer,
            )
            loss = vocab_parallel_linear_cross_entropy(
                value_of(x), projection, labels, spec, chunk=self.logits_chunk, sizes=sizes
            )
        else:
            loss = split_cross_entropy(self.projection(x, sizes), labels, spec, overwrite=True)
        return loss.sum() / batch["num_targets"].to(loss.dtype)

    @torch.no_grad()
    def num_right(
        self, x: HiddenStates, labels: Tensor, sizes: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return how many labels that count are the most likely token.

        Shapes: x [b, s, h] (with `sizes` this rank's part of the sequence), labels [b, s] -> 0-d.
        Collectives: two all-reduces of a number for each label; with `sizes` one all-gather more.
        """
        logits = self.projection(x, sizes)
        top, at = logits.max(-1)
        best = all_reduce(top.clone(), self.axis, "max")
        # of equal logits the first token counts, whatever rank has it
        nobody = torch.full_like(at, self.vocab_size)
        token = torch.where(top == best, at + self.vocab_start, nobody)
        token = -all_reduce(-token, self.axis, "max")
        return ((token == labels) & (labels != IGNORE_INDEX)).sum()

    def logits(self, x: HiddenStates) -> Tensor:
        """Return the logits of the words, gathered from all tp ranks. Shapes: x [.., h] -> [..,
        v]."""
        logits = self.transform(self.projection(x))
        return gather_from(logits, self.axis, -1, split_sizes(self.vocab_size, self.axis.size))


class GPTHead(nn.Module):
    """Final norm (pre-norm models), projection, loss of the next token.

    If the batch has `WANTS_ACCURACY`, in an evaluation, the share of the labels that are the most
    likely token is a metric, with the divisor of the loss.
    Shapes: x [b, s, h], labels [b, s] -> {"lm": 0-d}. Collectives: see LanguageModelHead.
    """

    def __init__(self, model: ModelConfig, build: Build):
        super().__init__()
        self.axis = build.axis
        self.sequence = build.sequence
        self.norm = (
            nn.Identity() if model.post_norm else make_norm(model, build, sequence=build.sequence)
        )
        self.language_model = LanguageModelHead(model, build, bias=False)

    def forward(self, x: HiddenStates, batch: MicroBatch, key: RandomKey | None) -> Losses:
        sizes = part_of(batch, self.axis, self.sequence).sizes
        x = self.norm(x)
        losses = {"lm": self.language_model(x, batch, key, sizes)}
        if WANTS_ACCURACY not in batch:
            return losses
        accuracy = self.language_model.num_right(x, batch["labels"], sizes) / batch["num_targets"]
        return LossesAndMetrics(losses, {ACCURACY: accuracy})

    def logits(self, x: HiddenStates) -> Tensor:
        """Return the logits of the words, gathered from all tp ranks. Shapes: x [b, s, h] -> [b,
        s, v]."""
        return self.language_model.logits(self.norm(x))


class ReplicatedLinear(ParallelModule):
    """A linear layer that every tp rank holds unsharded. Shapes: [.., in] -> [.., out]."""

    weight: Tensor
    bias: Tensor

    def __init__(self, in_features: int, out_features: int, init_std: float, build: Build):
        super().__init__(build.axis)
        self.add_parameter(
            "weight",
            Placement((out_features, in_features), Init("normal", init_std)),
            **build.factory,
        )
        self.add_parameter(
            "bias", Placement((out_features,), Init("zeros"), weight_decay=False), **build.factory
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def without_bias(self, x: Tensor) -> Tensor:
        """Return x W^T, for a caller that adds the bias in another operator. Shapes: [.., in] ->
        [.., out]."""
        return nn.functional.linear(x, self.weight)


def labelled_rows(labels: Tensor) -> Tensor:
    """Return the indices of the labels that count, ascending. Shapes: [r] -> [n]."""
    return (labels != IGNORE_INDEX).nonzero().squeeze(1)


def padded_labelled_rows(labels: Tensor) -> Tensor:
    """Return the indices of the labels that count, padded to at least LABELLED of the rows.

    The padding repeats a row that does not count, so that micro-batches have one shape.
    Shapes: labels [b, s] -> [max(n, b * ceil(LABELLED * s))].
    """
    b, s = labels.shape
    rows = labelled_rows(labels.flatten())
    usual = b * math.ceil(LABELLED["bert"] * s)
    if len(rows) >= usual:
        return rows
    spare = (labels.flatten() == IGNORE_INDEX).int().argmax()
    return torch.cat([rows, spare.expand(usual - len(rows))])


class BertHead(nn.Module):
    """Masked-language-model transform and loss; next-sentence or sentence-order loss on [CLS].

    Only positions that have a label are transformed and projected, about 15 %. If the batch has
    `labelled`, its rows are used, some of which have no label.
    Shapes: x [b, s, h], labels [b, s], sentence_labels [b] -> {"mlm": 0-d, "nsp" or "sop": 0-d}.
    Collectives: see LanguageModelHead. With `sequence`: one all-gather more, forward.
    Source: arXiv 1810.04805 (MLM, NSP), arXiv 1909.11942 (SOP).
    """

    def __init__(self, model: ModelConfig, build: Build):
        super().__init__()
        self.axis = build.axis
        self.sequence = build.sequence
        h = model.hidden_size
        std = model.init_std
        self.final_norm = (
            nn.Identity() if model.post_norm else make_norm(model, build, sequence=build.sequence)
        )
        self.activation = activation_function(
            "gelu" if model.gated else model.activation, build.kernels
        )
        self.transform = ReplicatedLinear(h, h, std, build)
        self.norm = make_norm(model, build, sequence=False)
        self.language_model = LanguageModelHead(model, build, bias=True)
        self.sentence = model.sentence_head
        if self.sentence != "none":
            self.pooler = ReplicatedLinear(h, h, std, build)
            self.classifier = ReplicatedLinear(h, 2, std, build)

    def forward(self, x: HiddenStates, batch: MicroBatch, key: RandomKey | None) -> Losses:
        x = value_of(self.final_norm(x))
        if (sizes := part_of(batch, self.axis, self.sequence).sizes) is not None:
            x = gather_from(x, self.axis, 1, sizes)
        labels = rearrange(batch["labels"], "b s -> (b s)")
        labelled = batch["labelled"] if "labelled" in batch else labelled_rows(labels)
        rows = self.transformed(rearrange(x, "b s h -> (b s) h").index_select(0, labelled))
        targets = {"labels": labels[labelled], "num_targets": batch["num_targets"]}
        losses = {"mlm": self.language_model(rows, targets, key)}
        if self.sentence != "none":
            scores = self._scores(x[:, 0])
            scores = scores if scores.dtype == torch.float64 else scores.float()
            loss = nn.functional.cross_entropy(scores, batch["sentence_labels"], reduction="sum")
            losses[self.sentence] = loss / batch["num_samples"].to(loss.dtype)
        return losses

    def transformed(self, x: Tensor) -> Tensor:
        """Return the hidden states that are projected to the vocabulary. Shapes: [.., h] ->
        same."""
        return value_of(
            self.norm(self.activation(self.transform.without_bias(x), self.transform.bias))
        )

    def _scores(self, first: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.pooler(first)))

    def logits(self, x: HiddenStates) -> Tensor:
        """Return the logits of the words, gathered from all tp ranks. Shapes: x [b, s, h] -> [b,
        s, v]."""
        return self.language_model.logits(self.transformed(value_of(self.final_norm(x))))

    def sentence_logits(self, x: HiddenStates) -> Tensor:
        """Return the logits of the sentence label, for a model with such a head. Shapes: x [b,
        s, h] -> [b, 2]."""
        return self._scores(value_of(self.final_norm(value_of(x)[:, 0])))

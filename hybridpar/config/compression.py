"""The section [compression]: what is sent between ranks in fewer bytes than it has, with what is lost made up for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from hybridpar.config.typed import AtLeastOne, Count, Within
from hybridpar.errors import Problem

if TYPE_CHECKING:
    from hybridpar.config.sections import Config


@dataclass(frozen=True)
class CompressionConfig:
    """Codecs of what ranks send to each other. Evaluation, generation and export use none, but for a subspace.

    What a batch does not send of gradients between replicas is added to the next one's (error feedback), but for sbpca.
    It is as large as they are, on every replica and with any parallel.zero.
    `gradients` have no effect where parallel.dp is 1 and no weight is tied across stages.
    """

    messages: Literal["none", "bf16", "int8", "int4", "dct", "subspace"] = "none"
    """Activations between stages in training: bf16; or a bfloat16 scale for each 64 features of a token and 8 or 4 bits
    a feature, 4 bits after a Hadamard rotation. fp32 takes 2, 3.9 or 7.5 times the bytes. dct: each token's features
    that are farthest from zero, and a bit for each feature; zeros behind the link (after arXiv 2010.08899).
    subspace: a token's coordinates along fixed random directions, of all else nothing; then the projection is a part of
    the model, also in evaluations, which needs the same stages from then on, and is not exported. Of small models that
    were tried int4 learns more for the same bytes than either. Exact are those into a head that is a stage of its own,
    and what a rank of a V hands over to itself."""
    messages_backward: Literal["same", "none", "bf16", "int8", "int4"] = "same"
    """Gradients between stages; same: as `messages`, with dct those of the features that were sent."""
    messages_kept: Annotated[float, Within(above=0, most=1)] = 0.1
    """dct: share of a token's features that is sent, of `tensor`, too; subspace: directions, as a share of features."""
    messages_values: Literal["full", "bf16"] = "full"
    """dct, subspace: type of the numbers that are sent, all ways; full: train.dtype."""
    tensor: Literal["none", "bf16", "int8", "int4", "dct"] = "none"
    """What tp ranks send of their parts of a layer's sums, four times a layer and micro-batch, in training. Every rank
    gets the parts of all others, so that more ranks save less. dct: the largest features of each part, which alone have
    a gradient (messages_kept)."""
    gradients: Literal["none", "bf16", "int8", "int4", "dct", "powersgd", "sbpca"] = "none"
    """bf16, int8, int4: rounded; every replica gets those of all others, so with 4, 8 and 16 replicas they take as many
    bytes as whole ones do. dct: elements above a threshold, with their places (arXiv 2010.08899). powersgd: two factors
    of each matrix (arXiv 1905.13727). sbpca: the same of each linear layer's weight, from what the products would be
    made of, which waits until the batch is over; no gradient is computed whole, and what is lost stays lost (streaming
    batch PCA, doi 10.1145/3577214)."""
    gradients_kept: Annotated[float, Within(above=0, most=1)] = 0.01
    """dct: share of a tensor's elements above its threshold where that is set anew."""
    gradients_limit: Annotated[float, Within(1, most=1e6)] = 2.0
    """dct: most elements that a batch sends of a tensor, in multiples of gradients_kept; the rest waits."""
    gradients_period: AtLeastOne = 100
    """dct: batches from one setting of the thresholds to the next."""
    gradients_values: Literal["full", "bf16", "int8", "int4"] = "full"
    """dct, powersgd: the elements or factors that are sent; full: in the type of gradients. int8, int4: powersgd alone;
    four or seven times as many columns in as many bytes, which keep far more than rounding takes off."""
    gradients_rank: AtLeastOne = 4
    """powersgd, sbpca: columns of each factor."""
    gradients_blocks: AtLeastOne = 4
    """sbpca: blocks of a batch, of whole micro-batches in order; each is a step, takes as many bytes as a batch of
    powersgd does, and two messages after each other. As many as there are micro-batches at most."""
    gradients_start: Count = 0
    """First batch that is compressed; those before send whole gradients."""
    gradients_smallest: Count = 1024
    """Tensors of fewer elements are sent whole."""

    @property
    def replicas_differ(self) -> bool:
        """Whether every replica keeps something of its own: what it has not sent of its gradients."""
        return self.gradients not in ("none", "sbpca")

    @property
    def both_ways(self) -> tuple[str, str]:
        """The names of the codecs of activations and of their gradients."""
        forward, backward = self.messages, self.messages_backward
        return forward, forward if backward == "same" else backward

    def conflicts(self, config: Config) -> Iterator[Problem]:
        """Settings that do not go with those of other sections."""
        for reason in self._against_gradients(config) if self.gradients != "none" else ():
            yield Problem("compression.gradients", self.gradients, reason, "none")
        shapes = [config.model.activation_shape(n) for n in range(config.model.num_blocks - 1)]
        if self.both_ways != ("none", "none") and any(isinstance(s, dict) or s != shapes[0] for s in shapes):
            yield Problem("compression.messages", self.messages, "needs one tensor of one shape between all blocks, "
                          f"and {config.model.kind} has others", "none")
        if self.gradients in ("dct", "sbpca") and self.gradients_values in ("int8", "int4"):
            yield Problem("compression.gradients_values", self.gradients_values, "is of powersgd's factors, and "
                          f"compression.gradients is {self.gradients}", "full")
        if self.tensor != "none" and config.parallel.sequence:
            yield Problem("compression.tensor", self.tensor, "does not go with parallel.sequence, with which a rank "
                          "gets its part of a sum alone", "none")

    @staticmethod
    def _against_gradients(config: Config) -> Iterator[str]:
        if config.parallel.sites > 1:
            yield (f"does not go with parallel.sites = {config.parallel.sites}, within which links are fast: "
                   "outer.precision is for what sites send")
        if config.memory.budget:
            yield (f"does not go with memory.budget = {config.memory.budget}: what a replica has not sent is needed "
                   "whole, once a batch")


UNCOMPRESSED = CompressionConfig()

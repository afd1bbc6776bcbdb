"""The section [compression]: codecs for activations and gradients that ranks send to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.config.compression_methods import (
    GRADIENTS,
    BackwardName,
    GradientCompression,
    GradientsName,
    MessagesName,
)
from hybridpar.config.typed import AtLeastOne, Count, Within


@dataclass(frozen=True)
class CompressionConfig:
    """Codecs for what ranks send to each other. Evaluation, generation and export use none.

    The part of a batch's gradients that a replica does not send is added to its next batch's (error
    feedback), except with sbpca. It takes as much memory as the gradients, on every replica and
    with any parallel.zero. `gradients` has no effect if parallel.dp is 1 and no weight is tied
    across stages.
    """

    messages: MessagesName = "none"
    """Activations between stages in training. bf16. int8, int4: 8 or 4 bits a feature, and a
    bfloat16 scale for each 64 features of a token; 4 bits after a Hadamard rotation. fp32 takes 2,
    3.9 or 7.5 times the bytes. dct: each token's features farthest from zero, and a bit for each
    feature; the others are zeros behind the link (after arXiv 2010.08899). In small studies int4
    learned more for the same bytes. Exact are messages into a head that is a stage of its own, and
    what a rank of a V hands to itself."""
    messages_backward: BackwardName = "same"
    """Gradients between stages. same: like `messages`; with dct, only the features that were
    sent forward."""
    messages_kept: Annotated[float, Within(above=0, most=1)] = 0.1
    """dct: share of a token's features that is sent."""
    messages_values: Literal["full", "bf16"] = "full"
    """dct: type of the numbers that are sent, forward and backward. full: train.dtype."""
    gradients: GradientsName = "none"
    """Gradients that replicas send to each other. bf16, int8, int4: rounded gradients. Every
    replica receives the gradients of all others, so with 4, 8 and 16 replicas they take as many
    bytes as uncompressed ones. dct: the elements above a threshold, with their positions (arXiv
    2010.08899). powersgd: two low-rank factors of each matrix (arXiv 1905.13727). sbpca: factors
    of each linear layer's weight gradient, made from activations and their gradients, which wait
    in memory until their block of micro-batches has ended; no matrix of gradients is kept. The
    approximation error is dropped (streaming batch PCA, doi 10.1145/3577214). Layers of torch,
    such as nn.Linear, send full gradients."""
    gradients_kept: Annotated[float, Within(above=0, most=1)] = 0.01
    """dct: share of a tensor's elements that are above the threshold when it is set. A batch sends
    at most twice that share; the rest waits for the next batch."""
    gradients_period: AtLeastOne = 100
    """dct: batches between two settings of the threshold."""
    gradients_values: Literal["full", "bf16", "int8", "int4"] = "full"
    """dct, powersgd: type of the elements or factors that are sent. full: the type of the
    gradients. int8, int4: powersgd only. The same bytes then hold four or seven times as many
    columns, which gains far more accuracy than rounding loses."""
    gradients_rank: AtLeastOne = 4
    """powersgd, sbpca: columns of each factor."""
    gradients_blocks: AtLeastOne = 4
    """sbpca: blocks of micro-batches that a batch is divided into; at most num_microbatches.
    Each block is one step of the method, sends as many bytes as a batch of powersgd, and takes
    two messages one after the other. More blocks keep less in memory. Blocks are sent while the
    batch goes on, if each rank has one stage; with 2bw and pipedream once the update of the batch
    before is made."""
    gradients_start: Count = 0
    """First batch that is compressed; earlier batches send full gradients."""
    gradients_warmup: Count = 0
    """dct: batches, from gradients_start on, in which the share that is sent falls from an eighth to
    gradients_kept, by the same factor in each batch. Message buffers hold an eighth of the
    gradients then."""
    gradients_smallest: Count = 1024
    """Tensors with fewer elements than this are sent uncompressed."""

    @property
    def replicas_differ(self) -> bool:
        """Whether every replica keeps something of its own: what it has not sent of its
        gradients."""
        return self._row is not None and self._row.keeps_unsent

    @property
    def takes_factors(self) -> bool:
        """Whether the method of `gradients` takes them as factors, which are never multiplied."""
        return self._row is not None and self._row.takes_factors

    @property
    def depends_on_values(self) -> bool:
        """Whether values of gradients decide which operators the method of `gradients` runs."""
        return self._row is not None and self._row.depends_on_values

    @property
    def value_types(self) -> tuple[str, ...]:
        """The values of gradients_values that the method of `gradients` supports; empty: all."""
        return () if self._row is None else self._row.value_types

    @property
    def _row(self) -> GradientCompression | None:
        return GRADIENTS.get(self.gradients)

    @property
    def both_ways(self) -> tuple[str, str]:
        """The names of the codecs of activations and of their gradients."""
        forward = self.messages
        backward = self.messages_backward
        return forward, forward if backward == "same" else backward


UNCOMPRESSED = CompressionConfig()

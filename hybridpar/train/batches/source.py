"""Micro-batches of a loader, prepared for the executor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridpar.config import Config
from hybridpar.data.loader import Loader
from hybridpar.models.blocks import with_sequences
from hybridpar.models.heads import ACCURACY, WANTS_ACCURACY, padded_labelled_rows
from hybridpar.nn.context import ALONE, CUT, Context
from hybridpar.random import RandomKey


@dataclass(frozen=True)
class LoaderSource:
    """Prepare a loader's micro-batches for the executor: on the device, with a dropout key.

    Args:
        evaluated: Number of batches of an evaluation, and the labels that count in all of them;
            losses are then shares of the means over the evaluation. None: training; losses are
            shares of the means over a batch.
        fixed_shapes: Pad the rows that BERT's head takes to a fixed number, for CUDA graphs.
        context: The ranks that share the tokens of each sample.
    """

    loader: Loader
    config: Config
    device: torch.device
    evaluated: tuple[int, int] | None = None
    fixed_shapes: bool = False
    context: Context = ALONE

    def microbatch(self, number: int) -> tuple[dict[str, Tensor], RandomKey | None]:
        """Return the tensors of a micro-batch, and its dropout key in training."""
        batch, index = divmod(number, self.config.pipeline.num_microbatches)
        tensors = dict(self.loader.microbatch(batch, index))
        if self.fixed_shapes and self.config.model.kind == "bert":
            tensors["labelled"] = padded_labelled_rows(tensors["labels"])
        model = self.config.model
        labels = tensors.get("labels")
        of_tokens = labels is not None and labels.dim() == 2  # a custom model's may be of samples
        if self.evaluated is None and model.routed_experts and of_tokens:
            tensors = with_sequences(tensors)
        tensors = self.context.cut(tensors)
        tensors = {n: t if n == CUT else self._on_device(t) for n, t in tensors.items()}
        num_batches, num_targets = self.evaluated or (1, self.loader.num_targets(batch))
        # Without labels the loss sums are 0; dividing by 1 keeps losses and gradients 0.
        # Each site divides by its share, so that the mean over sites is the batch's mean.
        # On the device, because torch rounds a division by a CPU scalar differently, and because
        # CUDA graphs read from device memory.
        sites = self.config.parallel.sites
        tensors["num_targets"] = self._number(max(num_targets, 1) / sites)
        tensors["num_samples"] = self._number(num_batches * self.config.global_batch_size / sites)
        if self.evaluated is not None and ACCURACY in self.config.train.eval_metrics:
            tensors[WANTS_ACCURACY] = self._number(1.0)
        key = self._key(batch, index) if self.evaluated is None else None
        return tensors, key

    def _key(self, batch: int, index: int) -> RandomKey:
        train = self.config.train
        key = RandomKey.of(
            train.seed, batch, self.loader.first_sample(index), train.micro_batch_size
        )
        # copied from pinned memory: creating it on the device would wait for the stream
        return replace(key, counter=self._on_device(key.counter))

    def _number(self, x: float) -> Tensor:
        return torch.full((), x, dtype=torch.float64, device=self.device)

    def _on_device(self, x: Tensor) -> Tensor:
        if x.device.type == self.device.type:
            return x
        # pinned, because a copy from pageable memory waits for the stream
        return x.pin_memory().to(self.device, non_blocking=True)

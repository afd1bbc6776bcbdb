"""The source of the executor's micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridpar.config import Config
from hybridpar.data.loader import Loader
from hybridpar.models.blocks import padded_labelled_rows
from hybridpar.random import RandomKey


@dataclass(frozen=True)
class LoaderSource:
    """The micro-batches of a loader as the executor asks for them, on the device, with their
    dropout key.

    Args:
        evaluated: How many batches an evaluation has, and the labels that count in all of them.
            Losses are then shares of the means over the whole evaluation. None: training, where
                they are shares of the means over a batch.
    """

    loader: Loader
    config: Config
    device: torch.device
    evaluated: tuple[int, int] | None = None
    fixed_shapes: bool = False
    """Micro-batches of a BERT come with the rows that its head takes, of one number as a rule: for
    CUDA graphs."""

    def microbatch(self, number: int) -> tuple[dict[str, Tensor], RandomKey | None]:
        batch, index = divmod(number, self.config.pipeline.num_microbatches)
        tensors = dict(self.loader.microbatch(batch, index))
        if self.fixed_shapes and self.config.model.kind == "bert":
            tensors["labelled"] = padded_labelled_rows(tensors["labels"])
        tensors = {n: self._on_device(t) for n, t in tensors.items()}
        num_batches, num_targets = self.evaluated or (1, self.loader.num_targets(batch))
        # Where no label counts, all losses are sums of nothing: divided by one they are 0, and so
        # are gradients. Of several sites, each divides by its share: the mean over sites is then
        # that of the whole batch. On the device: torch divides by numbers of the CPU in another
        # way, and a CUDA graph has them on the GPU.
        sites = self.config.parallel.sites
        tensors["num_targets"] = self._number(max(num_targets, 1) / sites)
        tensors["num_samples"] = self._number(num_batches * self.config.global_batch_size / sites)
        return tensors, self._key(batch, index) if self.evaluated is None else None

    def _key(self, batch: int, index: int) -> RandomKey:
        train = self.config.train
        key = RandomKey.of(
            train.seed, batch, self.loader.first_sample(index), train.micro_batch_size
        )
        return replace(
            key, counter=self._on_device(key.counter)
        )  # made there, it would wait for the stream

    def _number(self, x: float) -> Tensor:
        return torch.full((), x, dtype=torch.float64, device=self.device)

    def _on_device(self, x: Tensor) -> Tensor:
        if x.device.type == self.device.type:
            return x
        return x.pin_memory().to(
            self.device, non_blocking=True
        )  # from other memory the copy waits for the stream

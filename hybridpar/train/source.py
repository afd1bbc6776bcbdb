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
    """The micro-batches of a loader as the executor asks for them, on the device, with their dropout key."""

    loader: Loader
    config: Config
    device: torch.device
    training: bool
    fixed_shapes: bool = False
    """Micro-batches of a BERT come with the rows that its head takes, of one number as a rule: for CUDA graphs."""

    def microbatch(self, number: int) -> tuple[dict[str, Tensor], RandomKey | None]:
        batch, index = divmod(number, self.config.pipeline.num_microbatches)
        tensors = dict(self.loader.microbatch(batch, index))
        if self.fixed_shapes and self.config.model.kind == "bert":
            tensors["labelled"] = padded_labelled_rows(tensors["labels"])
        tensors = {n: self._on_device(t) for n, t in tensors.items()}
        # on the device: torch divides by numbers of the CPU in another way, and a CUDA graph has them on the GPU
        # of several sites, a site's share of the batch's: the mean over sites is then that of the whole batch
        sites = self.config.parallel.sites
        tensors["num_targets"] = self._number(self.loader.num_targets(batch) / sites)
        tensors["num_samples"] = self._number(self.config.global_batch_size / sites)
        return tensors, self._key(batch, index) if self.training else None

    def _key(self, batch: int, index: int) -> RandomKey:
        train = self.config.train
        key = RandomKey.of(train.seed, batch, self.loader.first_sample(index), train.micro_batch_size)
        return replace(key, counter=self._on_device(key.counter))  # made there, it would wait for the stream

    def _number(self, x: float) -> Tensor:
        return torch.full((), x, dtype=torch.float64, device=self.device)

    def _on_device(self, x: Tensor) -> Tensor:
        if x.device.type == self.device.type:
            return x
        return x.pin_memory().to(self.device, non_blocking=True)  # from other memory the copy waits for the stream

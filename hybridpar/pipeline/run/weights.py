"""The live versions of one stage's weights: flat buffers, bound to the modules by pointer.

                 version t        version t+1
    master  ........................[=======]      fp32 (mixed precision only): always the newest
    working [=======]...............[=======]      what micro-batches run on; version v lives in buffer v % n
    leaves   views of a working buffer; an in-flight micro-batch keeps the leaves it ran on through its autograd graph

A switch of version rebinds pointers. Making version t+1 writes the buffer of version t+1-n, whose last backward is over
(the plan's check proves it; autograd's own version counters would raise if it were not).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from hybridpar.errors import CheckpointError
from hybridpar.nn.layout import FlatLayout
from hybridpar.nn.matmul import IN_PLACE
from hybridpar.nn.placement import Placement, named_placements

LOW_PRECISION = (torch.bfloat16, torch.float16)


class WeightStore:
    """Allocates a stage built on the meta device and owns every version of its parameters.

    dtype: what micro-batches compute in. bf16 and fp16 add one fp32 master copy, on which the optimizer works.
    """

    def __init__(self, stage: nn.Module, num_versions: int, dtype: torch.dtype, device: torch.device):
        self.placements: dict[str, Placement] = {}
        by_id: dict[int, str] = {}
        parameters: dict[str, Tensor] = {}
        for name, parameter, placement in sorted(named_placements(stage), key=lambda item: _group(item[2])):
            self.placements[name], by_id[id(parameter)], parameters[name] = placement, name, parameter
        self.dtype = dtype
        self.master_dtype = torch.float32 if dtype in LOW_PRECISION else dtype
        self.layout = FlatLayout.of(parameters, self.master_dtype, offset_dtype=dtype)
        self.buffers = [torch.zeros(self.layout.numel, dtype=dtype, device=device) for _ in range(num_versions)]
        views = [self.layout.views(flat) for flat in self.buffers]
        self.leaves = [{name: view.detach().requires_grad_() for name, view in table.items()} for table in views]
        if dtype == self.master_dtype:
            for leaf in chain.from_iterable(leaves.values() for leaves in self.leaves):
                setattr(leaf, IN_PLACE, True)
        self.master = self.layout.zeros(device) if dtype != self.master_dtype else None
        self._views = views if self.master is None else [self.layout.views(self.master)] * num_versions
        # every place in the module tree that holds a parameter; a tied one has several
        self._places = [
            (module._parameters, key, by_id[id(parameter)])
            for module in stage.modules() for key, parameter in module._parameters.items() if parameter is not None
        ]
        self._bound: int | None = None
        self.newest = 0
        self.bind(0)

    @property
    def num_versions(self) -> int:
        return len(self.buffers)

    def slot(self, version: int) -> int:
        return version % self.num_versions

    def leaves_of(self, version: int) -> dict[str, Tensor]:
        """The differentiable parameters of a live version, by name."""
        assert self.newest - self.num_versions < version <= self.newest, f"version {version} is not live"
        return self.leaves[self.slot(version)]

    def bind(self, version: int) -> None:
        """Points the modules at `version`; copies nothing."""
        if (slot := self.slot(version)) == self._bound:
            return
        leaves = self.leaves_of(version)
        for table, key, name in self._places:
            table[key] = leaves[name]  # type: ignore[assignment]
        self._bound = slot

    def parameters_of_optimizer(self) -> dict[str, Tensor]:
        """What the optimizer works on, by name: the master, else the newest version itself (no autograd history)."""
        return self._views[self.slot(self.newest)]

    @torch.no_grad()
    def fill(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Sets the newest version: `write` fills the tensors it is given (fp32, or fp64 in an fp64 run)."""
        write(self.parameters_of_optimizer())
        if self.master is not None:
            self.buffers[self.slot(self.newest)].copy_(self.master)

    @torch.no_grad()
    def advance(self, update: Callable[[list[Tensor]], None] | None) -> None:
        """Makes version newest + 1 by `update` in place on a copy of the newest; None: the new version is equal."""
        old, new = self.buffers[self.slot(self.newest)], self.buffers[self.slot(self.newest + 1)]
        self.newest += 1
        if self.master is None and new is not old:
            new.copy_(old)
        if update is not None:
            update(list(self.parameters_of_optimizer().values()))
        if self.master is not None and (update is not None or new is not old):
            new.copy_(self.master)

    @property
    def live_versions(self) -> range:
        """The versions that the buffers hold once the pipeline is drained, oldest first."""
        return range(max(self.newest - self.num_versions + 1, 0), self.newest + 1)

    @torch.no_grad()
    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Takes `tensors`, by parameter name, as `version`, which is the newest from now on; call in ascending order.

        Raises: CheckpointError.
        """
        self.newest = version
        _copy_all(self.leaves_of(version), tensors, f"weights of version {version}")
        self._bound = None
        self.bind(version)

    @torch.no_grad()
    def restore_master(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes `tensors` as the master copy, where there is one. Raises: CheckpointError."""
        if self.master is not None:
            _copy_all(self.layout.views(self.master), tensors, "master weights")


def _group(placement: Placement) -> int:
    """Tied parameters first, then replicated, then split ones: gradients are reduced by kind, each contiguous."""
    return 0 if placement.tied else 1 if placement.shard is None else 2


def _copy_all(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    for name, target in targets.items():
        if name not in tensors:
            raise CheckpointError(f"{what}: {name} is missing")
        if tensors[name].shape != target.shape:
            raise CheckpointError(
                f"{what}: {name} has shape {tuple(tensors[name].shape)}, this model needs {tuple(target.shape)}")
        target.copy_(tensors[name])

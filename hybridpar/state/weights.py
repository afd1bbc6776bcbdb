"""The live versions of one stage's weights: flat buffers, bound to the modules by pointer.

                 version t        version t+1
    master  ........................[=======]      fp32, in mixed precision or where weights are predicted: the newest
    working [=======]...............[=======]      what micro-batches run on; version v lives in buffer v % n
    leaves   views of a working buffer; an in-flight micro-batch keeps the leaves it ran on through its autograd graph

A switch of version rebinds pointers. Making version t+1 writes the buffer of version t+1-n, whose last backward is over
(the plan's check proves it; autograd's own version counters would raise if it were not).

Where replicas share the update (ZeRO-1), a rank keeps the master of its own parts only, writes those, and an all-gather
fills in the others' while training goes on; the first micro-batch on the new version waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridpar.comm import Works
from hybridpar.errors import CheckpointError
from hybridpar.nn.placement import Placement, has_shared_rows, named_placements
from hybridpar.ops.update import Weights
from hybridpar.state.chunks import Buffer, Chunk, Location
from hybridpar.state.layout import FlatLayout
from hybridpar.state.partition import Partition

LOW_PRECISION = (torch.bfloat16, torch.float16)
Update = Callable[[Weights], None]


class StageParameters:
    """The parameters of a stage built on the meta device: placements by name, and where they lie in a flat buffer.

    dtype: what micro-batches compute in; `layout` has the dtype of gradients and of the master copy.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        self.master_dtype = torch.float32 if dtype in LOW_PRECISION else dtype
        self.placements: dict[str, Placement] = {}
        by_id: dict[int, str] = {}
        parameters: dict[str, Tensor] = {}
        for name, parameter, placement in sorted(named_placements(stage), key=lambda item: _kind(item[2])):
            self.placements[name], by_id[id(parameter)], parameters[name] = placement, name, parameter
        self.layout = FlatLayout.of(parameters, self.master_dtype, offset_dtype=dtype)
        # every place in the module tree that holds a parameter; a tied one has several
        self.places = [
            (module._parameters, key, by_id[id(parameter)])
            for module in stage.modules() for key, parameter in module._parameters.items() if parameter is not None
        ]


class WeightStore:
    """Owns every version of a stage's parameters.

    bf16 and fp16 add one fp32 master copy, on which the optimizer works. So does `predict`, in any precision: micro-
    batches then run on W + (W - W before the last update), a guess at the weights their gradient will be applied to.
    Source of prediction: PipeOptim, arXiv 2312.00839.
    `partition`: which parts this rank updates, and how it gets the others. `places`: modules that hold each parameter.
    `chunks`: of the working buffers (none: each is one); no bucket of a shared partition may cross them.
    """

    def __init__(self, parameters: StageParameters, partition: Partition, num_versions: int, device: torch.device, *,
                 predict: bool = False, chunks: Sequence[Chunk] = ()):
        self.placements, self.layout, self.predicts = parameters.placements, parameters.layout, predict
        self.dtype, self.master_dtype, self._device = parameters.dtype, parameters.master_dtype, device
        self.partition = partition
        self.buffers = [Buffer(self.layout, self.dtype, device, chunks) for _ in range(num_versions)]
        self.leaves = [{name: view.detach().requires_grad_() for name, view in buffer.views().items()}
                       for buffer in self.buffers]
        self._own_layout = self._layout_of_owned()
        self.master = None
        if predict or self.dtype != self.master_dtype:
            place = Location.SHARDED if partition.is_sharded else Location.DEVICE
            self.master = Buffer(self._own_layout, self.master_dtype, device, place=place)
        self._spans = list(self._merged_spans())
        if self.master is not None:
            self._views = [self.master.views()] * num_versions
        else:
            self._views = [dict(zip(self._own_layout.names, self.owned_views(buffer), strict=True))
                           for buffer in self.buffers]
        self._lists = [list(views.values()) for views in self._views]
        self._working = [self.owned_views(buffer) for buffer in self.buffers] if self.master is not None else []
        self.places = parameters.places
        self._arriving: dict[int, Works] = {}
        self._bound: int | None = None
        self.newest = 0
        self.bind(0)

    def _layout_of_owned(self) -> FlatLayout:
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        own = {o.name: shapes[o.name] if o.part is None else (o.stop - o.start,) for o in self.partition.owned}
        return FlatLayout(list(own), list(own.values()), self.master_dtype, offset_dtype=self.dtype)

    def _merged_spans(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, start in the master) of what this rank owns; neighbours in one chunk are one."""
        start, stop, at = 0, 0, 0
        cuts = {chunk.start for chunk in self.buffers[0].chunks}
        for owned, offset in zip(self.partition.owned, self._own_layout.offsets, strict=True):
            if owned.start - offset != start - at or owned.start in cuts:
                if start < stop:
                    yield start, stop, at
                start, at = owned.start, offset
            stop = owned.stop
        if start < stop:
            yield start, stop, at

    def owned_views(self, flat: Tensor | Buffer) -> list[Tensor]:
        """Views of what this rank owns of a flat buffer, in order: parameters, or parts of them as vectors."""
        return [flat[o.start : o.stop].view(shape)
                for o, shape in zip(self.partition.owned, self._own_layout.shapes, strict=True)]

    @property
    def num_versions(self) -> int:
        return len(self.buffers)

    def slot(self, version: int) -> int:
        return version % self.num_versions

    def leaves_of(self, version: int) -> dict[str, Tensor]:
        """The differentiable parameters of a live version, by name, once they are all here."""
        assert self.newest - self.num_versions < version <= self.newest, f"version {version} is not live"
        self.await_version(version)
        return self.leaves[self.slot(version)]

    def bind(self, version: int) -> None:
        """Points the modules at `version`; copies nothing."""
        self.await_version(version)
        if (slot := self.slot(version)) == self._bound:
            return
        leaves = self.leaves_of(version)
        for table, key, name in self.places:
            table[key] = leaves[name]  # type: ignore[assignment]
        self._bound = slot

    def is_arriving(self, version: int) -> bool:
        """Whether parts of `version` that other replicas make are not here yet."""
        return version in self._arriving and not self._arriving[version].is_done()

    def await_version(self, version: int) -> None:
        """Returns once `version` is all here."""
        if (arriving := self._arriving.pop(version, None)) is not None:
            arriving.wait()

    def parameters_of_optimizer(self) -> dict[str, Tensor]:
        """Tensors that the optimizer works on, by name: this rank's parts of the master, else of the newest version
        (no autograd history)."""
        return self._views[self.slot(self.newest)]

    @torch.no_grad()
    def fill(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Sets the newest version: `write` fills all parameters of this stage (fp32, or fp64 in an fp64 run)."""
        newest = self.buffers[self.slot(self.newest)]
        if self.master is None:
            write(newest.views())
            return
        full = self._full()
        write(full.views())
        newest.copy_(full)
        for start, stop, at in self._spans if full is not self.master else ():
            self.master[at : at + stop - start].copy_(full[start:stop])

    def _full(self) -> Buffer:
        """The master where this rank has all of it, else a new buffer."""
        assert self.master is not None
        if not self.partition.is_sharded:
            return self.master
        return Buffer(self.layout, self.master_dtype, self._device)

    @torch.no_grad()
    def advance(self, update: Update | None, *, predict: bool = True) -> None:
        """Makes version newest + 1: `update` writes it, from what this rank owns of the newest one; None: it is equal,
        and nothing is predicted of it. `predict`: whether that is wanted of this version, where weights are predicted.

        Collectives: an all-gather over the owners, which `bind` waits for, where the update is shared.
        """
        before, after = self.slot(self.newest), self.slot(self.newest + 1)
        old, new = self.buffers[before], self.buffers[after]
        self.await_version(self.newest)
        self.newest += 1
        if update is None and not self.predicts:
            if new is not old:
                new.copy_(old)
            return
        if update is None:
            self._write(new)
        elif self.master is None:
            update(Weights(self._lists[before], self._lists[after]))
        else:
            update(Weights(self._lists[0], self._lists[0], self._working[after], self.predicts and predict))
        self._arriving[self.newest] = self.partition.gather(new)

    def _write(self, flat: Buffer) -> None:
        """Copies the master to its places in `flat`."""
        assert self.master is not None
        for start, stop, at in self._spans:
            flat[start:stop].copy_(self.master[at : at + stop - start])

    @torch.no_grad()
    def full_weights(self) -> dict[str, Tensor]:
        """All parameters of this stage as training has made them (neither rounded nor predicted); read only.

        Collectives: an all-gather where the master is shared.
        """
        if self.master is None:
            return {name: leaf.detach() for name, leaf in self.leaves_of(self.newest).items()}
        if (full := self._full()) is not self.master:
            self._write(full)
            self.partition.gather(full).wait()
        return full.views()

    @contextmanager
    def unpredicted(self) -> Iterator[None]:
        """While in it, the newest version is W itself rather than what is predicted. Collectives: as `full_weights`."""
        if not self.predicts:
            yield
            return
        self.await_version(self.newest)
        flat = self.buffers[self.slot(self.newest)]
        predicted = [tensor.clone() for tensor in flat.tensors]
        self._write(flat)
        self.partition.gather(flat).wait()
        try:
            yield
        finally:
            for tensor, before in zip(flat.tensors, predicted, strict=True):
                tensor.copy_(before)

    @property
    def live_versions(self) -> range:
        """The versions that the buffers hold once the pipeline is drained, oldest first."""
        return range(max(self.newest - self.num_versions + 1, 0), self.newest + 1)

    @torch.no_grad()
    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Takes `tensors`, by parameter name, as `version`, which is the newest from now on; call in ascending order.

        Raises: CheckpointError.
        """
        for arriving in list(self._arriving):
            self.await_version(arriving)
        self.newest = version
        copy_all(self.leaves_of(version), tensors, f"weights of version {version}")
        self._bound = None
        self.bind(version)

    @torch.no_grad()
    def restore_master(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes `tensors` as what this rank owns of the master copy, where there is one. Raises: CheckpointError."""
        if self.master is not None:
            copy_all(self.master.views(), tensors, "master weights")


def _kind(placement: Placement) -> int:
    """The place of a parameter in the layout: tied ones first, then replicated ones, then split ones, and last split
    ones with rows on several tp ranks. Gradients of each of these are reduced apart, so they are contiguous."""
    if placement.tied or placement.shard is None:
        return 0 if placement.tied else 1
    return 3 if has_shared_rows(placement) else 2


def copy_all(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Copies tensors by name to their targets. Raises: CheckpointError where one is missing or of another shape."""
    for name, target in targets.items():
        if name not in tensors:
            raise CheckpointError(f"{what}: {name} is missing")
        tensor = tensors[name]
        if tensor.shape != target.shape:
            raise CheckpointError(
                f"{what}: {name} has shape {tuple(tensor.shape)}, this model needs {tuple(target.shape)}")
        target.copy_(tensor)

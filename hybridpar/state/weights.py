"""The live versions of one stage's weights: flat buffers, bound to the modules by pointer.

                 version t        version t+1
    master  ........................[=======]      the newest, fp32: in mixed precision or with weight prediction;
                                                   with a host optimizer in any precision
    working [=======]...............[=======]      micro-batches run on it; version v lives in
                                                   buffer v % n
    leaves   views of a working buffer; an in-flight micro-batch keeps the leaves it ran on through
             its autograd graph

A switch of version rebinds pointers. Making version t+1 writes the buffer of version t+1-n, whose
last backward is complete (the plan's check proves it; otherwise autograd's own version counters
would raise).

If replicas shard the update (ZeRO-1), a rank keeps only its own shards of the master and writes
them; an all-gather brings the others while training continues, and the first micro-batch on the new
version waits for it. If replicas shard the weights (ZeRO-3), a rank keeps shards of working
buffers, and unsharded chunks are gathered and released (shares.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.errors import CheckpointError
from hybridpar.ops.update import Weights
from hybridpar.state.fp8 import Fp8Weights
from hybridpar.state.frozen import FrozenWeights
from hybridpar.state.parameters import StageParameters
from hybridpar.state.policy import StatePolicy
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import EMPTY, Buffer, BufferUsage, Memory, cut
from hybridpar.state.residency.shares import Shares

Update = Callable[[Weights], None]


class WeightStore:
    """Owns every version of a stage's trained parameters, and its frozen parameters (`frozen`).

    bf16 and fp16 add one fp32 master copy, on which the optimizer works. So does prediction, in any
    precision: micro-batches then run on W + (W - W before the last update), a prediction of the
    weights their gradient will be applied to. Source of prediction: PipeOptim, arXiv 2312.00839. An
    update is made group by group.

    Args:
        partition: Which shards of the trained parameters this rank updates, and how it gets the
            others. Its uses cut the buffers into chunks.
        frozen: Which shards of the frozen parameters this rank keeps.
        policy: Number of versions, and whether they are predicted, sharded or quantized.
        hosted: Names of the parameters that the host updates.

    Attributes:
        shares: This rank's shard of each buffer, if replicas shard the weights.
    """

    def __init__(
        self,
        parameters: StageParameters,
        partition: Partition,
        frozen: Partition,
        policy: StatePolicy,
        memory: Memory,
        hosted: Collection[str] = (),
    ):
        self.placements = parameters.placements
        self.layout = parameters.layout
        self.predicts = policy.predicts
        self.dtype = parameters.dtype
        self.master_dtype = parameters.master_dtype
        self.partition = partition
        self.memory = memory
        self._uses = uses = partition.uses
        self._on_host = policy.on_host
        self.copies = policy.on_host and not memory.is_of_host
        """Whether gradients are copied to a host, and weights from it."""
        self.keeps_master = self.predicts or self.dtype != self.master_dtype
        """Whether the master copy differs from every version of the weights."""
        chunks = cut(self.layout, uses)
        self.buffers = [
            Buffer(self.layout, self.dtype, memory, chunks, f"weights/{i}")
            for i in range(policy.num_versions)
        ]
        self.leaves = [
            {name: view.detach().requires_grad_() for name, view in buffer.views().items()}
            for buffer in self.buffers
        ]
        splits = policy.splits_weights
        self.shares = Shares.of(partition, self.buffers, memory, "weights", split=splits)
        self.frozen = FrozenWeights(parameters, frozen, memory, splits=splits)
        quantizable = parameters.quantizable if policy.config.train.fp8 else set()
        self.fp8 = Fp8Weights([*self.leaves, self.frozen.leaves], quantizable)
        """Quantized copies of hidden matrices, by slot; frozen parameters come last."""
        self._own_layout = own_layout = partition.layout_of_owned(
            self.master_dtype, offset_dtype=self.dtype
        )
        self.master = None
        if self.keeps_master or self.copies:
            own_chunks = cut(own_layout, lambda name: replace(uses(name), hosted=name in hosted))
            self.master = Buffer(own_layout, self.master_dtype, memory, own_chunks, "master")
        self.made: Buffer | None = None
        if self.keeps_master and self.copies:
            self.made = self.on_host("weights", self.dtype)
        """New weights on the host, in the versions' dtype, if the master copy has another."""
        # numbers of owned parameters, by group and whether the host updates them
        self._indices: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for i, name in enumerate(own_layout.names):
            self._indices[self.group_of(name), name in hosted].append(i)
        self._working = [shares.owned() for shares in self.shares] or [
            list(partition.owned_views(buffer)) for buffer in self.buffers
        ]
        """This rank's shards of the working buffers, in order."""
        if self.master is not None:
            self._views = [self.master.views()] * self.num_versions
        else:
            self._views = [
                dict(zip(own_layout.names, views, strict=True)) for views in self._working
            ]
        self._lists = [list(views.values()) for views in self._views]
        self._made = {} if self.made is None else self.made.views(hosted)
        self.places = [place for place in parameters.places if self.placements[place[2]].trainable]
        self._arriving: dict[int, Works] = {}
        self._bound: int | None = None
        self.newest = 0
        self.bind(0)

    def group_of(self, name: str) -> int:
        """Return the part of an update that a parameter belongs to."""
        return self._uses(name).group

    def is_kept(self, use: BufferUsage) -> bool:
        """Return whether chunks of a use are never sharded."""
        return use.stays or not self.shares

    def kept(self, version: int) -> dict[str, Tensor]:
        """Return the parameters of a live version that are never sharded, by name."""
        return {
            name: leaf
            for name, leaf in self.leaves_of(version).items()
            if self.is_kept(self._uses(name))
        }

    def on_host(self, kind: str, dtype: torch.dtype | None = None) -> Buffer:
        """Allocate host memory for this rank's hosted shards; dtype None: as the master copy."""
        assert self.master is not None
        chunks = [chunk for chunk in self.master.chunks if chunk.use.hosted] or [EMPTY]
        return Buffer(
            self._own_layout, dtype or self.master_dtype, self.memory, chunks, f"host/{kind}"
        )

    @torch.no_grad()
    def make_on_host(
        self, version: int, update: Update | None, *, predict: bool, group: int
    ) -> None:
        """Make the host's part of a group of a version, as `advance` makes the rest."""
        if not self.copies:
            self._make(version, update, predict=predict, group=group, hosted=True)
            return
        numbers = self._indices[group, True]
        master = [self._lists[0][i] for i in numbers]
        made = [self._made[self._own_layout.names[i]] for i in numbers] if self._made else ()
        if update is not None:
            update(Weights(master, master, made, self.predicts and predict))
            return
        for target, source in zip(made, master, strict=True) if made else ():
            target.copy_(source)

    def arriving(self, version: int, group: int) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of tensors of a group: a shard's place in a version, and its place on the
        host, where it is computed. None if the host updates in place.
        """
        if not self.copies:
            return []
        working = self._working[self.slot(version)]
        names = self._own_layout.names
        return [
            (working[i], self._made.get(names[i], self._lists[0][i]))
            for i in self._indices[group, True]
        ]

    def as_masters(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Return gradients in the precision of the update."""
        return [
            gradient if gradient.dtype is self.master_dtype else gradient.to(self.master_dtype)
            for gradient in gradients
        ]

    @property
    def num_versions(self) -> int:
        return len(self.buffers)

    def slot(self, version: int) -> int:
        return version % self.num_versions

    def leaves_of(self, version: int) -> dict[str, Tensor]:
        """Return the trained parameters of a live version, by name, once all have arrived."""
        assert self.newest - self.num_versions < version <= self.newest, (
            f"version {version} is not live"
        )
        self.await_version(version)
        return self.leaves[self.slot(version)]

    def bind(self, version: int) -> None:
        """Point the modules at `version`; copy nothing."""
        self.await_version(version)
        if (slot := self.slot(version)) == self._bound:
            return
        leaves = self.leaves_of(version)
        for table, key, name in self.places:
            table[key] = leaves[name]  # type: ignore[assignment]
        self._bound = slot

    def arriving_parts(self, version: int) -> Works:
        """Return the communication that brings `version` from other replicas."""
        return self._arriving.get(version, Works())

    def is_arriving(self, version: int) -> bool:
        """Return whether some of `version` has not arrived."""
        return not self.arriving_parts(version).is_done()

    def await_version(self, version: int) -> None:
        """Return once all of `version` has arrived, and is quantized if products are in fp8."""
        if (arriving := self._arriving.pop(version, None)) is not None:
            arriving.wait()
        self.fp8.refresh(self.slot(version), self.num_versions)

    def parameters_of_optimizer(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer works on, by name: this rank's shards of the
        master, or of the newest version if there is no master. They have no autograd history.
        """
        return self._views[self.slot(self.newest)]

    @torch.no_grad()
    def fill(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Set the newest version: `write` fills all parameters of this stage (fp32, or fp64 in an
        fp64 run), by name, in as many calls as there are parameters.
        """
        for arriving in list(self._arriving):  # a late arrival would overwrite these weights
            self.await_version(arriving)
        masters = {} if self.master is None else self.master.views()
        owned = {o.name: o for o in self.partition.owned}
        slot = self.slot(self.newest)
        self.fp8.mark_stale(slot, self.num_versions)
        for name, leaf in self.leaves[slot].items():
            master = masters.get(name)
            share = self.shares[slot].views.get(name) if self.shares else None
            with self.memory.writing(*(view for view in (leaf, master, share) if view is not None)):
                if self.master is None:
                    write({name: leaf.detach()})
                else:
                    full = torch.empty(leaf.shape, dtype=self.master_dtype, device=leaf.device)
                    write({name: full})
                    leaf.detach().copy_(full)
                    if master is not None:
                        part = owned[name].part
                        master.copy_(full if part is None else full.view(-1)[slice(*part)])
                if self.shares:
                    self.shares[slot].take([name])
        self.frozen.fill(write)

    @torch.no_grad()
    def advance(self, update: Update | None, *, predict: bool = True, group: int = 0) -> None:
        """Make version newest + 1.

        Parameters that the host updates have arrived already.

        Args:
            update: Writes the version, from this rank's shards of the newest one; None: the new
                version equals it, without prediction.
            predict: Predict this version, if weights are predicted.
            group: Which part of the version to make; part 0 comes first.

        Collectives: an all-gather over the owners, which `bind` waits for, if replicas shard the
        update.
        """
        self.newest += group == 0
        after = self.slot(self.newest)
        self.await_version(self.newest - 1)
        if update is not None or self.predicts or self.num_versions > 1:
            self.fp8.mark_stale(after)
        if not self._on_host or self._indices[group, False]:
            self._make(self.newest, update, predict=predict, group=group, hosted=False)
        if update is None and not self.keeps_master and not self._on_host:
            return  # all shards are copied
        arriving = self.arriving_parts(self.newest)
        self._arriving[self.newest] = Works(
            (
                arriving,
                self.partition.gather(
                    self.buffers[after], lambda use: use.group == group and self.is_kept(use)
                ),
            )
        )

    def _make(
        self, version: int, update: Update | None, *, predict: bool, group: int, hosted: bool
    ) -> None:
        """Write this rank's hosted shards of a group of a version, or its other shards."""
        before = self.slot(version - 1)
        after = self.slot(version)
        mine = self._indices[group, hosted]
        if update is None and self.master is None:
            self._keep(before, after, group)
        elif update is None:  # from the master: a version's memory may be gone by now
            self._write(after, mine)
        elif self.master is None:
            update(Weights(self._lists[before], self._lists[after]).only(mine))
        else:
            update(
                Weights(
                    self._lists[0], self._lists[0], self._working[after], self.predicts and predict
                ).only(mine)
            )

    def _keep(self, before: int, after: int, group: int) -> None:
        """Copy a group from one buffer to another."""
        if after == before:
            return
        for buffers in (self.buffers, [shares.buffer for shares in self.shares]):
            for number in buffers[after].group(group) if buffers else ():
                if buffers is not self.buffers or self.is_kept(buffers[after].chunks[number].use):
                    buffers[after].take(buffers[before], number)

    def _write(self, slot: int, numbers: Sequence[int]) -> None:
        """Copy owned parameters, by number, from the master to a working buffer."""
        assert self.master is not None
        for i in numbers:
            self._working[slot][i].copy_(self._lists[slot][i])

    @torch.no_grad()
    def full_weights(self) -> dict[str, Tensor]:
        """Return all parameters of this stage, neither rounded nor predicted; read only.

        Collectives: an all-gather if the master is sharded.
        """
        if not (self.keeps_master or self.shares) or not self.partition.is_sharded:
            here = self.leaves_of(self.newest)
            if self.master and self.keeps_master:
                here = self.master.views()
            trained = {name: self.memory.read(view.detach()) for name, view in here.items()}
        else:
            owned = map(self.memory.read, self._lists[self.slot(self.newest)])
            trained = self.partition.whole(owned, self.memory.device, self.master_dtype)
        return trained | self.frozen.full()

    @contextmanager
    def unpredicted(self) -> Iterator[None]:
        """Replace the newest version by unpredicted W in this context. May all-gather."""
        if not self.predicts:
            yield
            return
        self.await_version(self.newest)
        slot = self.slot(self.newest)
        flat = self.buffers[slot]
        held = [
            tensor
            for chunk, tensor in zip(flat.chunks, flat.tensors, strict=True)
            if self.is_kept(chunk.use)
        ]
        held += self.shares[slot].buffer.tensors if self.shares else []
        predicted = [tensor.clone() for tensor in held]
        self.fp8.mark_stale(slot)
        self._write(slot, range(len(self._lists[slot])))
        self.partition.gather(flat, self.is_kept).wait()
        try:
            yield
        finally:
            for tensor, before in zip(held, predicted, strict=True):
                tensor.copy_(before)
            self.fp8.mark_stale(slot)

    @property
    def live_versions(self) -> range:
        """The versions that the buffers hold once the pipeline is drained, oldest first."""
        return range(max(self.newest - self.num_versions + 1, 0), self.newest + 1)

    @torch.no_grad()
    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, by parameter name, to `version`, which becomes the newest; call in
        ascending order. Sharded chunks are left out.

        Raises:
            CheckpointError: A tensor is missing or of another shape.
        """
        for arriving in list(self._arriving):
            self.await_version(arriving)
        self.newest = version
        copy_all(self.kept(version), tensors, f"weights of version {version}", self.memory)
        self.fp8.mark_stale(self.slot(version))
        if self.master is not None and not self.keeps_master:
            for master, own in zip(self._lists[0], self._working[self.slot(version)], strict=True):
                master.copy_(self.memory.read(own))
        self._bound = None
        self.bind(version)

    @torch.no_grad()
    def restore_frozen(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, by name, to the unsharded frozen parameters. Raises: CheckpointError."""
        copy_all(self.frozen.kept(), tensors, "frozen weights", self.memory)
        self.fp8.mark_stale(self.num_versions)

    @torch.no_grad()
    def restore_master(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` to this rank's shards of the master copy. Raises: CheckpointError."""
        if self.master is not None and self.keeps_master:
            copy_all(self.master.views(), tensors, "master weights", self.memory)


def copy_all(
    targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str, memory: Memory
) -> None:
    """Copy tensors by name to their targets. Raises: CheckpointError, naming the first misfit."""
    for name, target in targets.items():
        if name not in tensors:
            raise CheckpointError(f"{what}: {name} is missing")
        tensor = tensors[name]
        if tensor.shape != target.shape:
            raise CheckpointError(
                f"{what}: {name} has shape {tuple(tensor.shape)}, but this model requires "
                f"{tuple(target.shape)}"
            )
        with memory.writing(target):
            target.copy_(tensor)

"""An opened checkpoint: any part of any tensor, read for a rank of any grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybridpar.checkpoint.format.manifest import Manifest, ShardFile, read_manifest
from hybridpar.checkpoint.format.shards import SavedShard
from hybridpar.checkpoint.reshard import clip, find_pieces
from hybridpar.errors import CheckpointError
from hybridpar.flight import NO_FLIGHT, Flight
from hybridpar.grid import APART, BATCH, EXPERTS, MODEL, place_of, sizes_of
from hybridpar.nn.placement import Held, Placement, Range, Shard
from hybridpar.optim import ParameterSlot
from hybridpar.state.kinds import Anchor, Master, WeightShares, WeightVersions, saved_kind
from hybridpar.state.residency.chunks import block_of


@dataclass(frozen=True)
class Holder:
    """A stage that has saved a parameter, and the parameter's name there."""

    stage: int
    name: str
    placement: Placement


@dataclass(frozen=True)
class Keeper:
    """A tensor of a file, which has elements `part` of a parameter's local tensor."""

    shard: SavedShard
    key: str
    part: Range

    def whole(self) -> Tensor:
        """Return the full tensor."""
        info = self.shard.file.tensors[self.key]
        target = torch.empty(prod(info.shape), dtype=info.dtype)
        self.shard.file.read(self.key, np.array([[0, 0, target.numel()]], np.int64), target)
        return target.view(info.shape)


@dataclass(frozen=True)
class Member:
    """A rank that took part in the reduction of a parameter's gradient.

    Attributes:
        holder: The stage and the placement of the parameter.
        replica: The rank's index along dp and cp together.
    """

    holder: Holder
    replica: int


class Saved:
    """Reader of pieces of a checkpoint's tensors. Only files that have them are opened, and each
    header is read once.

    Args:
        flight: Told of every tensor.
        site: The site whose files are read, if several have saved.

    Raises:
        CheckpointError: Here and below, for missing or damaged files.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest | None = None,
        flight: Flight = NO_FLIGHT,
        site: int = 0,
    ):
        self.folder, self.manifest, self._flight = folder, manifest or read_manifest(folder), flight
        self._site = dict.fromkeys(APART, site) if self.manifest.config.parallel.sites > 1 else {}
        self._files = sorted(self.manifest.shards, key=lambda shard: tuple(shard.place.values()))
        self._at: dict[tuple[tuple[str, int], ...], list[ShardFile]] = {}
        self._open: dict[str, SavedShard] = {}
        self._placements: dict[int, dict[str, Placement]] = {}
        self.stages = {
            file.place["pp"]: {n for blocks in file.spans for n in blocks}
            for file in self.manifest.shards
        }

    def placements(self, stage: int) -> dict[str, Placement]:
        """Return the placements of a stage's parameters, by name; ranks along ep have different
        ones."""
        if self.manifest.config.parallel.ep == 1:
            return next(self._files_of(stage)).placements
        if stage not in self._placements:
            self._placements[stage] = {
                name: place
                for file in self._files_of(stage)
                for name, place in file.placements.items()
            }
        return self._placements[stage]

    def holders(self, name: str, tied: str = "") -> list[Holder]:
        """Return the stages that have saved a parameter: under this name first, then under a
        name that is tied to it."""
        found = [
            Holder(stage, name, self.placements(stage)[name])
            for stage, blocks in self.stages.items()
            if block_of(name) in blocks and name in self.placements(stage)
        ]
        for stage in (
            sorted({min(self.stages), max(self.stages)}) if tied else ()
        ):  # the stage with the embedding, or with the head
            found += [
                Holder(stage, other, place)
                for other, place in self.placements(stage).items()
                if place.tied == tied and other != name
            ]
        return found

    def keeps(self, slot: ParameterSlot, kind: str, what: str) -> bool:
        """Return whether such a tensor, say 'momentum', was saved for this parameter or any
        other trained one beside it; False if it was frozen."""
        holders = [
            holder
            for holder in self.holders(slot.name, slot.placement.tied)
            if holder.placement.trainable
        ]
        return any(
            (kind, what) in shard.kept
            for holder in holders
            for shard in self._files_of(holder.stage)
        )

    def has(self, slot: ParameterSlot, kind: str, what: str = "") -> bool:
        """Return whether this very parameter has such a tensor."""
        return bool(self._keepers(self.holders(slot.name, slot.placement.tied), 0, kind, what))

    def read(
        self, slot: ParameterSlot, kind: str, what: str = "", member: Member | None = None
    ) -> Tensor:
        """Return the part of a parameter's tensor that `slot` names, on the CPU, in new memory.

        Args:
            slot: The parameter, and the part that is needed.
            kind: Kind of state.
            what: Name of the tensor within the kind, as in StateKind.key.
            member: The rank whose tensor is read, for kinds that differ between replicas.

        Shapes: slot.shape.
        """
        self._flight.tick()
        holders = self.holders(slot.name, slot.placement.tied)
        replica = None
        if member is not None:
            holders = [member.holder]
            replica = member.replica
        wanted = f"{kind} {what} of {slot.name}" if what else f"{kind} of {slot.name}"
        if not (first := self._keepers(holders, 0, kind, what, replica)):
            raise CheckpointError(f"{self.folder}: has no {wanted}")
        target = torch.empty(slot.numel, dtype=first[0].shard.file.tensors[first[0].key].dtype)
        filled = 0
        try:
            sources = find_pieces(slot.placement, slot.rank, holders[0].placement)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {slot.name} {error}") from None
        for source, pieces in sources.items():
            if slot.part is not None:
                pieces = clip(pieces, 1, slot.part)
            done = 0
            for keeper in (
                self._keepers(holders, source, kind, what, replica) if len(pieces) else ()
            ):
                start = max(done, keeper.part[0])
                stop = keeper.part[1]
                mine = clip(pieces, 0, (start, stop))
                mine[:, 0] += start - keeper.part[0]
                keeper.shard.file.read(keeper.key, mine, target)
                filled += int(mine[:, 2].sum())
                done = max(done, stop)
        if filled != slot.numel:
            raise CheckpointError(
                f"{self.folder}: has only {filled} of the {slot.numel} elements of {wanted}"
            )
        return target.view(slot.shape)

    def members(self, slot: ParameterSlot) -> list[Member]:
        """Return the ranks that took part in the reduction of a parameter's gradient, in the
        order of their axis: stage by stage, all replicas that hold it."""
        holders = sorted(
            self.holders(slot.name, slot.placement.tied), key=lambda holder: holder.stage
        )
        return [
            Member(holder, replica)
            for holder in holders
            for replica in range(self.manifest.config.parallel.dp_cp)
            if self._is_held_by(holder, replica)
        ]

    def _is_held_by(self, holder: Holder, replica: int) -> bool:
        """Return whether a replica holds a parameter: one rank of ep does if it is an expert's."""
        if holder.placement.along(EXPERTS) is not Held.SHARDED:
            return True
        files = self._files_of(holder.stage, replica=replica)
        return any(holder.name in file.placements for file in files)

    def share(self, slot: ParameterSlot, kind: str, rank: int, size: int) -> Tensor | None:
        """Return the sum of the tensors of all members whose number is `rank` modulo `size`; None
        if there are none.

        The sum over all members thus stays the same when their number changes, and with an equal
        number each gets its own tensor.
        """
        total = None
        for member in self.members(slot)[rank::size]:
            if self._keepers([member.holder], 0, kind, "", member.replica):
                kept = self.read(slot, kind, member=member)
                total = kept if total is None else total.add_(kept)
        return total

    def same(
        self, slot: ParameterSlot, kind: str, what: str, rank: int, size: int
    ) -> Tensor | None:
        """Return the tensor of member `rank` of `size`, of any shape; None if the number of
        members, or the member's part of the parameter, has changed."""
        if len(members := self.members(slot)) != size:
            return None
        holder = members[rank].holder
        replica = members[rank].replica
        if holder.placement.shard != slot.placement.shard:
            return None
        keepers = self._keepers([holder], slot.rank, kind, what, replica)
        return keepers[0].whole() if keepers else None

    def alike(self, slot: ParameterSlot, kind: str, what: str) -> Tensor | None:
        """Return the tensor that all replicas of the ranks with the same part of the parameter
        have saved, of any shape; None if no rank had that part or saved one."""
        holders = [
            holder
            for holder in self.holders(slot.name, slot.placement.tied)
            if holder.placement.shard == slot.placement.shard
        ]
        keepers = self._keepers(holders, slot.rank, kind, what)
        return keepers[0].whole() if keepers else None

    def read_newest(self, slot: ParameterSlot) -> Tensor:
        """Return the newest weights of a parameter, neither rounded nor predicted: the master
        weights if there are any."""
        if self.has(slot, Master.name):
            return self.read(slot, Master.name)
        return self.read_version(slot, self.manifest.step)

    def read_version(self, slot: ParameterSlot, version: int) -> Tensor:
        """Return the weights of a saved version of a parameter, from one file or from shards. A
        frozen parameter has one version."""
        if not all(
            holder.placement.trainable for holder in self.holders(slot.name, slot.placement.tied)
        ):
            version = self.manifest.step
        kind = WeightShares if self.has(slot, WeightShares.name, str(version)) else WeightVersions
        return self.read(slot, kind.name, str(version))

    def read_common(self, slot: ParameterSlot) -> Tensor:
        """Return the last weights that all sites had in common; with one site, the newest
        weights."""
        return (
            self.read(slot, Anchor.name) if self.has(slot, Anchor.name) else self.read_newest(slot)
        )

    def _keepers(
        self, holders: Sequence[Holder], rank: int, kind: str, what: str, replica: int | None = None
    ) -> list[Keeper]:
        """Return the tensors that make up shard `rank` of the holders' split, in their order.
        `replica`: only from that replica."""
        found = []
        of_kind = saved_kind(kind)
        for holder in holders:
            key = of_kind.key(holder.name, what)
            whole = 0, prod(holder.placement.local_shape(rank))
            found += [
                Keeper(shard, key, whole if of_kind.whole else shard.parts.get(holder.name, whole))
                for shard in self._files_of(holder.stage, holder.placement.shard, rank, replica)
                if key in shard.file.tensors
            ]
        return sorted(found, key=lambda keeper: keeper.part)

    def _files_of(
        self, stage: int, split: Shard | None = None, rank: int = 0, replica: int | None = None
    ) -> Iterator[SavedShard]:
        """Yield the files of a stage with shard `rank` of a split, from all replicas or from
        one."""
        wanted = (
            dict.fromkeys(MODEL, 0)
            | self._site
            | {"pp": stage}
            | ({split.axis: rank} if split else {})
        )
        if replica is not None:
            sizes = sizes_of(self.manifest.config.parallel)
            wanted |= place_of(replica, {name: sizes[name] for name in sizes if name in BATCH})
        if (places := tuple(wanted.items())) not in self._at:  # for all tensors there once
            self._at[places] = [
                file for file in self._files if wanted.items() <= file.place.items()
            ]
        for file in self._at[places]:
            if file.name not in self._open:
                self._open[file.name] = SavedShard(self.folder, file, self.manifest.config)
            yield self._open[file.name]

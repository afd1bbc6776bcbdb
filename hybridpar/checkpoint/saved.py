"""An opened checkpoint: any part of any tensor, read for a rank of any grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybridpar.checkpoint.manifest import Manifest, ShardFile, read_manifest
from hybridpar.checkpoint.reshard import clip, find_pieces
from hybridpar.checkpoint.shards import SavedShard
from hybridpar.errors import CheckpointError
from hybridpar.flight import NO_FLIGHT, Flight
from hybridpar.grid import APART, BATCH, MODEL
from hybridpar.nn.placement import Placement, Range, Shard
from hybridpar.optim import ParameterSlot
from hybridpar.state.chunks import block_of
from hybridpar.state.kinds import Anchor, Master, WeightShares, WeightVersions, saved_kind


@dataclass(frozen=True)
class Holder:
    """A stage that has saved a parameter, and what it is called there."""

    stage: int
    name: str
    placement: Placement


@dataclass(frozen=True)
class Keeper:
    """A file's tensor, which is elements `part` of a parameter's local tensor."""

    shard: SavedShard
    key: str
    part: Range

    def whole(self) -> Tensor:
        """All of the tensor."""
        info = self.shard.file.tensors[self.key]
        target = torch.empty(prod(info.shape), dtype=info.dtype)
        self.shard.file.read(self.key, np.array([[0, 0, target.numel()]], np.int64), target)
        return target.view(info.shape)


@dataclass(frozen=True)
class Member:
    """One of the ranks that summed a parameter's gradient."""

    holder: Holder
    replica: int


class Saved:
    """Reader of pieces of a checkpoint's tensors, from those files alone that have them; each
    header is read once.

    `flight` is told of every tensor. `site`: whose files, where several sites have saved.
    Raises: CheckpointError, here and below, for what is missing or damaged.
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
        self.stages = {
            file.place["pp"]: {n for blocks in file.spans for n in blocks}
            for file in self.manifest.shards
        }

    def placements(self, stage: int) -> dict[str, Placement]:
        """Placements of a stage's parameters, by name."""
        return next(self._files_of(stage)).placements

    def holders(self, name: str, tied: str = "") -> list[Holder]:
        """Stages that have saved a parameter: under this name first, then under another one that is
        tied to it."""
        found = [
            Holder(stage, name, self.placements(stage)[name])
            for stage, blocks in self.stages.items()
            if block_of(name) in blocks and name in self.placements(stage)
        ]
        for stage in (
            sorted({min(self.stages), max(self.stages)}) if tied else ()
        ):  # with the embedding, or the head
            found += [
                Holder(stage, other, place)
                for other, place in self.placements(stage).items()
                if place.tied == tied and other != name
            ]
        return found

    def keeps(self, slot: ParameterSlot, kind: str, what: str) -> bool:
        """Whether such a tensor, say 'momentum', was kept of this parameter or of any other trained
        one beside it; not if it was frozen."""
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
        """Whether this very parameter has such a tensor."""
        return bool(self._keepers(self.holders(slot.name, slot.placement.tied), 0, kind, what))

    def read(
        self, slot: ParameterSlot, kind: str, what: str = "", member: Member | None = None
    ) -> Tensor:
        """The part that `slot` names of a parameter's tensor of a kind. `what`: as in
        StateKind.key. `member`: whose, of a kind that differs from replica to replica.

        Shapes: slot.shape, on the CPU, in memory of its own.
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
                f"{self.folder}: has only {filled} of {slot.numel} elements of {wanted}"
            )
        return target.view(slot.shape)

    def members(self, slot: ParameterSlot) -> list[Member]:
        """The ranks that summed a parameter's gradient, in the order of their axis: stage by stage,
        all replicas."""
        holders = sorted(
            self.holders(slot.name, slot.placement.tied), key=lambda holder: holder.stage
        )
        return [
            Member(holder, replica)
            for holder in holders
            for replica in range(self.manifest.config.parallel.dp)
        ]

    def share(self, slot: ParameterSlot, kind: str, rank: int, size: int) -> Tensor | None:
        """The sum of what the members whose number is `rank` modulo `size` have kept; None:
        nothing. So the sum over all members stays what it was when their number changes, and as
        many as before have what they had."""
        total = None
        for member in self.members(slot)[rank::size]:
            if self._keepers([member.holder], 0, kind, "", member.replica):
                kept = self.read(slot, kind, member=member)
                total = kept if total is None else total.add_(kept)
        return total

    def same(
        self, slot: ParameterSlot, kind: str, what: str, rank: int, size: int
    ) -> Tensor | None:
        """What member number `rank` of `size` has kept, of whatever shape; None: there were more or
        fewer of them, or it had another part of the parameter."""
        if len(members := self.members(slot)) != size:
            return None
        holder = members[rank].holder
        replica = members[rank].replica
        if holder.placement.shard != slot.placement.shard:
            return None
        keepers = self._keepers([holder], slot.rank, kind, what, replica)
        return keepers[0].whole() if keepers else None

    def alike(self, slot: ParameterSlot, kind: str, what: str) -> Tensor | None:
        """What all replicas of the ranks with the same part of the parameter have kept, of whatever
        shape; None: no rank had that part, or they kept nothing."""
        holders = [
            holder
            for holder in self.holders(slot.name, slot.placement.tied)
            if holder.placement.shard == slot.placement.shard
        ]
        keepers = self._keepers(holders, slot.rank, kind, what)
        return keepers[0].whole() if keepers else None

    def read_newest(self, slot: ParameterSlot) -> Tensor:
        """The newest weights of a parameter, neither rounded nor predicted: the master's where
        there is one."""
        if self.has(slot, Master.name):
            return self.read(slot, Master.name)
        return self.read_version(slot, self.manifest.step)

    def read_version(self, slot: ParameterSlot, version: int) -> Tensor:
        """The weights of a parameter of a version that was saved, whole or in shares. All versions
        of a frozen one are the newest."""
        if not all(
            holder.placement.trainable for holder in self.holders(slot.name, slot.placement.tied)
        ):
            version = self.manifest.step
        kind = WeightShares if self.has(slot, WeightShares.name, str(version)) else WeightVersions
        return self.read(slot, kind.name, str(version))

    def read_common(self, slot: ParameterSlot) -> Tensor:
        """The weights that all sites had in common last; of one site, the newest."""
        return (
            self.read(slot, Anchor.name) if self.has(slot, Anchor.name) else self.read_newest(slot)
        )

    def _keepers(
        self, holders: Sequence[Holder], rank: int, kind: str, what: str, replica: int | None = None
    ) -> list[Keeper]:
        """Tensors that make up part `rank` of what the holders split, in their order. `replica`: of
        that one alone."""
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
        """Files of a stage with part `rank` of what is split so, those of all replicas or of
        one."""
        wanted = (
            dict.fromkeys(MODEL, 0)
            | self._site
            | {"pp": stage}
            | ({split.axis: rank} if split else {})
        )
        wanted |= {} if replica is None else {BATCH[0]: replica}
        if (places := tuple(wanted.items())) not in self._at:  # for all tensors there once
            self._at[places] = [
                file for file in self._files if wanted.items() <= file.place.items()
            ]
        for file in self._at[places]:
            if file.name not in self._open:
                self._open[file.name] = SavedShard(self.folder, file, self.manifest.config)
            yield self._open[file.name]

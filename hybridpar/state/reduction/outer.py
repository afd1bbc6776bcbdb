"""The outer step: averages the weights of sites that train apart (as DiLoCo).

    site 0   W ----- inner steps -----> W0    anchor - W0 -.                      anchor, momentum: equal to the bit
    site 1   W ----- inner steps -----> W1    anchor - W1 --+-> mean d;  v = momentum v + d
                                                            |   anchor -= lr (d + momentum v)
                                                            '-> W0, W1 = mix W0, W1 + (1 - mix)
                                                            anchor

It is part of UPDATE: it changes a version while that version is made (outer_timeline.py says
which). A rank exchanges the parameters that it updates (with ZeRO-1 its shard) with the ranks that
hold the same parameters at other sites. Every element goes through the same exactly rounded
operations at all sites, whatever their threads and vector widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hybridpar.comm import Works, all_gather_async
from hybridpar.config import OuterConfig
from hybridpar.grid import Axis
from hybridpar.ops.update import Weights
from hybridpar.optim import ParameterSlot
from hybridpar.state.layout import FlatLayout
from hybridpar.state.reduction.outer_timeline import OuterTimeline, fragment_of
from hybridpar.state.reduction.precision import Precision
from hybridpar.state.residency.chunks import Buffer, Chunk, Memory

_PIECE = 1 << 16
"""Elements that are worked on at a time, so that they stay in a cache."""
_PARCEL_BYTES = 4 << 20
"""Bytes of a message that go at once: each parcel has the whole train.timeout_s, also on slow
links."""
NUM_NOTES = 4
"""Numbers that sites tell each other with every message."""


Wait = Callable[[Callable[[], None]], None]
"""Called with a function that waits for other ranks."""


def wait_here(wait: Callable[[], None]) -> None:
    """Wait for other ranks, unobserved."""
    wait()


def _pieces(slot: ParameterSlot) -> list[int]:
    """Return the sizes of the pieces of a slot's tensor. Rows that other ranks hold as well are
    separate pieces, so all ranks write them alike.
    """
    rows = [stop - start for start, stop in slot.segments] if slot.num_parts > 1 else [1]
    parts = [slot.numel // sum(rows) * number for number in rows]
    return [min(_PIECE, part - start) for part in parts for start in range(0, part, _PIECE)] or [0]


class OuterStep:
    """The outer optimizer of the `slots` that this rank updates, and its messages over `site`.

    Between two versions at most one message is under way.

    Args:
        site: The ranks that hold the same parameters at other sites.
        slots: The shards that this rank updates.
        dtype: Type of the master copy, or of the weights if there is none.

    Attributes:
        buffers: Anchor, momentum ("outer") and, with lossy messages, "remainder": each parameter's
            quantization error, which is added to its next message; for a message under way, the
            numbers that it was made from. By the kind of state.
    """

    def __init__(
        self,
        settings: OuterConfig,
        site: Axis,
        slots: Sequence[ParameterSlot],
        dtype: torch.dtype,
        memory: Memory,
    ):
        self.settings = settings
        self.site = site
        self.timeline = OuterTimeline(settings)
        layout = FlatLayout({slot.name: slot.shape for slot in slots}, dtype)
        self._form = Precision(settings.precision, dtype)
        kinds = ["anchor", "outer", *["remainder"] * self._form.is_lossy]
        self.buffers = {kind: Buffer(layout, dtype, memory, kind=kind) for kind in kinds}
        views = {kind: list(kept.views().values()) for kind, kept in self.buffers.items()}
        self._anchors = views["anchor"]
        self._momenta = views["outer"]
        self._remainders = views.get("remainder", [])
        self._members: list[list[int]] = [[] for _ in range(settings.fragments)]
        for i, slot in enumerate(slots):
            self._members[fragment_of(slot.name, slot.placement.tied, settings.fragments)].append(i)
        self._slots = list(slots)
        self._pieces = list(map(_pieces, slots))
        self._cuts = [list(map(self._form.size, pieces)) for pieces in self._pieces]
        self._sizes = [[sum(self._cuts[i]) for i in members] for members in self._members]
        self.wire = memory.zeros(
            "wire", Chunk(0, site.size * max(map(sum, self._sizes))), self._form.unit
        )
        self._room = memory.zeros(
            "sums", Chunk(0, 2 * min(max((slot.numel for slot in slots), default=1), _PIECE)), dtype
        )
        self._notes: Sequence[float] = (0.0,) * NUM_NOTES
        self._heard: Tensor | None = None
        self._told = torch.zeros(site.size * NUM_NOTES, dtype=torch.float64, device=memory.device)
        self._under_way: Works | None = None

    @property
    def room(self) -> list[Tensor]:
        """Buffers for messages and sums."""
        return [self.wire, self._room]

    def message_bytes(self, fragment: int) -> int:
        """Return the bytes of this rank's message, equal at each site."""
        return (
            sum(self._sizes[fragment]) * self.wire.element_size()
            + self._told.nbytes // self.site.size
        )

    def sent(self, version: int) -> dict[str, Tensor]:
        """Return the differences that this rank has sent and no version has applied yet, by
        parameter. Empty if messages are lossy, because `remainder` has the numbers that they were
        made from.
        """
        if (fragment := self.timeline.under_way(version)) is None or self._form.is_lossy:
            return {}
        return {
            self._slots[i].name: message.view(self._slots[i].shape)
            for i, message in self._own(fragment)
        }

    @torch.no_grad()
    def begin(self, weights: Sequence[Tensor]) -> None:
        """Start from weights that all sites have in common, in the order of the slots."""
        for anchor, momentum, weight in zip(self._anchors, self._momenta, weights, strict=True):
            anchor.copy_(weight)
            momentum.zero_()
        for kept in self._remainders:
            kept.zero_()

    def begin_at(self, since: int) -> None:
        """Prepare for a load: sites train apart `since` a version; a message under way is void."""
        if self._under_way is not None:
            self._under_way.wait()
        self._under_way = None
        self.timeline = replace(self.timeline, since=since)

    def go_on(self, version: int) -> None:
        """Prepare to train from a version: resend the message that was under way when the
        checkpoint was saved.

        Collectives: as `step`.
        """
        fragment = self.timeline.under_way(version)
        if fragment is not None and self._under_way is None:
            self._notes = (0.0,) * NUM_NOTES
            for i, message in self._own(fragment) if self._form.is_lossy else ():
                for out, kept in zip(
                    message.split(self._cuts[i]), self._split(i, self._remainders[i]), strict=True
                ):
                    self._form.write(out, kept)
            self._send(fragment)

    # -- while a version is made

    def concerns(self, version: int) -> bool:
        """Return whether `step` changes a version."""
        return (
            self.timeline.leaving(version) is not None or self.timeline.taken(version) is not None
        )

    def tell(self, notes: Sequence[float]) -> None:
        """Send these notes with the next message."""
        self._notes = notes

    def take_heard(self) -> Tensor | None:
        """Return the notes that came with a message since the last call. Shapes: [sites, notes]."""
        heard = self._heard
        self._heard = None
        return heard

    @torch.no_grad()
    def step(self, version: int, weights: Weights, wait: Wait = wait_here) -> None:
        """Apply and send the fragments that are due while a version is made.

        Args:
            weights: The new weights of all slots, in order.
            wait: Called with a function that waits for other sites.

        Collectives: if a fragment leaves, all-gathers of it and of the notes over `site`.
        """
        at_once = self.settings.delay == 0
        arriving = self.timeline.taken(version)
        leaving = self.timeline.leaving(version)
        if arriving is not None and not at_once:
            self._take(arriving, weights, wait)
        if leaving is not None:
            for i, message in self._own(leaving):
                self._subtract(i, message, weights.new[i])
            self._send(leaving)
        if arriving is not None and at_once:
            self._take(arriving, weights, wait)

    def _spans(self, fragment: int) -> list[tuple[int, tuple[int, int]]]:
        """Return the slots of a fragment by number, and their ranges in a message."""
        ends = accumulate(self._sizes[fragment], initial=0)
        return list(zip(self._members[fragment], pairwise(ends), strict=True))

    def _own(self, fragment: int) -> list[tuple[int, Tensor]]:
        """Return the slots of a fragment by number, and this rank's message of each."""
        own = self._messages(fragment)[self.site.rank]
        return [(i, own[a:b]) for i, (a, b) in self._spans(fragment)]

    def _split(self, slot: int, x: Tensor) -> Sequence[Tensor]:
        """Return the pieces of a slot's tensor."""
        return x.view(-1).split(self._pieces[slot])

    def _messages(self, fragment: int) -> list[Tensor]:
        """Return the messages of all sites."""
        size = sum(self._sizes[fragment])
        if not size:
            return [self.wire[:0]] * self.site.size
        return list(self.wire[: self.site.size * size].split(size))

    def _send(self, fragment: int) -> None:
        size = sum(self._sizes[fragment])
        sites = self.site.size
        rank = self.site.rank
        self._told[rank * NUM_NOTES : (rank + 1) * NUM_NOTES] = torch.tensor(
            self._notes, dtype=torch.float64
        )
        most = max(_PARCEL_BYTES // self.wire.element_size(), 1)
        parcels = [
            (s, s * size + a, s * size + min(a + most, size))
            for a in range(0, size, most)
            for s in range(sites)
        ]
        notes = [(s, s * NUM_NOTES, (s + 1) * NUM_NOTES) for s in range(sites)]
        self._under_way = Works(
            (
                all_gather_async(self._told, notes, self.site),
                all_gather_async(self.wire, parcels, self.site),
            )
        )

    def _take(self, fragment: int, weights: Weights, wait: Wait) -> None:
        assert self._under_way is not None, "nothing has left: go_on comes before training"
        wait(self._under_way.wait)
        self._under_way = None
        self._heard = self._told.view(self.site.size, NUM_NOTES).clone()
        messages = self._messages(fragment)
        for i, (a, b) in self._spans(fragment):
            self._average(i, [m[a:b] for m in messages], weights.new[i])
            if weights.working:
                weights.working[i].copy_(weights.new[i])

    # -- arithmetic, piece by piece

    def _rooms(self, numel: int) -> tuple[Tensor, Tensor]:
        half = self._room.numel() // 2
        return self._room[:numel], self._room[half : half + numel]

    def _subtract(self, slot: int, message: Tensor, weight: Tensor) -> None:
        """Write the message of a slot."""
        kept = self._split(slot, self._remainders[slot]) if self._form.is_lossy else None
        pieces = zip(
            message.split(self._cuts[slot]),
            self._split(slot, self._anchors[slot]),
            self._split(slot, weight),
            strict=True,
        )
        for number, (out, x, y) in enumerate(pieces):
            difference = torch.sub(x, y, out=self._rooms(x.numel())[0])
            self._form.write(out, difference if kept is None else kept[number].add_(difference))

    def _average(self, slot: int, messages: Sequence[Tensor], weight: Tensor) -> None:
        """Apply the messages of a slot. Multiplications and additions are separate operations:
        fused ones do not round alike in all parts of a tensor.
        """
        settings = self.settings
        tensors = (self._anchors[slot], self._momenta[slot], weight)
        pieces = zip(
            *(self._split(slot, t) for t in tensors),
            *(m.split(self._cuts[slot]) for m in messages),
            strict=True,
        )
        kept = self._split(slot, self._remainders[slot]) if self._form.is_lossy else None
        for number, (a, v, w, *ms) in enumerate(pieces):
            mean, other = self._rooms(a.numel())
            if kept is not None:
                kept[number].sub_(self._form.read(other, ms[self.site.rank]))
            self._form.read(mean, ms[0])
            for m in ms[1:]:
                mean.add_(self._form.read(other, m))
            mean.mul_(1 / len(ms))
            v.mul_(settings.momentum).add_(mean)
            a.sub_(mean.add_(torch.mul(v, settings.momentum, out=other)).mul_(settings.lr))
            if settings.mix:
                w.mul_(settings.mix).add_(torch.mul(a, 1 - settings.mix, out=other))
            else:
                w.copy_(a)

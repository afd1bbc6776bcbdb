"""State of a checkpoint for training that resumes on another grid, schedule or ZeRO setting.

After t batches, drained, a checkpoint has W(t), and with schedule 2bw W(t-1), the older of two
versions:

    2bw -> 2bw               both versions unchanged, on any grid
    2bw -> one version       W(t); W(t-1) is left out. Batch t is the first whose gradients are not
                             a step old
    one version -> 2bw       both are W(t), and so is the loss scale that comes with them: as in a
                             2bw run with sync_steps = t, batch t takes gradients at W(t), batch t+1
                             too, batch t+2 at W(t+1)
    pipedream -> pipedream   W(t) on every stage, which is all that a drained pipeline needs
    pipedream <-> others     as from and to one version

The rest is the same set of numbers however it is cut. State of a kind that the old run had not
begins as in a new run (StateKind.restate): a master copy equals the weights, an optimizer's state
is zero. So does all state of a parameter that was frozen and is trained now; one that was trained
and is frozen now stays at W(t). Predicted weights are not W: a run that does not predict takes W(t)
from the master, for both versions. What replicas have not sent of their gradients goes to as many
others as there are now: rank i of w gets the sum of the old ones i, i + w, and so on. A run that
does not compress leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.checkpoint.saved import Saved
from hybridpar.optim import ParameterSlot
from hybridpar.state import RankState
from hybridpar.state.kinds import parse_key


class Restated(Mapping[str, Tensor]):
    """The tensors that a rank needs, by the keys of RankState.tensors; each is read when it is
    accessed.

    Args:
        state: State of the rank, as constructed.
        ahead: Number of batches that are skipped: training resumes after them, as if they had not
            been in the data.

    Raises:
        CheckpointError: A tensor is missing or damaged, or has another shape.
    """

    def __init__(self, saved: Saved, state: RankState, ahead: int = 0):
        self._saved = saved
        self._state = saved.manifest.state
        self._here = state
        self.read = saved.read
        self.keeps = saved.keeps
        self.newest = saved.read_newest
        self.alike = saved.alike
        self.common = saved.read_common
        weights = state.weights
        self._unpredicts = (
            saved.manifest.config.optim.staleness == "prediction" and not weights.predicts
        )
        self._slots = state.owned_slots
        self._whole = state.whole_slots
        self._ahead = ahead
        newest = self._state.batches_done + ahead
        self.versions = range(max(newest - weights.num_versions + 1, 0), newest + 1)

    def meta(self, scaler: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rest of the state for Engine.load_state. `scaler`: the new run's loss
        scaler, used if none was saved."""
        state = self._state
        scale = state.loss_scales.get(state.batches_done, float(scaler["scale"]))
        scales = {v: state.loss_scales.get(self._stored(v), scale) for v in self.versions}
        return replace(
            state,
            batches_done=state.batches_done + self._ahead,
            versions=tuple(self.versions),
            loss_scaler=state.loss_scaler or scaler,
            loss_scales=scales,
        ).as_meta()

    def _stored(self, version: int) -> int:
        """Return the saved version that serves as `version`."""
        saved = version - self._ahead
        return (
            saved
            if saved in self._state.versions and not self._unpredicts
            else self._state.batches_done
        )

    def version(self, slot: ParameterSlot, version: int) -> Tensor:
        """Return the weights that the new run uses as that version."""
        if (
            not slot.placement.trainable
        ):  # sites may have trained it separately before it was frozen
            return self.common(slot)
        if self._unpredicts:
            return self.newest(slot)
        return self._saved.read_version(slot, self._stored(version))

    def share(self, slot: ParameterSlot, kind: str) -> Tensor | None:
        """See state.kind.Stored."""
        axis = self._here.partition.axis_of(slot.name)
        return self._saved.share(slot, kind, axis.rank, axis.size)

    def same(self, slot: ParameterSlot, kind: str, what: str) -> Tensor | None:
        """See state.kind.Stored."""
        axis = self._here.partition.axis_of(slot.name)
        return self._saved.same(slot, kind, what, axis.rank, axis.size)

    def __getitem__(self, key: str) -> Tensor:
        kind, parameter, what = parse_key(key)
        slot = (self._whole if kind.whole else self._slots)[parameter]
        tensor = kind.restate(self, slot, what)
        return (
            torch.zeros(slot.shape, dtype=self._here.weights.master_dtype)
            if tensor is None
            else tensor
        )

    def __contains__(self, key: object) -> bool:
        kind, parameter, _ = parse_key(str(key))
        return parameter in (self._whole if kind.whole else self._slots)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of the rank's current state; an optimizer asks for its state
        itself."""
        return iter(self._here.tensors())

    def __len__(self) -> int:
        return len(self._here.tensors())

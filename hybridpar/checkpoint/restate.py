"""A checkpoint's state as training on another grid, schedule or ZeRO setting goes on from it.

After t batches, drained, a checkpoint has W(t), and with schedule 2bw W(t-1), the older of two versions:

    2bw -> 2bw               both versions as they are, on any grid
    2bw -> one version       W(t); W(t-1) is left out. Batch t is the first whose gradients are not a step old
    one version -> 2bw       both are W(t), and so is the loss scale that comes with them: as in a 2bw run with
                             sync_steps = t, batch t takes gradients at W(t), batch t+1 too, batch t+2 at W(t+1)
    pipedream -> pipedream   W(t) on every stage, which is all that a drained pipeline goes on with
    pipedream <-> others     as from and to one version

The rest is the same set of numbers however it is cut. What the new run has and the old one had not begins as in a new
run: a master copy equals the weights, an optimizer's state is zero, nothing is predicted of W(t) (staleness). Predicted
weights are not W: a run that does not predict takes W(t) from the master, for both versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.checkpoint.saved import Saved
from hybridpar.checkpoint.shards import MASTER, OPTIMIZER, WEIGHTS
from hybridpar.grid import Place
from hybridpar.optim import ParameterSlot
from hybridpar.state.weights import WeightStore


class Restated(Mapping[str, Tensor]):
    """The tensors that a rank needs, named as by Engine.state_tensors; each is read when it is asked for.

    `slots`: what the rank updates. `meta`: the rest of the state, as Engine.load_state takes it. `ahead`: so many
    batches are gone over: training goes on behind them as it would have from here, had they not been in the data.
    Raises: CheckpointError where one is missing, damaged or of another shape.
    """

    def __init__(self, saved: Saved, weights: WeightStore, slots: Mapping[str, ParameterSlot], where: Place,
                 ahead: int = 0):
        self._saved, self._slots, self._state = saved, slots, saved.manifest.state
        self._unpredicts = saved.manifest.config.optim.staleness == "prediction" and not weights.predicts
        self._whole = {name: ParameterSlot(name, place, where) for name, place in weights.placements.items()}
        self._has_master, self._dtype = weights.master is not None, weights.master_dtype
        self._ahead, newest = ahead, self._state.batches_done + ahead
        self.versions = range(max(newest - weights.num_versions + 1, 0), newest + 1)

    def meta(self, scaler: Mapping[str, Any]) -> dict[str, Any]:
        """`scaler`: the new run's own, for a checkpoint that has none."""
        state = self._state
        scale = state.loss_scales.get(state.batches_done, float(scaler["scale"]))
        scales = {v: state.loss_scales.get(self._stored(v), scale) for v in self.versions}
        return replace(
            state, batches_done=state.batches_done + self._ahead, versions=tuple(self.versions),
            loss_scaler=state.loss_scaler or scaler, loss_scales=scales).as_meta()

    def _stored(self, version: int) -> int:
        """The saved version that is taken as `version`."""
        saved = version - self._ahead
        return saved if saved in self._state.versions and not self._unpredicts else self._state.batches_done

    def __getitem__(self, name: str) -> Tensor:
        kind, _, rest = name.partition("/")
        if kind == WEIGHTS:
            version, _, parameter = rest.partition("/")
            if self._unpredicts:
                return self._saved.read_newest(self._whole[parameter])
            return self._saved.read(self._whole[parameter], WEIGHTS, str(self._stored(int(version))))
        if kind == MASTER:
            return self._saved.read_newest(self._slots[rest])
        parameter, _, state = rest.rpartition(".")
        slot = self._slots[parameter]
        if not self._saved.keeps_state(slot, state):
            return torch.zeros(slot.shape, dtype=self._dtype)
        return self._saved.read(slot, OPTIMIZER, state)

    def __contains__(self, name: object) -> bool:
        kind, _, rest = str(name).partition("/")
        if kind == WEIGHTS:
            return rest.partition("/")[2] in self._whole
        return (rest if kind == MASTER else rest.rpartition(".")[0]) in self._slots

    def __iter__(self) -> Iterator[str]:
        """Names of weights and master; an optimizer asks for its state by itself."""
        yield from (f"{WEIGHTS}/{version}/{name}" for version in self.versions for name in self._whole)
        yield from (f"{MASTER}/{name}" for name in self._slots if self._has_master)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Under(Mapping[str, Tensor]):
    """Those of `tensors` whose names begin with `prefix`, without it; each is fetched when it is asked for."""

    def __init__(self, prefix: str, tensors: Mapping[str, Tensor]):
        self._prefix, self._tensors = prefix, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._tensors

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

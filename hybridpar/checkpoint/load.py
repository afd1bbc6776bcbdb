"""Read checkpoints: to resume training on any grid, or as full tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.checkpoint import sites
from hybridpar.checkpoint.compatible import check_compatible
from hybridpar.checkpoint.folders import folder_of, published_steps
from hybridpar.checkpoint.format.manifest import Manifest, read_manifest
from hybridpar.checkpoint.format.part import Trainee
from hybridpar.checkpoint.format.shards import SavedShard
from hybridpar.checkpoint.restate import Restated
from hybridpar.checkpoint.saved import Saved
from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.data import DataStart
from hybridpar.errors import CheckpointError, ConfigError
from hybridpar.flight import NO_FLIGHT, Flight
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.models.groups import adapter_of, is_adapter
from hybridpar.nn.placement import Placement, named_placements
from hybridpar.optim import ParameterSlot
from hybridpar.runtime.stage import Stage
from hybridpar.state import RankState
from hybridpar.state.kinds import OuterRemainder, Sent


def resume(
    root: Path,
    engine: Trainee,
    corpus: str,
    say: Callable[[str], None],
    *,
    up_to: int | None = None,
    go_on_at: int = 0,
) -> int:
    """Load the newest complete checkpoint under `root` into `engine`, and return its step; 0 if
    there is none.

    The checkpoint may be from another grid, schedule or ZeRO setting (restate.py). Each rank reads
    what it needs and verifies its checksums. If one rank finds damage, all skip this checkpoint,
    and `say` gets the file and the damage. If train.continue_with lets data or batches change, the
    engine's `data_start` says since when.

    Args:
        up_to: Latest step to load; None for any.
        go_on_at: A later step to resume after, as if the batches in between had not been in the
            data.

    Collectives: on all ranks of the grid.

    Raises:
        CheckpointError: On all ranks, if model, batch size or corpus do not match, or no checkpoint
            is complete.
    """
    world = engine.grid.world
    steps = [
        step
        for step in gather_objects(published_steps(root), world)[0]
        if up_to is None or step <= up_to
    ]
    for step in steps:
        folder = folder_of(root, step)
        damage = ""
        mismatch = ""
        site = 0
        try:
            manifest = read_manifest(folder)
            mismatch = _mismatch(manifest, engine.config, corpus, folder)
            mismatch = mismatch or sites.mismatch(manifest, engine.config, folder)
            site = sites.source(manifest, engine)
            manifest = sites.going_on(
                _going_on(manifest.of_site(site), engine.config, corpus), engine.config
            )
        except CheckpointError as error:
            damage = str(error)
        outcomes = gather_objects((damage, mismatch), world)
        if wrong := [text for _, text in outcomes if text]:
            raise CheckpointError(wrong[0])
        damages = [text for text, _ in outcomes if text] or failures_together(
            world,
            load,
            Saved(folder, manifest, engine.grid.flight, site),
            engine,
            max(go_on_at - step, 0),
        )
        if not damages:
            return step
        say(f"{damages[0]}: passed over")
    if steps:
        raise CheckpointError(
            f"{root}: none of the {len(steps)} checkpoints is complete; move them away to start "
            f"from the beginning"
        )
    return 0


def failures_together(world: Axis, do: Callable[..., None], *args: Any) -> list[str]:
    """Call `do(*args)` on every rank, and return all ranks' CheckpointErrors as texts, on every
    rank.

    Collectives: one gather.
    """
    failure = ""
    try:
        do(*args)
    except CheckpointError as error:
        failure = str(error)
    return [text for text in gather_objects(failure, world) if text]


def load(saved: Saved, engine: Trainee, ahead: int = 0) -> None:
    """Load the state that this rank needs from a checkpoint of any grid into `engine`. For `ahead`
    see Restated.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    state = Restated(saved, engine.state, ahead)
    engine.load_state(state, state.meta(engine.state_meta()["loss_scaler"]))
    if sites.comes_back(saved.manifest, engine):
        _begin_at_anchor(FullWeights(saved.folder, engine.grid.flight), engine.state)


def _begin_at_anchor(full: FullWeights, state: RankState) -> None:
    """Set a rank's weights to the last common weights of all sites, as if it had not trained
    since."""

    def write(tensors: Mapping[str, Tensor]) -> None:
        for name, target in tensors.items():
            target.copy_(full.read_part(state.whole_slots[name]))

    state.weights.fill(write)
    for kind in state.kinds:
        if isinstance(kind, Sent | OuterRemainder):
            for tensor in kind.tensors().values():
                tensor.zero_()


def check_files(folder: Path, manifest: Manifest) -> None:
    """Verify the checksums of all files.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    for shard in manifest.shards:
        SavedShard(folder, shard, manifest.config).file.check()


def _mismatch(manifest: Manifest, config: Config, corpus: str, folder: Path) -> str:
    try:
        check_compatible(manifest.config, config, folder, (manifest.corpus, corpus))
    except CheckpointError as error:
        return str(error)
    return ""


def _going_on(manifest: Manifest, config: Config, corpus: str) -> Manifest:
    """Return the manifest with the position of the next batch in the data stream.

    Batches of another size continue after the last sample. Other data starts at its first sample,
    and may have other losses.
    """
    state = manifest.state
    step = manifest.step
    size = manifest.config.global_batch_size
    same_data = manifest.corpus == corpus
    before = manifest.state.data_start
    if same_data and size == config.global_batch_size:
        return manifest
    start = DataStart(
        step, before.position(step, size) if same_data else 0, before.consumed(step, size)
    )
    return replace(
        manifest, state=replace(state, data_start=start, recent=state.recent if same_data else {})
    )


class FullWeights:
    """The newest weights of a checkpoint, assembled one at a time: the fp32 master weights if it
    has them; with several sites, the anchor, which is the last weights that all sites had in
    common.

    `flight` is told of each weight. A weight that is tied across stages has both its names. All
    that is read is verified against its checksums.

    Raises:
        CheckpointError: Here and below, if a file is missing or damaged, or does not match the
            model.
    """

    def __init__(self, folder: Path, flight: Flight = NO_FLIGHT):
        self.folder, self.manifest = folder, read_manifest(folder)
        self._saved = Saved(folder, self.manifest, flight)
        self.placements: dict[str, Placement] = {}
        for stage in self._saved.stages:
            self.placements |= self._saved.placements(stage)
        self._check_model()

    def _check_model(self) -> None:
        """Check the model's sizes against the tensors before building it, so that nothing larger
        than the files is allocated."""
        model = self.manifest.config.model
        largest = max(max(place.shape, default=1) for place in self.placements.values())
        for name, size in model.tensor_sizes.items():
            if size > largest:
                raise CheckpointError(
                    f"{self.folder}: its model's {name} = {size} is out of range: its largest "
                    f"tensor has {largest} elements"
                )
        try:
            stage = Stage(build_blocks(model, Axis("tp"), range(model.num_blocks)))
        except ConfigError as error:
            raise CheckpointError(f"{self.folder}: its model is not valid ({error})") from None
        for name, _, place in named_placements(stage):
            saved = self.placements.get(name)
            if saved is None or saved.shape != place.shape:
                what = "is missing" if saved is None else f"has shape {list(saved.shape)}"
                raise CheckpointError(
                    f"{self.folder}: {name} {what}, its model needs {list(place.shape)}"
                )

    def read(self, name: str) -> Tensor:
        """Return the global tensor of a parameter. Raises: CheckpointError."""
        place = self.placements[name]
        return self.read_part(
            ParameterSlot(name, Placement(place.shape, place.init, tied=place.tied))
        )

    def read_part(self, slot: ParameterSlot) -> Tensor:
        """Return a rank's shard of a parameter, which may be tied to one with another name.
        Shapes: slot.shape. Raises: CheckpointError."""
        return self._saved.read_common(slot)

    def find_tied(self, name: str, tied: str) -> str | None:
        """Return the name under which this checkpoint has a parameter: its own, or the name of a
        parameter tied to it. None if it has neither."""
        if name in self.placements:
            return name
        return next(
            (other for other, place in self.placements.items() if tied and place.tied == tied), None
        )


class MergedWeights(FullWeights):
    """The weights of a checkpoint with its adapters (LoRA) merged into them, as a checkpoint of a
    model without adapters. Without adapters: its weights.

    A merged weight is computed in float64, and is fp32 where the checkpoint has less.
    """

    def __init__(self, folder: Path, flight: Flight = NO_FLIGHT):
        super().__init__(folder, flight)
        self._adapters = {
            name: self.placements.pop(name) for name in list(self.placements) if is_adapter(name)
        }
        config = self.manifest.config
        adapters = config.model.lora_adapters
        if adapters is not None:
            self._scale = adapters.alpha / adapters.rank
            config = replace(config, model=config.transformer.without_adapters)
            self.manifest = replace(self.manifest, config=config)

    def read_part(self, slot: ParameterSlot) -> Tensor:
        part = super().read_part(slot)
        names = adapter_of(slot.name)
        if not names or names[0] not in self._adapters:
            return part
        places = {name: self._adapters[name] for name in names}
        slots = [ParameterSlot(n, Placement(p.shape, p.init)) for n, p in places.items()]
        a, b = (super(MergedWeights, self).read_part(slot).double() for slot in slots)
        added = slot.placement.take(b @ a, slot.rank).mul_(self._scale)
        dtype = torch.promote_types(part.dtype, torch.float32)
        return added.add_(part.double()).to(dtype)


def load_full(folder: Path) -> tuple[Config, dict[str, Tensor]]:
    """Return the configuration and all weights by name (see FullWeights). Shapes: global.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    full = FullWeights(folder)
    return full.manifest.config, {name: full.read(name) for name in full.placements}

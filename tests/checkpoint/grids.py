"""All ranks of a grid in one process: engines that never communicate, and a state in which no two
tensors are equal."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.checkpoint.folders import begin, publish
from hybridpar.checkpoint.format.manifest import TrainingState
from hybridpar.checkpoint.format.part import Part, is_writer
from hybridpar.checkpoint.load import load
from hybridpar.checkpoint.save import make_manifest
from hybridpar.checkpoint.saved import Saved
from hybridpar.config import Config
from hybridpar.grid import AxisSizes, ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.nn.placement import Placement
from hybridpar.state.kinds import parse_key
from hybridpar.train.engine import Engine

SCALER = {"scale": 1024.0, "good_steps": 3, "overflows": 0}


def engines(config: Config, sizes: AxisSizes | None = None) -> Iterator[Engine]:
    """The engine of every rank of a grid (config.parallel's), one at a time; nothing must go over
    its axes."""
    sizes = sizes or sizes_of(config.parallel)
    for rank in range(prod(sizes.values())):
        yield Engine(
            JobPlan(config),
            ProcessGrid.imagined(sizes, rank, lambda *_: object()),
            torch.device("cpu"),
        )


@lru_cache(maxsize=4096)
def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers that a name determines, exact in bf16."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


class Truth(Mapping[str, Tensor]):
    """Expected value of every tensor of a rank's state, on any grid; tied weights are one."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.parts = engine.state.parts

    def __getitem__(self, key: str) -> Tensor:
        kind, name, what = parse_key(key)
        version, state = (what, "") if kind.whole else ("", what)
        place: Placement = self.engine.state.placements[name]
        whole = numbers(f"{kind.name} {version} {state} {place.tied or name}", place.shape)
        local = place.take(whole, self.engine.grid.tp.rank)
        if not kind.whole and name in self.parts:
            start, stop = self.parts[name]
            local = local.flatten()[start:stop]
        store = self.engine.state.weights
        return local.to(store.dtype if kind.name == "weights" else store.master_dtype).clone()

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def fill(engine: Engine, step: int) -> None:
    """Gives a rank its part of the state after so many steps."""
    newest = range(max(step - engine.state.weights.num_versions + 1, 0), step + 1)
    engine.load_state(
        Truth(engine),
        {
            "batches_done": step,
            "versions": list(newest),
            "num_updates": step,
            "loss_scaler": SCALER,
            "loss_scales": {str(v): 2.0**v for v in newest},
        },
    )


def save_all(root: Path, config: Config, step: int = 5, sizes: AxisSizes | None = None) -> Path:
    """The checkpoint that the ranks of a grid write of that state."""
    aside = begin(root, step)
    written = []
    for engine in engines(config, sizes):
        fill(engine, step)
        if is_writer(engine):
            written.append(Part.of(engine).write(aside))
    state = TrainingState.of(engine.state_meta())
    return publish(aside, make_manifest(config, "corpus", state, written))


def load_all(folder: Path, config: Config, sizes: AxisSizes | None = None) -> Iterator[Engine]:
    """Every rank of another grid, with what it loads."""
    saved = Saved(folder)
    for engine in engines(config, sizes):
        load(saved, engine)
        yield engine


def differing(engine: Engine, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """Names of a rank's tensors that are not what they ought to be."""
    truth = Truth(engine)
    found = engine.state.tensors()
    assert len(found) >= len(engine.state.placements)  # with ZeRO a rank may own nothing
    return [
        name
        for name, tensor in found.items()
        if not name.startswith(ignore)
        and (tensor.dtype != truth[name].dtype or not torch.equal(tensor, truth[name]))
    ]

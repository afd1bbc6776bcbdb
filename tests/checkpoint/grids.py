"""All ranks of a grid in one process: engines that never communicate, and a state in which no two tensors are equal."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.checkpoint.folders import begin, publish
from hybridpar.checkpoint.load import load
from hybridpar.checkpoint.manifest import TrainingState
from hybridpar.checkpoint.part import Part, is_writer
from hybridpar.checkpoint.save import make_manifest
from hybridpar.checkpoint.saved import Saved
from hybridpar.config import Config
from hybridpar.flight import NO_FLIGHT
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn.placement import Placement
from hybridpar.state.kinds import parse_key
from hybridpar.train.engine import Engine

SCALER = {"scale": 1024.0, "good_steps": 3, "overflows": 0}


def grid_at(pp_rank: int, dp_rank: int, tp_rank: int, sizes: tuple[int, int, int]) -> ProcessGrid:
    """The grid (tp, pp, dp) as one of its ranks sees it; its axes must not be communicated over."""
    tp, pp, dp = sizes

    def line(name: str, ranks: list[int]) -> Axis:
        group: Any = object() if len(ranks) > 1 else None
        return Axis(name, ranks.index(rank) if rank in ranks else 0, tuple(ranks), group)

    def number(s: int, d: int, t: int) -> int:
        return (s * dp + d) * tp + t

    rank = number(pp_rank, dp_rank, tp_rank)
    ends = [number(s, d, tp_rank) for s in (0, pp - 1) for d in range(dp)]
    stages = [number(s, dp_rank, tp_rank) for s in range(pp)]
    grid = object.__new__(ProcessGrid)
    grid.device_type, grid.sizes, grid.flight = "cpu", {"pp": pp, "dp": dp, "tp": tp}, NO_FLIGHT
    grid._set(
        line("tp", [number(pp_rank, dp_rank, t) for t in range(tp)]),
        line("dp", [number(pp_rank, d, tp_rank) for d in range(dp)]), line("pp", stages), line("pp_reverse", stages),
        line("ends", ends if pp > 1 and pp_rank in (0, pp - 1) else [rank]), line("world", list(range(tp * pp * dp))))
    return grid


def engines(config: Config) -> Iterator[Engine]:
    """The engine of every rank of config.parallel, one at a time."""
    parallel = config.parallel
    for place in product(range(parallel.pp), range(parallel.dp), range(parallel.tp)):
        yield Engine(config, grid_at(*place, (parallel.tp, parallel.pp, parallel.dp)), torch.device("cpu"))


@lru_cache(maxsize=4096)
def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """The same ones for the same name, exact in bf16."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


class Truth(Mapping[str, Tensor]):
    """What every tensor of a rank's state ought to be, whatever the grid; tied weights are one."""

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
    engine.load_state(Truth(engine), {
        "batches_done": step, "versions": list(newest), "num_updates": step, "loss_scaler": SCALER,
        "loss_scales": {str(v): 2.0**v for v in newest}})


def save_all(root: Path, config: Config, step: int = 5) -> Path:
    """The checkpoint that the ranks of a grid write of that state."""
    aside = begin(root, step)
    written = []
    for engine in engines(config):
        fill(engine, step)
        if is_writer(engine):
            written.append(Part.of(engine).write(aside))
    state = TrainingState.of(engine.state_meta())
    return publish(aside, make_manifest(config, "corpus", state, written))


def load_all(folder: Path, config: Config) -> Iterator[Engine]:
    """Every rank of another grid, with what it loads."""
    saved = Saved(folder)
    for engine in engines(config):
        load(saved, engine)
        yield engine


def differing(engine: Engine, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """Names of a rank's tensors that are not what they ought to be."""
    truth, found = Truth(engine), engine.state.tensors()
    assert len(found) >= len(engine.state.placements)  # with ZeRO a rank may own nothing
    return [name for name, tensor in found.items() if not name.startswith(ignore)
            and (tensor.dtype != truth[name].dtype or not torch.equal(tensor, truth[name]))]

"""Settings, grids and placements that the optimizer tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.grid import Axis
from hybridpar.nn.placement import Init, Placement, Shard
from hybridpar.optim import ParameterSlot

ONE = Axis("tp")
INIT = Init("normal", 0.02)


@dataclass(frozen=True)
class Settings:
    name: str = "adamw"
    spec: str = ""
    lr: float = 1e-2
    min_lr: float = 1e-3
    warmup_steps: int = 0
    decay: str = "cosine"
    decay_steps: int = 0
    restarts: int = 0
    lr_points: tuple[tuple[int, float], ...] = ()
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False
    staleness: str = "none"
    staleness_steps: int = 0
    clip_grad: float = 1.0


def overlapping(parts: int) -> Shard:
    """7 rows over `parts` ranks; from two ranks on, some are held by several, at different local
    positions."""
    ranges = {
        1: (((0, 7),),),
        2: (((0, 5),), ((3, 7),)),
        3: (((0, 2), (3, 6)), ((3, 6),), ((1, 7),)),
    }
    return Shard(0, ranges[parts])


def placements(parts: int) -> dict[str, Placement]:
    """Odd shapes, every kind of split, with and without decay, of one hidden matrix and several;
    the first is tied."""
    return {
        "embedding": Placement((13, 5), INIT, Shard.even(0, 13, parts), tied="word"),
        "column": Placement((9, 5), INIT, Shard.even(0, 9, parts), matrices=(((0, 4),), ((4, 9),))),
        "row": Placement((5, 11), INIT, Shard.even(1, 11, parts), matrices=(((0, 5),),)),
        "kv": Placement(
            (7, 5),
            INIT,
            overlapping(parts),
            matrices=(((0, 2), (4, 5)), ((2, 3),), ((3, 4), (5, 7))),
        ),
        "kv_bias": Placement((7,), INIT, overlapping(parts), weight_decay=False),
        "bias": Placement((1,), Init("zeros"), weight_decay=False),
        "replicated": Placement((3, 3, 3), INIT),
        "few": Placement((2,), INIT, Shard.even(0, 2, parts)),  # empty on the last of three ranks
        "square": Placement((4, 4), INIT, matrices=(((0, 4),),), weight_decay=False),
        "narrow": Placement(
            (3, 2), INIT, Shard.even(1, 2, parts), matrices=(((0, 3),),)
        ),  # likewise
    }


def slots(parts: int, rank: int, **place: int) -> list[ParameterSlot]:
    return [
        ParameterSlot(name, placement, {"tp": rank, **place})
        for name, placement in placements(parts).items()
    ]


def random_tensors(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """One global tensor for each placement."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=dtype) for p in placements(1).values()]


def local(tensors: list[Tensor], parts: int, rank: int) -> list[Tensor]:
    return [
        p.take(x, rank).clone() for p, x in zip(placements(parts).values(), tensors, strict=True)
    ]


def assemble(by_rank: list[list[Tensor]], parts: int) -> list[Tensor]:
    """Global tensors from the local ones of all ranks."""
    return [
        p.assemble([tensors[i] for tensors in by_rank])
        for i, p in enumerate(placements(parts).values())
    ]

"""Profiles and machines made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridpar.config import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.links import Curve, MeasuredLink
from hybridpar.planner.measuring.profile import BlockCost, Hardware, Profile, settings_of
from hybridpar.prediction.work import KINDS

MODEL = ModelConfig(num_layers=6, hidden_size=64, num_heads=4, seq_length=32, vocab_size=128)


def config(
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    m: int = 8,
    b: int = 2,
    schedule: str = "1f1b",
    split: tuple[int, ...] = (),
    recompute: str = "none",
    zero: int = 0,
    **model: object,
) -> Config:
    return Config(
        model=replace(MODEL, **model),
        parallel=ParallelConfig(tp, pp, dp, zero=zero),  # type: ignore[arg-type]
        pipeline=PipelineConfig(
            schedule=schedule, num_microbatches=m, split=split, recompute=recompute
        ),  # type: ignore[arg-type]
        train=TrainConfig(micro_batch_size=b, device="cpu"),
    )


def profile(
    base: Config,
    *,
    layer: float = 1.0,
    head: float = 1.0,
    sizes: Sequence[int] = (1, 2, 4),
    degrees: Sequence[int] = (1, 2),
    update: float = 0.0,
    wait: float = 0.0,
    cores: int = 0,
    remake: float = 0.0,
) -> Profile:
    """A layer's forward of one sample takes `layer` seconds, its backward twice that, and what is
    cheap of it `remake`; tp divides them."""
    blocks = {}
    for tp in degrees:
        for b in sizes:
            for kind, time in zip(KINDS, (0.0, layer, head), strict=True):
                forward = b * time / tp
                messages = (1024 * b,) * 2 if tp > 1 and kind == "layer" else ()
                blocks[kind, tp, b] = BlockCost(
                    forward,
                    2 * forward,
                    0.0,
                    update,
                    wait * bool(messages),
                    wait * bool(messages),
                    messages,
                    messages,
                    remake=b * remake / tp * (kind == "layer"),
                    parameters=20000 // tp,
                )
    hardware = Hardware("made", 8, 1e9, cores=cores)
    return Profile(hardware, blocks, {"local": link()}, settings_of(base))


def link(
    latency: float = 0.0, bandwidth: float = 1e12, ranks: Sequence[int] = (2, 4)
) -> MeasuredLink:
    points = ((1.0, latency), (1e6, latency + 1e6 / bandwidth))
    return MeasuredLink("local", Curve(points), {n: Curve(points) for n in ranks})


def machine(
    base: Config,
    devices: int,
    *,
    made: Profile | None = None,
    inner: MeasuredLink | None = None,
    per_server: int = 0,
    outer: MeasuredLink | None = None,
    memory: float = 1e9,
) -> Machine:
    made = made or profile(base)
    return Machine(
        made, devices, per_server or devices, inner or made.links["local"], outer, memory
    )


def any_grid(base: Config, devices: int = 4, *, memory: float = 1e9, wait: float = 0.1) -> Machine:
    times = profile(base, layer=1.0, head=2.0, update=0.3, wait=wait, degrees=(1, 2, 4))
    return machine(
        base, devices, made=times, inner=link(latency=0.05, bandwidth=1e5), memory=memory
    )


def even(memory: float) -> tuple[Config, Machine]:
    """Sixteen blocks for four devices; the embedding takes no time."""
    base = replace(
        config(m=8, b=1, num_layers=14, hidden_size=96, seq_length=256),
        parallel=ParallelConfig(dp=0),
    )
    return base, machine(base, 4, made=profile(base), memory=memory)


def stale(update: float) -> tuple[Config, Machine]:
    """2bw with all that it needs, on a machine where it saves the pipeline's bubble, or the
    replicas' reduction."""
    base = replace(
        config(schedule="2bw", m=16, b=1),
        parallel=ParallelConfig(dp=0),
        optim=OptimConfig(name="muon", staleness="extrapolation"),
    )
    return base, machine(base, 2, made=profile(base, update=update), memory=1e11)

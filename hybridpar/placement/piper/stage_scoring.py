"""Cost and validity of a plan of stages, computed directly from the layers, without code of the
planners.

time of a stage   = compute / d + (edges / d + 4 (d - 1) / d * weights / N) / bandwidth
edges             = 2 (bytes + bytes exchanged in the group) over edges that lead into the
                    stage, or out of it
memory of a stage = sum of a y + b,  y = ceil(d of this and of all later stages / d):
                    micro-batches in flight

Source: Piper (NeurIPS 2021), section 3; 4 (d - 1) / d is PipeDream's all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridpar.errors import Problem
from hybridpar.placement.piper.instance import Instance, Way


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A stage on `data * tensor` devices. `ways`: the name of the way that each layer (its
    position) is run."""

    ways: Mapping[int, str]
    data: int
    tensor: int


@dataclass(frozen=True, slots=True)
class StageScore:
    """Seconds per micro-batch, bytes of a device, and micro-batches in flight, by stage. `time` is
    the maximum over stages."""

    time: float
    times: tuple[float, ...]
    memory: tuple[float, ...]
    in_flight: tuple[int, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, eq=False, slots=True)
class StagePlan:
    """A planner's plan, scored by `score_stages`. No stages: the planner found nothing that fits
    the memory."""

    instance: Instance = field(repr=False)
    planner: str
    stages: tuple[LayerGroup, ...] = field(repr=False)
    score: StageScore
    seconds: float
    stats: dict[str, float] = field(default_factory=dict)
    note: str = ""
    """Reason why there may be faster plans, such as the time limit."""
    bound: float = 0.0
    """Lower bound on the time of any plan."""

    @property
    def fits(self) -> bool:
        return bool(self.stages)

    @property
    def time(self) -> float:
        """Seconds per micro-batch when the pipeline is full; infinite if nothing fits."""
        return self.score.time

    def document(self) -> dict[str, Any]:
        """Return plain values: the stages, first to last, with the ids of their layers and the way
        each is run."""
        parts = zip(
            self.stages, self.score.times, self.score.memory, self.score.in_flight, strict=True
        )
        return {
            "timePerSample": self.time if self.fits else None,
            "solver": self.planner,
            "seconds": self.seconds,
            "note": self.note,
            "bound": self.bound,
            "stages": [
                {
                    "dataParallel": stage.data,
                    "tensorParallel": stage.tensor,
                    "time": time,
                    "memory": memory,
                    "inFlight": in_flight,
                    "nodes": {str(self.instance.ids[v]): way for v, way in stage.ways.items()},
                }
                for stage, time, memory, in_flight in parts
            ],
        }

    @property
    def failure(self) -> str:
        """Why nothing was found, in words."""
        found = "was found in time that" if self.note else ""
        return " ".join(
            f"{self.planner}: nothing {found} fits {self.instance.num_devices} devices of "
            f"{self.instance.memory / 1e9:.6g} GB; {self.seconds:.2f} s".split()
        )

    @property
    def quality(self) -> str:
        """The plan's time and what is known of its quality, in words."""
        text = f"{self.planner}: {self.time:.6g} s a micro-batch; {self.seconds:.2f} s to find"
        if not self.note:
            return text
        return (
            f"{text}; {self.note}, at most {1 - self.bound / self.time:.2%} could be saved (bound "
            f"{self.bound:.6g})"
        )

    def __str__(self) -> str:
        if not self.fits:
            return self.failure
        lines = [self.quality]
        for stage, seconds, memory in zip(
            self.stages, self.score.times, self.score.memory, strict=True
        ):
            again = sum(
                name != self.instance.ways[v][stage.tensor][0].name
                for v, name in stage.ways.items()
            )
            lines.append(
                f"  {len(stage.ways)} layers  data {stage.data}  tensor {stage.tensor}  "
                f"{seconds:.6g} s  "
                f"{memory / 2**30:.2f} GiB  {again} not run the first way"
            )
        return "\n".join(lines)


NOTHING = StageScore(float("inf"), (), (), (), ())


@dataclass(frozen=True, slots=True)
class PlannerResult:
    """Stages that a planner has found, not scored yet.

    Attributes:
        stages: The stages, first to last; empty: nothing fits.
        stats: Numbers about the search.
        note: Reason why there may be faster plans, such as the time limit.
        bound: Lower bound on the time of any plan.
    """

    stages: Sequence[LayerGroup]
    stats: dict[str, float]
    note: str = ""
    bound: float = 0.0


def make_plan(instance: Instance, planner: str, found: PlannerResult, seconds: float) -> StagePlan:
    """Score the stages that a planner has found in so many seconds."""
    score = score_stages(instance, found.stages) if found.stages else NOTHING
    assert not score.problems, f"{planner}: {score.problems[0]}"
    return StagePlan(
        instance,
        planner,
        tuple(found.stages),
        score,
        seconds,
        found.stats,
        found.note,
        found.bound,
    )


def score_stages(instance: Instance, stages: Sequence[LayerGroup]) -> StageScore:
    """Return the costs of the stages in order, and raise an error if they are not valid."""
    found: list[Problem] = _structure(instance, stages)
    if found:
        return StageScore(float("inf"), (), (), (), tuple(found))
    times = []
    memories = []
    flights = []
    left = sum(stage.data for stage in stages)
    for i, stage in enumerate(stages):
        d = stage.data
        y = -(-left // d)
        left -= d
        ways = {v: _way(instance, v, stage) for v in stage.ways}
        compute = sum(way.time for way in ways.values())
        crossing = 0.0
        for u, v, num_bytes in instance.edges:
            if (u in ways) != (v in ways):
                crossing += 2 * (
                    num_bytes + (ways[u].sync_backward[v] if u in ways else ways[v].sync_forward[u])
                )
        weights = sum(way.weights for way in ways.values())
        sync = 4 * (d - 1) / d * weights / instance.num_microbatches
        times.append(compute / d + (crossing / d + sync) / instance.bandwidth)
        memories.append(sum(way.memory_a * y + way.memory_b for way in ways.values()))
        flights.append(y)
        if memories[-1] > instance.memory * (1 + 1e-12):  # planners add up in another order
            found.append(
                Problem(
                    f"memory of stage {i}",
                    memories[-1],
                    f"is more than {instance.memory:g}",
                    f"maxMemoryPerDevice = {memories[-1]:g}",
                )
            )
    return StageScore(max(times), tuple(times), tuple(memories), tuple(flights), tuple(found))


def _way(instance: Instance, v: int, stage: LayerGroup) -> Way:
    return next(way for way in instance.ways[v][stage.tensor] if way.name == stage.ways[v])


def _structure(instance: Instance, stages: Sequence[LayerGroup]) -> list[Problem]:
    found: list[Problem] = []
    of_layer: dict[int, int] = {}
    for i, stage in enumerate(stages):
        if stage.data < 1 or instance.num_microbatches % stage.data:
            found.append(
                Problem(
                    f"data of stage {i}",
                    stage.data,
                    f"must divide {instance.num_microbatches}",
                    "1",
                )
            )
        for v, name in stage.ways.items():
            if not any(way.name == name for way in instance.ways[v].get(stage.tensor, ())):
                found.append(
                    Problem(
                        f"way of layer {instance.ids[v]}", name, f"is none at tensor {stage.tensor}"
                    )
                )
            if v in of_layer:
                found.append(
                    Problem(
                        "layer", instance.ids[v], f"is in stages {of_layer[v]} and {i}", "one stage"
                    )
                )
            of_layer[v] = i
    if len(of_layer) < instance.num_layers:
        lost = next(v for v in range(instance.num_layers) if v not in of_layer)
        found.append(Problem("layer", instance.ids[lost], "is in no stage", "one stage"))
        return found
    for u, v, _ in instance.edges:
        if of_layer[u] > of_layer[v]:
            found.append(
                Problem(
                    "edge", f"{instance.ids[u]} -> {instance.ids[v]}", "leads to an earlier stage"
                )
            )
    if (used := sum(s.data * s.tensor for s in stages)) > instance.num_devices:
        found.append(
            Problem(
                "devices", used, f"are more than {instance.num_devices}", str(instance.num_devices)
            )
        )
    if (replicas := sum(s.data for s in stages)) > instance.num_microbatches:
        found.append(
            Problem(
                "sum of data", replicas, f"is more than {instance.num_microbatches} micro-batches"
            )
        )
    return found

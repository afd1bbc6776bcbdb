"""Memory report of `hybridpar check` and `plan`: whether a configuration fits, and which settings
would make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridpar.config import Config, Launch
from hybridpar.schedules.simulate.timeline import milliseconds

if TYPE_CHECKING:
    from hybridpar.planner.machines.machine import Machine
    from hybridpar.planner.searching.candidates import Candidate
    from hybridpar.prediction import StageMemory

_GB = 1e9
_WORTH_SAYING = 0.005
"""Smallest share of a step that is reported."""


@dataclass(frozen=True)
class Room:
    """Memory that a process may use.

    Args:
        limit: Bytes; 0 if unknown.
        machine: The machine of a profile or cluster, or None.
    """

    limit: float
    machine: Machine | None = None

    @staticmethod
    def of(config: Config, launch: Launch, profile: str, cluster: str, memory_gb: float) -> Room:
        """Return the memory limit from `memory_gb`, else from a profile or cluster, else from this
        machine.

        This machine counts only if the job has no more processes than it has cores or GPUs.

        Args:
            config: A resolved configuration.

        Raises:
            ConfigError: A profile or cluster cannot be used.
            DataError: A profile is damaged.
        """
        from hybridpar.planner.measuring.local_profile import machine_for

        machine = None
        if profile or cluster:
            machine = machine_for(config, launch, profile, cluster, config.parallel.num_ranks)
        if memory_gb:
            return Room(_GB * memory_gb, machine)
        return Room(machine.memory_limit if machine else _memory_here(config), machine)


def _memory_here(config: Config) -> float:
    """Return the bytes for each process of a job on this machine, or 0 if the job is too large for
    it."""
    import torch

    from hybridpar.cores import available_cores
    from hybridpar.prediction.limit import limit_here
    from hybridpar.prediction.predict import default_device

    ranks = config.parallel.num_ranks
    kind = default_device(config).type
    places = torch.cuda.device_count() if kind == "cuda" else available_cores()
    return limit_here(kind, ranks) if ranks <= places else 0.0


def saves_most(config: Config) -> str:
    """Return a line about the setting that saves a rank of a resolved configuration most host
    memory.

    The line is shown after a rank has failed, so nothing is raised. A rank on the CPU is predicted
    with each setting. A rank on a GPU keeps little in host memory except offloaded state.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    from hybridpar.job import JobPlan
    from hybridpar.planner.searching.remedies import Fitting
    from hybridpar.prediction.predict import default_device, predict

    try:
        device = default_device(config)
        if device.type != "cpu":
            moved = (
                ("memory.host_optimizer = false", config.memory.host_optimizer),
                ("memory.offload_activations = 0", bool(config.memory.offload_activations)),
                ("checkpoint.asynchronous = false", config.saves_beside_training),
            )
            names = [name for name, is_on in moved if is_on]
            return (
                "less of the host's memory: "
                f"{names[0] if names else 'fewer ranks on this host (--ranks)'}"
            )
        peak = max(stage.needed for stage in predict(JobPlan(config), device=device))
        best = Fitting(peak / 2, device).smallest(config)
    except SignalException:  # torch's agent raises this exception for SIGTERM
        raise
    except Exception as error:
        return f"`hybridpar memory` says what needs less ({type(error).__name__} here)"
    if best is None:
        return (
            f"a rank is predicted to need {peak / _GB:.3g} GB, and no setting is known that needs "
            "less"
        )
    return (
        f"a rank is predicted to need {peak / _GB:.3g} GB; {best.settings} saves most: "
        f"{best.peak / _GB:.3g} GB"
    )


def fit_report(
    config: Config, memory: Sequence[StageMemory], room: Room, rank_name: str, *, largest: bool
) -> tuple[dict[str, Any], list[str]]:
    """Report whether a resolved configuration fits, the settings that would make it fit, its
    predicted step time, and the largest model and the longest sequence that fit.

    Args:
        memory: The predicted memory of the configuration.

    Returns:
        The report as plain values, and as lines for the user.
    """
    from hybridpar.planner.searching.remedies import Fitting
    from hybridpar.prediction.predict import default_device

    peaks = [stage.needed for stage in memory]
    most = max(peaks)
    device = room.machine.device if room.machine else default_device(config)
    plain: dict[str, Any] = {"memory_limit": room.limit or None}
    lines = _times(config, room, plain)
    if not room.limit:
        return plain, lines
    fitting = Fitting(room.limit, device, room.machine)
    plain["fits"] = most <= room.limit
    if most > room.limit:
        found = fitting.remedies(config)
        plain["remedies"] = [vars(remedy) for remedy in found]
        lines += [
            f"{rank_name} {peaks.index(most)} needs {most / _GB:.3g} GB, and there are "
            f"{room.limit / _GB:.3g}: "
            + ("what would make it fit" if found else "nothing that is known makes it fit"),
            *(f"  {remedy}" for remedy in found),
        ]
    if largest:
        sizes = fitting.largest(config)
        plain["largest"] = dict(sizes)
        if longest := fitting.longest(config):
            plain["longest_sequence"] = longest
            lines.append(
                f"the longest sequence of this model in {room.limit / _GB:.3g} GB a process, on "
                f"this grid: {longest:,} tokens (parallel.cp divides them)"
            )
        lines += [
            f"the largest model of this width in {room.limit / _GB:.3g} GB a process, on this grid",
            *(f"  {number:>5} layers  {settings}" for settings, number in sizes),
        ]
    return plain, lines


def _times(config: Config, room: Room, plain: dict[str, Any]) -> list[str]:
    """Return lines about the step time that a profile predicts, and its share of waiting for
    offloaded state."""
    from hybridpar.planner.costs.step_cost import StepCost
    from hybridpar.planner.costs.transfer_costs import UnknownCosts
    from hybridpar.planner.searching.plan_report import exposed_moves, speed

    if room.machine is None:
        return []
    try:
        cost = StepCost(config, room.machine)
    except UnknownCosts as error:
        plain["step_ms"] = None
        return [f"no step time is predicted: {error.problems[0]}"]
    step = cost.step_time
    exposed = exposed_moves(cost)
    plain |= {"step_ms": 1e3 * step, "exposed_moves_ms": 1e3 * exposed}
    lines = [f"predicted: {milliseconds(step)} ms a step, {speed(cost)}"]
    if cost.moves is not None:
        waits = f"{1e3 * exposed:.3g} ms of it ({exposed / step:.0%}) are waiting for"
        lines.append(
            f"{waits if exposed > _WORTH_SAYING * step else 'compute hides'} {cost.moves.what}"
        )
    return lines


def closest_remedies(failed: Sequence[Candidate], limit: float) -> list[str]:
    """Return lines about the settings that would make the configuration fit which exceeds the limit
    least, out of the rejected candidates."""
    from hybridpar.planner.costs.candidate_memory import MemoryCheck
    from hybridpar.planner.searching.plan_report import describe
    from hybridpar.planner.searching.remedies import Fitting

    check = MemoryCheck(limit)
    nearest = min(
        failed,
        key=lambda one: (one.config.train.micro_batch_size, check.least(one.cost)),
        default=None,
    )
    if nearest is None:
        return []
    machine = nearest.cost.machine
    found = Fitting(limit, machine.device, machine).remedies(nearest.config)
    if not found:
        return [f"no setting that is known makes {describe(nearest.config)} fit"]
    return [
        f"what would make {describe(nearest.config)} fit:",
        *(f"  {remedy}" for remedy in found),
    ]

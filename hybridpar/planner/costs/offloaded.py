"""Candidates that offload activations to a file instead of recomputing them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.searching.candidates import Candidate, balanced
from hybridpar.schedules.passes.offload import most_away
from hybridpar.schedules.simulate.predict import free_to_leave
from hybridpar.validate import problems


def knows_files(candidate: Candidate) -> bool:
    """Return whether file costs are known for the candidate's machine, and the candidate keeps
    nothing in a file or on a host yet."""
    config = candidate.config
    machine = candidate.cost.machine
    memory = config.memory
    speeds = machine.profile.state
    return bool(
        machine.device.type == "cpu"
        and speeds.read
        and speeds.written
        and not memory.host_optimizer
        and not memory.is_limited
        and not memory.offload_activations
    )


def with_activations_away(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate without recomputation and with offloaded micro-batches: as many as cost
    no time, and as many as possible."""
    cost = candidate.cost
    if not any(most_away(cost.schedule, cost.shape, rank) for rank in range(cost.pp)):
        return
    every = cost.shape.num_microbatches * cost.shape.virtual_stages
    config = replace(
        candidate.config,
        memory=replace(candidate.config.memory, offload_activations=every),
        pipeline=replace(candidate.config.pipeline, recompute="none", split=()),
    )
    if problems(config, cost.machine.num_devices):
        return
    most = balanced(config, cost.machine)
    free = free_to_leave(most.cost.costs, most.cost.shape, most.cost.schedule_options)
    for away in dict.fromkeys(
        (free, tuple(most_away(cost.schedule, cost.shape, rank) for rank in range(cost.pp)))
    ):
        if any(away):
            made = replace(
                most.config, memory=replace(most.config.memory, offload_activations=away)
            )
            yield Candidate(made, StepCost(made, cost.machine), tried_recomputation=True)

"""Plans for fewer devices that are as fast: with slow links or an indivisible batch, further
devices only wait."""

from __future__ import annotations

from dataclasses import replace

from hybridpar.config import Config
from hybridpar.errors import ConfigError
from hybridpar.planner.costs.documents import within_documents
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import Profile
from hybridpar.planner.searching.candidates import Candidate, Request, batch_size
from hybridpar.planner.searching.search import search
from hybridpar.prediction.work import block_kinds

AS_FAST = 1.01
"""Largest step time on fewer devices, relative to the step time on all."""


def as_fast_on_fewer(
    config: Config, machine: Machine, request: Request, best: Candidate
) -> Candidate | None:
    """Return the plan for the fewest devices, found by halving, that is about as fast as `best`, or
    None.

    The search stops at the first half that cannot do the batch's work in that time.
    """
    found = None
    number = machine.num_devices
    most = AS_FAST * best.cost.step_time
    work = least_work(config, machine) * batch_size(config, request)
    while number % 2 == 0:
        number //= 2
        if work / number > most:
            break
        try:
            ranked = search(
                config, replace(machine, num_devices=number), replace(request, top=1, quick=True)
            ).ranked
        except ConfigError:  # kept axes are larger than this half, or nothing divides the batch
            break
        if not ranked or ranked[0].cost.step_time > most or ranked[0].is_stale > best.is_stale:
            break
        found = ranked[0]
    return found


def least_work(config: Config, machine: Machine) -> float:
    """Return a lower bound on the device seconds of a sample, over the machine's devices and
    micro-batch sizes."""
    kinds = block_kinds(config.model)

    def work(profile: Profile, tp: int, b: int) -> float:
        costs = {kind: profile.block(kind, tp, b) for kind in dict.fromkeys(kinds)}
        if config.data.document_length:
            costs = within_documents(costs, config)
        every = [costs[kind] for kind in kinds]
        return sum(
            cost.forward - cost.forward_idle + cost.backward - cost.backward_idle for cost in every
        )

    return min(
        tp / b * work(profile, tp, b)
        for profile in machine.profiles(range(machine.num_devices))
        for tp in profile.tp_degrees
        for b in profile.micro_batches(tp)
    )

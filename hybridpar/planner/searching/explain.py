"""Explain why a candidate does not fit, and why there is no candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridpar.config import Config
from hybridpar.errors import ConfigError, config_error
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.searching.candidates import Candidate, Request, batch_size, grids


def why_not(candidate: Candidate, ranked: Sequence[Candidate], limit: float) -> str:
    """Return which stage needs how much memory, and which similar candidate would fit."""
    if candidate.memory is None:
        text = f"does not fit into {limit / 1e9:.1f} GB, and recomputation is not enough"
    else:
        totals = [stage.needed for stage in candidate.memory]
        text = (
            f"{candidate.cost.shape.rank_name} {totals.index(max(totals))} needs "
            f"{max(totals) / 1e9:.1f} of "
            f"{limit / 1e9:.1f} GB, and recomputation is not enough"
        )
    tp, pp, _ = candidate.grid
    b = candidate.config.train.micro_batch_size
    near = []
    for other in ranked:
        t, p, _ = other.grid
        size = other.config.train.micro_batch_size
        if other.config.parallel.cp > candidate.config.parallel.cp:
            near.append(f"parallel.cp={other.config.parallel.cp}")
        elif (t, size) == (tp, b) and p > pp:
            near.append(f"pp={p}")
        elif (p, size) == (pp, b) and t > tp:
            near.append(f"tp={t}")
        elif (t, p) == (tp, pp) and size < b:
            near.append(f"train.micro_batch_size={size}")
        elif (
            other.grid == candidate.grid
            and other.config.parallel.zero > candidate.config.parallel.zero
        ):
            near.append(f"parallel.zero={other.config.parallel.zero}")
    return f"{text}; {' or '.join(dict.fromkeys(near))} would fit" if near else text


def nothing_to_try(config: Config, machine: Machine, request: Request) -> ConfigError:
    """Return an error that says why there is no candidate."""
    number = machine.num_devices
    keep = request.keep
    profile = machine.profile
    kept = " ".join(f"{axis}={size}" for axis, size in keep.items()) or "any grid"
    if keep.get("pp", 1) > (blocks := config.model.num_blocks):
        return config_error(
            "parallel.pp",
            keep["pp"],
            f"must be at most {blocks}, the number of the model's blocks",
            str(blocks),
        )
    if keep.get("tp", 1) > (heads := config.model.max_tp):
        return config_error(
            "parallel.tp", keep["tp"], f"must be at most {config.model.max_tp_rule}", str(heads)
        )
    if grids(config, machine, keep):
        batch = batch_size(config, request)
        return config_error(
            "batch_size",
            batch,
            f"no grid of {number} devices with {kept} divides this batch into micro-batches of "
            f"the profiled sizes {profile.micro_batches(profile.tp_degrees[0])} in a number "
            f"that the schedule can run",
            str(-(-batch // number) * number * 2),
        )
    fixed = math.prod(size for axis, size in keep.items() if axis != "ep")
    if "dp" not in keep:
        fixed *= config.parallel.least_dp
    return config_error(
        "ranks",
        number,
        f"no grid with {kept} has this many ranks (tp degrees: {profile.tp_degrees})",
        str(max(number // fixed, 1) * fixed),
    )

"""`hybridpar profile`: measure blocks and links of this machine, in a job's ranks or in new
processes."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridpar import __version__
from hybridpar.comm import gather_objects
from hybridpar.comm.ranks import run_on_ranks
from hybridpar.config import Config, Launch
from hybridpar.cores import available_cores
from hybridpar.cpu import cpu_name
from hybridpar.errors import config_error
from hybridpar.planner.machines.codec_costs import measure_codecs
from hybridpar.planner.measuring.bench import FULL, QUICK, Effort, measure_blocks, world_axis
from hybridpar.planner.measuring.links import QUICK_SIZES, SIZES, measure_links
from hybridpar.planner.measuring.profile import Hardware, Profile, StateSpeeds, settings_of
from hybridpar.planner.measuring.profile_file import FORMAT
from hybridpar.planner.measuring.state_speeds import measure_state
from hybridpar.prediction.work import block_forms
from hybridpar.state.residency.tiered import folder_to_measure
from hybridpar.train.launching.launch import (
    Job,
    choose_backend,
    choose_device,
    keep_freed_memory,
    set_threads,
)


def measure_machine(
    config: Config,
    launch: Launch,
    *,
    degrees: Sequence[int] = (),
    sizes: Sequence[int] = (),
    quick: bool = False,
    ranks: int = 0,
) -> Profile:
    """Measure in the ranks that torchrun started, or else in `ranks` new processes.

    Args:
        config: The configuration.
        launch: How this process was started.
        degrees: Tensor-parallel degrees; none: 1, 2, 4, .. up to the number of ranks.
        sizes: Micro-batch sizes; none: the configuration's, and twice that.
        quick: Whether to measure less, in a few seconds.
        ranks: Number of processes; 0 for one per core or GPU.

    Returns:
        The profile, equal on all ranks.

    Raises:
        ConfigError: The configuration cannot be measured.
        HybridparError: A process failed; has its traceback.
    """
    every = torch.cuda.device_count() if _has_gpus(config) else max(2, available_cores())
    ranks = launch.world_size if launch.world_size > 1 else ranks or every
    own = config.train.micro_batch_size
    sizes = tuple(sizes) or ((own,) if quick else (own, 2 * own))
    degrees = tuple(degrees) or tuple(
        t for t in (1, 2, 4, 8, 16) if t <= min(ranks, config.model.max_tp) and ranks % t == 0
    )
    if (most := max(degrees)) > config.model.max_tp:
        raise config_error(
            "tp", most, f"must be at most {config.model.max_tp_rule}", str(config.model.max_tp)
        )
    request = (config, degrees, sizes, quick)
    if launch.world_size > 1 or ranks == 1:
        job = Job.connect(launch)
        device = choose_device(config.train, launch, job.gather)
        set_threads(config.train.threads, launch)
        job.require_addresses(backend := choose_backend(config.train, device))
        job.start_group(device, backend, max(config.train.timeout_s, 120.0))
        profile = measure_here(*request, device)
        job.end_group()
        return profile
    # forked processes have torch already imported; CUDA does not survive a fork
    kind, start = ("cuda", "spawn") if _has_gpus(config) else ("cpu", "fork")
    backend = choose_backend(config.train, torch.device(kind))
    profile, *_ = run_on_ranks(_measure_in_process, ranks, *request, backend=backend, start=start)
    return profile


def identity(config: Config) -> dict[str, Any]:
    """Return the identity of this machine and configuration, which a cached profile must match."""
    forms = ""
    if config.model.spec:  # custom code may change
        forms = hashlib.sha256(repr(block_forms(config.model)).encode()).hexdigest()
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if _has_gpus(config)
        else []
    )
    return {
        "settings": settings_of(config),
        "gpus": gpus,
        "train": [config.train.micro_batch_size, config.train.threads, config.train.share_gpus],
        "folder": str(folder_to_measure(config)),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "torch": torch.__version__,
        "hybridpar": __version__,
        "schedule": config.pipeline.schedule,
        "format": FORMAT,
        "blocks": forms,
        "packed": config.data.is_packed,
    }


def _has_gpus(config: Config) -> bool:
    return config.train.device != "cpu" and torch.cuda.is_available()


def measure_here(
    config: Config, degrees: Sequence[int], sizes: Sequence[int], quick: bool, device: torch.device
) -> Profile:
    """Return the profile measured on this rank's job. Collectives: on all ranks of the job."""
    if device.type == "cpu":
        keep_freed_memory()
    world = world_axis(device)
    effort = QUICK if quick else FULL
    links = measure_links(world, device, sizes=QUICK_SIZES if quick else SIZES)
    blocks, had_core = measure_blocks(config, degrees, sizes, device, effort)
    state = measure_state(config, world, quick=quick) if device.type == "cpu" else StateSpeeds()
    codecs = measure_codecs(config, world) if device.type == "cpu" else {}
    hardware = _hardware(
        device, gather_objects(platform.node(), world), shared=config.train.share_gpus
    )
    hardware = replace(hardware, efficiency=round(had_core, 4) if hardware.cores else 1.0)
    return Profile(
        hardware,
        blocks,
        links,
        settings_of(config),
        state=state,
        codecs=codecs,
        about=_about(effort, world.size),
    )


def _hardware(device: torch.device, hosts: Sequence[str], *, shared: bool) -> Hardware:
    number = len(set(hosts))
    here = -(-len(hosts) // number)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpus = torch.cuda.device_count()
        devices = max(gpus, here)
        part = gpus / devices if shared else 1  # the process's share of a GPU
        return Hardware(
            properties.name,
            devices,
            properties.total_memory * part,
            hosts=number,
            host_memory=memory / devices,
        )
    return Hardware(
        cpu_name(), here, memory / here, available_cores(), torch.get_num_threads(), number
    )


def _about(effort: Effort, ranks: int) -> dict[str, Any]:
    root = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "hybridpar": __version__,
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": ranks,
        "seconds": effort.seconds,
    }


def _measure_in_process(
    config: Config, degrees: Sequence[int], sizes: Sequence[int], quick: bool
) -> Profile:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    launch = Launch(rank, rank, ranks, ranks)
    set_threads(config.train.threads, launch)
    # all ranks were started here, and see the same GPUs
    gpus = torch.cuda.device_count()
    device = choose_device(
        config.train, launch, lambda mine: [mine and str(r % gpus) for r in range(ranks)]
    )
    return measure_here(config, degrees, sizes, quick, device)

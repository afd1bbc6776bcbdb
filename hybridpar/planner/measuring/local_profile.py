"""The machine to plan for: one that a file describes, or this one, measured now or earlier."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from hybridpar.config import Config, Launch
from hybridpar.planner.machines.cluster import estimated, measured_machine, read_cluster
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.measure_machine import identity, measure_machine
from hybridpar.planner.measuring.profile import Profile, check_settings
from hybridpar.planner.measuring.profile_file import read_profile, write_profile


def machine_for(
    config: Config,
    launch: Launch,
    profile: str,
    cluster: str,
    devices: int,
    keep: Mapping[str, int] | None = None,
) -> Machine:
    """Return the machine of a cluster file, of a profile, of both, or this machine, profiled now or
    earlier.

    Args:
        config: The configuration.
        launch: How this process was started.
        profile: Path of a profile, or "".
        cluster: Path of a cluster file, or "".
        devices: Number of devices; 0 for all, or on CPUs as many as the sizes of the axes to keep
            allow.
        keep: Sizes of axes of the grid that must stay.

    Raises:
        ConfigError: The files do not fit the configuration.
        DataError: A file is damaged.
    """
    found: Profile | None = None
    if profile:
        found = read_profile(Path(profile))
        check_settings(found, config)
    if cluster:
        return estimated(config, read_cluster(Path(cluster)), devices, found)
    found = found or cached_profile(config, launch)
    if not devices and found.hardware.cores:
        kept = math.prod(size for axis, size in (keep or {}).items() if axis != "ep")
        if keep and "dp" not in keep:
            kept *= config.parallel.least_dp
        every = found.hardware.devices_per_host * found.hardware.hosts
        devices = (
            kept if keep and {"tp", "pp", "dp"} <= keep.keys() else kept * max(1, every // kept)
        )
    return measured_machine(found, devices)


def cached_profile(config: Config, launch: Launch) -> Profile:
    """Return a quick profile of this machine, from the cache if one was made on the quiet machine
    before."""
    key = hashlib.sha256(
        json.dumps(identity(config), sort_keys=True, default=str).encode()
    ).hexdigest()[:16]
    path = config.cache_folder / "profiles" / f"{key}.json"
    if path.exists() and (kept := read_profile(path)).hardware.was_quiet:
        return kept
    print("measuring this machine", file=sys.stderr)
    profile = measure_machine(config, launch, quick=True)
    if not profile.hardware.was_quiet:
        return profile  # the planner reports that the machine was busy
    try:
        write_profile(profile, path)
    except OSError as error:
        print(
            f"{path}: cannot be written ({error.strerror}), so these times are not kept",
            file=sys.stderr,
        )
    return profile

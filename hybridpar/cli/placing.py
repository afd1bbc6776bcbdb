"""Flags of the commands of operator placement, `place` and `graph`. What they do is in
hybridpar/placement/commands.py, which is imported when one of them runs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from hybridpar.cli.values import ConfigFile, Devices, Overrides
from hybridpar.config import Launch
from hybridpar.errors import config_error

GraphFile = Positional[Annotated[Path, arg(metavar="GRAPH.json")]]


@dataclass(frozen=True)
class Place:
    """Place a graph of operators on accelerators and CPUs, and say how far from the best the
    placement may be."""

    path: GraphFile
    """A workload of Tarnawski et al., such as `hybridpar graph` writes, or an instance of Piper's
    planner."""
    solver: str = ""
    """dp: the best pipeline. dpl (the default): the best split of one order of the operators. milp:
    the best placement of all, in which a device may hold several chunks of the model, as in
    interleaved pipelines (--whole-blocks: such as `hybridpar train` runs). milp-contiguous: the
    best with one chunk each. Baselines: pipedream, greedy, local-search, one-accelerator, expert
    (with --split). latency-milp, latency-greedy: for the time of one sample. Piper instances:
    piper, or its baseline equi."""
    accelerators: int = 0
    """0: as many as the file says."""
    cpus: int = -1
    """-1: as many as the file says."""
    memory_gb: float = 0.0
    """Memory of each accelerator, in 1e9 bytes; 0: as the file says."""
    whole_blocks: bool = False
    """All operators of a block (the nodes' layerId) share a device, as in `hybridpar train`. A
    placement that is a pipeline is then its pipeline.split; one that goes round the devices more
    than once, its pipeline.virtual_stages, too."""
    time_limit: float = 60.0
    """Seconds, after which the best that was found counts, with a bound. dp may take one second
    more, the milps half.
    """
    max_ideals: int = 0
    """dp and piper: most ideals (sets of operators that may come first). With more they try some
    orders of the operators, and give the best with a bound. Their memory and time grow with it; 0:
    60,000."""
    slots: int = 1
    """latency-milp: how often each accelerator may be called for a sample."""
    split: str = ""
    """expert: a file of the paper's format, which --output writes too."""
    output: str = ""
    """Write the placement to this file, in the paper's format of splits."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        _require_extra("place")
        from hybridpar.placement.commands import place_graph

        return place_graph(self)


@dataclass(frozen=True)
class Graph:
    """Write the operator graph of a model, with times and memory of its operators, for
    `hybridpar place`."""

    path: ConfigFile
    config: Overrides
    output: str = "graph.json"
    """File for the graph."""
    training: bool = False
    """Whether the graph has backward nodes, gradients and optimizer state."""
    profile: str = ""
    """A file of `hybridpar profile`, whose times of a block its operators share out. Empty:
    estimates."""
    cluster: str = ""
    """A cluster.toml: the devices, and the slowest of its links. With a profile: its blocks, and
    these links."""
    device: str = "a100-80gb"
    """Device to estimate for, without profile and cluster."""
    link: str = "nvlink3"
    """Link between these devices."""
    accelerators: Devices = 0
    """Number of devices; 0: all of the profile or cluster, else 8."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        _require_extra("graph")
        from hybridpar.placement.commands import write_graph

        return write_graph(self, launch)


def _require_extra(command: str) -> None:
    """Raises: ConfigError if the libraries of the extra [placement] are not installed."""
    if absent := [name for name in ("scipy", "networkx") if importlib.util.find_spec(name) is None]:
        raise config_error(
            "command",
            command,
            f"requires {' and '.join(absent)}",
            "pip install 'hybridpar[placement]'",
        )

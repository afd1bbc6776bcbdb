"""Flags of the operator placement commands `place` and `graph`, implemented in
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
    """Place a graph of operators on accelerators and CPUs, and report a bound on the distance from
    the optimum."""

    path: GraphFile
    """A workload of Tarnawski et al., as written by `hybridpar graph`, or an instance of the Piper
    planner."""
    solver: str = ""
    """dpl (default): optimal for one linear order of the operators. dp: optimal pipeline. milp:
    optimal placement; a device may hold several chunks of the model, as in an interleaved pipeline
    (add --whole-blocks for one that `hybridpar train` can run). milp-contiguous: optimal with one
    chunk per device. Baselines: pipedream, greedy, local-search, one-accelerator, expert (needs
    --split). latency-milp, latency-greedy: minimize the latency of one sample. Piper instances:
    piper (default), or its baseline equi."""
    objective: str = "serial"
    """The minimized time. serial (default): the largest load of a device, which computes and
    transfers by turns. overlapped: the same, where transfers run beside computing. gpipe: the
    largest forward load plus the largest backward load, for schedules whose backwards begin when
    all forwards are done; milp minimizes it."""
    accelerators: int = 0
    """Number of accelerators. 0 (default): from the file."""
    cpus: int = -1
    """Number of CPUs. -1 (default): from the file."""
    memory_gb: float = 0.0
    """Memory of each accelerator in 1e9 bytes. 0 (default): from the file."""
    whole_blocks: bool = False
    """Keep all operators of a block (the nodes' layerId) on one device, as `hybridpar train` does.
    If the placement is a pipeline, its pipeline.split is printed, and also its
    pipeline.virtual_stages if it visits the devices more than once."""
    time_limit: float = 60.0
    """Time limit in seconds. At the limit, the best placement so far is reported with a bound. dp
    may exceed the limit by one second, the MILP solvers by half a second."""
    max_ideals: int = 0
    """dp and piper: largest number of ideals (sets of operators closed under predecessors). Beyond
    it the solver tries some linear orders of the operators and reports a bound. Memory and time
    grow with it. 0 (default): 60,000."""
    slots: int = 1
    """latency-milp: how often each accelerator may be called for one sample."""
    split: str = ""
    """expert: a split file in the paper's format, as written by --output."""
    output: str = ""
    """Write the placement to this file, in the paper's split format."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        _require_extra("place")
        from hybridpar.placement.commands import place_graph

        return place_graph(self)


@dataclass(frozen=True)
class Graph:
    """Write the operator graph of a model for `hybridpar place`, with the time and memory of each
    operator."""

    path: ConfigFile
    config: Overrides
    output: str = "graph.json"
    """File for the graph."""
    training: bool = False
    """Include backward nodes, gradients and optimizer state."""
    profile: str = ""
    """A file of `hybridpar profile`, whose block times are distributed over operators. Empty
    (default): estimates."""
    cluster: str = ""
    """A cluster.toml: use its devices and the slowest of its links. With a profile: block times
    from the profile, links from the cluster."""
    device: str = "a100-80gb"
    """Device to estimate for, without a profile and cluster."""
    link: str = "nvlink3"
    """Link between these devices."""
    accelerators: Devices = 0
    """Number of devices. 0 (default): all devices of the profile or cluster, else 8."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        _require_extra("graph")
        from hybridpar.placement.commands import write_graph

        return write_graph(self, launch)


def _require_extra(command: str) -> None:
    """Raise a ConfigError if the libraries of the extra [placement] are not installed."""
    if absent := [name for name in ("scipy", "networkx") if importlib.util.find_spec(name) is None]:
        raise config_error(
            "command",
            command,
            f"requires {' and '.join(absent)}",
            "pip install 'hybridpar[placement]'",
        )

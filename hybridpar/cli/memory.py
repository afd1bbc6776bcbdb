"""Flags of the command `memory`. What it does is in hybridpar/memory_behaviour/commands.py, which
is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from hybridpar.cli.values import ConfigFile, JobRanks, Overrides, Within
from hybridpar.config import Launch


@dataclass(frozen=True)
class Memory:
    """Say which blocks make up a rank's memory, when they are used, and what settings save;
    predicted or recorded."""

    path: ConfigFile
    config: Overrides
    measured: Annotated[str, arg(name="run")] = ""
    """A run folder: use what it recorded (train.record_memory), and its configuration."""
    trust: bool = False
    """With --run and no configuration file: import the code of a custom model that the run folder
    names."""
    rank: Annotated[int, Within(-1, 2**40)] = -1
    """A rank of the job; -1: the one with the largest peak, of all that recorded, or of the first
    pipeline."""
    ranks: JobRanks = 0
    """Processes of the job, none of which is started; 0: as many as the grid has."""
    batches: Annotated[int, Within(1, 1000)] = 4
    """Batches to predict; the first and the last one may differ from the others."""
    profile: str = ""
    """Predict with the times of a file of `hybridpar profile`."""
    cluster: str = ""
    """A cluster.toml: predict with estimated times on those machines (or those of the profile)."""
    output: str = ""
    """A folder for memory.html, memory.svg, memory.perfetto.json and, for predictions,
    trace.jsonl."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.memory_behaviour.commands import report_memory

        return report_memory(self, launch)

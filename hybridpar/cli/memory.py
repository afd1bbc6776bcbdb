"""Flags of the command `memory`, implemented in hybridpar/memory_behaviour/commands.py, which is
imported when the command runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from hybridpar.cli.values import ConfigFile, JobRanks, Overrides, Within
from hybridpar.config import Launch


@dataclass(frozen=True)
class Memory:
    """Report the blocks in a rank's memory, when they are used, and which settings save memory;
    predicted or recorded."""

    path: ConfigFile
    config: Overrides
    measured: Annotated[str, arg(name="run")] = ""
    """A run folder: use its recorded memory (train.record_memory) and its configuration."""
    trust: bool = False
    """Import the code of a custom model from the folder that the run recorded. Needed only with
    --run and without a configuration file."""
    rank: Annotated[int, Within(-1, 2**40)] = -1
    """Rank of the job to report. -1 (default): the rank with the largest peak, out of the recorded
    ranks or of the first pipeline."""
    ranks: JobRanks = 0
    """Number of processes of the job; none is started. 0 (default): the size of the grid."""
    batches: Annotated[int, Within(1, 1000)] = 4
    """Number of batches to predict. The first and the last one may differ from the others."""
    profile: str = ""
    """A file of `hybridpar profile`, whose times the prediction uses."""
    cluster: str = ""
    """A cluster.toml: predict for those machines with estimated times, or with the times of the
    profile."""
    output: str = ""
    """Folder for memory.html, memory.svg, memory.perfetto.json and, for predictions, trace.jsonl
    (above 8 MiB trace.jsonl.gz)."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.memory_behaviour.commands import report_memory

        return report_memory(self, launch)

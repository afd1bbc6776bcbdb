"""Log files of ranks: none, as ranks write to their supervisor's terminal, and say in flight records how they end."""

from __future__ import annotations

import os
from dataclasses import replace

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest


class NoLogs(DefaultLogsSpecs):
    """Where torch's agent writes the output of ranks: nowhere.

    Torch's default makes a folder in the temporary folder for each launch, and never removes it.
    """

    def __init__(self) -> None:
        super().__init__(log_dir=os.devnull)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Torch's own would read the null device twice a rank, ten times a second, as if it were a log."""
        return replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})

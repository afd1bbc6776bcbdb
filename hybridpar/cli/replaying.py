"""The command that runs a step of a run again."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from hybridpar.cli.values import Threads, Within
from hybridpar.config import Launch
from hybridpar.errors import config_error


@dataclass(frozen=True)
class Replay:
    """Run one step of a run again on one CPU process, and say where its numbers stop being finite."""

    path: Positional[Annotated[Path, arg(metavar="BUNDLE.json | RUN")]]
    """What an anomaly left in a run's folder anomalies/; or a run folder, and a --step."""
    step: Annotated[int, Within(0, 2**40)] = 0
    """Of a run folder: which one, as in its metrics."""
    threads: Threads = 0
    """CPU threads; 0: all cores."""
    json: bool = False
    """The report as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.checkpoint.files import to_json
        from hybridpar.train.launch import set_threads
        from hybridpar.verify.replay import replay

        if self.step and not self.path.exists():
            raise config_error("path", str(self.path), "does not exist", "a run folder, such as runs/NAME")
        if self.path.is_dir() != (self.step > 0):
            raise config_error("step", self.step, "says which step of a run folder; a bundle has its own",
                               "hybridpar replay runs/NAME --step 100")
        set_threads(self.threads, launch)
        report = replay(self.path, self.step, lambda text: print(text, file=sys.stderr))
        print(to_json(report.as_json()) if self.json else "\n".join(report.lines()))
        return 0 if report.agrees else 1

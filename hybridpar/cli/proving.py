"""Commands that check computed numbers: `hybridpar verify`, `conform` and `replay`."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from hybridpar.cli.planning import resolved
from hybridpar.cli.values import ConfigFile, Overrides, Threads, Within, parse_grid
from hybridpar.config import Launch
from hybridpar.errors import config_error
from hybridpar.reading import nearest_path, runs_near, to_json


@dataclass(frozen=True)
class Verify:
    """Compare a few batches on a process grid with the same batches in one process, in float64,
    tensor by tensor."""

    path: ConfigFile
    config: Overrides
    grid: str = ""
    """Grid to verify, such as tp=2,pp=2,dp=2; omitted axes are 1. Empty (default): the
    configuration's grid."""
    batches: Annotated[int, Within(1, 10_000)] = 4
    """Number of batches to compare."""
    nan_batches: tuple[int, ...] = ()
    """Batches (from 0) whose gradient is set to NaN on one rank, so that all ranks must skip the
    update."""
    resume_at: int = 0
    """Save after this number of batches, restart from the checkpoint, and continue. 0 (default):
    never."""
    json: bool = False
    """Print the report as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.verify.run import Disturbance, on_grid, verify

        parallel = self.config.parallel
        own = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "ep")}
        own["dp"] = max(parallel.dp, parallel.least_dp)
        sizes = parse_grid(self.grid) if self.grid else own
        resolved(on_grid(self.config, sizes))
        for name, number in (
            ("resume_at", self.resume_at),
            *(("nan_batches", n) for n in self.nan_batches),
        ):
            if not 0 <= number < self.batches:
                rule = f"must be from 0 to {self.batches - 1}, as --batches is {self.batches}"
                raise config_error(name, number, rule, str(self.batches - 1))
        disturbance = Disturbance(frozenset(self.nan_batches), self.resume_at)
        report = verify(self.config, sizes, self.batches, disturbance)
        out = sys.stderr if self.json else sys.stdout
        for what, worst in report.worst.items():
            place = f"({worst.name}, batch {worst.batch})"
            print(f"{what:<10} worst relative error {worst.error:.1e}  {place}", file=out)
        print(report, file=out)
        if self.json:
            print(to_json(report.as_json()))
        return 0 if report.ok else 1


@dataclass(frozen=True)
class Conform:
    """Compare parallel modules of any framework with one process, case by case, and name the cause
    of a difference."""

    factories: Positional[str]
    """A module and a dict of factories in it, such as "my_module:FACTORIES"; see
    hybridpar/conformance."""
    ranks: Annotated[tuple[int, ...], Within(1, 64)] = (1, 2, 3, 4)
    """Numbers of processes to run each case on."""
    tolerance: Annotated[float, Within(above=0, most=1)] = 1e-9
    """Largest difference relative to the largest element. Use 1e-5 for modules that compute in
    float32."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.conformance import conform

        results = conform(_factories(self.factories), self.ranks, tolerance=self.tolerance)
        wrong = [result for result in results if result.findings]
        if self.json:
            print(
                json.dumps({"ok": not wrong, "results": [result.as_json() for result in results]})
            )
        else:
            print(*results, f"{len(results)} runs, {len(wrong)} with differences", sep="\n")
        return 1 if wrong else 0


def _factories(name: str) -> dict[str, Any]:
    """Return the factories that "module:name" refers to; modules in the working folder come first.

    Raises:
        ConfigError: The name does not refer to a dict of factories.
    """
    module, _, attribute = name.partition(":")
    sys.path[:0] = [str(Path.cwd())] * (str(Path.cwd()) not in sys.path)
    try:
        found = getattr(importlib.import_module(module), attribute, None) if module else None
    except ImportError as error:
        raise config_error(
            "factories", name, f"cannot be imported ({error})", "my_module:FACTORIES"
        ) from error
    if not isinstance(found, dict):
        raise config_error(
            "factories",
            name,
            "must be a module and the name of a dict in it, as module:NAME",
            "my_module:FACTORIES",
        )
    return found


@dataclass(frozen=True)
class Replay:
    """Repeat one step of a run on one CPU process, and report where its numbers stop being
    finite."""

    path: Positional[Annotated[Path, arg(metavar="BUNDLE_OR_RUN")]]
    """A replay bundle from a run's folder anomalies/, or a run folder together with --step."""
    step: Annotated[int, Within(0, 2**40)] = 0
    """Step to repeat, as numbered in the metrics of the run folder."""
    trust: bool = False
    """Import a custom model's code from the folder that the run recorded. Otherwise Python looks in
    the working folder and in installed packages."""
    threads: Threads = 0
    """CPU threads. 0 (default): all cores."""
    json: bool = False
    """Print the report as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.train.launching.launch import set_threads
        from hybridpar.verify.replay import replay

        if self.step and not self.path.exists():
            raise config_error(
                "path", str(self.path), "does not exist", runs_near(self.path) or "runs/NAME"
            )
        if not self.path.is_dir() and self.path.suffix != ".json" and not self.step:
            raise config_error(
                "path",
                str(self.path),
                "must be an anomaly's bundle (.json) or a run folder",
                "runs/NAME/anomalies/step_00000100.json, or runs/NAME --step 100",
            )
        if not self.path.exists():
            raise config_error(
                "path",
                str(self.path),
                "does not exist",
                nearest_path(self.path) or "runs/NAME/anomalies/step_00000100.json",
            )
        if self.path.is_dir() != (self.step > 0):
            raise config_error(
                "step",
                self.step,
                "not supported with a bundle, which has its own step; it selects a step of a "
                "run folder",
                "hybridpar replay runs/NAME --step 100",
            )
        set_threads(self.threads, launch)
        report = replay(
            self.path, self.step, lambda text: print(text, file=sys.stderr), trust=self.trust
        )
        print(to_json(report.as_json()) if self.json else "\n".join(report.lines()))
        return 0 if report.agrees else 1

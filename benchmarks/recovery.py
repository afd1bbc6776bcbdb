"""Claims: a job whose ranks are killed, hang (also in a save) or lose a link goes on by itself, says who failed, and
ends with the bits of an undisturbed one; where a save fails, or its files are damaged, it trains on without it.

    python -m benchmarks.recovery                      55 faults in 7 jobs of 4 ranks: 10 to 20 minutes on 2 cores
    python -m benchmarks.recovery --only 0 1           two of the jobs; their entries replace those in the result file

Jobs are `hybridpar train --ranks 4` (pp = 2, dp = 2, 2bw, ZeRO-1) with seeded faults, one in each stretch between two
checkpoints, in turn of all kinds; the last two jobs have a few each. For each job this is asserted:

    every fault happened, the job ended well, and was started again once for each fault that ends it
    losses and gradient norms of all steps, and every file of the last checkpoint, are those of the undisturbed job, to
    the bit
    each time training went on after the newest checkpoint that was there when the fault came, or a newer one that was
    under way: at most the steps since then were lost
    every checkpoint was whole when it appeared (looked at meanwhile, and at the end)
    the rank that is named is the one that was meant (of a lost link, one of its two ends)

A gradient that is not finite is skipped (anomalies.on_non_finite), which changes the numbers, so the job that a job is
compared with has the same ones. In the last job but one all ranks roll back instead, alike in both. In the last job it
is to stop: then the job ends with exit code 1, all up to there is as undisturbed, and it is not started again.

Seconds: `noticed`, from the fault until the supervisor has noticed (faults.timeout_s included where ranks hang or a
link is lost); `again`, until all ranks train again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine
from benchmarks.files import as_text
from hybridpar.checkpoint.folders import folder_of, saved_steps
from hybridpar.checkpoint.load import check_files
from hybridpar.checkpoint.manifest import read_manifest
from hybridpar.config import from_mapping, to_toml
from hybridpar.errors import CheckpointError
from hybridpar.train.metrics import read_metrics

RANKS, STRETCH, TIMEOUT_S, SLOW_S = 4, 10, 4.0, 1.0
KINDS = ("kill", "hang", "cut link", "slow link", "corrupt shard", "disk full", "nan gradient", "hang save")
SAVING = ("corrupt shard", "disk full", "hang save")
LINKS = ((0, 1), (0, 2), (1, 3), (2, 0), (2, 3), (3, 1))
ENDS = {"kill": "died", "hang": "hangs", "cut link": "link", "hang save": "hangs"}
"""How the supervisor calls what ends a job."""
SKIP, ROLL_BACK, STOP = "skip", "roll_back", "stop"
OWN = {ROLL_BACK: ("kill", "nan gradient", "kill"), STOP: ("kill", "nan gradient")}
"""The faults of the jobs after the main ones, by what they do where a gradient is not finite."""
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 32, "vocab_size": 300, "dropout": 0.1},
    "parallel": {"pp": 2, "dp": 2, "zero": 1},
    "pipeline": {"schedule": "2bw", "num_microbatches": 2},
    "train": {"micro_batch_size": 2, "threads": 1, "device": "cpu", "save_interval": STRETCH, "timeout_s": 30.0},
    "optim": {"lr": 3e-3},
    "checkpoint": {"read_back": True},
    "faults": {"timeout_s": TIMEOUT_S, "save_timeout_s": TIMEOUT_S},
}


def draw_faults(seed: int, job: int, kinds: Sequence[str]) -> tuple[list[str], int]:
    """One fault for each stretch of a job, not in its first steps, and how many steps it has. What a save meets comes
    out after another stretch, which has no fault."""
    draw = random.Random(f"{seed} {job}")
    found, stretch = [], 0
    for kind in kinds:
        stretch += 1
        rank, step = draw.randrange(RANKS), STRETCH * stretch + draw.randint(4, STRETCH - 1)
        stretch += kind in SAVING
        a, b = draw.choice(LINKS)
        found.append({
            "slow link": f"slow link {a}-{b} at step {step} for {SLOW_S:g} s",
            "cut link": f"cut link {a}-{b} at step {step}"}.get(kind, f"{kind} rank {rank} at step {step}"))
    return found, STRETCH * (stretch + 2)


@dataclass
class Job:
    """One call of `hybridpar train`: its output with times, and the checkpoints that were looked at."""

    folder: Path
    exit_code: int = 0
    lines: list[tuple[float, str]] = field(default_factory=list)
    looked_at: set[tuple[int, int]] = field(default_factory=set)
    damaged: list[str] = field(default_factory=list)

    def run(self, config: Path, faults: Sequence[str], *flags: str) -> Job:
        command = [sys.executable, "-m", "hybridpar", "train", str(config), "--ranks", str(RANKS), "--run.name",
                   self.folder.name, *flags, "--inject", *faults]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        watcher = threading.Thread(target=self._look, args=(process,), daemon=True)
        watcher.start()
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append((time.time(), line.rstrip()))
        self.exit_code = process.wait()
        watcher.join()
        return self

    def _look(self, process: subprocess.Popen[str]) -> None:
        root = self.folder / "checkpoints"
        while process.poll() is None:
            for step in saved_steps(root):
                folder = folder_of(root, step)
                with suppress(FileNotFoundError):
                    key = step, folder.stat().st_ino
                    if key not in self.looked_at:
                        self._check(folder)
                        self.looked_at.add(key)
            time.sleep(0.02)

    def _check(self, folder: Path) -> None:
        try:
            check_files(folder, read_manifest(folder))
        except CheckpointError as error:
            if folder.exists():  # else it has been removed meanwhile
                self.damaged.append(str(error))

    def resumed(self) -> list[tuple[float, int]]:
        """When training began again, and after which step."""
        found = [(when, re.search(r"going on after step (\d+)", line)) for when, line in self.lines]
        return [(when, int(match[1])) for when, match in found if match]

    def steps(self) -> list[tuple[Any, ...]]:
        """What each step came to."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        return [(row["step"], row["loss"], row["grad_norm"], row.get("skipped")) for row in rows if "loss" in row]

    @property
    def saved(self) -> int:
        """The step of the last checkpoint."""
        return saved_steps(self.folder / "checkpoints")[0]

    def files(self, step: int) -> dict[str, bytes]:
        """Those of a checkpoint."""
        folder = folder_of(self.folder / "checkpoints", step)
        return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}

    def marks(self) -> list[dict[str, Any]]:
        """The faults that happened, in order."""
        paths = (self.folder / "injected").glob("*")
        return sorted((json.loads(path.read_text()) for path in paths), key=lambda mark: mark["time"])

    def failures(self) -> list[dict[str, Any]]:
        """What the supervisor has seen."""
        path = self.folder / "failures.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def examine(job: Job, calm: Job, faults: Sequence[str], policy: str) -> dict[str, Any]:
    """What came of a job, and all that is wrong with it."""
    marks, failures, resumed = job.marks(), job.failures(), job.resumed()
    steps, undisturbed = job.steps(), calm.steps()
    wrong = []
    if policy == STOP:  # in the last fault's step
        stop = int(faults[-1].rpartition(" ")[2])
        expected = (f"refused: all ranks stopped: step {stop}: the gradient norm is nan; stopped, the newest "
                    f"checkpoint is of step {job.saved}")
        said = [f"{last['kind']}: {last['text']}" for last in failures[-1:]]
        wrong += [f"{len(steps)} steps, then {said}, not {stop}"] * ((len(steps), said) != (stop, [expected]))
        steps, undisturbed, failures = steps[:stop - 1], undisturbed[:stop - 1], failures[:-1]
    wrong += [f"step {a}, undisturbed {b}" for a, b in zip_longest(steps, undisturbed) if a != b][:1]
    wrong += ["files of the last checkpoint differ"] * (job.files(job.saved) != calm.files(job.saved))
    wrong += [text for text, bad in (
        (f"exit code {job.exit_code}", job.exit_code != (policy == STOP)),
        ("damaged: " + "; ".join(job.damaged), job.damaged),
        (f"did not happen: {set(faults) - {m['fault'] for m in marks}}", len(marks) != len(faults))) if bad]
    ending = [mark for mark in marks if mark["kind"] in ENDS]
    if not len(ending) == len(failures) == len(resumed):
        wrong.append(f"{len(ending)} faults that end a job, {len(failures)} failures, {len(resumed)} new starts")
    found = [{"fault": mark["fault"], "survived": policy != STOP} for mark in marks if mark["kind"] not in ENDS]
    for mark, failure, (when, step) in zip(ending, failures, resumed, strict=False):
        saved, lost = max(mark["saved"]), mark["done"] - step
        wrong += [f"{mark['fault']}: {text}" for text, bad in (
            (f"called {failure['kind']}", failure["kind"] != ENDS[mark["kind"]]),
            (f"rank {failure['rank']} is blamed",
             mark["kind"] in ("kill", "hang", "hang save") and failure["rank"] != mark["rank"]),
            (f"{failure['text']}", mark["kind"] == "cut link" and not _names_link(mark, failure)),
            (f"went on after step {step}, {saved} was saved", step < saved),
            (f"{lost} steps lost", lost > STRETCH)) if bad]
        found.append({
            "fault": mark["fault"], "noticed_s": round(failure["time"] - mark["time"], 3),
            "again_s": round(when - mark["time"], 3), "lost_steps": lost, "said": failure["text"]})
    return {"faults": found, "num_faults": len(faults), "checkpoints_looked_at": len(job.looked_at),
            "steps": len(steps), "final_loss": steps[-1][1], "wrong": wrong}


def _kind(fault: str) -> str:
    return max((kind for kind in KINDS if fault.startswith(kind)), key=len)


def _names_link(mark: dict[str, Any], failure: dict[str, Any]) -> bool:
    named = re.match(r"the link between rank (\d+) and rank (\d+)", failure["text"])
    return named is not None and set(named.groups()) == set(re.findall(r"\d+", mark["fault"])[:2])


def run_job(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """An entry of the result file."""
    kinds: Sequence[str] = [KINDS[(number * args.faults + i) % len(KINDS)] for i in range(args.faults)]
    policy = SKIP
    if number >= args.jobs:
        policy, kinds = list(OWN.items())[number - args.jobs]
    faults, num_steps = draw_faults(args.seed, number, kinds)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        corpus = folder / "corpus.txt"
        draw = random.Random(0)
        corpus.write_text("\n".join(" ".join(draw.choice(("stone", "river", "cloud", "lamp", "lamps", "clouded"))
                                             for _ in range(12)) for _ in range(400)))
        config = folder / "config.toml"
        sections = SECTIONS | {"data": {"corpus": [str(corpus)]}, "run": {"dir": str(folder)}}
        sections["train"] = sections["train"] | {"num_steps": num_steps}
        config.write_text(to_toml(from_mapping(sections)))
        same = [fault for fault in faults if fault.startswith("nan") and policy != STOP]
        flags = ("--anomalies.on_non_finite", policy)
        calm = Job(folder / "calm").run(config, same, *flags, "--checkpoint.keep", "1000")
        start = time.monotonic()
        job = Job(folder / "disturbed").run(config, faults, *flags)
        entry = {"job": number, "on_non_finite": policy} | examine(job, calm, faults, policy) | {
            "seconds": round(time.monotonic() - start, 1), "machine": machine()}
        if entry["wrong"]:
            print("\n".join(line for _, line in job.lines), file=sys.stderr)
        return entry


def summary(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all jobs: faults, recoveries, and times by kind."""
    faults = [fault for job in jobs for fault in job["faults"]]
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        mine = [fault for fault in faults if _kind(fault["fault"]) == kind]
        entry: dict[str, Any] = {"faults": len(mine)}
        for name in ("noticed_s", "again_s", "lost_steps"):
            if values := [fault[name] for fault in mine if name in fault]:
                entry[name] = {"median": statistics.median(values), "max": max(values)}
        kinds[kind] = entry
    good = [job for job in jobs if not job["wrong"]]
    return {"jobs": len(jobs), "faults": sum(job["num_faults"] for job in jobs),
            "recoveries": sum(fault.get("survived", True) for job in good for fault in job["faults"]), "kinds": kinds,
            "checkpoints_looked_at": sum(job["checkpoints_looked_at"] for job in jobs)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Injects faults into training jobs, and asserts that they recover.")
    parser.add_argument("--jobs", type=int, default=5, help=f"besides those of {', '.join(OWN)}, which come last")
    parser.add_argument("--faults", type=int, default=10, help="in each job")
    parser.add_argument("--only", type=int, nargs="*", help="run these jobs alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="where jobs run; the system's temporary folder")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--rounds", type=int, default=0, help="nothing is repeated here")
    args = parser.parse_args()
    path = Path(args.out) / "recovery.json"
    kept = {job["job"]: job for job in json.loads(path.read_text())["cases"]} if args.only and path.exists() else {}
    for number in args.only or range(args.jobs + len(OWN)):
        kept[number] = run_job(number, args)
        jobs = [kept[job] for job in sorted(kept)]
        path.write_text(as_text({
            "claim": "recovery", "seed": args.seed, "timeout_s": TIMEOUT_S, "stretch": STRETCH,
            "summary": summary(jobs), "cases": jobs}) + "\n")
        for fault in kept[number]["faults"]:
            print(json.dumps(fault))
        print(f"job {number}: {kept[number]['seconds']} s, {kept[number]['wrong'] or 'all well'}", flush=True)
    print(json.dumps(summary([kept[job] for job in sorted(kept)]), indent=1))
    return any(job["wrong"] for job in kept.values())


if __name__ == "__main__":
    sys.exit(main())

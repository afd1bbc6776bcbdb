"""Claim: whenever a job is killed while it saves, the newest checkpoint that is published is whole,
and training continues from it, with the bits of a job that nobody has killed.

    python -m benchmarks.kills                 100 kills, some minutes on two cores
    python -m benchmarks.kills --kills 5

A job of four ranks (pp = 2, dp = 2, 2bw, ZeRO-1: each writes a file) trains and saves beside
training, again and again. With SIGKILL all ranks at once are ended, or one, which the others
outlive for a while, at a seeded random moment of a save: from the making of its folder until
somewhat later than it is published on average. Each time:

    what is published    no less than before; every file of every one compared with its checksums
    what is not          is not taken for it
    the newest one       loads on another grid, in one process, and nothing is passed over
    the next start       goes on after it

At the end losses and gradient norms of all steps, and every file of the last checkpoint, are those
of a job that was left alone.

Phases, by what lies in the folder that is written (of one rank's end: just before, else just
after):

    copying      nothing yet                   renaming     the manifest, too: next is the rename that publishes it
    writing      not all bytes of all files    published    it has its name
    syncing      all bytes, but a file is not known to last      pruning   an older one is being removed

A test (tests/checkpoint/test_folders.py) kills between any two calls of the system.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import RESULTS, machine
from benchmarks.files import as_text
from hybridpar import checkpoint
from hybridpar.checkpoint.folders import folder_of, saved_steps
from hybridpar.checkpoint.format.manifest import MANIFEST, read_manifest
from hybridpar.checkpoint.load import check_files
from hybridpar.cli import main as hybridpar
from hybridpar.config import Config, ParallelConfig, from_mapping, to_toml
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine
from hybridpar.train.reporting.run_metrics import read_metrics

RANKS = 4
CONFIG = from_mapping(
    {
        "model": {
            "num_layers": 2,
            "hidden_size": 512,
            "num_heads": 8,
            "seq_length": 16,
            "vocab_size": 300,
        },
        "parallel": {"pp": 2, "dp": 2, "zero": 1},
        "pipeline": {"schedule": "2bw", "num_microbatches": 2},
        "optim": {"decay": "constant"},
        "train": {
            "micro_batch_size": 1,
            "threads": 1,
            "device": "cpu",
            "save_interval": 4,
            "timeout_s": 60.0,
        },
    }
)
END = 10**6
LATE = "hybridpar.train.job", "torch.fx.experimental.symbolic_shapes", "torch.utils.tensorboard"
"""Modules that every rank would load later: they are loaded once, before ranks are forked."""
LOOK_EVERY_S = 0.001
GIVE_UP_S = 120.0
OUTLIVES_S = 0.5
LATER = 1.2


@dataclass
class Job:
    """The ranks of one start: processes of one group, forked, so that none need load torch
    again."""

    config: Config
    log: Path
    pids: list[int] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.config.run.folder / "checkpoints"

    def start(self, num_steps: int = END) -> Job:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        path = self.log.with_suffix(".toml")
        path.write_text(
            to_toml(replace(self.config, train=replace(self.config.train, num_steps=num_steps)))
        )
        for rank in range(RANKS):
            pid = forked(lambda rank=rank: self._be(rank, port, path))
            os.setpgid(pid, (self.pids or [pid])[0])
            self.pids.append(pid)
        return self

    def _be(self, rank: int, port: int, path: Path) -> int:
        with self.log.open("a") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {
            name: str(value)
            for name, value in (
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", RANKS),
                ("LOCAL_WORLD_SIZE", RANKS),
            )
        }
        return hybridpar(["train", str(path)])

    def end(self, victim: int, outlives_s: float) -> str:
        """Kills one rank, the others somewhat later; or all (-1). The phase that it was in."""
        found = phase(self.root)
        if victim >= 0:
            os.kill(self.pids[victim], signal.SIGKILL)
            time.sleep(outlives_s)
        os.killpg(self.pids[0], signal.SIGKILL)
        self.wait()
        return found if victim >= 0 else phase(self.root)

    def wait(self) -> list[int]:
        """The exit codes."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def await_save(self, number: int) -> tuple[int, float]:
        """Returns when that save of this start begins: its step, and when."""
        seen: list[int] = []
        end = time.monotonic() + GIVE_UP_S
        old = set(self.root.glob(".step_*.part"))  # of the start before
        while len(seen) < number:
            assert time.monotonic() < end, (
                f"no save in {GIVE_UP_S} s:\n{self.log.read_text()[-3000:]}"
            )
            seen += [
                step
                for path in set(self.root.glob(".step_*.part")) - old
                if (step := int(path.name[6:-5])) not in seen
            ]
            old &= set(self.root.glob(".step_*.part"))
            time.sleep(LOOK_EVERY_S)
        return seen[-1], time.monotonic()


def forked(action: Callable[[], int]) -> int:
    """A process of its own that does it and ends with the exit code that it returns."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = action()
    finally:
        sys.stdout.flush()
        os._exit(code)


def phase(root: Path) -> str:
    """Return the phase of the save that is under way or over."""
    (aside,) = sorted(root.glob(".step_*.part"))[-1:] or (None,)
    if aside is None:
        return "pruning" if list(root.glob(".step_*.gone")) else "published"
    names = {path.name: path.stat().st_size for path in aside.iterdir()}
    if MANIFEST in names:
        return "renaming"
    shards = {name: size for name, size in names.items() if name.endswith(".safetensors")}
    if not shards:
        return "copying"
    whole = {
        shard.name: shard.num_bytes
        for step in saved_steps(root)[:1]
        for shard in read_manifest(folder_of(root, step)).shards
    }
    return (
        "syncing"
        if all(shards.get(name, 0) > size - 4096 for name, size in whole.items())
        else "writing"
    )


def examine(config: Config) -> dict[str, Any]:
    """The newest checkpoint that is published, and all that is wrong with what is there."""
    root = config.run.folder / "checkpoints"
    wrong = []
    steps = saved_steps(root)
    for step in steps:
        check_files(folder_of(root, step), manifest := read_manifest(folder_of(root, step)))
        wrong += [f"{step} is called {manifest.step}"] * (manifest.step != step)
    one = replace(
        config.train,
        num_steps=END,
        micro_batch_size=config.parallel.dp * config.train.micro_batch_size,
    )
    alone = replace(config, parallel=ParallelConfig(dp=1), train=one)
    said: list[str] = []
    loaded = checkpoint.resume(
        root,
        Engine(JobPlan(alone), ProcessGrid(), torch.device("cpu")),
        manifest.corpus,
        said.append,
    )
    wrong += [
        *said,
        *[f"step {loaded} was loaded, {steps[0]} is the newest"] * (loaded != steps[0]),
    ]
    return {
        "newest": steps[0],
        "read": len(steps),
        "wrong": wrong,
        "left": sorted(path.name for path in root.iterdir() if path.name.startswith(".")),
    }


NOTHING: dict[str, Any] = {"newest": 0, "read": 0, "left": []}


def apart(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the action's result from a process of its own, so that this one stays without threads
    and can fork."""
    reader, writer = os.pipe()

    def answer() -> int:
        try:
            found = action()
        except Exception as error:
            found = NOTHING | {"wrong": [f"{type(error).__name__}: {error}"]}
        return 0 * os.write(writer, json.dumps(found).encode())

    pid = forked(answer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else NOTHING | {"wrong": ["the process that reads it died"]}


def measure_save(job: Job) -> float:
    """Seconds from the making of a folder until it is published, median of some saves; then all
    ranks are killed."""
    seconds = []
    for _ in range(3):
        step, begun = job.await_save(1)
        while step not in saved_steps(job.root):
            time.sleep(LOOK_EVERY_S)
        seconds.append(time.monotonic() - begun)
    job.end(-1, 0)
    return median(seconds)


def kill_often(
    config: Config, folder: Path, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """An entry for each kill, and how long a save takes."""
    draw = random.Random(args.seed)
    cases = []
    log = folder / "log"
    save_s = measure_save(Job(config, log).start())
    first = apart(lambda: examine(config))
    newest = first["newest"]
    wrong = first["wrong"]
    assert not wrong, f"before any save was disturbed: {wrong}"
    for number in range(args.kills):
        log.write_text("")
        job = Job(config, log).start()
        victim = draw.randrange(RANKS) if draw.random() < 0.5 else -1
        step, begun = job.await_save(draw.choice((1, 2)))
        time.sleep(draw.uniform(0, LATER * save_s))
        published = saved_steps(job.root)[0]
        after = time.monotonic() - begun
        case = {
            "kill": number,
            "of": "all" if victim < 0 else f"rank {victim}",
            "step": step,
            "after_s": round(after, 4),
            "phase": job.end(victim, draw.uniform(0, OUTLIVES_S)),
        }
        case |= apart(lambda: examine(config))
        resumed = re.findall(r"resuming after step (\d+)", log.read_text())
        case["wrong"] += [
            text
            for text, bad in (
                (
                    f"went on after step {resumed}, {newest} was the newest",
                    resumed != [str(newest)],
                ),
                (f"{case['newest']} is the newest, {published} was", case["newest"] < published),
            )
            if bad
        ]
        cases.append(case)
        print(json.dumps(case), flush=True)
        if case["wrong"]:
            print(log.read_text(), file=sys.stderr)
            break
        newest = case["newest"]
    return cases, save_s


def compare(config: Config, folder: Path) -> list[str]:
    """Ends the job, and compares it with one that is left alone; what is not the same."""
    num_steps = 4 + max(saved_steps(config.run.folder / "checkpoints"))
    calm = replace(config, run=replace(config.run, name="calm"))
    wrong = [
        f"{name}: exit codes {codes}"
        for name, one in (("the last start", config), ("calm", calm))
        if any(codes := Job(one, folder / "log").start(num_steps).wait())
    ]
    rows = [
        [
            (row["step"], row["loss"], row["grad_norm"])
            for row in read_metrics(one.run.folder / "metrics.jsonl")
            if "loss" in row
        ]
        for one in (config, calm)
    ]
    files = [
        {
            path.name: path.read_bytes()
            for path in folder_of(one.run.folder / "checkpoints", num_steps).iterdir()
            if path.name != MANIFEST
        }
        for one in (config, calm)
    ]
    return [
        *wrong,
        *["steps differ"] * (rows[0] != rows[1] or len(rows[0]) != num_steps),
        *["files differ"] * (files[0] != files[1] or len(files[0]) != RANKS),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kills training jobs while they save, and reads what is left."
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", default=None, help="where jobs run; the system's temporary folder"
    )
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--rounds", type=int, default=0, help="nothing is repeated here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for module in LATE:
        with suppress(ImportError):
            importlib.import_module(module)
    began = time.monotonic()
    words = random.Random(0)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text(
            "\n".join(
                " ".join(words.choice(("stone", "river", "lamp", "clouds")) for _ in range(12))
                for _ in range(400)
            )
        )
        config = from_mapping(
            {"data": {"corpus": [str(folder / "corpus.txt")]}, "run": {"dir": name}}, CONFIG
        )
        cases, save_s = kill_often(config, folder, args)
        wrong = [
            f"kill {case['kill']}: {text}" for case in cases for text in case["wrong"]
        ] or compare(config, folder)
        root = config.run.folder / "checkpoints"
        num_bytes = sum(
            shard.num_bytes for shard in read_manifest(folder_of(root, saved_steps(root)[0])).shards
        )
    summary = {
        "kills": len(cases),
        "of_all_ranks": sum(case["of"] == "all" for case in cases),
        "phases": dict(Counter(case["phase"] for case in cases).most_common()),
        "checkpoints_read": sum(case["read"] for case in cases),
        "num_bytes": num_bytes,
        "save_s": round(save_s, 3),
        "half_written": sum(any(name.endswith(".part") for name in case["left"]) for case in cases),
        "seconds": round(time.monotonic() - began, 1),
        "wrong": wrong,
    }
    document = {
        "claim": "kills",
        "seed": args.seed,
        "machine": machine(),
        "summary": summary,
        "cases": cases,
    }
    (Path(args.out) / "kills.json").write_text(as_text(document) + "\n")
    print(json.dumps(summary, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""Claim: a job recovers from faults by itself, or once its command is given again, and ends with
the same bits.

    python -m benchmarks.recovery                              500 faults in 25 jobs of 4 ranks:
                                                               over an hour on 2 cores
    python -m benchmarks.recovery --modes plain zero3          two of the five modes
    python -m benchmarks.recovery --modes plain --only 0 3     two jobs of a mode

The result file is written after every job. The entry of a job replaces an older one of the same
mode and number.

Jobs are `hybridpar train --ranks 4` (pp = 2, dp = 2, 2bw). Each has one fault of every kind
(KINDS), in a seeded order. Some faults are injected (`--inject`). The others are signals from
outside, to a random rank or to the supervisor, at a random moment: during imports (before the
flight record of a rank exists), in set-up, in a step, or in a save. After a fault that ends the
supervisor all ranks must be gone within faults.timeout_s + GRACE_S; then the same command is given
again. A fault during imports or set-up comes in the restart after another fault, or in the first
start.

Each fault must have happened and must have been noticed in time. The failure must name the right
rank or link. The job must resume from the newest checkpoint that was published when the fault came,
or from a newer one. Each job must end with exit code 0, and no process may be left. Its losses,
gradient norms and validation losses, and every file of its last checkpoint, must be equal to the
bit to those of an undisturbed job of the same mode. Every checkpoint must match its checksums as
soon as it is published.

Seconds: `noticed` from the fault until the supervisor reports it; `gone` from the signal to the
supervisor until no process of the job is left; `again` from the fault until all ranks train again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine
from benchmarks.disturbed_job import (
    GRACE_S,
    IMPORTS,
    INJECTED,
    RANKS,
    SAVE,
    SETUP,
    SLOW_S,
    STARTS,
    STEP,
    STRETCH,
    TERMINATED,
    DisturbedJob,
    Fault,
    Kind,
)
from benchmarks.files import as_text
from hybridpar.checkpoint.handover import writers
from hybridpar.config import Config, from_mapping, to_toml
from hybridpar.grid import place_of, sizes_of

TIMEOUT_S = 3.0
START_TIMEOUT_S = 20.0
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "seq_length": 32,
        "vocab_size": 300,
        "dropout": 0.1,
    },
    "parallel": {"pp": 2, "dp": 2, "zero": 1},
    "pipeline": {"schedule": "2bw", "num_microbatches": 2},
    "train": {
        "micro_batch_size": 2,
        "threads": 1,
        "device": "cpu",
        "save_interval": STRETCH,
        "timeout_s": 30.0,
        "eval_interval": STRETCH // 2,
        "eval_batches": 1,
    },
    "optim": {"lr": 3e-3},
    "checkpoint": {"read_back": True},
    "faults": {
        "timeout_s": TIMEOUT_S,
        "save_timeout_s": TIMEOUT_S,
        "start_timeout_s": START_TIMEOUT_S,
    },
}
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "zero3": {"parallel": {"zero": 3}},
    "budget": {"memory": {"budget": 420_000}},
    "host_optimizer": {"memory": {"host_optimizer": True}},
    "compressed": {
        "compression": {
            "gradients": "dct",
            "gradients_smallest": 64,
            "gradients_kept": 0.1,
            "messages": "int8",
        }
    },
}
"""The settings of each mode, by section. The budget is just above what the largest segment
needs."""
LINKS = ((0, 1), (0, 2), (1, 3), (2, 0), (2, 3), (3, 1))
KINDS: tuple[tuple[Kind, ...], ...] = (
    (Kind("kill", "rank", STEP, "died"),),
    (Kind("stop", "rank", STEP, "hangs"),),
    (Kind("kill", "rank", SAVE, "died"),),
    (Kind("stop", "rank", SAVE, "hangs"),),
    (Kind("kill", "rank", IMPORTS, "died"),),
    (Kind("stop", "rank", IMPORTS, "hangs"), Kind("stop", "rank", SETUP, "hangs")),
    (Kind("kill", "rank", SETUP, "died"),),
    (Kind("kill", "supervisor", STEP),),
    (Kind("kill", "supervisor", SAVE),),
    (Kind("stop", "supervisor", STEP), Kind("stop", "supervisor", SAVE)),
    (Kind("terminate", "supervisor", STEP), Kind("terminate", "supervisor", SAVE)),
    (Kind("kill", "supervisor", IMPORTS), Kind("kill", "supervisor", SETUP)),
    (
        Kind("kill", "supervisor of a stopped rank", STEP),
        Kind("terminate", "supervisor of a stopped rank", STEP),
    ),
    (Kind("kill", INJECTED, STEP, "died"),),
    (Kind("hang", INJECTED, STEP, "hangs"),),
    (Kind("hang save", INJECTED, SAVE, "hangs"),),
    (Kind("cut link", INJECTED, STEP, "link"),),
    (Kind("slow link", INJECTED, STEP),),
    (Kind("corrupt shard", INJECTED, SAVE),),
    (Kind("disk full", INJECTED, SAVE),),
)
"""The faults of a job. Where there are two of them, jobs take them in turn."""


def config_of(mode: str, num_steps: int = 100) -> Config:
    """Return the configuration of a mode, without a corpus."""
    sections = {name: dict(values) for name, values in SECTIONS.items()}
    for name, values in MODES[mode].items():
        sections[name] = sections.get(name, {}) | values
    sections["train"]["num_steps"] = num_steps
    return from_mapping(sections)


def draw_faults(seed: int, mode: str, number: int, count: int) -> list[Fault]:
    """Draw the faults of a job, in order.

    Args:
        count: Number of faults, at most one of each kind.
    """
    draw = random.Random(f"{seed} {mode} {number}")
    kinds = [choices[number % len(choices)] for choices in KINDS]
    kinds = draw.sample(kinds, count)
    starts = [kind for kind in kinds if kind.moment in STARTS]
    others = [kind for kind in kinds if kind.moment not in STARTS]
    # Each fault of a start follows another fault that ends all ranks, or is the first one.
    places = ["first", *(kind.name for kind in others if kind.ends_ranks)]
    follows = dict(zip(draw.sample(places, min(len(starts), len(places))), starts, strict=False))
    ordered = [follows["first"]] if "first" in follows else []
    for kind in others:
        ordered.append(kind)
        if kind.name in follows:
            ordered.append(follows[kind.name])
    faults = []
    stretch = 1
    for kind in ordered:
        faults.append(_draw_fault(draw, kind, stretch, mode))
        stretch += kind.stretches
    return faults


def _draw_fault(draw: random.Random, kind: Kind, stretch: int, mode: str) -> Fault:
    config = config_of(mode)
    rank = draw.randrange(RANKS)
    if kind.target == INJECTED:
        step = STRETCH * stretch + draw.randint(4, STRETCH - 1)
        if kind.moment == SAVE:
            sizes = sizes_of(config.parallel)
            places = writers(sizes, config.replicas_differ)
            rank = draw.choice([rank for rank in range(RANKS) if place_of(rank, sizes) in places])
        sender, receiver = draw.choice(LINKS)
        where = f"{sender}-{receiver}" if "link" in kind.signal else f"rank {rank}"
        text = f"{kind.signal} {where} at step {step}"
        if kind.signal == "slow link":
            text += f" for {SLOW_S:g} s"
        return Fault(kind, rank, step, text=text)
    # A save begins with a multiple of the stretch. A fault in it waits for the save, not for a step
    # before.
    step = STRETCH * stretch + (draw.randint(1, 4) if kind.moment == STEP else 0)
    longest = {IMPORTS: 1.0, SETUP: 0.3, STEP: 0.1, SAVE: 0.03}[kind.moment]
    delay_s = round(draw.uniform(0, longest), 3)
    text = kind.name
    if kind.target != "supervisor":
        text = text.replace("rank", f"rank {rank}")
    if kind.moment not in STARTS:
        text += f", from step {step} on"
    return Fault(kind, rank, step, delay_s, text=f"{text}, {delay_s:g} s later")


def steps_of(faults: Sequence[Fault]) -> int:
    """Return the number of steps of a job that leaves room for its last fault."""
    last = max((fault.step for fault in faults), default=0)
    return STRETCH * (last // STRETCH + 4)


def examine(job: DisturbedJob, undisturbed: DisturbedJob, num_faults: int) -> dict[str, Any]:
    """Compare an ended job with the undisturbed one of its mode; an entry of the result file."""
    wrong = [*job.wrong, *(f"undisturbed job: {text}" for text in undisturbed.wrong)]
    for name, rows, expected in (
        ("steps", job.steps(), undisturbed.steps()),
        ("validations", job.validations(), undisturbed.validations()),
    ):
        if rows != expected:
            steps = sorted({row[0] for row in {*rows} ^ {*expected}})
            wrong.append(
                f"{name}: not as in the undisturbed job at {steps[:9]}; {len(rows)} rows, not "
                f"{len(expected)}"
            )
    if not job.files() or job.files() != undisturbed.files():
        wrong.append("files of the last checkpoint differ")
    if job.damaged:
        wrong.append("damaged: " + "; ".join(job.damaged))
    if len(job.faults) != num_faults:
        wrong.append(f"{num_faults - len(job.faults)} faults did not happen")
    steps = job.steps()
    return {
        "faults": job.faults,
        "num_faults": num_faults,
        "checkpoints_looked_at": len(job.looked_at),
        "steps": len(steps),
        "final_loss": steps[-1][1] if steps else None,
        "left_over": job.left_over,
        "wrong": wrong,
    }


def run_mode(mode: str, numbers: Sequence[int], args: argparse.Namespace) -> Any:
    """Run jobs of a mode, after the undisturbed one; yields an entry for each."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        words = random.Random(0)
        corpus = folder / "corpus.txt"
        corpus.write_text(
            "\n".join(
                " ".join(
                    words.choice(("stone", "river", "cloud", "lamp", "lamps", "clouded"))
                    for _ in range(12)
                )
                for _ in range(400)
            )
        )
        drawn = {number: draw_faults(args.seed, mode, number, args.faults) for number in numbers}
        config = from_mapping(
            {
                "data": {"corpus": [str(corpus)]},
                "run": {"dir": str(folder)},
                "faults": {"start_timeout_s": args.start_timeout},
            },
            config_of(mode, max(map(steps_of, drawn.values()))),
        )
        path = folder / "config.toml"
        path.write_text(to_toml(config))
        undisturbed = DisturbedJob(folder / "undisturbed", path, config, [])
        undisturbed.run()
        if undisturbed.wrong:
            print(
                "\n".join(
                    [
                        *(line for _, line in undisturbed.lines),
                        f"undisturbed job: {undisturbed.wrong}",
                    ]
                ),
                file=sys.stderr,
            )
        for number, faults in drawn.items():
            start = time.monotonic()
            job = DisturbedJob(folder / f"job{number}", path, config, faults)
            try:
                job.run()
                entry = examine(job, undisturbed, len(faults))
            except Exception:
                traceback.print_exc()
                entry = {
                    "faults": job.faults,
                    "num_faults": len(faults),
                    "checkpoints_looked_at": 0,
                    "steps": 0,
                    "final_loss": None,
                    "left_over": job.left_over,
                    "wrong": [traceback.format_exc(limit=-1)],
                }
            if entry["wrong"] or any(fault["wrong"] for fault in entry["faults"]):
                print("\n".join(f"{when:.2f} {line}" for when, line in job.lines), file=sys.stderr)
            yield (
                {
                    "mode": mode,
                    "job": number,
                    "seed": args.seed,
                    "start_timeout_s": args.start_timeout,
                }
                | entry
                | {"seconds": round(time.monotonic() - start, 1), "machine": machine()}
            )


def is_well(job: dict[str, Any]) -> bool:
    """Whether nothing of a job is wrong."""
    return not job["wrong"] and not any(fault["wrong"] for fault in job["faults"])


def summary(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count faults and recoveries over all jobs, and summarize times by kind.

    A fault counts as a recovery if nothing about it is wrong and its job ended with the right bits.
    """
    modes: dict[str, Any] = {}
    for mode in MODES:
        mine = [job for job in jobs if job["mode"] == mode]
        recoveries = [
            fault
            for job in mine
            if not job["wrong"]
            for fault in job["faults"]
            if not fault["wrong"]
        ]
        if mine:
            modes[mode] = {
                "jobs": len(mine),
                "faults": sum(job["num_faults"] for job in mine),
                "recoveries": len(recoveries),
                "left_over": sum(job["left_over"] for job in mine),
            }
    kinds: dict[str, Any] = {}
    faults = [fault for job in jobs for fault in job["faults"]]
    for kind in (kind for choices in KINDS for kind in choices):
        same = [fault for fault in faults if fault["kind"] == kind.name]
        entry: dict[str, Any] = {
            "faults": len(same),
            "wrong": sum(bool(fault["wrong"]) for fault in same),
        }
        for name in ("noticed_s", "gone_s", "again_s", "lost_steps"):
            if values := [fault[name] for fault in same if name in fault]:
                entry[name] = {"median": round(statistics.median(values), 3), "max": max(values)}
        if same:
            kinds[kind.name] = entry
    return {
        "jobs": len(jobs),
        "faults": sum(job["num_faults"] for job in jobs),
        "recoveries": sum(mode["recoveries"] for mode in modes.values()),
        "left_over": sum(job["left_over"] for job in jobs),
        "checkpoints_looked_at": sum(job["checkpoints_looked_at"] for job in jobs),
        "modes": modes,
        "kinds": kinds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Disturbs training jobs with faults, and asserts that they recover."
    )
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument("--jobs", type=int, default=5, help="of each mode")
    parser.add_argument(
        "--faults", type=int, default=len(KINDS), help="in each job, at most one of each kind"
    )
    parser.add_argument("--only", type=int, nargs="*", help="run these jobs of each mode alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=START_TIMEOUT_S,
        help="faults.start_timeout_s; at least some times what four ranks need for imports",
    )
    parser.add_argument(
        "--folder", default=None, help="where jobs run; default: the system's temporary folder"
    )
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--rounds", type=int, default=0, help="ignored: nothing is repeated here")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED)
    )  # so that jobs are ended, too
    path = Path(args.out) / "recovery.json"
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    if path.exists():
        kept = {
            (job["mode"], job["job"]): job
            for job in json.loads(path.read_text())["cases"]
            if "mode" in job
        }
    ran = []
    for mode in args.modes:
        for entry in run_mode(mode, range(args.jobs) if args.only is None else args.only, args):
            kept[mode, entry["job"]] = entry
            ran.append(entry)
            jobs = sorted(
                kept.values(), key=lambda job: (list(MODES).index(job["mode"]), job["job"])
            )
            path.write_text(
                as_text(
                    {
                        "claim": "recovery",
                        "timeout_s": TIMEOUT_S,
                        "grace_s": GRACE_S,
                        "stretch": STRETCH,
                        "summary": summary(jobs),
                        "cases": jobs,
                    }
                )
                + "\n"
            )
            for fault in entry["faults"]:
                print(json.dumps(fault))
            print(
                f"{mode}, job {entry['job']}: {entry['seconds']} s, "
                f"{'all well' if is_well(entry) else entry['wrong'] or 'see its faults'}",
                flush=True,
            )
    print(json.dumps(summary(ran), indent=1))
    return not all(map(is_well, ran))


if __name__ == "__main__":
    sys.exit(main())

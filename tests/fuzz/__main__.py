"""python -m tests.fuzz --inputs 1000000 --seed 1 --out fuzz.json [--targets manifest,index]

Runs each target's inputs in child processes of CHUNK inputs, so that a process that dies, or waits
for ever, is one failure among others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .harness import Tally, inputs_of, limit_memory, put, run_one
from .target import Target
from .targets import BY_NAME, TARGETS

CHUNK = 4000
TRACED_EVERY = 4
DEADLINE_S = 300.0
SHARED = "/dev/shm"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="in all, shared evenly among the targets"
    )
    parser.add_argument("--first", type=int, default=0, help="number of each target's first input")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default="", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument(
        "--out", default="", help="a JSON file; what it has of the same seed stays, and is added to"
    )
    parser.add_argument(
        "--one",
        type=int,
        default=-1,
        help="run that input of one target in this process, and show it",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    targets = (
        [BY_NAME[name] for name in options.targets.split(",")] if options.targets else list(TARGETS)
    )
    if options.one >= 0:
        return show(targets[0], options.one, options.seed)
    each = options.inputs / sum(target.share for target in targets)
    tallies: dict[str, Tally] = {}
    seconds: dict[str, float] = {}
    for target in targets:
        start = time.monotonic()
        assert target.seeds  # made once, here
        tally = tallies[target.name] = run(
            target, numbers_of(target, options.first, each), options.seed
        )
        seconds[target.name] = time.monotonic() - start
        print(
            f"{target.name:<16} {tally.inputs:>8} inputs {tally.rejected:>8} rejected, "
            f"{seconds[target.name]:7.1f} s, longest {1e3 * tally.longest_s:7.1f} ms, "
            f"peak {tally.largest_bytes / 2**20:6.2f} MiB, {len(tally.failures)} failures",
            flush=True,
        )
        for number, what in tally.failures[:5]:
            print(f"    {number}: {what}", flush=True)
    if options.out:
        write(Path(options.out), options, tallies, seconds)
    return 1 if any(tally.failures for tally in tallies.values()) else 0


def numbers_of(target: Target, first: int, each: float) -> range:
    """Inputs of a target; a target with a whole share has `each`."""
    return range(first, first + math.ceil(each * target.share))


def run(target: Target, numbers: range, seed: int) -> Tally:
    """The inputs of these numbers, in child processes one after the other."""
    total = Tally()
    at = numbers.start
    while at < numbers.stop:
        stop = min(at + CHUNK, numbers.stop)
        part, reached, end = child(target, range(at, stop), seed)
        total.add(part)
        if reached < stop:
            total.inputs += 1
            total.failures.append((reached, f"the process died: {end}"))
            stop = reached + 1
        at = stop
    return total


def child(target: Target, numbers: range, seed: int) -> tuple[Tally, int, str]:
    """Results of the inputs, the first unfinished one, and how the process ended."""
    board = mmap.mmap(-1, 1 << 20)  # progress, then the tally
    board[:8] = numbers.start.to_bytes(8, "little")
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            work(target, numbers, seed, board)
            status = 0
        os._exit(status)
    last = -1
    since = time.monotonic()
    end = ""
    while not end:
        done, code = os.waitpid(pid, os.WNOHANG)
        reached = int.from_bytes(board[:8], "little")
        if done:
            end = f"status {os.waitstatus_to_exitcode(code)}"
        elif reached != last:
            last = reached
            since = time.monotonic()
        elif time.monotonic() - since > DEADLINE_S:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    text = bytes(board[16 : 16 + int.from_bytes(board[8:16], "little")])
    plain = json.loads(text) if text else {"failures": []}
    plain["failures"] = [(number, what) for number, what in plain["failures"]]
    return Tally(**plain), int.from_bytes(board[:8], "little"), end


def work(target: Target, numbers: range, seed: int, board: mmap.mmap) -> None:
    tally = Tally()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust says on stderr that it panics
    with tempfile.TemporaryDirectory(dir=SHARED if Path(SHARED).is_dir() else None) as name:
        folder = Path(name) / "input"
        folder.mkdir()
        limit_memory()
        for number in numbers:
            try:
                files = inputs_of(target, number, seed)
            except Exception as error:
                tally.failures.append((number, f"no input could be made: {error!r}"))
            else:
                run_one(target, files, folder, tally, number, traced=number % TRACED_EVERY == 0)
            tally.failures = tally.failures[:50]
            if number % 100 == 99 or number == numbers[-1]:
                text = json.dumps(vars(tally)).encode()[: len(board) - 16]
                board[16 : 16 + len(text)] = text
                board[8:16] = len(text).to_bytes(8, "little")
            board[:8] = (number + 1).to_bytes(8, "little")


def show(target: Target, number: int, seed: int) -> int:
    """One input, its files left in a folder, and the traceback of what it raises."""
    folder = Path(tempfile.mkdtemp()) / "input"
    folder.mkdir()
    put(inputs_of(target, number, seed), folder)
    print(folder, file=sys.stderr)
    target.read(folder)
    return 0


def write(
    path: Path, options: argparse.Namespace, tallies: dict[str, Tally], seconds: dict[str, float]
) -> None:
    """The result, beside what the file has already."""
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    document["runs"].append(
        {
            "seed": options.seed,
            "first": options.first,
            "inputs": sum(t.inputs for t in tallies.values()),
            "seconds": round(sum(seconds.values()), 1),
            "failures": sum(len(t.failures) for t in tallies.values()),
            "targets": {
                name: tally.as_json() | {"seconds": round(seconds[name], 1)}
                for name, tally in tallies.items()
            },
        }
    )
    document["inputs"] = sum(run["inputs"] for run in document["runs"])
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""One input to one reader: what came of it, how long it took, and how much memory."""

from __future__ import annotations

import resource
import shutil
import signal
import time
import traceback
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from hybridpar.errors import HybridparError

from .mutate import mutate_names
from .target import Files, Target

LIMIT_S = 10.0
"""CPU time of an input: how busy the machine is says nothing of the code."""
HEADROOM = 96 << 20
"""Bytes that a process may take over what it has: what wants more fails."""
ALLOWED = 12 << 20
PER_BYTE = 64
"""Peak of one input: a fixed part (readers work on chunks of some MiB), and so many bytes for each
of its files."""
LONGEST_MESSAGE = 30_000


@dataclass
class Tally:
    """Results of many inputs. `failures`: (number of the input, what went wrong)."""

    inputs: int = 0
    rejected: int = 0
    longest_s: float = 0.0
    largest_bytes: int = 0
    largest_share: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.inputs += other.inputs
        self.rejected += other.rejected
        self.longest_s = max(self.longest_s, other.longest_s)
        self.largest_bytes = max(self.largest_bytes, other.largest_bytes)
        self.largest_share = max(self.largest_share, other.largest_share)
        self.failures += other.failures

    def as_json(self) -> dict[str, Any]:
        """Plain values only."""
        return {
            "inputs": self.inputs,
            "rejected": self.rejected,
            "longest_ms": round(1e3 * self.longest_s, 2),
            "largest_peak_bytes": self.largest_bytes,
            "largest_peak_per_byte": round(self.largest_share, 1),
            "failures": self.failures[:20],
            "num_failures": len(self.failures),
        }


class Hang(BaseException):
    """An input took too long."""


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise Hang


def limit_memory() -> None:
    """This process can take HEADROOM bytes more, from now on."""
    used = (
        int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    )  # data and stack
    resource.setrlimit(resource.RLIMIT_DATA, (used + HEADROOM, resource.RLIM_INFINITY))


def inputs_of(target: Target, number: int, seed: int) -> Files:
    """The files of an input: those of a valid set, one of them mutated, or its name."""
    return mutated(target, Random(f"{seed} {target.name} {number}"))


def mutated(target: Target, random: Random) -> Files:
    files = dict(random.choice(target.seeds))
    if target.renames and random.random() < 0.1:
        return mutate_names(files, random)
    name = random.choice([n for n in files if target.mutator_of(n) is not None])
    mutator = target.mutator_of(name)
    assert mutator is not None
    files[name] = mutator(files[name], random)
    return target.repair(files)


def put(files: Files, folder: Path) -> None:
    """Makes them all that a folder holds."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def run_one(
    target: Target, files: Files, folder: Path, tally: Tally, number: int, *, traced: bool = True
) -> None:
    """Writes the files and reads them; notes in `tally` what came of it. `traced`: all allocations
    of Python and numpy, which makes it slower by half; what is not traced is held by limit_memory
    alone."""
    put(files, folder)
    size = sum(map(len, files.values()))
    problem = ""
    signal.signal(signal.SIGPROF, _on_alarm)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    if traced:
        tracemalloc.start(1)
    start = time.process_time()
    try:
        target.read(folder)
    except HybridparError as error:
        tally.rejected += 1
        problem = _unclear(str(error))
    except Hang:
        problem = f"took longer than {LIMIT_S} s"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        where = traceback.extract_tb(error.__traceback__)
        problem = (
            f"{type(error).__name__}: {str(error)[:200]} at {where[-1].filename}:{where[-1].lineno}"
        )
        problem += "".join(f" < {Path(f.filename).name}:{f.lineno}" for f in reversed(where[-6:-1]))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if not problem and peak > ALLOWED + PER_BYTE * size:
        problem = f"took {peak} bytes for {size}"
    tally.inputs += 1
    tally.longest_s = max(tally.longest_s, seconds)
    tally.largest_bytes = max(tally.largest_bytes, peak)
    tally.largest_share = max(tally.largest_share, peak / max(size, 1))
    if problem:
        tally.failures.append((number, problem))


def _unclear(message: str) -> str:
    """The fault of an error's message; empty: none."""
    if not message or len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message)} characters"
    if not message.replace("\n", "").replace("\t", "").isprintable():
        return f"a message that cannot be printed: {message[:100]!r}"
    return ""

"""Shared by the tests of whole runs: a small corpus, a small configuration, and jobs without a
launcher."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from hybridpar.config import Config, Launch, from_mapping, load_toml
from hybridpar.errors import HybridparError
from hybridpar.schedules.action import Action
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.launching.launch import Job

TOML = """
[model]
num_layers = 2
hidden_size = 16
num_heads = 2
seq_length = 16
vocab_size = 300
[pipeline]
schedule = "{schedule}"
num_microbatches = 2
[optim]
lr = 1e-2
[train]
num_steps = 6
micro_batch_size = 2
threads = 1
device = "cpu"
timeout_s = 120.0
eval_interval = 3
eval_batches = 1
save_interval = 2
[data]
corpus = ["{corpus}"]
split = 0.2
[run]
dir = "{runs}"
"""


LONG_S = 250.0
"""A job that takes longer hangs, however busy the machine is; pytest gives up later."""


def write_corpus(path: Path) -> Path:
    """Some 20 kB of words, always the same."""
    draw = random.Random(0)
    words = [f"{a}{b}" for a in ["stone", "river", "cloud", "lamp"] for b in ("", "s", "ed", "ing")]
    path.write_text(
        "\n".join(
            " ".join(draw.choice(words) for _ in range(12)).capitalize() + "." for _ in range(300)
        )
    )
    return path


def write_config(folder: Path, schedule: str = "2bw") -> Path:
    """A configuration that trains for a second, and its corpus."""
    path = folder / "tiny.toml"
    corpus = write_corpus(folder / "corpus.txt")
    path.write_text(TOML.format(schedule=schedule, corpus=corpus, runs=folder / "runs"))
    return path


def run_job(num_ranks: int, *args: str | Path) -> str:
    """Output of `hybridpar *args` on so many local ranks, run by `fork_ranks`."""
    from hybridpar.cli import main  # here, as GPUs are tested where tyro is missing, too

    return fork_ranks(num_ranks, partial(main, list(map(str, args))))


def fork_ranks(num_ranks: int, call: Callable[[], object]) -> str:
    """Output of `call` on so many ranks that find the environment of torchrun. They are forks of
    this process: they import nothing again, and what the test has patched is patched in them.

    Raises: AssertionError with that text, where a rank fails or the job hangs.
    """
    with reserved_port() as port, tempfile.NamedTemporaryFile() as output:
        fork = multiprocessing.get_context("fork").Process
        ranks = [
            fork(target=_rank, args=(rank, num_ranks, port, output.name, call))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + LONG_S
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
            rank.kill()
            rank.join()
        text = Path(output.name).read_text()
        assert [rank.exitcode for rank in ranks] == [0] * num_ranks, text
        return text


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that nobody is given meanwhile; who asks for it by its number may
    listen there."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def _rank(
    rank: int, num_ranks: int, port: int, output: str, call: Callable[[], object]
) -> NoReturn:
    gc.freeze()  # a destructor of the tests' garbage may wait for a thread that is not here
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with open(output, "a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(call())  # type: ignore[arg-type]


def must_be_killed(call: Callable[[], object]) -> None:
    """Calls it in a fork of this process, which has to end itself by SIGKILL."""
    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join(LONG_S)
    process.kill()
    assert process.exitcode == -signal.SIGKILL


def on_ranks(num_ranks: int, action: Callable[[Job], Any]) -> list[Any]:
    """Results or errors of `action(job)` on each rank."""
    store = dist.HashStore()  # which rank 0 has

    def run(rank: int) -> Any:
        try:
            return action(Job(Launch(rank, rank, num_ranks, num_ranks), store))
        except HybridparError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(rows: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each step."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def tiny(folder: Path, schedule: str = "2bw", **sections: dict[str, Any]) -> Config:
    """A configuration on one process, changed."""
    base = load_toml(write_config(folder, schedule))
    return from_mapping({"train": {"num_steps": 8, "eval_interval": 0}} | sections, base)


def poison_gradients(monkeypatch: pytest.MonkeyPatch, batches: set[int]) -> None:
    """Gradients of all micro-batches of these batches are NaN."""
    healthy = BatchPolicy.loss_gradient

    def poisoned(self: BatchPolicy, action: Action) -> float:
        factor = healthy(self, action)
        return math.nan if action.microbatch // self.shape.num_microbatches in batches else factor

    monkeypatch.setattr(BatchPolicy, "loss_gradient", poisoned)

"""Measured memory is what the allocator handed out: known sizes, blocks from before, other threads,
malloc's count."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.prediction import Usage, measure
from hybridpar.prediction import meter as meter_module

CPU = torch.device("cpu")
HERE = Path(__file__).parent


def test_current_and_peak_are_the_bytes_of_live_tensors() -> None:
    with measure(CPU) as meter:
        assert meter.read() == Usage(0, 0)
        kept = torch.empty(1000)
        gone = torch.empty(500, dtype=torch.float64)
        del gone
        assert meter.read() == Usage(4000, 8000)
        view = kept[10:].view(-1, 9)
        assert meter.read() == Usage(4000, 8000), "a view takes nothing"
        meter.restart_peak()
        assert meter.read() == Usage(4000, 4000)
        more = torch.empty(7)
        del kept
        assert meter.read().current == 4028, "the view keeps it"
    del more, view
    assert meter.read() == Usage(4028, 4028), "the numbers stay when the measurement is over"


def test_tensors_of_autograd_are_seen() -> None:
    n = 1 << 16
    x = torch.zeros(n, requires_grad=True)
    gradient = torch.ones(n)
    with measure(CPU) as meter:
        y = x.exp()
        assert meter.read() == Usage(4 * n, 4 * n)
        y.backward(gradient)
        del y
        assert meter.read().current == 4 * n, "the gradient"
        assert meter.read().peak == 8 * n


def test_blocks_from_before_do_not_count_when_they_are_returned() -> None:
    before = torch.empty(1000)
    with measure(CPU) as meter:
        inside = torch.empty(10)
        del before
        assert meter.read() == Usage(40, 40)
    with measure(CPU) as meter:
        del inside
        assert meter.read() == Usage(0, 0), "of an earlier measurement neither"


def test_another_thread_may_be_the_last_to_hold_a_tensor() -> None:
    """Returns like Gloo's: the allocator reports them to nobody, but its next total shows them."""
    with measure(CPU) as meter:
        box = [torch.empty(1000)]
        assert meter.read().current == 4000
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert meter.read() == Usage(0, 4000)


def test_a_collection_during_a_reading_frees_nothing_from_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reading makes many objects, so the collector may run in it, where nothing is reported."""
    allocations = meter_module._allocations

    def with_collection(roots: Iterable[Any]) -> list[Any]:
        gc.collect()
        return allocations(roots)

    with measure(CPU):  # the allocator knows the sizes of what is made inside a measurement
        garbage: list[object] = [torch.empty(1000)]
    garbage.append(garbage)
    del garbage
    monkeypatch.setattr(meter_module, "_allocations", with_collection)
    with measure(CPU) as meter:
        inside = torch.empty(500)
        meter.read()
        assert meter.read().current == 2000
    del inside


def test_readings_in_between_lose_nothing() -> None:
    def work(meter, every: int) -> Usage:
        held = []
        for i in range(40):
            held.append(torch.empty(100 + i))
            if i % 3 == 2:
                del held[0]
            if i % every == 0:
                meter.read()
        del held[20:]
        return meter.read()

    with measure(CPU) as meter:
        once = work(meter, 1000)
    with measure(CPU) as meter:
        often = work(meter, 1)
    assert once == often
    assert once.peak > once.current > 0


SCRIPT = """
import ctypes, gc, json, sys, torch
from hybridpar.config import from_mapping
from hybridpar.data.loader import BatchLoader
from hybridpar.data.synthetic import SyntheticSamples
from hybridpar.grid import ProcessGrid
from hybridpar.prediction import measure
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine

torch.set_num_threads(1)
counter = ctypes.CDLL(None)
counter.malloc_current.restype = counter.malloc_peak.restype = ctypes.c_long

def run(config):
    loader = BatchLoader(
        SyntheticSamples(config.model, padding=False), micro_batch_size=4, num_microbatches=2
    )
    Engine(JobPlan(config), ProcessGrid(), torch.device("cpu")).train(loader, 3, lambda step: None)

dtype, schedule = sys.argv[1:]
config = from_mapping({
    "model": {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "seq_length": 128, "vocab_size": 4096,
              "dropout": 0.1, "attention_dropout": 0.1},
    "parallel": {"dp": 1}, "pipeline": {"num_microbatches": 2, "schedule": schedule},
    "train": {"micro_batch_size": 4, "dtype": dtype}})
run(config)
gc.collect()
counter.malloc_reset_peak()
before = counter.malloc_current()
run(config)
by_malloc = counter.malloc_peak() - before
with measure(torch.device("cpu")) as meter:
    run(config)
print(json.dumps((by_malloc, meter.read().peak)))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD")
@pytest.mark.parametrize(("dtype", "schedule"), [("fp32", "1f1b"), ("bf16", "2bw")])
def test_the_peak_of_training_is_that_which_malloc_counts(
    tmp_path: Path, dtype: str, schedule: str
) -> None:
    """A second, independent witness under all of torch: blocks from 16 KiB on, but for what MKL
    keeps from before."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    library = tmp_path / "malloc_count.so"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", library, HERE / "malloc_count.c", "-ldl"],
        check=True,
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", SCRIPT, dtype, schedule]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    by_malloc, metered = json.loads(done.stdout)
    assert metered == pytest.approx(by_malloc, rel=0.02)
    assert metered > 50 * 2**20

"""Every benchmark runs in its smallest form and writes its result. What it measures is not looked
at, except where the numbers do not depend on time."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks import budget, common, compression, memory_behaviour
from hybridpar.comm.ranks import run_on_ranks

BENCHMARKS = Path(common.__file__).parent
QUICK = {
    "data_parallel": "--rounds 1 --shapes tiny --dtypes fp32 --microbatches 1",
    "experts": "--rounds 1 --layers tiny --threads 1",
    "fp8_estimate": "",
    "memory_behaviour": "--rounds 1 --shapes tiny --dtypes fp32 --microbatches 1 --parts overhead",
    "model_spec": "--rounds 1 --shapes tiny",
    "packed_attention": "--rounds 1 --rows 256 --dtypes fp32",
    "pieces": "--rounds 1",
    "pipeline": "--rounds 1 --shapes tiny --dtypes fp32 --microbatches 2 --schedules 1f1b",
    "recompute": "--rounds 1 --shapes tiny --dtypes fp32",
    "simulator": (
        "--rounds 1 --shapes tiny --stages 2 --microbatches 2 --schedules 1f1b --batches 3"
    ),
}
"""Flags of the smallest form of each benchmark; these take less than a second."""
SLOW = {
    "host_optimizer": "--rounds 1 --shapes tiny --threads 1",
    "generate": (
        "--rounds 1 --models tiny --dtypes fp32 --threads 1 --batches 2 --prompts 8 --tokens 4"
    ),
    "budget": ("--rounds 1 --shapes curve host --schedules 1f1b --shares 1 --threads 1 --turns 1"),
    "compressed_training": (
        "--steps 4 --seeds 0 --variants muon muon-dct-warmup adamw-dct-rows "
        "adamw-dct-own-momentum adamw-dct-masked adamw-messages-threshold muon-sites-100"
    ),
    "checkpoint": "--rounds 1 --shapes tiny --steps 1 --load-rounds 1",
    "context_parallel": "--rounds 1 --shapes tiny --dtypes fp32",
    "estimates": "",
    "gpu_ops": "--device cpu --sizes tiny --rounds 2",
    "host_overlap": "--rounds 1 --batches 1",
    "kills": "--kills 1",
    "large_import": "--shapes tiny",
    "link_peers": "--rounds 1 --shapes tiny --batches 1 --links wan=1000:1",
    "memory": "--shapes tiny --kinds gpt --schedules 1f1b --stages 2 --dtypes fp32",
    "memory_tools": "--shapes tiny --microbatches 1",
    "messages": "--steps 2 --stages 2 --schedules 1f1b --codecs none",
    "nest": "--models llama2-7B",
    "ops": "--rounds 1 --sizes tiny --dtypes fp32",
    "paper": "",
    "placement": "--solvers dpl --time-limit 1",
    "plan_speed": "--only simulate",
    "planner": "--rounds 1 --shapes tiny --ranks 1 --batch 2 --batches 3",
    "recovery": "--modes plain --jobs 1 --faults 1",
    "single": "--rounds 1 --shapes tiny --threads 1 --dtypes fp32",
    "sites": "--rounds 1 --shapes tiny --pace 0",
    "slow_link": "--rounds 1 --shapes tiny --dtypes fp32 --kinds pipelines --links wan=1000:1",
    "tensor_parallel": "--rounds 1 --shapes tiny --dtypes fp32",
    "tide": "--shares 0 --picture=",
    "vee": "--rounds 1 --ranks 2 --microbatches 3 --batches 1 --pace-ms 1",
    "zero": "--rounds 1 --shapes tiny --microbatches 1 --zero 2",
}
"""Like the above, for what takes longer; only --thorough runs these."""
NO_RESULT = {"fp8_estimate"}
ELSEWHERE = {
    "__main__": "runs the others",
    "gpu_check": "test_gpu_check",
    "gpu_environment": "test_gpu_check",
    "summary": "test_results",
}
"""Files that are programs, and the tests that run them."""


def run(name: str, flags: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Run a benchmark in this process, its ranks as forks; return its result file."""

    def fork_ranks(fn: Any, num_ranks: int, *args: Any, start: str) -> list[Any]:
        return run_on_ranks(fn, num_ranks, *args)

    monkeypatch.setattr(common, "run_on_ranks", fork_ranks)
    out = [] if name in NO_RESULT else ["--out", str(folder)]
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}", *flags.split(), *out])
    assert not importlib.import_module(f"benchmarks.{name}").main()
    results = list(folder.glob("*.json"))
    assert len(results) == (name not in NO_RESULT)
    return json.loads(results[0].read_text()) if results else {}


def test_all_programs_are_tried() -> None:
    programs = {
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    }
    assert programs == {*QUICK, *SLOW, *ELSEWHERE, "compression"}
    assert not QUICK.keys() & SLOW.keys()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in SLOW)]
)
def test_smallest_form(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name in ("generate", "experts"):
        pytest.importorskip("transformers")
    for shape in ("curve", "host"):
        monkeypatch.setitem(budget.SHAPES, shape, common.SHAPES["tiny"])
    monkeypatch.setattr(memory_behaviour, "BOUND", inf)  # no test has a bound on time
    monkeypatch.chdir(tmp_path)  # some write their own files beside
    try:
        result = run(name, (QUICK | SLOW)[name], tmp_path, monkeypatch)
    except AssertionError:
        if "skipped, as this machine cannot make the hosts" in capsys.readouterr().out:
            pytest.skip("this machine cannot make hosts")
        raise
    assert result or name in NO_RESULT


@pytest.mark.thorough
@pytest.mark.ranks
def test_compression_says_what_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and torch's PowerSGD have the same factors; of the others, more bytes bring more."""
    flags = "--no-race --shapes tiny --microbatches 2"
    case, memory = run("compression", flags, tmp_path, monkeypatch)["cases"]
    found = case["arrived"]
    assert found.keys() == {*compression.METHODS, "powerSGD_hook"}
    assert found["none"] == {"arrived": 1, "bytes": 1}
    assert found["bf16"]["bytes"] == 0.5
    assert found["powersgd"]["arrived"] == pytest.approx(
        found["powerSGD_hook"]["arrived"], abs=2e-3
    )
    for method in ("dct", "powersgd", "sbpca"):
        assert 0.5 < found[method]["arrived"] < found["int4"]["arrived"]
    bytes_of_block = found["powersgd"]["bytes"]
    assert found["sbpca"]["bytes"] == pytest.approx(compression.BLOCKS * bytes_of_block, rel=1e-3)
    mib = memory["memory"]
    assert mib.keys() == {*compression.METHODS, compression.ONE_BY_ONE}
    assert all(later <= whole for whole, *split in mib.values() for later in split)
    assert mib["sbpca"] == mib[compression.ONE_BY_ONE], "two micro-batches have two blocks"
    for zero in range(4):
        assert mib["sbpca"][zero] < mib["powersgd"][zero], "sbpca keeps no matrix of gradients"


@pytest.mark.ranks
@pytest.mark.thorough
def test_compression_trains_with_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--losses --steps 2 --schedules 1f1b --methods"
    methods = ["none", "sbpca", "dct"]
    result = run("compression", f"{flags} {' '.join(methods)}", tmp_path, monkeypatch)
    assert [case["settings"]["codec"] for case in result["cases"]] == methods


@pytest.mark.ranks
@pytest.mark.thorough
def test_compression_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("compression", "--rounds 1 --shapes tiny", tmp_path, monkeypatch)
    race, *_ = result["cases"]
    assert race["bytes_a_step"]["hybridpar, int8"] < race["bytes_a_step"]["hybridpar, whole"]

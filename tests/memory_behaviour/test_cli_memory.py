"""hybridpar memory: the report before a run and of what a run recorded, its files, and what is
wrong with its input."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from memory_behaviour.pipeline_trace import HEADER, KIB, trace
from test_cli import fails
from train.runs import write_config

from hybridpar.cli import main
from hybridpar.config import from_mapping, load_toml, to_toml
from hybridpar.job import JobPlan
from hybridpar.memory_behaviour import commands
from hybridpar.memory_behaviour.events import Header, Span
from hybridpar.memory_behaviour.trace_file import header_line, read_trace, span_line
from hybridpar.prediction import predict
from hybridpar.train.folder import MEMORY


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, "1f1b")


def recorded(folder: Path, config: Path, traces: dict[int, list[Span]]) -> Path:
    """A run folder with these ranks' memory in it; rank r is stage r."""
    resolved = from_mapping({"parallel": {"pp": 2, "dp": 1}}, load_toml(config))
    (folder / MEMORY).mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(resolved))
    for rank, spans in traces.items():
        header = replace(HEADER, rank=rank, place={"pp": rank, "dp": 0, "tp": 0})
        (folder / MEMORY / f"rank{rank}.jsonl").write_text(
            header_line(header) + "".join(map(span_line, spans))
        )
    return folder


@pytest.fixture
def run(tmp_path: Path, config: Path) -> Path:
    return recorded(
        tmp_path / "runs" / "my", config, {0: trace(3, rank=0), 1: trace(3, rank=1, unit=64 * KIB)}
    )


def test_the_peak_before_a_run_is_the_predicted_one(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--parallel.pp", "2", "--parallel.dp", "1", "--checkpoint.asynchronous", "False"]
    memory = predict(
        JobPlan(
            from_mapping(
                {"parallel": {"pp": 2, "dp": 1}, "checkpoint": {"asynchronous": False}},
                load_toml(config),
            )
        )
    )
    fullest = max(range(2), key=lambda rank: memory[rank].total)
    assert main(["memory", str(config), *flags, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["rank"], plain["place"]) == (fullest, {"pp": fullest, "dp": 0, "tp": 0})
    assert plain["predicted"]
    assert plain["num_steps"] == 4
    assert plain["peak"]["bytes"] == memory[fullest].total
    assert sum(plain["peak"]["by_category"].values()) == memory[fullest].total
    assert plain["swaps"] == []
    assert (
        main(
            ["memory", str(config), *flags, "--rank", str(1 - fullest), "--batches", "1", "--json"]
        )
        == 0
    )
    plain = json.loads(capsys.readouterr().out)
    assert (plain["rank"], plain["num_steps"]) == (1 - fullest, 1)


def test_files(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    assert main(["memory", str(config), "--output", str(folder), "--batches", "2"]) == 0
    said = capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "memory.html",
        "memory.perfetto.json",
        "memory.svg",
        "trace.jsonl",
    ]
    header, spans = read_trace(folder / "trace.jsonl")
    assert header.predicted
    assert {span.step for span in spans} >= {1, 2}
    page = (folder / "memory.html").read_text()
    for line in ("largest living set", "lifetimes and access intervals", "stability"):
        assert line in said
        assert line in page


@pytest.mark.thorough
def test_a_large_trace_is_written_compressed(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["memory", str(config), "--batches", "2", "--output"]
    assert main([*flags, str(tmp_path / "small")]) == 0
    plain = (tmp_path / "small" / "trace.jsonl").read_bytes()
    monkeypatch.setattr(commands, "_LARGE_TRACE", len(plain) - 1)
    assert main([*flags, str(tmp_path / "large")]) == 0
    packed = (tmp_path / "large" / "trace.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == plain
    assert len(packed) < len(plain) / 4
    assert not (tmp_path / "large" / "trace.jsonl").exists()


@pytest.mark.thorough
def test_times_of_a_cluster_make_swaps_possible(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        'servers = 1\ndevices_per_server = 2\ndevice = "v100-16gb"\ninner = "nvlink2"\n'
    )
    assert (
        main(
            [
                "memory",
                str(config),
                "--parallel.pp",
                "2",
                "--train.dtype",
                "bf16",
                "--cluster",
                str(cluster),
                "--json",
            ]
        )
        == 0
    )
    plain = json.loads(capsys.readouterr().out)
    assert {swap["link"] for swap in plain["swaps"]} >= {"pcie3", "pcie4", "pcie5", "c2c"}


@pytest.mark.thorough
def test_a_run_shows_the_fullest_rank_or_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--run", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("peaks\nrank  place")
    assert "rank 0 (pp=0 dp=0 tp=0): a peak of 15.8 MiB in F5@0v1 of step 2" in said
    assert main(["memory", "--run", str(run), "--rank", "1", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["rank"], plain["predicted"], plain["num_steps"]) == (1, False, 3)
    assert len(plain["swaps"]) > 3
    assert main(["memory", "--run", str(run), "--output", str(run / "pictures")]) == 0
    assert not (run / "pictures" / "trace.jsonl").exists()
    assert "rank 0" in (run / "pictures" / "memory.svg").read_text()


def test_impossible_arguments(
    run: Path, config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "rank = 7: must be from 0 to 0: the grid has 1 ranks; try 0" in fails(
        capsys, "memory", config, "--rank", "7"
    )
    assert "rank = 7: was not recorded; the run recorded 0, 1; try 0" in fails(
        capsys, "memory", "--run", run, "--rank", "7"
    )
    assert re.search(
        r"memory\.limit = 4096: too small: activations and the state .* take (\d+) bytes; try \1",
        fails(capsys, "memory", config, "--memory.limit", "4KiB"),
    )
    assert "nowhere': does not exist; try" in fails(capsys, "memory", "--run", tmp_path / "nowhere")
    message = fails(capsys, "memory", config, "--run", tmp_path / "nowhere")
    assert "nowhere': not a run folder; try runs/NAME" in message
    empty = recorded(tmp_path / "empty", config, {})
    message = fails(capsys, "memory", "--run", empty)
    assert "empty': has no record of memory; try a run with train.record_memory = 3" in message
    none = recorded(tmp_path / "none", config, {0: []})
    assert "the trace of rank 0 has no block" in fails(capsys, "memory", "--run", none)
    path = run / MEMORY / "rank0.jsonl"
    path.write_text(path.read_text().replace('"malloc"', '"mallok"', 1))
    assert "rank0.jsonl, line 2" in fails(capsys, "memory", "--run", run)
    assert "batches = 0: must be at least 1" in fails(capsys, "memory", config, "--batches", "0")
    file = tmp_path / "file"
    file.write_text("mine")
    message = fails(capsys, "memory", config, "--output", file)
    assert "output = " in message
    assert "cannot be written (Not a directory)" in message
    assert len(message.splitlines()) == 1
    assert file.read_text() == "mine"


def test_an_output_does_not_replace_the_configuration(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "memory.svg"
    mine.write_text(config.read_text())
    assert "is what is read, and would be lost" in fails(
        capsys, "memory", mine, "--output", tmp_path
    )


def test_check_says_the_short_form(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(config), "--parallel.pp", "2"]) == 0
    said = capsys.readouterr().out
    assert "takes the most, " in said
    assert "would save" in said


def test_a_trace_of_another_grid_is_refused_and_one_beyond_the_grid_is_old(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run / MEMORY / "rank2.jsonl"
    old.write_text("old")
    assert main(["memory", "--run", str(run), "--json"]) == 0
    capsys.readouterr()
    path = run / MEMORY / "rank0.jsonl"
    path.write_text(
        header_line(Header(place={"pp": 0, "dp": 1, "tp": 0})) + "".join(map(span_line, trace(1)))
    )
    message = fails(capsys, "memory", "--run", run)
    assert (
        "rank0.jsonl: belongs to rank 0 at {'pp': 0, 'dp': 1, 'tp': 0}, which does not match "
        "rank 0 of this run at" in message
    )


def test_a_rank_that_recorded_nothing_yet(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / MEMORY / "rank1.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert main(["memory", "--run", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[3].split() == [
        "1",
        "pp=1",
        "dp=0",
        "tp=0",
        "-",
        "-",
        "0",
        "0.00",
    ]

"""A run's report of sent traffic: each link's numbers and bytes by the codecs' formulas, in
metrics, in the report and on the dashboard."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from train.runs import metrics, run_job, write_config

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.state.compression.method import Sent
from hybridpar.train.engine import Engine
from hybridpar.train.reporting.sent_traffic import Stream, describe_sent, gather_sent
from hybridpar.watch import Board

STEPS = 3
M = 2
B = 2
SEQ = 7
HIDDEN = 70
ROWS = B * SEQ
FORTH = "stage 0 -> 1"
BACK = "stage 1 -> 0"


def make(compression: dict[str, Any], **parallel: int) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": HIDDEN,
                "num_heads": 7,
                "seq_length": SEQ,
                "vocab_size": 37,
                "tie_embeddings": False,
            },
            "parallel": parallel,
            "compression": {"gradients_smallest": 0} | compression,
            "pipeline": {"num_microbatches": M},
            "train": {"micro_batch_size": B, "num_steps": 20},
        }
    )


def train(config: Config) -> tuple[dict[Stream, Sent], tuple[int, int], dict[str, int]]:
    """All ranks' sent bytes, this rank's number of parameters, with and without what aligns them,
    and the bytes that its axes counted."""
    grid = ProcessGrid(sizes_of(config.parallel))
    engine = Engine(JobPlan(config), grid, torch.device("cpu"))
    loader = SyntheticLoader(config.model, B, M, grid.dp.rank, grid.dp.size)
    engine.train(loader, STEPS, lambda step: None)
    counted = {name: grid.axis(name).traffic.num_bytes["send"] for name in ("pp", "pp_reverse")} | {
        "dp": grid.dp.traffic.num_bytes["broadcast"]
    }
    engine.evaluate(loader, 1)  # sends messages, which do not count
    layout = engine.state.partition.layout
    return gather_sent(engine), (layout.numel, sum(map(prod, layout.shapes.values()))), counted


def train_each(configs: list[Config]) -> list[Any]:
    return list(map(train, configs))


@pytest.mark.ranks
def test_messages_are_counted_by_link_and_codec() -> None:
    """On three ranks of tp each sends its rows. int4: two tiles of 32 bytes and a scale; int8: of
    64. dct: a tenth of the 70 features, and forth 70 bits."""
    whole = STEPS * M * ROWS * HIDDEN
    cases = {
        (): ("none", HIDDEN, 4 * HIDDEN, "none", HIDDEN, 4 * HIDDEN),
        (("messages", "int4"), ("messages_backward", "int8")): (
            *("int4", HIDDEN, 2 * (32 + 2)),
            *("int8", HIDDEN, 2 * (64 + 2)),
        ),
        (("messages", "dct"),): ("dct", 7, 7 * 4 + 9, "dct", 7, 7 * 4),
    }
    ranks = run_ranks(train_each, 6, [make(dict(case), tp=3, pp=2, dp=1) for case in cases])
    for i, (forth, num, size, back, num_back, size_back) in enumerate(cases.values()):
        found = ranks[0][i][0]
        times = STEPS * M * ROWS
        assert found == {
            Stream(FORTH, "activations", forth): Sent(num * times, size * times, whole, 4 * whole),
            Stream(BACK, "gradients", back): Sent(
                num_back * times, size_back * times, whole, 4 * whole
            ),
        }
        assert all(rank[i][0] == found for rank in ranks)
        for stream, axis in zip(found, ("pp", "pp_reverse"), strict=True):
            counted = sum(rank[i][2][axis] for rank in ranks)
            assert counted == found[stream].num_bytes


@pytest.mark.ranks
def test_gradients_are_counted_by_axis_and_method() -> None:
    """Each replica sends its gradient once; before `gradients_start` uncompressed."""
    configs = [
        make({}, dp=2),
        make({"gradients": "int8", "gradients_smallest": 64}, dp=2),
        make({"gradients": "powersgd", "gradients_rank": 2, "gradients_start": 1}, dp=2),
        make({}, dp=2, zero=2),
    ]
    plain, int8, powersgd, zero = run_ranks(train_each, 2, configs)[0]
    aligned, numel = plain[1]
    both = 2 * STEPS * aligned
    assert plain[0] == {
        Stream("dp", "weight gradients", "none"): Sent(both, 4 * both, both, 4 * both)
    }
    # zero = 2 reduces after every micro-batch
    both *= M
    assert zero[0] == {
        Stream("dp", "weight gradients", "none"): Sent(both, 4 * both, both, 4 * both)
    }
    both = 2 * STEPS * numel
    (sent,) = [sent for stream, sent in int8[0].items() if stream.codec == "int8"]
    assert 0.25 < sent.num_bytes / sent.whole_bytes < 0.29
    assert sum(sent.whole_elements for sent in int8[0].values()) == both
    sent = powersgd[0][Stream("dp", "weight gradients", "powersgd")]
    assert (sent.whole_elements, sent.whole_bytes) == (both, 4 * both)
    assert 2 * numel < sent.elements < both / 2  # the first of three steps is whole


def test_the_report_says_it_in_words() -> None:
    sent = {
        Stream("stage 0 -> 1", "activations", "dct"): Sent(100, 600, 1000, 4000),
        Stream("dp", "weight gradients", "none"): Sent(7e6, 28e6, 7e6, 28e6),
    }
    assert describe_sent(sent, 2) == [
        "sent a batch, stage 0 -> 1: activations by dct, 50 numbers in 0.3 kB (1 / 10 of the "
        "numbers, 1 / 6.67 of the bytes)",
        "sent a batch, dp: weight gradients uncompressed, 3,500,000 numbers in 14 MB",
    ]


@pytest.mark.ranks
def test_metrics_report_and_dashboard_have_them(tmp_path: Path) -> None:
    sizes = ["--model.hidden_size", "48", "--model.num_heads", "3"]
    flags = ["--parallel.pp", "2", "--compression.messages", "int8", "--run.name", "run", *sizes]
    said = run_job(2, "train", write_config(tmp_path), *flags)
    run = tmp_path / "runs" / "run"
    rows = [row for row in metrics(run) if "traffic" in row]
    assert [row["step"] for row in rows] == [2, 3, 4, 6]  # where the pipeline drained
    for row in rows:
        assert row["traffic"]["batches"] == row["step"]
        streams = row["traffic"]["streams"]
        numbers = row["step"] * 2 * 2 * 16 * 48
        assert [(one["link"], one["codec"], one["elements"]) for one in streams[:2]] == [
            (FORTH, "int8", numbers) if one["what"] == "activations" else (BACK, "int8", numbers)
            for one in streams[:2]
        ]
    a_batch = 2 * 2 * 16 * 48
    assert f"sent a batch, {FORTH}: activations by int8, {a_batch:,} numbers in" in said
    shown = Board(run).look()["traffic"]
    assert [(one["link"], one["what"], one["elements"]) for one in shown[:2]] == [
        (FORTH, "activations", a_batch),
        (BACK, "gradients", a_batch),
    ]
    assert [one["link"] for one in shown[2:]] == ["embedding_group"]


@pytest.mark.parametrize(
    "traffic",
    [
        3,
        {"batches": 0, "streams": []},
        {"batches": True, "streams": []},
        {"batches": 2, "streams": {"link": "x"}},
        {"batches": 2, "streams": [5, {"link": 3, "what": "a", "codec": "b"}]},
        {"batches": 2, "streams": [{"link": "l", "what": "a", "codec": "b", "elements": 1.5}]},
    ],
)
def test_the_dashboard_leaves_out_what_is_no_traffic(tmp_path: Path, traffic: Any) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "traffic": traffic}) + "\n")
    assert Board(tmp_path).look()["traffic"] == []

"""Compressed messages in training: their bytes by the formula, what they leave exact, what they
save in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prediction.test_predict import agree, small
from prediction.test_predict import make as large
from ranks import run_ranks

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.nn.placement import split_sizes
from hybridpar.prediction.predict import predict
from hybridpar.state.audit import bit_hash
from hybridpar.train.engine import Engine
from hybridpar.validate import problems

STEPS = 2
M = 3
B = 2
SEQ = 7
HIDDEN = 70


def make(compression: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": HIDDEN,
                "num_heads": 7,
                "seq_length": SEQ,
                "vocab_size": 37,
                **sections.get("model", {}),
            },
            "parallel": {"tp": 3, "pp": 2, "dp": 1, **sections.get("parallel", {})},
            "compression": compression,
            "pipeline": {"num_microbatches": M, **sections.get("pipeline", {})},
            "train": {"micro_batch_size": B, "num_steps": 20, **sections.get("train", {})},
        }
    )


def train(config: Config) -> dict[str, Any]:
    """Bytes by axis and operation of training and of an evaluation, and the evaluation of the first
    weights."""
    grid = ProcessGrid(tp=config.parallel.tp, pp=config.parallel.pp)
    engine = Engine(JobPlan(config), grid, torch.device("cpu"))
    loader = SyntheticLoader(config.model, B, M, 0, 1)
    traffic = {name: grid.axis(name).traffic for name in ("pp", "pp_reverse")}
    found: dict[str, Any] = {"first": engine.evaluate(loader, 1)}
    for what, run in (
        ("trained", lambda: engine.train(loader, STEPS, lambda step: None)),
        ("evaluated", lambda: engine.evaluate(loader, 1)),
    ):
        for one in traffic.values():
            one.clear()
        run()
        found[what] = {name: dict(one.num_bytes) for name, one in traffic.items()}
    found["bits"] = {name: int(bit_hash(x)) for name, x in engine.state.tensors().items()}
    return found


def train_each(configs: list[Config]) -> list[dict[str, Any]]:
    return list(map(train, configs))


@pytest.mark.ranks
def test_bytes_are_those_of_the_formula_and_evaluation_is_exact() -> None:
    """14 rows on three tp ranks: 5, 5 and 4. int4: two tiles of 32 bytes and a scale; int8: of 64.
    dct: a tenth of the 70 features, and forth 70 bits."""
    cases = (
        ({"messages": "int4", "messages_backward": "int8"}, 2 * (32 + 2), 2 * (64 + 2)),
        ({"messages": "dct"}, 7 * 4 + 9, 7 * 4),
    )
    configs = [make(compression) for compression in ({}, *(case[0] for case in cases))]
    exact, *coded = zip(*run_ranks(train_each, 6, configs), strict=True)
    for (_, forth, back), of_ranks in zip(cases, coded, strict=True):
        for rank, (found, plain) in enumerate(zip(of_ranks, exact, strict=True)):
            rows = split_sizes(B * SEQ, 3)[rank % 3]
            op, other = ("send", "recv") if rank < 3 else ("recv", "send")
            assert found["trained"] == {
                "pp": {op: STEPS * M * rows * forth},
                "pp_reverse": {other: STEPS * M * rows * back},
            }
            assert found["evaluated"] == plain["evaluated"]
            assert found["first"] == plain["first"]
            assert found["bits"] != plain["bits"]


@pytest.mark.ranks
def test_a_codec_without_a_link_changes_no_bit() -> None:
    alone = {"parallel": {"tp": 1, "pp": 1}}
    assert run_ranks(train, 1, make({"messages": "int4"}, **alone)) == run_ranks(
        train, 1, make({}, **alone)
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("compression", "tp", "pipeline"),
    [
        ({"messages": "dct"}, 2, {"schedule": "2bw", "recompute": "stage"}),
        (
            {"messages": "int4"},
            1,
            {"stage_layout": "v", "split_backward": True, "recompute": "stage"},
        ),
        (
            {"messages": "dct", "messages_kept": 0.5, "messages_values": "bf16"},
            1,
            {"schedule": "gpipe", "split": (2, 3, 1)},
        ),
    ],
    ids=str,
)
def test_predicted_memory_is_the_allocators(
    compression: dict[str, Any], tp: int, pipeline: dict[str, Any]
) -> None:
    pp = len(pipeline.get("split", (0, 0)))
    agree(small(tp=tp, pp=pp, pipeline=pipeline, compression=compression))


def test_a_recomputed_stage_keeps_its_input_as_it_came() -> None:
    plain = large(pp=2, pipeline={"schedule": "gpipe", "recompute": "stage"})
    found = {
        name: predict(JobPlan(from_mapping({"compression": {"messages": name}}, plain)))[1]
        for name in ("none", "int4")
    }
    rows = 4 * 128
    kept = found["none"].activations - found["int4"].activations
    assert kept == found["int4"].in_flight * (rows * (256 * 4 - 4 * 34) - 4), (
        "but for a leaf of one number"
    )
    assert (
        predict(JobPlan(from_mapping({"compression": {"messages": "int4"}}, large(pp=1))))[0]
        == predict(JobPlan(large(pp=1)))[0]
    )


@pytest.mark.parametrize(
    ("compression", "sections", "message"),
    [
        (
            {"messages": "int4"},
            {"model": {"hidden_size": 7}},
            "compression.messages = 'int4': would save nothing: it takes 34 bytes per token, "
            "and the 7 features (model.hidden_size) take 28 "
            "bytes in fp32; try none",
        ),
        (
            {"messages_backward": "bf16"},
            {"train": {"dtype": "fp16"}},
            "compression.messages_backward = 'bf16': would save nothing: it takes 140 bytes per "
            "token, and the 70 features (model.hidden_size) take 140 bytes in fp16; try none",
        ),
        (
            {"messages": "dct", "messages_kept": 1.0},
            {},
            "compression.messages = 'dct': would save nothing: it takes 289 bytes per token, "
            "and the 70 features (model.hidden_size) take 280 "
            "bytes in fp32; try none",
        ),
    ],
    ids=str,
)
def test_useless_codecs_are_refused(
    compression: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    assert [str(problem) for problem in problems(make(compression, **sections), 6)] == [message]

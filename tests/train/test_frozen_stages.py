"""Stages before the first trained parameter: no gradient is sent to them, and they keep nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import gpt, samples, start
from prediction.test_predict import peak_of_run, small
from ranks import run_ranks
from train.runs import metrics, run_job, write_config

from hybridpar.config import Config
from hybridpar.job import JobPlan
from hybridpar.prediction.predict import predict
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.proof.prove import prove
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import find_schedule
from hybridpar.verify.run import verify

LORA = {"lora_rank": 3, "lora_targets": ("blocks.4.*", "blocks.6.mlp.*")}
TWO_BW = {"schedule": "2bw"}
SPLIT = {"split": (2, 2, 2)}


def make(**sections: Any) -> Config:
    """Six layers, of which the fourth is the first with adapters."""
    own = {"model": LORA, "parallel": {"dp": 1}, "pipeline": {"num_microbatches": 5}}
    return gpt((6, 24, 6, 16, 61), own, sections)


FOUR = {"parallel": {"pp": 4}, "pipeline": {"split": (2, 2, 2, 2)}}


def gradients_sent(config: Config) -> set[int]:
    """The stages that send a gradient."""
    job = JobPlan(config)
    plan = make_plan(job.schedule, job.shape, num_batches=2)
    sent = {a.stage for actions in plan.values() for a in actions if a.kind is Kind.SEND_B}
    received = {a.stage for actions in plan.values() for a in actions if a.kind is Kind.RECV_B}
    assert received == {stage - 1 for stage in sent}
    return sent


def test_only_stages_after_the_first_trained_one_send_gradients() -> None:
    config = make(**FOUR)
    assert [(b.start, b.stop) for b in JobPlan(config).split] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert JobPlan(config).shape.num_frozen == 2
    assert gradients_sent(config) == {3}
    assert gradients_sent(make(**FOUR, model={"lora_rank": 0})) == {1, 2, 3}
    groups = [{"pattern": f"blocks.{n}.*", "frozen": True} for n in range(2)]
    untied = {"lora_rank": 0, "tie_embeddings": False}
    frozen = make(**FOUR, model=untied, optim={"groups": groups})
    assert gradients_sent(frozen) == {2, 3}
    v = {"stage_layout": "v", "activations": "half", "split_backward": True, **TWO_BW}
    in_a_v = make(parallel={"pp": 2}, pipeline=v | {"split": (2, 2, 2, 2)})
    assert JobPlan(in_a_v).shape.num_frozen == 2
    assert gradients_sent(in_a_v) == {3}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    "options",
    [
        ScheduleOptions("1f1b"),
        ScheduleOptions("gpipe"),
        ScheduleOptions("2bw"),
        ScheduleOptions("2bw", gather=True, gradient_buffers=1),
        ScheduleOptions("pipedream", clip=False),
        ScheduleOptions("1f1b", split=True, zero_bubble=True),
        ScheduleOptions("interleaved", virtual_stages=2),
        ScheduleOptions("2bw", virtual_stages=2),
        ScheduleOptions("2bw", virtual_stages=2, stage_layout="v", activations="half", split=True),
        ScheduleOptions("1f1b", virtual_stages=2, stage_layout="v", split=True),
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in vars_of(o).items()),
)
def test_plans_without_these_messages_are_proved(options: ScheduleOptions) -> None:
    schedule = find_schedule(options)
    chunks = max(options.virtual_stages, 1)
    for p, m in ((2, 4), (3, 6), (4, 8), (12, 24)):
        for frozen in sorted({1, p - 1, p * chunks // 2, p * chunks - 1}):
            shape = PipelineShape(p, m, chunks, options.stage_layout, frozen)
            assert prove(schedule, shape)


def vars_of(options: ScheduleOptions) -> dict[str, Any]:
    default = ScheduleOptions(options.schedule)
    fields = ScheduleOptions.__dataclass_fields__
    return {
        name: getattr(options, name)
        for name in fields
        if name == "schedule" or getattr(options, name) != getattr(default, name)
    }


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "sections"),
    [
        ({"pp": 4}, {"pipeline": TWO_BW}),
        (
            {"pp": 2, "dp": 2},
            {
                "pipeline": TWO_BW
                | {"split_backward": True, "stage_layout": "v", "activations": "half"},
                "parallel": {"zero": 3},
            },
        ),
        (
            {"pp": 3},
            {
                "pipeline": {
                    "schedule": "interleaved",
                    "virtual_stages": 2,
                    "num_microbatches": 6,
                }
            },
        ),
        (
            {"pp": 4, "tp": 2},
            {
                "pipeline": {"recompute": "stage", "split_backward": True, "zero_bubble": True},
                "parallel": {"sequence": True},
            },
        ),
        ({"pp": 4}, {"compression": {"messages": "int8"}, "pipeline": TWO_BW}),
        ({"pp": 3}, {"pipeline": {"schedule": "pipedream"}}),
        ({"pp": 2}, {"pipeline": {"schedule": "gpipe"}, "memory": {"budget": 200_000}}),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_grids_with_frozen_stages_are_one_training(
    grid: dict[str, int], sections: dict[str, Any]
) -> None:
    report = verify(make(**sections), grid, 3)
    assert report.ok, report.first_divergence


def kept_and_sent(config: Config) -> tuple[int, int]:
    """The gradients that this rank sends in a batch, and what it keeps of a micro-batch."""
    engine, loader = start(config)
    flight = []
    original = engine.executor._forward

    def noted(action: Any) -> None:
        original(action)
        one = engine.executor._flight[action.stage, action.part, action.microbatch]
        flight.append(one.input is not None or one.edge is not None)

    engine.executor._table[Kind.F] = noted
    engine.train(samples(engine), 1, lambda step: None)
    assert loader is not None
    return engine.grid.pp.rank, sum(flight)


@pytest.mark.ranks
def test_a_frozen_stage_keeps_nothing_for_a_backward() -> None:
    config = make(**FOUR)
    assert dict(run_ranks(kept_and_sent, 4, config)) == {0: 0, 1: 0, 2: 5, 3: 5}


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "sections",
    [
        {"pp": 3, "pipeline": TWO_BW | SPLIT},
        {"pp": 3, "pipeline": {"recompute": "stage"} | SPLIT},
        {
            "pp": 3,
            "tp": 2,
            # with a larger one the most memory is taken by numbers that are drawn at the start
            "model": {"vocab_size": 512},
            "train": {"dtype": "bf16"},
            "pipeline": {"split_backward": True} | SPLIT,
        },
        {
            "pp": 2,
            "pipeline": TWO_BW | {"virtual_stages": 2, "split_backward": True},
        },
    ],
    ids=str,
)
def test_predicted_memory_is_the_allocators_count(sections: dict[str, Any]) -> None:
    targets = {"lora_rank": 4, "lora_targets": ("blocks.3.*", "blocks.4.*")}
    model = {"num_layers": 4, **targets} | sections.get("model", {})
    config = small(**sections | {"model": model})
    job = JobPlan(config)
    predicted = predict(job)
    assert job.shape.num_frozen
    for stage, peak in run_ranks(peak_of_run, config.parallel.num_ranks, config):
        # the peak of a rank that trains nothing is where its weights are drawn
        if max(job.shape.stages_of(stage)) >= job.shape.num_frozen:
            assert predicted[stage].total == pytest.approx(peak, rel=0.05), stage


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.full_report
def test_a_run_reports_its_costs_without_these_messages(tmp_path: Path) -> None:
    flags = ["--model.lora_rank", "2", "--model.lora_targets", "blocks.2.*"]
    flags += ["--train.num_steps", "14", "--train.eval_interval", "0", "--train.save_interval", "0"]
    out = run_job(2, "train", str(write_config(tmp_path)), "--parallel.pp", "2", *flags)
    rows = metrics(tmp_path / "runs" / "run")
    assert [row["step"] for row in rows][-1] == 14, out
    assert (tmp_path / "runs" / "run" / "costs.json").is_file()

"""Steps that go wrong: found and answered by all ranks alike, rolled back exactly, and run again
elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import Config, Launch, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.schedules.action import Action
from hybridpar.state import find_divergence
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.faults.anomalies import RunningAnomalyDetector
from hybridpar.validate import problems

ALONE = Launch(0, 0, 1, 1)
CPU = torch.device("cpu")


def judge(**settings: Any) -> RunningAnomalyDetector:
    return RunningAnomalyDetector(from_mapping({"anomalies": settings}))


def losses(start: int, count: int) -> list[float]:
    """Falling, with noise."""
    return [3.0 - 0.01 * i + 0.02 * (i * 7 % 5 - 2) for i in range(start, start + count)]


def test_a_spike_is_told_from_noise_and_from_a_fall() -> None:
    judged = judge(loss_spike=6.0, on_loss_spike="roll_back", window=16)
    assert all(
        judged.detect(i + 1, loss, 1.0, cured=False) is None for i, loss in enumerate(losses(0, 40))
    )
    assert judged.detect(41, 2.0, 1.0, cured=False) is None, "a loss may fall"
    found = judged.detect(42, 4.5, 1.0, cured=False)
    assert found is not None
    assert (found.kind, found.policy) == ("loss_spike", "roll_back")
    assert "the loss is 4.5, " in found.what
    assert judged.detect(43, losses(42, 1)[0], 1.0, cured=False) is None, (
        "a spike is not among those it is judged by"
    )


def test_too_few_losses_tell_nothing() -> None:
    judged = judge(loss_spike=3.0, norm_spike=3.0, window=16)
    for i in range(8):
        assert judged.detect(i + 1, 1.0 + 100.0 * i, 1.0, cured=False) is None
    norm = judged.detect(9, 400.0, 50.0, cured=False)
    assert norm is not None
    assert norm.kind == "norm_spike"


def test_a_judge_goes_on_from_its_state() -> None:
    first = judge(loss_spike=6.0, norm_spike=6.0, window=16)
    for i, loss in enumerate(losses(0, 20)):
        first.detect(i + 1, loss, 2 * loss, cured=False)
    second = judge(loss_spike=6.0, norm_spike=6.0, window=16)
    second.load_state(json.loads(json.dumps(first.state())))
    for loss, norm in ((2.9, 5.0), (9.0, 5.0), (2.9, 90.0), (math.nan, 1.0)):
        assert second.detect(21, loss, norm, cured=False) == first.detect(
            21, loss, norm, cured=False
        )
    assert judge().state() == {}, "nothing is kept that nobody asked for"


def test_too_many_anomalies_end_the_run() -> None:
    judged = judge(limit=3, window=8)
    found = [judged.detect(step, math.inf, 1.0, cured=False) for step in (1, 2, 12, 13, 14)]
    assert [a.policy for a in found if a] == ["skip"] * 4 + ["stop"]
    assert "the 3th anomaly within 8 steps" in found[-1].what  # type: ignore[union-attr]
    assert judged.detect(15, math.nan, math.nan, cured=True) is None, (
        "fp16's loss scale deals with that"
    )


def test_impossible_actions_are_refused() -> None:
    def wrong(**sections: Any) -> list[str]:
        return [p.field for p in problems(from_mapping(sections), 1)]

    unclipped = {"pipeline": {"schedule": "pipedream"}, "optim": {"clip_grad": 0.0}}
    assert wrong(**unclipped) == []
    assert wrong(**unclipped, anomalies={"on_non_finite": "skip"}) == ["anomalies.on_non_finite"]
    assert wrong(**unclipped, anomalies={"loss_spike": 5.0}) == ["anomalies.on_loss_spike"]
    assert wrong(anomalies={"on_non_finite": "roll_back"}) == ["train.save_interval"]
    assert wrong(anomalies={"on_divergence": "roll_back"}) == [], "no audit, no divergence"
    assert wrong(anomalies={"loss_spike": 5.0, "window": 4}) == ["anomalies.window"]


# -- engines


def make(schedule: str, sections: dict[str, Any] | None = None, **parallel: int) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 24,
                "num_heads": 3,
                "num_kv_heads": 1,
                "seq_length": 12,
                "vocab_size": 37,
            },
            "parallel": {"dp": 1, **parallel},
            "pipeline": {"num_microbatches": 3, "schedule": schedule},
            "train": {"micro_batch_size": 2, "num_steps": 20},
            "optim": {"lr": 1e-2, "decay": "constant"},
        }
        | (sections or {})
    )


class Poisoned(BatchPolicy):
    """The loss gradient is NaN in batch 4."""

    def loss_gradient(self, action: Action) -> float:
        return math.nan if action.microbatch == 4 * 3 else super().loss_gradient(action)


class Later(SyntheticLoader):
    """The batches of another loader from one on."""

    behind = 0

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        return super().microbatch(batch + self.behind, index)

    def num_targets(self, batch: int) -> int:
        return super().num_targets(batch + self.behind)


def build(config: Config, *, poisoned: bool = False) -> tuple[Engine, Later]:
    """`poisoned`: the last replica is."""
    parallel = config.parallel
    grid = ProcessGrid(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    policy = Poisoned(JobPlan(config)) if poisoned and grid.dp.is_last else None
    return Engine(JobPlan(config), grid, CPU, policy=policy), Later(
        config.model, 2, 3, grid.dp.rank, grid.dp.size
    )


def poisoned_steps(config: Config) -> tuple[int, list[tuple[int, str, bool]]]:
    engine, loader = build(config, poisoned=True)
    seen: list[StepResult] = []
    engine.train(loader, 12, seen.append)
    return engine.batches_done, [
        (s.step, s.anomaly.policy if s.anomaly else "", s.skipped) for s in seen
    ]


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "policy"),
    [
        ("1f1b", "skip"),
        ("2bw", "skip"),
        ("2bw", "stop"),
        ("pipedream", "roll_back"),
        ("unclipped", "auto"),
    ],
)
def test_all_ranks_decide_alike(schedule: str, policy: str) -> None:
    sections = {
        "anomalies": {"on_non_finite": policy},
        "train": {"micro_batch_size": 2, "save_interval": 5},
    }
    if schedule == "unclipped":
        sections["optim"] = {"clip_grad": 0.0}
    config = make("pipedream" if schedule == "unclipped" else schedule, sections, pp=2, dp=2)
    everyone = run_ranks(poisoned_steps, 4, config)
    assert all(one == everyone[0] for one in everyone)
    done, seen = everyone[0]
    expected = {"auto": "stop"}.get(policy, policy)
    assert seen[4] == (5, expected, schedule != "unclipped")
    if policy == "skip":
        assert (done, len(seen)) == (12, 12)
        assert not any(anomaly or skipped for _, anomaly, skipped in seen[:4] + seen[5:])
    else:
        assert 5 <= done == len(seen) <= 10


def rolled_back(config: Config, root: Path) -> None:
    """Gone over, batches have never been: the same weights come of data without them, dropout being
    off."""
    engine, loader = build(config)
    engine.train(loader, 3, lambda step: None)
    checkpoint.save(root, engine, "corpus")
    engine.train(loader, 4, lambda step: None)
    assert checkpoint.resume(root, engine, "corpus", print, up_to=6, go_on_at=6) == 3
    got: list[StepResult] = []
    engine.train(loader, 3, got.append)
    other, without = build(config)
    checkpoint.resume(root, other, "corpus", print)
    object.__setattr__(without, "behind", 3)
    wanted: list[StepResult] = []
    other.train(without, 3, wanted.append)
    assert [(s.step, s.losses, s.grad_norm) for s in got] == [
        (s.step + 3, s.losses, s.grad_norm) for s in wanted
    ]
    for name, tensor in other.state.weights.full_weights().items():
        assert torch.equal(tensor, engine.state.weights.full_weights()[name])


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "sections"),
    [
        ("1f1b", {}),
        ("2bw", {}),
        ("2bw", {"parallel": {"dp": 2, "pp": 1, "zero": 1}}),
        ("2bw", {"optim": {"staleness": "prediction", "decay": "constant"}}),
    ],
    ids=str,
)
def test_batches_that_are_gone_over_have_never_been(
    tmp_path: Path, schedule: str, sections: dict[str, Any]
) -> None:
    run_ranks(rolled_back, 2, make(schedule, {"parallel": {"pp": 2, "dp": 1}} | sections), tmp_path)


def diverged(config: Config, name: str, rank: int) -> list[str]:
    engine, loader = build(config)
    engine.train(loader, 2, lambda step: None)
    found = [find_divergence(engine.state.placed(), engine.grid)]
    leaf = engine.state.weights.leaves_of(2).get(name)
    if engine.grid.rank == rank and leaf is not None:
        with torch.no_grad():
            leaf.view(-1)[3] += 1e-6
    return [*found, find_divergence(engine.state.placed(), engine.grid)]


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "name", "rank", "expected"),
    [
        (
            {"dp": 3},
            "blocks.1.mlp.up.weight",
            0,
            "blocks.1.mlp.up.weight of rank 0 is not what rank 1 has",
        ),
        (
            {"tp": 2},
            "blocks.1.attention_norm.weight",
            1,
            "attention_norm.weight of rank 1 is not what rank 0 has",
        ),
        (
            {"pp": 2},
            "blocks.3.language_model.projection.weight",
            1,
            " of rank 1 is not what rank 0 has",
        ),
    ],
    ids=str,
)
def test_the_replica_that_differs_is_named(
    grid: dict[str, int], name: str, rank: int, expected: str
) -> None:
    number = math.prod(grid.values())
    everyone = run_ranks(diverged, number, make("2bw", **grid), name, rank)
    assert all(one == everyone[0] for one in everyone)
    before, after = everyone[0]
    assert before == ""
    assert after.startswith("weights/2/")
    assert expected in after

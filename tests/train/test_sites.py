"""Sites of whole grids: what goes between them, what they end with, how they go on, and what each
of them counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import start
from ranks import run_ranks

from hybridpar import checkpoint
from hybridpar.cli.planning import cost_on_machine
from hybridpar.comm import Work, all_gather_async, barrier
from hybridpar.config import Config, Launch, from_mapping
from hybridpar.errors import CheckpointError, ConfigError
from hybridpar.state import find_divergence
from hybridpar.state.reduction import outer
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.forecasts.site_traffic import SiteTraffic, site_traffic

pytestmark = pytest.mark.ranks
STREAMED = {"every": 4, "fragments": 2, "delay": 2, "mix": 0.5, "precision": "bf16"}


def make(parallel: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 3,
                "hidden_size": 12,
                "num_heads": 3,
                "seq_length": 6,
                "vocab_size": 37,
            },
            "parallel": {"dp": 1} | parallel,
            "pipeline": {"num_microbatches": 2} | sections.get("pipeline", {}),
            "train": {"micro_batch_size": 1, "num_steps": 40} | sections.get("train", {}),
            "optim": {"lr": 1e-2} | sections.get("optim", {}),
            "outer": sections.get("outer", {}),
        }
    )


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in engine.state.tensors().items()}


def losses_and_weights(
    config: Config, num_batches: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, loader = start(config)
    steps: list[StepResult] = []
    engine.train(loader, num_batches, steps.append)
    news = [step.site_status.loss for step in steps if step.site_status is not None]
    return news or [step.loss for step in steps], dict(engine.state.weights.full_weights())


@pytest.mark.thorough
def test_an_outer_step_of_each_sgd_step_is_data_parallelism() -> None:
    """Means over sites of losses and weights are those of replicas, also where sites differ in
    labels that count."""
    sgd = {"name": "sgd", "momentum": 0.0, "clip_grad": 0.0, "lr": 0.3}
    common = {
        "optim": sgd,
        "train": {"dtype": "fp64"},
        "outer": {"every": 1, "lr": 1.0, "momentum": 0.0},
    }
    sites, replicas = (
        run_ranks(losses_and_weights, 2, make(parallel, **common), 4)
        for parallel in ({"sites": 2}, {"dp": 2})
    )
    for rank in range(2):
        assert sites[rank][0] == pytest.approx(replicas[0][0], rel=1e-9)
        for name, weight in replicas[0][1].items():
            torch.testing.assert_close(sites[rank][1][name], weight, rtol=1e-9, atol=1e-12)


def spoil(engine: Engine) -> None:
    """Batch 2 of the last site has an infinite gradient, which an fp16 run takes for an
    overflow."""
    usual = engine.policy.loss_gradient
    if engine.grid.site.is_last and engine.policy.scaler.dynamic:
        engine.policy.loss_gradient = (  # type: ignore[method-assign]
            lambda action: float("inf") if action.microbatch // 2 == 2 else usual(action)
        )


def train_and_go_on(config: Config, root: Path) -> dict[str, Any]:
    """Eight steps at once, and seven of which the last are made by another engine; what was counted
    and found."""
    engine, loader = start(config)
    grid = engine.grid
    spoil(engine)
    engine.train(loader, 8, lambda result: None)
    crossed = {
        name: (dict(axis.traffic.calls), sum(axis.traffic.num_bytes.values()))
        for name, axis in (("site", grid.site), ("world", grid.world))
    }
    first, loader = start(config)
    spoil(first)
    first.train(loader, 5, lambda result: None)
    under_way = [key for key in first.state.tensors() if key.startswith("sent/")]
    checkpoint.save(root, first, "")
    second, _ = start(config)
    checkpoint.resume(root, second, "", print)
    second.train(loader, 3, lambda result: None)
    wanted, found = weights_of(engine), weights_of(second)
    same = wanted.keys() == found.keys() and all(
        torch.equal(wanted[key], found[key]) for key in wanted
    )
    weights = engine.state.weights
    sizes = {name: place.shape for name, place in engine.state.placements.items()}
    report = {
        "same": same,
        "crossed": crossed,
        "under_way": under_way,
        "place": grid.place,
        "sizes": sizes,
        "audit": find_divergence(engine.state.placed(), grid),
        "weights": weights.full_weights(),
        "meta": (engine.state_meta(), second.state_meta()),
        "anchor": {
            k: t.clone()
            for k, t in engine.state.tensors().items()
            if k.startswith(("anchor", "outer"))
        },
    }
    if grid.rank == 3:
        next(iter(engine.state.outer.buffers["anchor"].views().values())).view(-1)[3] += 1e-3  # type: ignore[union-attr]
    report["corrupt"] = find_divergence(engine.state.placed(), grid)
    return report


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bf16"), ("int4", "fp16")])
def test_messages_are_all_that_crosses_and_go_on_to_the_bit(
    tmp_path: Path, precision: str, dtype: str
) -> None:
    """In fp16 a site that skips a step has a loss scale and a number of updates of its own, which
    are saved as well."""
    config = make(
        {"sites": 2, "pp": 2},
        outer=STREAMED | {"precision": precision},
        pipeline={"schedule": "2bw"},
        train={"dtype": dtype},
    )
    ranks, forecast = run_ranks(train_and_go_on, 4, config, tmp_path), site_traffic(config)
    assert forecast is not None
    # each fragment leaves twice in eight steps, and the four ranks count what both sites send
    assert sum(found["crossed"]["site"][1] for found in ranks) == 2 * 2 * 2 * sum(
        forecast.fragments
    )
    for found in ranks:
        assert found["same"]
        assert not found["audit"]
        twin = next(r for r in ranks if r["place"]["pp"] == found["place"]["pp"] and r is not found)
        assert all(
            torch.equal(tensor, twin["anchor"][key]) for key, tensor in found["anchor"].items()
        )
        assert any(
            not torch.equal(w, twin["weights"][name]) for name, w in found["weights"].items()
        ), "never apart"
        assert found["meta"][0] == found["meta"][1]
        assert found["meta"][0]["num_updates"] == 8 - (
            dtype == "fp16" and found["place"]["site"] == 1
        )
        calls, num_bytes = found["crossed"]["site"]
        # each fragment leaves twice in eight steps, from both sites, with four float64 notes
        numbers = [torch.Size(shape).numel() for shape in found["sizes"].values()]
        each = [2 * n if precision == "bf16" else -(-n // 64) * (32 + 2) for n in numbers]
        assert num_bytes == 2 * 2 * sum(each) + 4 * 2 * 4 * 8
        assert set(calls) == {"broadcast"}
        assert found["crossed"]["world"] == ({}, 0)
        assert "of rank 3 is not what rank" in found["corrupt"]
        # fragment 1 has left at step 4, and is taken by step 6
        assert bool(found["under_way"]) == (precision == "bf16")
        assert all(int(key.split(".")[1]) % 2 for key in found["under_way"])


def test_plans_and_their_costs_are_of_one_site() -> None:
    with pytest.raises(
        ConfigError, match="not supported by plan, which plans the grid of one site; try 1"
    ):
        cost_on_machine(make({"sites": 2}), "", "", Launch(0, 0, 1, 1))


def stop_one(config: Config) -> tuple[int, list[int], list[int]]:
    engine, loader = start(config)
    seen: list[int] = []
    told: list[int] = []

    def on_step(result: StepResult) -> None:
        seen.append(result.step)
        told.extend([result.step] if result.site_status is not None else [])
        engine.request_stop(engine.grid.rank == 1 and result.step == 2)

    engine.train(loader, 30, on_step)
    return engine.batches_done, seen, told


def test_all_sites_stop_with_the_same_batch() -> None:
    """The request of one site's rank, made at step 2, leaves with the message of step 5, which step
    6 takes."""
    config = make({"sites": 2}, outer={"every": 5, "delay": 1})
    assert run_ranks(stop_one, 2, config) == [(8, [*range(1, 9)], [6])] * 2


@dataclass
class Late:
    """A message over a link so slow that it begins to leave when no site can go on without it.
    steps: of each site."""

    send: Callable[[], Work]
    steps: list[Path]

    def wait(self) -> None:
        own = self.steps[-1].stat().st_size
        end = time.monotonic() + 200
        while min(path.stat().st_size for path in self.steps) < own:
            assert time.monotonic() < end, "a site waits for a message that may still take a step"
            time.sleep(0.001)
        self.send().wait()

    def is_done(self) -> bool:
        return False


def with_a_slow_link(
    config: Config, root: Path, is_slow: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, loader = start(config)
    site = engine.grid.site
    losses = list[float]()
    steps = [root / f"{is_slow} {rank}" for rank in range(site.size)]
    steps[site.rank].touch()
    barrier(site)
    messages: list[Late] = []

    def send(*args: Any) -> Late:
        messages.append(Late(partial(all_gather_async, *args), steps))
        return messages[-1]

    if is_slow and site.is_last:
        outer.all_gather_async = send  # type: ignore[assignment]

    def on_step(step: StepResult) -> None:
        losses.append(step.loss)
        with steps[site.rank].open("a") as file:
            file.write(".")

    engine.train(loader, 8, on_step)
    assert len(messages) == (8 if is_slow and site.is_last else 0), "notes and weights, four times"
    return losses, dict(engine.state.weights.full_weights())


@pytest.mark.thorough
def test_a_site_behind_a_slower_link_holds_nobody_up_within_the_delay(tmp_path: Path) -> None:
    """Its messages leave as late as they may; nothing is different then."""
    config = make({"sites": 3}, outer=STREAMED)
    slow, equal = (
        run_ranks(with_a_slow_link, 3, config, tmp_path, is_slow) for is_slow in (True, False)
    )
    for one, other in zip(slow, equal, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


def test_the_slowest_link_is_told_what_it_must_carry() -> None:
    """Two messages of 3 MB within 14 steps of 0.2 s, and the same of a second."""
    traffic = SiteTraffic((3_000_000, 2_000_000), 30, 14, 200.0, sites=3)
    assert traffic.needed_mbit == pytest.approx(2 * 8 * 3 / 2.8)
    assert (
        "at 200 ms a step the slowest site's link must carry 17.1 Mbit/s each way, or all wait"
        in str(traffic)
    )
    assert "at 1 s a step the slowest site's link must carry 3.43 Mbit/s" in str(
        replace(traffic, step_ms=0.0)
    )
    waiting = replace(traffic, delay=0)
    assert waiting.needed_mbit is None
    assert "training waits for the slowest of them" in str(waiting)


def save_after(config: Config, root: Path, num_batches: int) -> dict[str, torch.Tensor]:
    engine, loader = start(config)
    engine.train(loader, num_batches, lambda result: None)
    checkpoint.save(root, engine, "")
    return dict(engine.state.weights.full_weights())


def resumed(config: Config, root: Path) -> tuple[str, dict[str, torch.Tensor], int]:
    engine, loader = start(config)
    try:
        checkpoint.resume(root, engine, "", print)
    except CheckpointError as error:
        return str(error), {}, 0
    loaded = {name: weight.clone() for name, weight in engine.state.weights.full_weights().items()}
    engine.train(loader, 3, lambda result: None)
    return "", loaded, engine.batches_done


@pytest.mark.thorough
def test_another_timeline_goes_on_where_all_are_the_same(tmp_path: Path) -> None:
    two = make({"sites": 2}, outer={"every": 3}, optim={"name": "muon"})
    one, often = (
        make(
            {"sites": sites},
            pipeline={"num_microbatches": m},
            optim={"name": "muon"},
            outer={"every": 2},
        )
        for sites, m in ((1, 4), (2, 2))
    )
    run_ranks(save_after, 2, two, tmp_path / "odd", 2)
    refused = run_ranks(resumed, 2, often, tmp_path / "odd")[1][0]
    assert (
        "differ at step 2, so outer.every cannot change here; they next are after step 3" in refused
    )
    common = run_ranks(save_after, 2, two, tmp_path / "even", 3)
    ((error, loaded, done),) = run_ranks(resumed, 1, one, tmp_path / "even")
    assert (error, done) == ("", 6)
    assert all(torch.equal(loaded[name], site[name]) for site in common for name in loaded)
    _, full = checkpoint.load_full(tmp_path / "even" / "step_00000003")
    assert all(torch.equal(full[name], loaded[name]) for name in loaded)
    alone = run_ranks(save_after, 1, one, tmp_path / "one", 2)[0]
    for error, loaded, done in run_ranks(resumed, 2, two, tmp_path / "one"):
        assert (error, done) == ("", 5)
        assert all(torch.equal(loaded[name], alone[name]) for name in alone)


@pytest.mark.thorough
def test_sites_that_are_left_go_on_from_their_own_state_at_any_step(tmp_path: Path) -> None:
    """Three, with a message under way, of which one does not come back, or two; and a fourth, which
    comes with the weights that the three had in common last."""
    four, three, two, one = (
        make({"sites": sites}, outer=STREAMED, pipeline={"num_microbatches": 12 // sites})
        for sites in (4, 3, 2, 1)
    )
    saved = run_ranks(save_after, 3, three, tmp_path, 5)
    assert any(not torch.equal(saved[0][name], saved[1][name]) for name in saved[0]), "never apart"
    common = checkpoint.load_full(tmp_path / "step_00000005")[1]
    more = run_ranks(gone_on, 4, four, tmp_path)
    for site, (weights, divergence, anchor, done) in enumerate(more):
        assert all(
            torch.equal(w, saved[site][name] if site < 3 else common[name])
            for name, w in weights.items()
        )
        assert (divergence, done) == ("", 8)
        assert all(torch.equal(x, more[0][2][key]) for key, x in anchor.items())
    found = run_ranks(gone_on, 2, two, tmp_path)
    for site, (weights, divergence, anchor, done) in enumerate(found):
        assert all(torch.equal(weights[name], saved[site][name]) for name in weights)
        assert (divergence, done) == ("", 8)
        assert all(torch.equal(x, found[0][2][key]) for key, x in anchor.items())
    assert any(x.any() for x in found[0][2].values())
    weights, _, _, done = run_ranks(gone_on, 1, one, tmp_path)[0]
    assert done == 8
    assert all(torch.equal(weights[name], saved[0][name]) for name in weights)


def gone_on(
    config: Config, root: Path
) -> tuple[dict[str, torch.Tensor], str, dict[str, torch.Tensor], int]:
    engine, loader = start(config)
    checkpoint.resume(root, engine, "", print)
    weights = {name: weight.clone() for name, weight in engine.state.weights.full_weights().items()}
    engine.train(loader, 3, lambda result: None)
    anchor = {
        key: x.clone()
        for key, x in engine.state.tensors().items()
        if key.startswith(("anchor", "outer"))
    }
    return weights, find_divergence(engine.state.placed(), engine.grid), anchor, engine.batches_done

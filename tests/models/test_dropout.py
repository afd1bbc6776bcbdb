"""torch's dropout in custom blocks: drawn by the key, so that it is the same training on every
grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from engines import start
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hybridpar import SequentialSpec, Trainer
from hybridpar.config import Config, from_mapping
from hybridpar.errors import ConfigError, HybridparError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.random import RandomKey

KEY = RandomKey.of(3, 0, 0)


class Dropping(nn.Module):
    """A module whose forward has dropout of the kind that `what` names."""

    def __init__(self, what: str):
        super().__init__()
        self.drop, self.channels, self.what = nn.Dropout(0.5), nn.Dropout2d(0.5), what

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        return FORWARDS[self.what](self, x)


def attention(layer: Dropping, x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(
        x, x, x, dropout_p=0.5 if layer.training else 0.0
    )


FORWARDS: dict[str, Any] = {
    "module": lambda layer, x: layer.drop(x),
    "twice": lambda layer, x: layer.drop(torch.ones_like(x)) + layer.drop(x),
    "function": lambda layer, x: functional.dropout(x, 0.5, layer.training),
    "in place": lambda layer, x: (functional.dropout(x, 0.5, layer.training, inplace=True), x)[1],
    "torch": lambda layer, x: torch.dropout(x, 0.5, layer.training),
    "channels": lambda layer, x: layer.channels(x.unflatten(1, (2, 3))).flatten(1, 2),
    "by channel": lambda layer, x: functional.dropout2d(
        x.unflatten(1, (2, 3)), 0.5, layer.training
    ).flatten(1, 2),
    "rows": lambda layer, x: layer.drop(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
    "transposed": lambda layer, x: layer.drop(x.transpose(0, 1)).transpose(0, 1),
    "attention": attention,
}


@dataclass(frozen=True)
class Row(SequentialSpec):
    """Inputs of shape (6, 5) through modules with dropout."""

    what: tuple[str, ...] = ("module",)

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Linear(5, 5)
        for what in self.what:
            yield Dropping(what)
        yield nn.Linear(5, 1)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (out.mean((1, 2)) - batch["y"]).square().mean()

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        x = np.random.default_rng([seed, number]).normal(size=(6, 5)).astype(np.float32)
        return {"x": x, "y": x[0, 0]}


def run(what: str, x: Tensor, key: RandomKey | None = KEY) -> Tensor:
    block = build_blocks(Row((what,)), Axis("tp"), [1], device="cpu")[1]
    for _ in range(2):  # the mode of the first forward in training makes no difference
        out: Tensor = block(x, {"x": x}, key)
    return out


@pytest.mark.parametrize(
    "what", ["module", "function", "in place", "torch", "channels", "by channel", "rows"]
)
def test_masks_are_those_of_the_sample_and_not_of_the_micro_batch(what: str) -> None:
    x = torch.zeros(4, 6, 5)
    before = torch.random.get_rng_state()
    whole = run(what, x)
    assert torch.equal(before, torch.random.get_rng_state())
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    halves = [run(what, x[:2]), run(what, x[2:], RandomKey.of(3, 0, 2))]
    assert torch.equal(whole, torch.cat(halves))
    assert not torch.equal(whole, run(what, x, RandomKey.of(3, 1, 0))), "another step"
    assert torch.equal(run(what, x, None), x + 1), "an evaluation"
    if "channel" in what:
        assert whole.unflatten(1, (2, 3)).flatten(2).std(-1).max() == 0


def test_each_call_of_a_module_has_a_mask_of_its_own() -> None:
    assert set(run("twice", torch.zeros(4, 6, 5)).unique().tolist()) == {0.0, 2.0, 4.0}


def test_dropout_of_what_does_not_begin_with_samples_is_refused() -> None:
    rule = r"in blocks.1 \(layer.drop\) gets a tensor of shape \(6, 4, 5\).* must be the 4 samples"
    with pytest.raises(ConfigError, match=rule):
        run("transposed", torch.zeros(4, 6, 5))


def test_a_row_trains_the_same_with_other_micro_batches() -> None:
    losses = []
    for micro_batch_size, num_microbatches in ((4, 1), (1, 4)):
        sections = {
            "pipeline": {"num_microbatches": num_microbatches, "recompute": "all"},
            "parallel": {"dp": 1},
            "train": {"micro_batch_size": micro_batch_size, "device": "cpu", "dtype": "fp64"},
        }
        engine, loader = start(from_mapping(sections, Config(model=Row(("module", "function")))))
        steps: list[float] = []
        engine.train(loader, 3, lambda step, steps=steps: steps.append(step.loss))
        losses.append(steps)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "pipeline"),
    [({"pp": 2, "dp": 2}, {"schedule": "2bw"}), ({"pp": 2}, {"recompute": "all"})],
)
def test_a_row_with_dropout_trains_as_one_process(
    grid: dict[str, int], pipeline: dict[str, Any]
) -> None:
    row = Row(("module", "function", "channels", "twice"))
    report = Trainer(
        row, pipeline={"num_microbatches": 2, **pipeline}, train={"micro_batch_size": 2}
    ).verify(grid, 2)
    assert report.ok, report.first_divergence


def test_dropout_of_torch_does_not_know_the_tokens_of_a_rank() -> None:
    class Shared(Row):
        context_parallel = True

    with pytest.raises(ConfigError, match=r"which tokens .* try hybridpar\.Dropout"):
        build_blocks(Shared(), Axis("tp"), [2], device="cpu")


@pytest.mark.parametrize("what", ["module", "function"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_in_a_function_that_torch_runs_again_is_refused(
    what: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run, in the backward, has no key: it would drop nothing, or other elements,
    without a word."""
    forward = FORWARDS[what]

    def checkpointed(layer: Dropping, x: Tensor) -> Any:
        return checkpoint(forward, layer, x, use_reentrant=reentrant)

    monkeypatch.setitem(FORWARDS, "checkpointed", checkpointed)
    with pytest.raises(ConfigError, match=r"blocks\.1 .*torch\.utils\.checkpoint"):
        run("checkpointed", torch.zeros(4, 6, 5).requires_grad_())


def test_attention_with_dropout_is_refused_with_advice() -> None:
    rule = (
        r"module 1 \(Dropping\) draws .*\(scaled_dot_product_attention\).*try dropout_p=0\.0, "
        r"or nn.Dropout"
    )
    with pytest.raises(HybridparError, match=rule):
        Trainer(Row(("attention",))).verify({"pp": 2})

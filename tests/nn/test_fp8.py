"""Products of factors in 8 bits: near those of float64, and only where they are wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar.config import Config, TrainConfig, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid
from hybridpar.memory import measure, predict
from hybridpar.nn import eight_bits
from hybridpar.train.engine import Engine
from hybridpar.train.launch import set_precision
from hybridpar.validate import resolve

CPU = torch.device("cpu")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_products_are_near_those_of_float64() -> None:
    """3 bits of mantissa: 1/16 at most of each factor, 1/32 on average. A row's size is its scale's affair."""
    x, w, dy, b = draw(3, 7, 64), draw(48, 64), draw(21, 48), draw(48)
    sizes = (10.0 ** torch.arange(-10, 11)).view(3, 7, 1)
    y = eight_bits.linear((x * sizes).bfloat16(), w).double() / sizes
    exact = x.double() @ w.double().t()
    assert ((y - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.08
    assert torch.equal(eight_bits.linear(x, w, b), eight_bits.linear(x, w) + b)
    dx, exact = eight_bits.input_gradient(dy, w).double(), dy.double() @ w.double()
    assert (dx - exact).norm() / exact.norm() < 0.05


def test_zeros_are_zeros_and_what_is_not_finite_is_seen() -> None:
    x, w = draw(4, 32), draw(16, 32)
    x[0], x[1, 3], x[2, 5] = 0, torch.inf, torch.nan
    y = eight_bits.linear(x, w)
    assert torch.equal(y[0], torch.zeros(16).bfloat16())
    assert not y[1:3].isfinite().any()
    assert y[3].isfinite().all()


class Count(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += op is torch.ops.aten._scaled_mm.default
        return op(*args, **(kwargs or {}))


def make(**sections: dict[str, Any]) -> Config:
    return from_mapping({
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 32, "vocab_size": 97,
                  **sections.get("model", {})},
        "parallel": {"dp": 1}, "pipeline": {"num_microbatches": 2, **sections.get("pipeline", {})},
        "train": {"micro_batch_size": 4, "num_steps": 8, "dtype": "bf16", "fp8": True, **sections.get("train", {})},
        "optim": {"lr": 3e-3}, "memory": sections.get("memory", {})})


def trained(config: Config) -> tuple[list[float], int]:
    """Losses of eight steps, and the number of products in 8 bits."""
    engine, losses, train = Engine(config, ProcessGrid(), CPU), list[float](), config.train
    loader = SyntheticLoader(config.model, train.micro_batch_size, config.pipeline.num_microbatches)
    with Count() as count:
        engine.train(loader, 8, lambda step: losses.append(step.loss))
    return losses, count.number


def test_hidden_matrices_are_multiplied_so() -> None:
    losses, number = trained(make())
    exact, none = trained(make(train={"fp8": False}))
    assert (number, none) == (8 * 2 * 2 * 4 * 2, 0)  # steps, micro-batches, layers, matrices, forward and backward
    assert losses == pytest.approx(exact, rel=0.01)
    assert losses != exact
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("sections", [
    {"pipeline": {"recompute": "all"}}, {"pipeline": {"split_backward": True}},
    {"pipeline": {"schedule": "gpipe", "num_microbatches": 4}, "train": {"micro_batch_size": 2},
     "memory": {"offload_activations": 2}},
], ids=str)
def test_how_it_is_computed_changes_little(sections: dict[str, dict[str, Any]], tmp_path: Any) -> None:
    """Sums of weights' gradients may be rounded in another way, which may carry a number to its neighbour."""
    config = make(**sections)
    config = replace(config, memory=replace(config.memory, folder=str(tmp_path)))
    losses, number = trained(config)
    assert losses == pytest.approx(trained(make())[0], rel=2e-3)
    assert number > 0


def test_its_memory_is_predicted() -> None:
    config = make(model={"hidden_size": 256, "seq_length": 128, "num_layers": 4})
    with measure(CPU) as meter:
        engine = Engine(config, ProcessGrid(), CPU)
        engine.train(SyntheticLoader(config.model, 4, 2), 3, lambda step: None)
        peak = meter.read().peak
    assert peak == pytest.approx(predict(config, device=CPU)[0].total, rel=0.05)


@pytest.mark.parametrize(("sections", "message"), [
    ({"train": {"dtype": "fp32"}}, "train.fp8 = .*goes with train.dtype = bf16, not fp32"),
    ({"parallel": {"tp": 2}}, "train.fp8 = .*ranks of parallel.tp = 2 have not"),
])
def test_what_it_does_not_go_with(sections: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(from_mapping({"train": {"dtype": "bf16", "fp8": True} | sections.get("train", {}),
                              "parallel": sections.get("parallel", {})}), 2)


def test_a_gpu_that_has_no_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with pytest.raises(ConfigError, match=r"compute capability 9\.0 or more, not 8\.0"):
        set_precision(TrainConfig(fp8=True, dtype="bf16"), torch.device("cuda"))
    set_precision(TrainConfig(fp8=True, dtype="bf16"), CPU)

"""Rows of ordinary modules: what is computed is what torch's Sequential computes, and what cannot be right is said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar import SequentialSpec
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks


@dataclass(frozen=True)
class Net(SequentialSpec):
    what: str = "generator"
    inputs = "numbers"

    def layers(self) -> Iterable[nn.Module]:
        if self.what == "list":
            return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
        return [] if self.what == "nothing" else self._one_by_one()

    def _one_by_one(self) -> Iterable[nn.Module]:
        first = nn.Linear(3, 8)
        yield first
        yield nn.Sequential(nn.Tanh(), nn.Linear(8, 3), first) if self.what == "tied" else nn.Tanh()
        yield nn.Linear(8, 5)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(out, batch["label"])

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        random = np.random.default_rng([seed, number])
        name = "x" if self.what == "other input" else "numbers"
        return {name: random.normal(size=3).astype(np.float32), "label": random.integers(5)}


@pytest.mark.parametrize("what", ["generator", "list"])
def test_micro_batches_add_up_to_the_batch_of_a_sequential(what: str) -> None:
    model, wide = Net(what), torch.float64
    assert model.num_blocks == 3
    assert [model.activation_shape(number) for number in range(2)] == [(8,), (8,)]
    blocks = build_blocks(model, Axis("tp"), range(3), device="cpu", dtype=wide)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).to(wide)
    plain.load_state_dict({name.replace(".layer", ""): value for name, value in
                           nn.Sequential(*blocks.values()).state_dict().items()})
    x, label = torch.randn(6, 3), torch.tensor([0, 1, 2, 3, 4, 0])
    whole = nn.functional.cross_entropy(plain(x.to(wide)), label)
    whole.backward()
    total = 0.0
    for part in (slice(0, 4), slice(4, 6)):
        batch, h = {"numbers": x[part], "label": label[part], "num_samples": torch.tensor(6.0, dtype=wide)}, None
        for block in blocks.values():
            h = block(h, batch, None)
        h["loss"].backward()
        total += h["loss"].item()
    assert total == pytest.approx(whole.item(), rel=1e-12)
    ours = [parameter.grad for block in blocks.values() for parameter in block.parameters()]
    assert all(torch.allclose(a, p.grad, rtol=1e-12) for a, p in zip(ours, plain.parameters(), strict=True))


def test_a_generator_makes_only_its_own_module_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    construct = nn.Linear.__init__

    def noted(self: nn.Linear, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        made.append(self.weight.device.type)

    assert Net().num_blocks == 3  # found once
    monkeypatch.setattr(nn.Linear, "__init__", noted)
    build_blocks(Net(), Axis("tp"), [2], device="cpu")
    assert made[:2] == ["meta", "cpu"]


@pytest.mark.parametrize(("what", "text"), [
    ("tied", r"one parameter in two modules \(weight of module 0, 2.weight of module 1\)"),
    ("nothing", r"has no modules"),
    ("other input", r"takes the input 'numbers', which its samples lack: they have x, label; try inputs = 'x'"),
])
def test_rows_that_cannot_be_right(what: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.spec = .*{text}"):
        _ = Net(what).num_blocks

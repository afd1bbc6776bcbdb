"""Parameters that move against the sign of their gradient, beside those of any optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridpar.config import OptimConfig
from hybridpar.grid import Axis
from hybridpar.nn.placement import Init, Placement
from hybridpar.ops.update import Weights
from hybridpar.optim import ParameterSlot, build_optimizer
from hybridpar.optim.norm import counted

USUAL = Placement((5, 3), Init("zeros"), matrices=(((0, 5),),))
SIGNED = Placement((4,), Init("zeros"), weight_decay=0.0, sign_step=0.25)
SLOTS = [
    ParameterSlot("a", USUAL),
    ParameterSlot("bias", SIGNED),
    ParameterSlot("b", replace(USUAL, matrices=())),
    ParameterSlot("other", replace(SIGNED, sign_step=0.5)),
]


def numbers(slots: list[ParameterSlot], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator) for slot in slots]


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "sgd"])
@pytest.mark.parametrize("staleness", ["none", "extrapolation"])
def test_others_have_the_bits_of_an_optimizer_without_them(name: str, staleness: str) -> None:
    settings = OptimConfig(name, lr=0.1, weight_decay=0.1, staleness=staleness)  # type: ignore[arg-type]
    usual = [slot for slot in SLOTS if not slot.placement.sign_step]
    both = build_optimizer(settings, SLOTS, Axis("tp"))
    alone = build_optimizer(settings, usual, Axis("tp"))
    weights = numbers(SLOTS, 1)
    plain = [weights[0].clone(), weights[2].clone()]
    start = [w.clone() for w in weights]
    steps = torch.zeros(4)
    for seed in (2, 3, 4):
        gradients = numbers(SLOTS, seed)
        gradients[1][2] = 0
        steps += gradients[1].sign()
        alone.step(plain, [gradients[0].clone(), gradients[2].clone()], lr=0.1, gradient_scale=0.5)
        both.step(weights, gradients, lr=0.1, gradient_scale=0.5)
    assert torch.equal(weights[0], plain[0])
    assert torch.equal(weights[2], plain[1])
    torch.testing.assert_close(weights[1], start[1] - 0.25 * steps)
    assert weights[1][2] == start[1][2]
    assert both.state_tensors().keys() == alone.state_tensors().keys()


def test_they_go_into_another_buffer_and_a_working_copy() -> None:
    """2BW has them with predicted weights."""
    settings = OptimConfig("adamw")
    slots = [SLOTS[1]]
    optimizer = build_optimizer(settings, slots, Axis("tp"))
    (old,) = numbers(slots, 1)
    (gradient,) = numbers(slots, 2)
    new = torch.empty(4)
    working = torch.empty(4, dtype=torch.bfloat16)
    optimizer.step(Weights([old], [new], [working], predicted=True), [gradient], lr=3.0)
    assert torch.equal(new, old - 0.25 * gradient.sign())
    assert torch.equal(working, (new * 2 - old).bfloat16())


def test_they_are_no_part_of_the_norm() -> None:
    gradients = numbers(SLOTS, 1)
    assert [x.data_ptr() for x in counted(gradients, SLOTS)] == [
        gradients[0].data_ptr(),
        gradients[2].data_ptr(),
    ]

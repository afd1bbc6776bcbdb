"""Recomputation, and what importing it costs; stages that are recomputed are in
pipeline/run/test_stage.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybridpar.autograd import recomputed
from hybridpar.errors import HybridparError


def test_input_alone_is_kept_and_seen_by_hooks() -> None:
    seen: list[Tensor] = []
    runs: list[int] = []

    def function(x: Tensor, weight: Tensor) -> Tensor:
        runs.append(1)
        return ((x * weight).exp() * weight).sin().sum()

    def see(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    x, weight = (
        torch.linspace(low, 1, 5, dtype=torch.float64, requires_grad=True) for low in (-1, 0.5)
    )
    expected = torch.autograd.grad(function(x, weight), (x, weight))
    with saved_tensors_hooks(see, lambda x: x):
        out = recomputed(function, x, weight)
    assert [one.data_ptr() for one in seen] == [x.data_ptr()]
    runs.clear()
    for _ in range(2):  # a second backward makes it all again
        found = torch.autograd.grad(out, (x, weight), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(runs) == 2


def test_it_runs_up_to_the_last_tensor_that_is_needed() -> None:
    reached: list[str] = []

    def function(x: Tensor) -> Tensor:
        x = x.exp()
        reached.append("needed")
        x = x + 1
        reached.append("not needed")
        return x

    x = torch.ones(3, requires_grad=True)
    recomputed(function, x).sum().backward()
    assert reached == ["needed", "not needed"], "exp saves its result: the backward ends there"
    assert torch.equal(x.grad, torch.ones(3).exp())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda x: x.exp().sum(), "saved 2 tensors in its first forward and 1 when it ran again"),
        (
            lambda x: x[:2].exp().sin().sum(),
            r"saved \(\(3,\), torch.float32\) in its first forward and \(\(2,\), torch.float32\)",
        ),
        (lambda x: x.double().exp().sin().sum(), r"saved .* and \(\(3,\), torch.float64\) when"),
    ],
    ids=["fewer", "shape", "type"],
)
def test_a_function_that_does_something_else_the_second_time_is_refused(
    again: Callable[[Tensor], Tensor], message: str
) -> None:
    runs: list[int] = []

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        return x.exp().sin().sum() if len(runs) == 1 else again(x)

    out = recomputed(function, torch.ones(3, requires_grad=True))
    with pytest.raises(HybridparError, match=message):
        out.backward()


@pytest.mark.parametrize("backward_casts", [False, True])
def test_it_runs_again_under_the_same_autocast_and_draws_the_same_numbers(
    backward_casts: bool,
) -> None:
    """Whatever was drawn since, which goes on as if nothing had been drawn again."""
    weight = torch.randn(8, 8)

    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x @ weight, 0.5).exp()

    results = []
    for run in (lambda x: function(x), lambda x: recomputed(function, x)):
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=not backward_casts):
            out = run(x)
        assert out.dtype == (torch.float32 if backward_casts else torch.bfloat16)
        torch.rand(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_casts):
            out.sum().backward()
        results.append((out, x.grad, torch.rand(3)))
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.thorough
def test_a_run_that_recomputes_imports_no_compiler() -> None:
    """Each would take up to a second of every start."""
    text = """import sys, torch, hybridpar.train.job; from hybridpar.autograd import backward_from, recomputed
x = torch.ones(2, requires_grad=True)
backward_from(torch.autograd.graph.get_gradient_edge(recomputed(torch.exp, x)), torch.ones(2))
sys.exit(", ".join({"sympy", "torch._dynamo", "triton"} & {*sys.modules}) or 0)"""
    subprocess.run([sys.executable, "-c", text], check=True)

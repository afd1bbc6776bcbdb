"""The passes of optimizers: every backend against float64 written out, and what changes no bit of
the compiled ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

import pytest
import torch
from ops.places import places
from torch import Tensor

from hybridpar import ops
from hybridpar.errors import ConfigError
from hybridpar.ops.backends import registry
from hybridpar.ops.update import AdamStep, Weights

SIZES = [
    (1,),
    (7, 5),
    (0,),
    (31,),
    (33,),
    (3, 0),
    (30, 257),
    (40_000,),
]  # one is more than a thread takes at a time
DECAYS = [0.1, 0.0, 0.1, 0.0, 0.3, 0.1, 0.0, 0.1]
PLAIN = AdamStep(0.3, 0.9, 0.95, 1e-8, 3)
STEPS = {
    "adamw": PLAIN,
    "unscaled": replace(PLAIN, scale=1.0),
    "nadamw": replace(PLAIN, nesterov=(1.7, 0.4)),
    "first": replace(PLAIN, count=1),
}
TYPES = [
    (torch.float64, None),
    (torch.float64, torch.float64),
    (torch.float32, None),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]
EXACT = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}

everywhere = pytest.mark.parametrize(("backend", "device"), places("optimizer"))
compiled = pytest.mark.parametrize(("backend", "device"), places("optimizer", reference=False))
needs_cpp = pytest.mark.skipif(
    registry.backends("optimizer")[0].unsupported("cpu") is not None, reason="needs hybridpar._C"
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randoms(
    seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu", *, positive: bool = False
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(s, generator=g, dtype=torch.float64).float() for s in SIZES]
    return [(x.abs() if positive else x).to(device, dtype) for x in drawn]


def poisoned(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [torch.full(s, torch.nan, dtype=dtype, device=device) for s in SIZES]


def written_out(
    step: AdamStep, lr: float
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """New weights, means, squares and directions in float64."""
    news = []
    means = []
    squares = []
    directions = []
    for x, g, m, v, decay in zip(
        randoms(0), randoms(1), randoms(2), randoms(3, positive=True), DECAYS, strict=True
    ):
        g = g * float(step.scale)
        m = step.beta1 * m + (1 - step.beta1) * g
        v = step.beta2 * v + (1 - step.beta2) * g * g
        a, b = step.nesterov or (1 / (1 - step.beta1**step.count), 0.0)
        direction = (a * m + b * g) / (v.sqrt() / sqrt(1 - step.beta2**step.count) + step.eps)
        news.append((1 - lr * decay) * x - lr * direction)
        means.append(m)
        squares.append(v)
        directions.append(direction)
    return news, means, squares, directions


def assert_close(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=tolerance, atol=4 * tolerance)


def weights_of(
    dtype: torch.dtype,
    working: torch.dtype | None,
    device: str,
    *,
    in_place: bool,
    predicted: bool = False,
) -> Weights:
    old = randoms(0, dtype, device)
    copies = [] if working is None else poisoned(working, device)
    return Weights(old, old if in_place else poisoned(dtype, device), copies, predicted)


def moments_of(dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    return randoms(2, dtype, device), randoms(3, dtype, device, positive=True)


@everywhere
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("dtype", "working"), TYPES, ids=str)
def test_adam_against_float64(
    backend: str,
    device: str,
    step: str,
    in_place: bool,
    dtype: torch.dtype,
    working: torch.dtype | None,
) -> None:
    weights = weights_of(dtype, working, device, in_place=in_place)
    gradients, (means, squares) = randoms(1, dtype, device), moments_of(dtype, device)
    ops.optimizer(weights.old[0], backend).adam(
        weights, gradients, (means, squares), DECAYS, 0.05, STEPS[step]
    )
    news, *moments, _ = written_out(STEPS[step], 0.05)
    assert_close(list(weights.new), news, EXACT[dtype])
    assert_close(means, moments[0], EXACT[dtype])
    assert_close(squares, moments[1], EXACT[dtype])
    for new, copy in zip(weights.new, weights.working, strict=False):
        assert torch.equal(copy, new.to(copy.dtype)), "rounded to nearest even"
    if not in_place:
        assert all(map(torch.equal, weights.old, randoms(0, dtype, device))), (
            "the version that is in use stays"
        )


@everywhere
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("working", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_predicted_weights_go_on_by_the_update(
    backend: str, device: str, in_place: bool, working: torch.dtype
) -> None:
    weights = weights_of(torch.float32, working, device, in_place=in_place, predicted=True)
    gradients = randoms(1, torch.float32, device)
    moments = moments_of(torch.float32, device)
    ops.optimizer(weights.old[0], backend).adam(weights, gradients, moments, DECAYS, 0.05, PLAIN)
    for old, new, copy in zip(
        randoms(0, torch.float32, device), weights.new, weights.working, strict=True
    ):
        assert torch.equal(copy, (2 * new - old).to(working))


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_directions_and_a_move_along_them(backend: str, device: str, dtype: torch.dtype) -> None:
    values = randoms(0, dtype, device)
    gradients = randoms(1, dtype, device)
    passes = ops.optimizer(values[0], backend)
    passes.adam_directions(values, gradients, moments_of(dtype, device), DECAYS, PLAIN)
    wanted = [
        -(u + decay * x)
        for u, x, decay in zip(written_out(PLAIN, 0.1)[3], randoms(0), DECAYS, strict=True)
    ]
    assert_close(gradients, wanted, EXACT[dtype])
    weights = weights_of(
        dtype, torch.float16 if dtype == torch.float32 else None, device, in_place=False
    )
    keeps = [1.0, 0.5] * 4
    factors = [0.1, 0.1, -0.2, 3.0] * 2
    passes.move(weights, gradients, keeps, factors)
    moved = [k * x + f * u for x, u, k, f in zip(randoms(0), wanted, keeps, factors, strict=True)]
    assert_close(list(weights.new), moved, 4 * EXACT[dtype])
    assert all(
        torch.equal(c, x.to(c.dtype)) for c, x in zip(weights.working, weights.new, strict=False)
    )


@everywhere
def test_extrapolation(backend: str, device: str) -> None:
    old, new, previous = (randoms(seed, device=device) for seed in range(3))
    weights = Weights(old, new, poisoned(torch.float64, device))
    ops.optimizer(old[0], backend).extrapolate(weights, previous)
    updates = [b - a for a, b in zip(randoms(0), randoms(1), strict=True)]
    wanted = [b + u - p for b, u, p in zip(randoms(1), updates, randoms(2), strict=True)]
    for got, want in ((new, wanted), (weights.working, wanted), (previous, updates)):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


@compiled
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bits_do_not_depend_on_the_place_or_on_threads(
    backend: str, device: str, dtype: torch.dtype, threads: None
) -> None:
    """Any piece of a tensor alone gives the same as within the whole: replicas may cut parameters
    as they like."""
    size = 200_000
    passes = ops.optimizer(torch.ones(1, device=device), backend)
    g = torch.Generator().manual_seed(5)
    columns = [torch.randn(size, generator=g).to(device, dtype) for _ in range(4)]
    columns[3].abs_()

    def run(cuts: list[int]) -> list[Tensor]:
        """The whole results of running on pieces that are tensors of their own."""
        old, grads, means, squares = ([x.clone() for x in c.split(cuts)] for c in columns)
        weights = Weights(
            old,
            [torch.full_like(x, torch.nan) for x in old],
            [torch.empty_like(x) for x in old],
            True,
        )
        passes.adam(weights, grads, (means, squares), [0.1] * len(cuts), 0.05, STEPS["nadamw"])
        return [torch.cat(list(x)) for x in (weights.new, weights.working, means, squares)]

    whole = run([size])
    torch.set_num_threads(4)
    for cuts in ([size], [1, 2, 3, 5, 8, 13, size - 32], [99_999, 100_001]):
        assert all(map(torch.equal, run(cuts), whole)), cuts


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_of_squares(backend: str, device: str, dtype: torch.dtype, threads: None) -> None:
    tensors = randoms(1, dtype, device)
    passes = ops.optimizer(torch.ones(1, device=device), backend)
    wanted = torch.stack([x.square().sum() for x in randoms(1)])
    got = passes.sum_squares(tensors)
    assert got.dtype == torch.float64
    precision = 1e-14 if backend != "torch" else {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(got.cpu(), wanted, rtol=precision, atol=0)
    if backend != "torch":
        torch.set_num_threads(3)
        assert torch.equal(passes.sum_squares(tensors), got)
    assert passes.sum_squares([]).shape == (0,)
    for bad in (torch.nan, torch.inf, -torch.inf):
        tensors[-1][12_345] = bad
        assert passes.sum_squares(tensors).isfinite().tolist() == [True] * (len(SIZES) - 1) + [
            False
        ]


@compiled
def test_squares_beyond_float32_are_summed(backend: str, device: str) -> None:
    large = torch.full((3,), 1e30, device=device)
    assert float(ops.optimizer(large, backend).sum_squares([large])) == pytest.approx(3e60)


@compiled
def test_autograd_hears_of_what_is_written(backend: str, device: str) -> None:
    """A backward that still needs the version that is written over must fail, not go on with other
    weights."""
    w = torch.ones(3, device=device)
    leaf = w.view(3).detach().requires_grad_()
    y = (leaf * leaf).sum()
    one = [torch.ones(3, device=device)]
    ops.optimizer(w, backend).move(Weights(one, [w]), one, [1.0], [1.0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@needs_cpp
def test_refuses_what_does_not_fit() -> None:
    passes = ops.optimizer(torch.ones(1), "cpp")
    a = [torch.ones(3)]
    b = [torch.ones(4)]
    with pytest.raises(RuntimeError, match=r"directions\[0\] has not the elements of old"):
        passes.move(Weights.in_place(a), b, [1.0], [1.0])
    with pytest.raises(RuntimeError, match="must be as many"):
        passes.move(Weights.in_place(a), [], [1.0], [1.0])
    with pytest.raises(RuntimeError, match="needs a keep and a factor"):
        passes.move(Weights.in_place(a), a, [], [1.0])
    with pytest.raises(RuntimeError, match="contiguous"):
        passes.move(Weights.in_place([torch.ones(3, 2).t()]), [torch.ones(2, 3)], [1.0], [1.0])
    with pytest.raises(RuntimeError, match="float32 or float64 weights"):
        passes.move(Weights.in_place([torch.ones(3).bfloat16()]), a, [1.0], [1.0])
    with pytest.raises(ConfigError, match=r"kernels\.optimizer = 'abacus': unknown backend"):
        ops.optimizer(torch.ones(1), "abacus")


@compiled
@pytest.mark.parametrize("shift", [1, 3, 4])
def test_adam_writes_equal_bits_at_any_address(backend: str, device: str, shift: int) -> None:
    """Parts of flat buffers (ZeRO-1) begin anywhere, whole parameters at multiples of 64 bytes."""

    def at(shift: int, tensors: list[Tensor]) -> list[Tensor]:
        placed = [x.new_empty(x.numel() + shift)[shift:].view(x.shape) for x in tensors]
        for to, x in zip(placed, tensors, strict=True):
            to.copy_(x)
        return placed

    results = []
    for offset in (0, shift):
        weights = Weights(
            at(offset, randoms(0, torch.float32, device)),
            at(offset, poisoned(torch.float32, device)),
            at(offset, poisoned(torch.bfloat16, device)),
        )
        moments = tuple(at(offset, x) for x in moments_of(torch.float32, device))
        gradients = at(offset, randoms(1, torch.float32, device))
        ops.optimizer(weights.old[0], backend).adam(
            weights, gradients, moments, DECAYS, 1e-2, PLAIN
        )
        results.append([*weights.new, *weights.working, *moments[0], *moments[1]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)

"""Recorder on plain PyTorch: the experiment of Li et al. (ISPASS 2021) on users' models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from memory_behaviour.traces import recording
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.user_models import ITERATIONS, alexnet, mlp, recorded, resnet, trained
from hybridpar.memory_behaviour.analysis.behaviour import analyse
from hybridpar.memory_behaviour.events import Category, Span, What, lives
from hybridpar.prediction import measure

pytestmark = pytest.mark.usefixtures("observer")
CPU = torch.device("cpu")
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "mlp": lambda: (mlp(), (32,)),
    "alexnet": lambda: (alexnet(width=4, size=63), (3, 63, 63)),
    "resnet": lambda: (resnet(width=4, blocks=(1, 1)), (3, 32, 32)),
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9, foreach=False),
    "momentum foreach": partial(torch.optim.SGD, momentum=0.9, foreach=True),
    "momentum fused": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "Adam": partial(torch.optim.Adam, foreach=False),
    "Adam foreach": partial(torch.optim.Adam, foreach=True),
    "Adam fused": partial(torch.optim.Adam, fused=True),
}


def train(
    name: str,
    optimizer: str = "momentum",
    *,
    batch: int = 4,
    to_none: bool = True,
    model: nn.Module | None = None,
) -> list[Span]:
    """The events of five iterations of training."""
    torch.manual_seed(0)
    made, shape = MODELS[name]()
    model = model or made
    x = torch.randn(batch, *shape)
    y = torch.randint(10, (batch,))
    sgd = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    return recorded(model, sgd, x, y, to_none=to_none)


def behaviours(spans: list[Span]) -> list[list[tuple[What, int, str]]]:
    """(kind, bytes, operator) of each iteration; the first is without what was there before."""
    rows: dict[int, list[tuple[What, int, str]]] = {}
    for span in spans:
        rows.setdefault(span.step, []).extend(
            (e.what, e.num_bytes, e.op) for e in span.events if not (e.name and not e.op)
        )
    return [rows[step] for step in sorted(rows)]


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_every_iteration_but_the_first_does_the_same(
    name: str, optimizer: str, to_none: bool
) -> None:
    spans = train(name, optimizer, to_none=to_none)
    first, second, *others = behaviours(spans)
    assert all(row == second for row in others)
    assert analyse(spans).stable_until == ITERATIONS
    assert analyse(spans).stable_from in ((1, 2) if optimizer == "SGD" else (2,))
    grads = sorted(p.numel() * 4 for p in MODELS[name]()[0].parameters())
    born, freed = (
        Counter(size for what, size, _ in second if what is kind)
        for kind in (What.MALLOC, What.FREE)
    )
    assert born == freed, "an iteration gives back what it takes"
    frees = Counter(size for what, size, _ in first if what is What.FREE)
    more = Counter(size for what, size, _ in first if what is What.MALLOC) - frees
    state = 0 if optimizer == "SGD" else 2 if "Adam" in optimizer else 1
    kept = Counter(grads * (1 + state))
    if "Adam" in optimizer:
        kept[4] += len(grads)  # counts of steps
    assert more == kept, "gradients and the optimizer's state"


def test_an_iteration_of_the_paper_s_mlp() -> None:
    """Known by hand: 11 operators of forward and backward make 15 blocks of which none is left."""
    _, row, *_ = behaviours(train("mlp", "SGD", batch=16))
    assert Counter(what for what, _, _ in row) == {
        What.MALLOC: 15,
        What.FREE: 15,
        What.READ: 34,
        What.WRITE: 19,
    }
    assert [(what.value, op) for what, _, op in row[-2:]] == [
        ("read", "aten::add_"),
        ("write", "aten::add_"),
    ]


BASIC = {"basic resnet": lambda: (resnet(width=4, blocks=(1, 1), bottleneck=False), (3, 32, 32))}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("make", {**MODELS, **BASIC}.values(), ids={**MODELS, **BASIC})
def test_ghosts_tell_the_same_events(make: Callable[[], tuple[nn.Module, tuple[int, ...]]]) -> None:
    predicted, real = (
        [
            [event._replace(time=0.0) for event in span.events]
            for span in trained(lambda: make()[0], make()[1], 4, ghosts=ghosts)
        ]
        for ghosts in (True, False)
    )
    assert predicted == real


def breakdown(spans: list[Span]) -> dict[str, int]:
    """Bytes at the peak: parameters, gradients, optimizer, inputs, and intermediates, which are all
    the others."""
    found: Counter[str] = Counter()
    for category, num_bytes in analyse(spans).peak.by_category.items():
        plain = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER, Category.BATCH)
        found[category.value if category in plain else "intermediates"] += num_bytes
    return found


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ["alexnet", "resnet"])
def test_intermediates_dominate_and_grow_with_the_batch(name: str) -> None:
    small, large = (breakdown(train(name, batch=batch)) for batch in (64, 256))
    parameters = sum(t.numel() * t.element_size() for t in MODELS[name]()[0].state_dict().values())
    assert small["weights"] == large["weights"] == parameters
    assert small["optimizer"] == large["optimizer"] > 0
    assert large["batch"] == 4 * small["batch"]
    assert large["intermediates"] / small["intermediates"] == pytest.approx(4, rel=0.1)
    assert large["intermediates"] > 0.75 * (
        sum(large.values()) - large["batch"]
    )  # images are large, layers thin here


@pytest.mark.thorough(keep=1)
def test_parameters_and_intermediates_grow_with_depth() -> None:
    found = [
        breakdown(train("resnet", batch=16, model=resnet(width=4, blocks=(n, n))))
        for n in (1, 2, 3)
    ]
    intermediates = [one["intermediates"] for one in found]
    assert intermediates[2] - intermediates[1] == pytest.approx(
        intermediates[1] - intermediates[0], rel=0.02
    )
    assert found[0]["weights"] < found[1]["weights"] < found[2]["weights"]
    assert len({one["batch"] for one in found}) == 1


class Residual(nn.Module):
    """Adds what it computes to its input, whose gradient is then a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), Residual(), Residual(), nn.Linear(64, 10))


@pytest.mark.parametrize("make", [mlp, residual])
def test_the_peak_is_the_allocator_s(make: Callable[[], nn.Module]) -> None:
    def run() -> None:
        torch.manual_seed(0)
        x = torch.randn(128, 32)
        y = torch.randint(10, (128,))
        model = make()
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            sgd.zero_grad()
            cross_entropy(model(x), y).backward()
            sgd.step()

    spans, recorder = recording()
    with recorder:
        run()
    recorder.close()
    with measure(CPU) as meter:
        run()
    assert analyse(spans).peak.num_bytes == meter.read().peak


@pytest.mark.parametrize("optimizer", ["momentum fused", "Adam foreach"])
def test_a_user_s_blocks_have_categories(optimizer: str) -> None:
    model = MODELS["resnet"]()[0]
    spans = train("resnet", optimizer, model=model)
    sizes: dict[Category, Counter[int]] = {}
    for life in lives(spans):
        sizes.setdefault(life.category, Counter())[life.num_bytes] += 1
    parameters = Counter(p.numel() * 4 for p in model.parameters())
    buffers = Counter(b.numel() * b.element_size() for b in model.buffers())
    assert sizes[Category.WEIGHTS] == parameters + buffers
    assert sizes[Category.GRADIENTS] == Counter(
        {size: n * ITERATIONS for size, n in parameters.items()}
    )
    moments = 2 if "Adam" in optimizer else 1
    counts = Counter({4: len(list(model.parameters()))} if "Adam" in optimizer else {})
    assert (
        sizes[Category.OPTIMIZER]
        == Counter({size: n * moments for size, n in parameters.items()}) + counts
    )
    assert sum(sizes[Category.BATCH].values()) == 2

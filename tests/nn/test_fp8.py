"""Linear layers in fp8: near float64, and on weights that are quantized once for each version."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar.config import Config, TrainConfig, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.build import build_blocks
from hybridpar.nn import fp8
from hybridpar.nn.fp8 import Fp8Weight
from hybridpar.nn.placement import ParallelModule
from hybridpar.prediction import measure, predict
from hybridpar.runtime.stage import Stage
from hybridpar.state import RankState, StatePolicy
from hybridpar.state.fp8 import unquantized_layers
from hybridpar.state.residency.chunks import Memory
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.engine import Engine
from hybridpar.train.launching.launch import set_precision
from hybridpar.validate import resolve

CPU = torch.device("cpu")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def quantized(weight: Tensor) -> Fp8Weight:
    made = Fp8Weight(weight)
    made.refresh()
    return made


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_products_are_near_those_of_float64(rows: int) -> None:
    """3 bits of mantissa: 1/16 at most of each factor, 1/32 on average. The scale of a row takes up
    its magnitude."""
    x = draw(rows, 3, 64)
    w = draw(48, 64)
    dy = draw(3 * rows, 48)
    b = draw(48)
    sizes = 10.0 ** torch.linspace(-10, 10, 3 * rows).view(rows, 3, 1)
    weight = quantized(w)
    y = fp8.linear((x * sizes).bfloat16(), weight).double() / sizes
    exact = x.double() @ w.double().t()
    assert ((y - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.09
    with_bias = fp8.linear(x, weight, b).double()
    exact = fp8.linear(x, weight).double() + b.double()
    assert (with_bias - exact).abs().max() <= 2**-7 * exact.abs().max()  # both are rounded
    dx = fp8.input_gradient(dy, weight).double()
    exact = dy.double() @ w.double()
    assert (dx - exact).norm() / exact.norm() < 0.05


def test_zeros_are_zeros_and_what_is_not_finite_is_seen() -> None:
    x = draw(4, 32)
    w = draw(16, 32)
    x[0], x[1, 3], x[2, 5] = 0, torch.inf, torch.nan
    y = fp8.linear(x, quantized(w))
    assert torch.equal(y[0], torch.zeros(16).bfloat16())
    assert not y[1:3].isfinite().any()
    assert y[3].isfinite().all()
    for broken in (torch.inf, torch.nan):
        w[2, 3] = broken
        weight = quantized(w)
        y = fp8.linear(x[3:], weight)
        dx = fp8.input_gradient(draw(5, 16), weight)
        assert (~y.isfinite()).nonzero()[:, 1].tolist() == [2]
        assert (~dx.isfinite()).nonzero()[:, 1].unique().tolist() == [3]


class Count(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += op is torch.ops.aten._scaled_mm.default
        return op(*args, **(kwargs or {}))


def make(**sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "num_heads": 4,
                "seq_length": 32,
                "vocab_size": 97,
                **sections.get("model", {}),
            },
            "parallel": {"dp": 1, **sections.get("parallel", {})},
            "pipeline": {"num_microbatches": 2, **sections.get("pipeline", {})},
            "train": {
                "micro_batch_size": 4,
                "num_steps": 8,
                "dtype": "bf16",
                "fp8": True,
                **sections.get("train", {}),
            },
            "optim": {"lr": 3e-3, **sections.get("optim", {})},
            "memory": sections.get("memory", {}),
        }
    )


def trained(config: Config) -> tuple[list[float], int]:
    """Losses of eight steps, and the number of products in fp8."""
    engine = Engine(JobPlan(config), ProcessGrid(), CPU)
    losses = list[float]()
    train = config.train
    loader = SyntheticLoader(config.model, train.micro_batch_size, config.pipeline.num_microbatches)
    with Count() as count:
        engine.train(loader, 8, lambda step: losses.append(step.loss))
    return losses, count.number


def test_hidden_matrices_are_multiplied_so() -> None:
    losses, number = trained(make())
    exact, none = trained(make(train={"fp8": False}))
    assert (number, none) == (
        8 * 2 * 2 * 4 * 2,
        0,
    )  # steps, micro-batches, layers, matrices, forward and backward
    assert losses == pytest.approx(exact, rel=0.01)
    assert losses != exact
    assert losses[-1] < losses[0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "sections",
    [
        {"pipeline": {"recompute": "all"}},
        {"pipeline": {"split_backward": True}},
        {
            "pipeline": {"schedule": "gpipe", "num_microbatches": 4},
            "train": {"micro_batch_size": 2},
            "memory": {"offload_activations": 2},
        },
    ],
    ids=str,
)
def test_how_it_is_computed_changes_little(
    sections: dict[str, dict[str, Any]], tmp_path: Any
) -> None:
    """Sums of weights' gradients may be rounded in another way, which may carry a number to its
    neighbour."""
    config = make(**sections)
    config = replace(config, memory=replace(config.memory, folder=str(tmp_path)))
    losses, number = trained(config)
    assert losses == pytest.approx(trained(make())[0], rel=2e-3)
    assert number > 0


LIVES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "1f1b": (1, {}),
    "gpipe": (1, {"pipeline": {"schedule": "gpipe"}}),
    "2bw": (1, {"pipeline": {"schedule": "2bw"}}),
    "recomputation": (1, {"pipeline": {"recompute": "all"}}),
    "two stages": (2, {"parallel": {"pp": 2}}),
    "two stages, 2bw": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "2bw"}}),
    "two stages, pipedream": (
        2,
        {"parallel": {"pp": 2}, "pipeline": {"schedule": "pipedream"}, "optim": {"clip_grad": 0.0}},
    ),
    "predicted weights": (
        2,
        {
            "parallel": {"pp": 2},
            "pipeline": {"schedule": "2bw"},
            "optim": {"staleness": "prediction"},
        },
    ),
    "V": (
        2,
        {
            "model": {"num_layers": 6},
            "parallel": {"pp": 2},
            "pipeline": {"stage_layout": "v", "split_backward": True, "num_microbatches": 4},
        },
    ),
    "ZeRO-1": (2, {"parallel": {"dp": 2, "zero": 1}}),
    "ZeRO-2": (2, {"parallel": {"dp": 2, "zero": 2}}),
    "host optimizer": (1, {"memory": {"host_optimizer": True}}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LIVES)
def test_weights_quantized_once_a_version_are_those_quantized_in_each_product(name: str) -> None:
    """To the bit, over steps, skipped ones too, evaluations, loaded states, and new starting
    values."""
    size, sections = LIVES[name]
    lives = run_ranks(two_lives, size, sections) if size > 1 else [two_lives(sections)]
    for (losses, weights, products, refreshed), (expected, same, *_) in lives:
        assert repr(losses) == repr(expected)
        assert weights == same
        assert products > refreshed > 0


def two_lives(sections: dict[str, dict[str, Any]]) -> list[Any]:
    return [life(sections, anew) for anew in (False, True)]


def life(
    sections: dict[str, dict[str, Any]], anew: bool
) -> tuple[list[float], dict[str, Any], int, int]:
    """Losses and the state's bytes after training, and the numbers of products and of quantized
    weights.

    Args:
        sections: Sections of the configuration.
        anew: Quantize the weight in each product, from the buffer that its leaf views.
    """
    config = make(**sections)
    parallel = config.parallel
    losses = list[float]()
    products = refreshed = 0
    refresh = Fp8Weight.refresh
    product = fp8._product

    def counted(weight: Fp8Weight) -> None:
        nonlocal refreshed
        refreshed += 1
        refresh(weight)

    engine = Engine(JobPlan(config), ProcessGrid(dp=parallel.dp, pp=parallel.pp), CPU)
    owners: dict[int, Fp8Weight] = {}
    for weight in chain.from_iterable(engine.state.weights.fp8._weights):
        owners |= {id(weight.rows): weight, id(weight.columns): weight}

    def multiplied(a: Tensor, b: Tensor, *others: Any) -> Tensor:
        nonlocal products
        products += 1
        if anew:
            refresh(owners[id(b)])
        return product(a, b, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Weight, "refresh", counted)
        patch.setattr(fp8, "_product", multiplied)
        factor = BatchPolicy.factor
        patch.setattr(
            BatchPolicy,
            "factor",
            lambda policy, batch, result: None if batch % 4 == 1 else factor(policy, batch, result),
        )
        loader = SyntheticLoader(
            config.model, 4, engine.shape.num_microbatches, engine.grid.dp.rank, engine.grid.dp.size
        )

        def train(number: int) -> None:
            engine.train(loader, number, lambda step: losses.append(step.loss))

        train(3)
        saved = {key: tensor.clone() for key, tensor in engine.state.tensors().items()}
        meta = engine.state_meta()
        losses += engine.evaluate(loader, 1).values()
        train(2)
        engine.load_state(saved, meta)  # weights of another version in the same buffers
        losses += engine.evaluate(loader, 1).values()
        train(3)
        engine.state.initialize(5)
        losses += engine.evaluate(loader, 1).values()
    return (
        losses,
        {key: tensor.float().sum().item() for key, tensor in saved.items()},
        products,
        refreshed,
    )


def test_frozen_weights_are_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(pipeline={"schedule": "2bw"})
    blocks = build_blocks(config.model, ProcessGrid().tp, range(4), dtype=torch.bfloat16)
    for module in blocks[1].modules():
        if isinstance(module, ParallelModule):
            module.placements = {
                n: replace(p, trainable=False) for n, p in module.placements.items()
            }
    for parameter in blocks[1].parameters():
        parameter.requires_grad_(requires_grad=False)
    state = RankState(Stage(blocks), ProcessGrid(), StatePolicy(config, 2, 1), Memory(CPU))
    refreshed = list[int]()
    refresh = Fp8Weight.refresh

    def counted(weight: Fp8Weight) -> None:
        refreshed.append(id(weight))
        refresh(weight)

    monkeypatch.setattr(Fp8Weight, "refresh", counted)
    state.initialize(1)
    *trained_weights, frozen = state.weights.fp8._weights
    assert [len(weights) for weights in (*trained_weights, frozen)] == [4, 4, 4]

    def bind() -> None:
        state.weights.bind(state.weights.newest)
        slot = state.weights.slot(state.weights.newest)
        for weight in (*trained_weights[slot], *frozen):
            for got, want in zip(weight.tensors(), quantized(weight.weight).tensors(), strict=True):
                assert torch.equal(got.float(), want.float())

    for _ in range(3):
        bind()
        state.begin(state.weights.newest)
        state.update(state.weights.newest, lr=0.1, factor=1.0)
    assert [refreshed.count(id(weight)) for weight in frozen] == [1] * 4
    saved = {key: tensor.clone() for key, tensor in state.tensors().items()}
    state.initialize(2)
    bind()
    state.load(saved, [2, 3], 3)
    bind()
    assert [refreshed.count(id(weight)) for weight in frozen] == [3] * 4


def test_layers_that_stay_in_bf16_are_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """PipelineShape that are no multiples of 16; and modules of torch."""
    Engine(JobPlan(make()), ProcessGrid(), CPU)
    assert "train.fp8" not in caplog.text
    Engine(JobPlan(make(model={"hidden_size": 24})), ProcessGrid(), CPU)
    (message,) = [
        record.getMessage() for record in caplog.records if "train.fp8" in record.getMessage()
    ]
    assert "no effect on 8 linear layers" in message
    assert "blocks.1.attention.qkv" in message
    assert unquantized_layers(nn.Sequential(nn.Linear(16, 16), nn.ReLU())) == ["0"]


@pytest.mark.thorough
def test_its_memory_is_predicted() -> None:
    config = make(model={"hidden_size": 256, "seq_length": 128, "num_layers": 4})
    with measure(CPU) as meter:
        engine = Engine(JobPlan(config), ProcessGrid(), CPU)
        engine.train(SyntheticLoader(config.model, 4, 2), 2, lambda step: None)
        peak = meter.read().peak
    assert peak == pytest.approx(predict(JobPlan(config), device=CPU)[0].total, rel=0.05)


@pytest.mark.parametrize(("schedule", "versions"), [("1f1b", 1), ("2bw", 2)])
def test_memory_of_the_quantized_weights(schedule: str, versions: int) -> None:
    """2 bytes for each parameter of a hidden matrix and version, and 4 for each of its rows and
    columns."""

    def total(on: bool) -> int:
        config = make(
            pipeline={"schedule": schedule},
            train={"fp8": on},
            model={"num_layers": 4, "hidden_size": 256},
        )
        return sum(Engine(JobPlan(config), ProcessGrid(), CPU).state.num_bytes().values())

    h = 256
    assert total(True) - total(False) == versions * 4 * (2 * 12 * h * h + 4 * (4 + 2 + 5 + 5) * h)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"dtype": "fp32"}}, 'train.fp8 = .*requires train.dtype = "bf16", not "fp32"'),
        ({"parallel": {"tp": 2}}, "train.fp8 = .*not supported with parallel.tp = 2"),
        (
            {"parallel": {"dp": 2, "zero": 3}},
            "train.fp8 = .*not supported with parallel.zero = 3.*parallel.zero = 2",
        ),
        (
            {"memory": {"budget": 2**30}},
            "train.fp8 = .*not supported with memory.budget.*memory.budget = 0",
        ),
    ],
)
def test_unsupported_combinations(sections: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(
            from_mapping(
                {
                    "train": {"dtype": "bf16", "fp8": True} | sections.get("train", {}),
                    "parallel": sections.get("parallel", {}),
                    "memory": sections.get("memory", {}),
                }
            ),
            2,
        )


def test_a_gpu_that_has_no_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with pytest.raises(ConfigError, match=r"compute capability 9\.0 \(H100, H200\), not 8\.0"):
        set_precision(TrainConfig(fp8=True, dtype="bf16"), torch.device("cuda"))
    set_precision(TrainConfig(fp8=True, dtype="bf16"), CPU)

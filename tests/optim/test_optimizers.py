from typing import get_args, get_type_hints

import pytest
import torch
from optim.cases import ONE, Settings, assemble, local, placements, random_tensors, slots
from ranks import run_ranks

from hybridpar.config import OptimConfig
from hybridpar.errors import CheckpointError
from hybridpar.grid import ProcessGrid
from hybridpar.nn.placement import Init, Placement
from hybridpar.ops.update import BLOCK
from hybridpar.optim import OPTIMIZERS, ParameterSlot, build_optimizer
from hybridpar.optim.schedule import DECAYS

STEPS = 20
VARIANTS = {
    "adamw": Settings(),
    "adamw_no_decay": Settings(weight_decay=0.0),
    "sgd": Settings(name="sgd"),
    "sgd_plain": Settings(name="sgd", momentum=0.0),
    "sgd_nesterov": Settings(name="sgd", nesterov=True),
    "lamb": Settings(name="lamb"),
    "muon": Settings(name="muon"),
    "muon_nesterov": Settings(name="muon", nesterov=True),
    "nadamw": Settings(staleness="nesterov"),
    "extrapolated": Settings(staleness="extrapolation"),
    "extrapolated_muon": Settings(name="muon", staleness="extrapolation"),
}
ELEMENTWISE = [name for name, s in VARIANTS.items() if s.name not in ("lamb", "muon")]


def gradient(step):
    return random_tensors(100 + step)


def train(settings, *, parts=1, rank=0, tp=ONE, dtype=torch.float64, scale=1.0, steps=STEPS):
    """Local parameters after `steps` steps, and the optimizer."""
    parameters = [x.to(dtype) for x in local(random_tensors(0), parts, rank)]
    optimizer = build_optimizer(settings, slots(parts, rank), tp)
    for step in range(steps):
        gradients = [x.to(dtype) for x in local(gradient(step), parts, rank)]
        optimizer.step(parameters, gradients, lr=settings.lr / (1 + step), gradient_scale=scale)
    return parameters, optimizer


def torch_reference(settings, scale=1.0):
    parameters = random_tensors(0)
    decays = [p.weight_decay for p in placements(1).values()]
    groups = [
        {
            "params": [x for x, d in zip(parameters, decays, strict=True) if d == wanted],
            "weight_decay": settings.weight_decay * wanted,
        }
        for wanted in (True, False)
    ]
    if settings.staleness == "nesterov":
        optimizer = torch.optim.NAdam(
            groups,
            betas=settings.betas,
            eps=settings.eps,
            decoupled_weight_decay=True,
            foreach=False,
        )
    elif settings.name == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, foreach=False)
    else:
        optimizer = torch.optim.SGD(
            groups, momentum=settings.momentum, nesterov=settings.nesterov, foreach=False
        )
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr / (1 + step)
        for x, g in zip(parameters, gradient(step), strict=True):
            x.grad = g * scale
        optimizer.step()
    return parameters


def assert_close(got, wanted, tolerance):
    for name, a, b in zip(placements(1), got, wanted, strict=True):
        torch.testing.assert_close(
            a.double(), b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def float64_scalars():
    """torch.optim keeps counters and NAdam's product of momenta in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "scale", [1.0, 0.3, torch.tensor(0.3, dtype=torch.float64)], ids=["1", "0.3", "tensor"]
)
@pytest.mark.parametrize(
    "variant", ["adamw", "adamw_no_decay", "sgd", "sgd_plain", "sgd_nesterov", "nadamw"]
)
def test_equals_torch_optim(variant, scale, float64_scalars):
    assert_close(
        train(VARIANTS[variant], scale=scale)[0],
        torch_reference(VARIANTS[variant], float(scale)),
        1e-13,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_follows_float64(variant):
    exact, _ = train(VARIANTS[variant], scale=0.3)
    got, _ = train(VARIANTS[variant], scale=0.3, dtype=torch.float32)
    assert_close(got, exact, 2e-6)  # 20 steps of float32 rounding on values of order 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_exact(variant):
    settings = VARIANTS[variant]
    wanted, _ = train(settings, dtype=torch.float32)
    parameters, optimizer = train(settings, dtype=torch.float32, steps=7)
    resumed = build_optimizer(settings, slots(1, 0), ONE)
    resumed.load_state_tensors(
        {k: v.clone() for k, v in optimizer.state_tensors().items()}, optimizer.num_updates
    )
    for step in range(7, STEPS):
        resumed.step(parameters, [g.float() for g in gradient(step)], lr=settings.lr / (1 + step))
    assert all(torch.equal(a, b) for a, b in zip(parameters, wanted, strict=True))
    assert resumed.num_updates == STEPS


def test_loaded_state_takes_the_precision_of_the_parameters():
    parameters, optimizer = train(Settings(), steps=3)
    resumed = build_optimizer(Settings(), slots(1, 0), ONE)
    resumed.load_state_tensors(optimizer.state_tensors(), 3)
    resumed.step([x.float() for x in parameters], [g.float() for g in gradient(3)], lr=0.1)
    assert {t.dtype for t in resumed.state_tensors().values()} == {torch.float32}


def test_state_is_named_after_parameter_and_shaped_like_it():
    _, optimizer = train(Settings(), parts=3, rank=1, steps=1)
    state = optimizer.state_tensors()
    assert list(state)[:2] == ["embedding.exp_avg", "column.exp_avg"]
    assert state["kv.exp_avg_sq"].shape == (3, 5)
    assert build_optimizer(Settings(), slots(1, 0), ONE).state_tensors() == {}
    assert train(Settings(name="sgd", momentum=0.0), steps=1)[1].state_tensors() == {}


def test_loading_says_what_is_wrong():
    optimizer = build_optimizer(Settings(), slots(1, 0), ONE)
    with pytest.raises(CheckpointError, match=r"embedding\.exp_avg is missing"):
        optimizer.load_state_tensors({}, 3)
    with pytest.raises(CheckpointError, match="has shape"):
        optimizer.load_state_tensors({"embedding.exp_avg": torch.zeros(3)}, 3)
    optimizer.load_state_tensors({}, 0)


def test_the_configuration_names_every_optimizer_and_decay():
    hints = get_type_hints(OptimConfig)
    assert set(OPTIMIZERS) == set(get_args(hints["name"]))
    assert set(DECAYS) == set(get_args(hints["decay"]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stage_without_parameters_works(name):
    optimizer = build_optimizer(
        Settings(name=name, spec="optim.rules:Lion" * (name == "own")), [], ONE
    )
    optimizer.step([], [], lr=1.0, gradient_scale=0.5)
    assert optimizer.num_updates == 1


@pytest.mark.parametrize("variant", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shared_rows_keep_equal_bits_on_all_holders(variant, dtype):
    """Vector kernels round a tensor's tail differently; shared rows lie at other places on other
    ranks."""
    held = {}
    for rank in range(3):
        parameters, _ = train(VARIANTS[variant], parts=3, rank=rank, dtype=dtype, scale=0.7)
        for i, slot in enumerate(slots(3, rank)):
            if slot.name.startswith("kv"):
                for row, values in zip(
                    slot.placement.shard.index(rank).tolist(), parameters[i], strict=True
                ):
                    assert torch.equal(held.setdefault((slot.name, row), values), values)


def sharded_on_ranks(settings, parts, dtype):
    tp = ProcessGrid(tp=parts).tp
    parameters, _ = train(settings, parts=parts, rank=tp.rank, tp=tp, dtype=dtype)
    assert tp.traffic.calls == (
        {"all_reduce": STEPS} if settings.name == "lamb" and parts > 1 else {}
    )
    return parameters


@pytest.mark.ranks
@pytest.mark.parametrize("parts", [2, 3])
def test_lamb_does_not_depend_on_the_split(parts):
    whole, _ = train(VARIANTS["lamb"])
    by_rank = run_ranks(sharded_on_ranks, parts, VARIANTS["lamb"], parts, torch.float64)
    assert_close(assemble(by_rank, parts), whole, 1e-13)
    for tensors in by_rank[1:]:  # replicated and shared alike stay equal bit for bit
        assert torch.equal(tensors[5], by_rank[0][5])
        assert torch.equal(tensors[6], by_rank[0][6])


@pytest.mark.ranks
def test_lamb_keeps_shared_rows_equal_in_float32():
    by_rank = run_ranks(sharded_on_ranks, 3, VARIANTS["lamb"], 3, torch.float32)
    kv = placements(3)["kv"].shard
    held = {}
    for rank, tensors in enumerate(by_rank):
        for row, values in zip(kv.index(rank).tolist(), tensors[3], strict=True):
            assert torch.equal(held.setdefault(row, values), values)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "muon" not in v])
def test_parameters_larger_than_a_block(variant):
    """A parameter of more than one CPU block: float32 does as float64 does."""
    settings = VARIANTS[variant]
    slot = ParameterSlot("w", Placement((BLOCK["cpu"] + 77, 2), Init("zeros")))
    x = torch.randn(slot.shape)
    g = torch.randn(slot.shape)
    results = []
    for dtype in (torch.float32, torch.float64):
        parameter = x.to(dtype, copy=True)
        build_optimizer(settings, [slot], ONE).step([parameter], [g.to(dtype, copy=True)], lr=0.1)
        results.append(parameter)
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-6, atol=1e-6)

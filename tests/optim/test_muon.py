import pytest
import torch
from optim.cases import INIT, ONE, Settings, assemble, local, placements, random_tensors, slots
from ranks import run_ranks

from hybridpar.config import OptimConfig
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn import (
    HeadLayout,
    ParallelAttention,
    ParallelMLP,
    Placement,
    Shard,
    named_placements,
)
from hybridpar.ops.split_qkv import split_heads
from hybridpar.optim import AdamW, ParameterSlot, build_optimizer, divisible
from hybridpar.optim.matrices import hidden_matrices, plan_rounds
from hybridpar.optim.muon import BATCH, PRECISION, Muon
from hybridpar.verify.rules import build_rule

STEPS = 6
NAMES = list(placements(1))
HIDDEN = [n for n, p in placements(1).items() if p.matrices]


def gradient(step):
    return random_tensors(100 + step)


def train(settings, *, parts=1, rank=0, tp=ONE, dtype=torch.float64, scale=1.0):
    parameters = [x.to(dtype) for x in local(random_tensors(0), parts, rank)]
    optimizer = build_optimizer(settings, slots(parts, rank), tp)
    for step in range(STEPS):
        gradients = [x.to(dtype) for x in local(gradient(step), parts, rank)]
        optimizer.step(parameters, gradients, lr=settings.lr / (1 + step), gradient_scale=scale)
    return parameters


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_equals_the_rule_written_out(scale, momentum, nesterov):
    if nesterov and not momentum:
        return
    settings = OptimConfig("muon", lr=0.02, weight_decay=0.1, momentum=momentum, nesterov=nesterov)
    rule = build_rule(settings, placements(1))
    weights = dict(zip(NAMES, random_tensors(0), strict=True))
    for step in range(STEPS):
        scaled = {n: g * scale for n, g in zip(NAMES, gradient(step), strict=True)}
        weights = rule(weights, scaled, settings.lr / (1 + step))
    for got, wanted in zip(train(settings, scale=scale), weights.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("nesterov", [False, True])
def test_does_as_torch_optim_up_to_its_bfloat16(nesterov):
    torch.manual_seed(0)
    whole = {n: p for n, p in placements(1).items() if len(p.matrices) == 1}
    values = {n: torch.randn(p.shape) for n, p in whole.items()}
    settings = Settings(name="muon", weight_decay=0.0, nesterov=nesterov)
    optimizer = build_optimizer(settings, [ParameterSlot(n, p) for n, p in whole.items()], ONE)
    ours = [x.clone() for x in values.values()]
    theirs = [x.clone() for x in values.values()]
    reference = torch.optim.Muon(
        theirs,
        lr=0.1,
        weight_decay=0.0,
        momentum=0.9,
        nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(STEPS):
        gradients = [torch.randn_like(x) for x in ours]
        for x, g in zip(theirs, gradients, strict=True):
            x.grad = g.clone()
        reference.step()
        optimizer.step(ours, gradients, lr=0.1)
    for a, b, start in zip(ours, theirs, values.values(), strict=True):
        assert (a - b).norm() < 0.1 * (b - start).norm()


def test_everything_else_is_adamw():
    got = train(Settings(name="muon"))
    others = [i for i, n in enumerate(NAMES) if n not in HIDDEN]
    adamw = AdamW([slots(1, 0)[i] for i in others], Settings(), ONE)
    parameters = [random_tensors(0)[i] for i in others]
    for step in range(STEPS):
        adamw.step(parameters, [gradient(step)[i] for i in others], lr=1e-2 / (1 + step))
    assert all(torch.equal(got[i], x) for i, x in zip(others, parameters, strict=True))


def test_a_step_has_the_size_of_one_of_adamw():
    """Root mean square near 0.2, which is AdamW's usual, for any shape."""
    for shape in ((64, 64), (64, 256), (256, 64)):
        slot = ParameterSlot("w", Placement(shape, INIT, matrices=(((0, shape[0]),),)))
        x = torch.zeros(shape)
        build_optimizer(Settings(name="muon"), [slot], ONE).step([x], [torch.randn(shape)], lr=1.0)
        assert 0.13 < x.square().mean().sqrt() < 0.23


def on_ranks(parts, dtype, nesterov):
    tp = ProcessGrid(tp=parts).tp
    result = train(
        Settings(name="muon", nesterov=nesterov), parts=parts, rank=tp.rank, tp=tp, dtype=dtype
    )
    assert tp.traffic.calls == ({"all_to_all": 2 * STEPS} if parts > 1 else {})
    return result


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(("dtype", "nesterov"), [(torch.float64, False), (torch.float32, True)])
def test_any_split_gives_the_bits_of_the_whole(parts, dtype, nesterov):
    """Rows held by several ranks at different places, matrices in interleaved rows, ranks without
    any, replicas."""
    (whole,) = run_ranks(on_ranks, 1, 1, dtype, nesterov)  # as many threads
    by_rank = run_ranks(on_ranks, parts, parts, dtype, nesterov)
    for name, got, wanted in zip(NAMES, assemble(by_rank, parts), whole, strict=True):
        tolerance = 0.0 if name in HIDDEN else 1e-6  # AdamW's kernel rounds by place
        torch.testing.assert_close(
            got, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    held = {}
    for rank, tensors in enumerate(by_rank):
        for slot, x in zip(slots(parts, rank), tensors, strict=True):
            shard = slot.placement.shard
            index = shard.index(rank) if shard else torch.arange(slot.shape[0])
            for i, row in zip(index.tolist(), x.movedim(slot.dim, 0), strict=True):
                assert torch.equal(held.setdefault((slot.name, i), row), row), slot.name


def in_bfloat16_on_ranks(parts):
    PRECISION["cpu", torch.float32] = torch.bfloat16
    tp = ProcessGrid(tp=parts).tp
    return train(Settings(name="muon"), parts=parts, rank=tp.rank, tp=tp, dtype=torch.float32)


@pytest.mark.ranks
def test_orthogonalised_in_bfloat16_as_on_cuda():
    """Momentum and weights stay float32; what travels is bfloat16."""
    wide = train(Settings(name="muon"), dtype=torch.float32)
    (whole,), split = run_ranks(in_bfloat16_on_ranks, 1, 1), run_ranks(in_bfloat16_on_ranks, 3, 3)
    for name, start, a, b, c in zip(
        NAMES, random_tensors(0), wide, whole, assemble(split, 3), strict=True
    ):
        if name in HIDDEN:
            assert torch.equal(b, c), name
            assert 0 < (a - b).norm() < 0.1 * (a - start).norm(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_as_on_the_cpu_up_to_bfloat16():
    wanted = train(Settings(name="muon"), dtype=torch.float32)
    parameters = [x.float().cuda() for x in random_tensors(0)]
    optimizer = build_optimizer(Settings(name="muon"), slots(1, 0), ONE)
    for step in range(STEPS):
        optimizer.step(parameters, [g.float().cuda() for g in gradient(step)], lr=1e-2 / (1 + step))
    for got, want, start in zip(parameters, wanted, random_tensors(0), strict=True):
        assert (got.cpu() - want).norm() <= 0.1 * (want - start).norm()


def layers_on_ranks(tp_size):
    """A layer's own placements: uneven heads, groups over several ranks, gate and up, features that
    do not divide."""
    tp = ProcessGrid(tp=tp_size).tp
    torch.manual_seed(0)
    held = []
    for axis in (Axis("tp"), tp):
        attention = ParallelAttention(48, 6, axis, num_kv_heads=3, device="meta")
        mlp = ParallelMLP(48, 50, axis, activation="swiglu", device="meta")
        held.append([(n, p) for module in (attention, mlp) for n, _, p in named_placements(module)])
    values, grads = (
        [torch.randn(p.shape, dtype=torch.float64) for _, p in held[0]] for _ in range(2)
    )
    results = []
    for axis, named in zip((Axis("tp"), tp), held, strict=True):
        mine = [ParameterSlot(n, p, {"tp": axis.rank}) for n, p in named]
        parameters, gradients = (
            [s.placement.take(x, axis.rank).clone() for s, x in zip(mine, xs, strict=True)]
            for xs in (values, grads)
        )
        build_optimizer(Settings(name="muon"), mine, axis).step(parameters, gradients, lr=0.1)
        results.append([(s, x) for s, x in zip(mine, parameters, strict=True)])
    for (_, whole), (slot, part) in zip(*results, strict=True):
        torch.testing.assert_close(
            part, slot.placement.take(whole, tp.rank), rtol=1e-15, atol=1e-15
        )


@pytest.mark.ranks
@pytest.mark.parametrize("tp_size", [2, 4, 6])
def test_layers(tp_size):
    run_ranks(layers_on_ranks, tp_size, tp_size)


def test_matrices_of_qkv_are_what_attention_splits_it_into():
    for heads, kv_heads in ((6, 6), (6, 3), (6, 1)):
        attention = ParallelAttention(24, heads, Axis("tp"), num_kv_heads=kv_heads)
        rows = torch.arange(attention.qkv.weight.shape[0]).view(1, 1, -1)
        queries, keys, values = split_heads(rows, attention.group_sizes)
        matrices = HeadLayout(24, heads, kv_heads, 1).qkv_matrices()
        for ranges, part in zip(matrices, (queries, keys, values), strict=True):
            assert [row for a, b in ranges for row in range(a, b)] == part.flatten().tolist()


def test_parameters_that_are_matrices():
    attention = ParallelAttention(24, 4, Axis("tp"))
    gated = ParallelMLP(24, 40, Axis("tp"), activation="swiglu")
    counts = {
        n: len(p.matrices) for module in (attention, gated) for n, _, p in named_placements(module)
    }
    assert counts == {
        "qkv.weight": 3,
        "qkv.bias": 0,
        "out.weight": 1,
        "out.bias": 0,
        "up.weight": 2,
        "up.bias": 0,
        "down.weight": 1,
        "down.bias": 0,
    }


def test_only_what_is_no_matrix_is_divisible():
    by_name = {s.name: s for s in slots(1, 0)}
    for name in ("adamw", "sgd"):
        assert all(divisible(Settings(name=name), s) for s in by_name.values())
    assert not any(divisible(Settings(name="lamb"), s) for s in by_name.values())
    assert [n for n, s in by_name.items() if not divisible(Settings(name="muon"), s)] == HIDDEN
    wrapped = build_optimizer(Settings(name="lamb", staleness="extrapolation"), [], ONE)
    assert not wrapped.divisible(by_name["row"])


def test_flat_pieces_do_for_the_rest():
    """Slots of ZeRO-1: one-dimensional parts of divisible parameters, next to whole matrices."""
    settings = Settings(name="muon")
    whole = train(settings)
    for i, slot in enumerate(slots(1, 0)):
        if slot.name in HIDDEN or slot.numel < 2:
            continue
        cut = slot.numel // 2
        piece = ParameterSlot(
            slot.name, Placement((cut,), INIT, weight_decay=slot.placement.weight_decay)
        )
        row = slots(1, 0)[NAMES.index("row")]
        values = [random_tensors(0)[i].flatten()[:cut], random_tensors(0)[NAMES.index("row")]]
        optimizer = build_optimizer(settings, [piece, row], ONE)
        for step in range(STEPS):
            grads = [gradient(step)[i].flatten()[:cut].clone(), gradient(step)[NAMES.index("row")]]
            optimizer.step(values, grads, lr=settings.lr / (1 + step))
        torch.testing.assert_close(values[0], whole[i].flatten()[:cut], rtol=1e-14, atol=1e-14)
        assert torch.equal(values[1], whole[NAMES.index("row")])


def test_batches_of_one_shape_change_nothing(monkeypatch):
    one_by_one = train(Settings(name="muon"))
    monkeypatch.setitem(BATCH, "cpu", 8)
    for a, b in zip(train(Settings(name="muon")), one_by_one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_state_has_what_each_kind_needs():
    optimizer = build_optimizer(Settings(name="muon"), slots(3, 1), ONE)
    optimizer.allocate(torch.device("cpu"), torch.float32)
    state = optimizer.state_tensors()
    assert {k.split(".")[1] for k in state if k.split(".")[0] in HIDDEN} == {"momentum"}
    assert {k.split(".")[1] for k in state if k.split(".")[0] not in HIDDEN} == {
        "exp_avg",
        "exp_avg_sq",
    }
    assert len(state) == len(HIDDEN) + 2 * (len(NAMES) - len(HIDDEN))
    assert state["kv.momentum"].shape == (3, 5)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_rounds_hold_every_matrix_once_and_share_the_work(num_ranks, limit):
    held = [
        ParameterSlot(
            f"w{i}", Placement((r, c), INIT, Shard.even(0, r, num_ranks), matrices=(((0, r),),))
        )
        for i, (r, c) in enumerate([(6, 6)] * 7 + [(24, 6)] * 4 + [(6, 24)] * 4)
    ]
    matrices = hidden_matrices(held, num_ranks)
    rounds = plan_rounds(matrices, num_ranks, limit)
    planned = [m for round_ in rounds for m in round_.matrices]
    assert sorted(m.blocks[0][0].slot for m in planned) == list(range(15))
    for i, round_ in enumerate(rounds):
        numel = sum(m.numel for m in round_.matrices)
        assert len(round_.matrices) <= num_ranks or numel <= limit * num_ranks
        assert i + 1 == len(rounds) or numel + rounds[i + 1].matrices[0].numel > limit * num_ranks
        loads = [sum(m.cost for m in round_.at_home(r)) for r in range(num_ranks)]
        assert max(loads) - min(loads) <= max(m.cost for m in round_.matrices)


def test_matrices_must_cover_the_parameter():
    slot = ParameterSlot("w", Placement((6, 4), INIT, matrices=(((0, 5),),)))
    with pytest.raises(AssertionError, match="5 rows"):
        Muon([slot], Settings(name="muon"), ONE)

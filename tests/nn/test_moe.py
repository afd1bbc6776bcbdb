"""The mixture of experts in one process: against einsum, a dense MLP, and itself with other
experts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.config import OptimConfig
from hybridpar.grid import Axis
from hybridpar.models.blocks import IGNORE_INDEX, sequence_shares
from hybridpar.nn import MixtureOfExperts, ParallelMLP
from hybridpar.nn.moe import (
    ExpertOptions,
    RouterOptions,
    SequenceShares,
    auxiliary_loss,
    choose,
    loads,
)
from hybridpar.nn.placement import Init, Placement
from hybridpar.optim import ParameterSlot, build_optimizer

AXIS = Axis("tp")
F64: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
H = 9
FFN = 7
E = 6
SHAPE = (3, 11)
TOP2 = RouterOptions()


def build(
    router: RouterOptions = TOP2, activation: Any = "swiglu", shared_ffn: int = 0
) -> MixtureOfExperts:
    torch.manual_seed(1)
    experts = ExpertOptions(H, E, FFN, shared_ffn, router, activation)
    layer = MixtureOfExperts(AXIS, experts, **F64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def tokens(seed: int = 2) -> Tensor:
    return torch.randn(*SHAPE, H, generator=torch.Generator().manual_seed(seed), **F64)


def batch_of(labels: Tensor, num_targets: float, **more: Tensor) -> SequenceShares:
    batch = {"labels": labels, "num_targets": torch.tensor(num_targets, dtype=torch.float64)}
    return sequence_shares({**batch, **more})


def with_padding() -> Tensor:
    """Labels of three sequences: all count, 5 count, none counts."""
    labels = torch.zeros(SHAPE, dtype=torch.int64)
    labels[1, 5:] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    return labels


def mlp(expert: Any, x: Tensor, activation: str) -> Tensor:
    up = x @ expert.up.weight.t()
    if activation == "swiglu":
        gate, up = up.chunk(2, -1)
        inside = F.silu(gate) * up
    else:
        inside = F.gelu(up, approximate="tanh")
    return inside @ expert.down.weight.t()


def naive(layer: MixtureOfExperts, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Every expert of every token, multiplied by a matrix of gates that are mostly zero; and the
    auxiliary loss of the labels of `with_padding`, sequence by sequence."""
    options = layer.options
    logits = x @ layer.router.weight.t()
    scores = torch.sigmoid(logits) if options.score == "sigmoid" else logits.softmax(-1)
    wanted = scores if layer.bias is None else scores + layer.bias
    one_hot = F.one_hot(wanted.topk(options.topk).indices, E).to(x.dtype)
    gates = torch.einsum("bske,bse->bse", one_hot, scores)
    if options.normalize:
        gates = gates / gates.sum(-1, keepdim=True)
    outputs = torch.stack([mlp(expert, x, activation) for expert in layer.experts], 2)
    y = torch.einsum("bse,bseh->bsh", gates * options.scale, outputs)
    if layer.shared is not None:
        y = y + mlp(layer.shared, x, activation)
    loss = x.new_zeros(())
    for number, length in ((0, 11), (1, 5)):
        of = scores[number, :length]
        chosen = one_hot[number, :length].sum((0, 1))
        mean = (of / of.sum(-1, keepdim=True)).mean(0)
        balance = E / (options.topk * length) * (chosen * mean).sum()
        z = logits[number, :length].logsumexp(-1).square().mean()
        loss = loss + length / 20 * (options.balance_loss * balance + options.z_loss * z)
    return y, loss


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("score_kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_outputs_and_gradients_are_those_of_a_one_hot_einsum(
    activation: str, score_kind: Any, normalize: bool
) -> None:
    """20 labels count in the whole batch, 16 of them in this micro-batch."""
    options = RouterOptions(3, score_kind, normalize, 1.3, 0.2, 0.05, bias_rate=0.1)
    layer = build(options, activation, shared_ffn=4)
    x = tokens().requires_grad_()
    parameters = [x, *(p for name, p in layer.named_parameters() if name != "bias")]
    weight = tokens(3)
    y = layer(x, None, batch_of(with_padding(), 20.0))
    got = torch.autograd.grad((y * weight).sum(), parameters)
    wanted, loss = naive(layer, x, activation)
    want = torch.autograd.grad((wanted * weight).sum() + loss, parameters)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-13)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [1, 4, 6])
def test_equal_experts_with_normalized_gates_are_one_dense_mlp(k: int) -> None:
    layer = build(RouterOptions(k))
    dense = ParallelMLP(H, FFN, AXIS, activation="swiglu", bias=False, **F64)
    dense.load_state_dict(layer.experts[0].state_dict())
    for expert in layer.experts:
        expert.load_state_dict(dense.state_dict())
    x = tokens()
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-12, atol=1e-14)


def test_permuting_experts_changes_nothing_but_their_names() -> None:
    layer = build(RouterOptions(2, balance_loss=0.1, z_loss=0.1, bias_rate=0.1))
    other = build(layer.options)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    with torch.no_grad():
        other.router.weight.copy_(layer.router.weight[order])
        other.bias.copy_(layer.bias[order])
        for to, source in enumerate(order):
            other.experts[to].load_state_dict(layer.experts[source].state_dict())
    x = tokens().requires_grad_()
    shares = batch_of(with_padding(), 16.0)
    results = []
    for one in (layer, other):
        y = one(x, None, shares)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, one.bias])))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-11, atol=1e-13)
    assert torch.equal(results[1][2], results[0][2][order])


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    layer = build(RouterOptions(2, bias_rate=0.1))
    with torch.no_grad():
        layer.bias.zero_()[3] = -100
    y = layer(tokens(), None, batch_of(with_padding(), 16.0))
    y.square().sum().backward()
    for number, expert in enumerate(layer.experts):
        for parameter in expert.parameters():
            assert parameter.grad is not None
            assert parameter.grad.any() == (number != 3)
    assert layer.bias.grad[3] == -16 * 2, "E * 0 less all loads: it rises"


def test_all_tokens_may_choose_the_same_experts() -> None:
    layer = build(RouterOptions(2, bias_rate=0.1))
    with torch.no_grad():
        layer.bias.zero_()[[1, 4]] = 100
    x = tokens()
    wanted, _ = naive(layer, x, "swiglu")
    torch.testing.assert_close(layer(x), wanted, rtol=1e-12, atol=1e-13)


def test_no_token_is_dropped() -> None:
    routing = choose(torch.rand(100, E, **F64), RouterOptions(3))
    assert sum(loads(routing.experts, E)) == 300
    assert all(len(set(row)) == 3 for row in routing.experts.tolist())


def test_first_of_equally_scored_experts_wins() -> None:
    scores = torch.full((40, E), 0.5, **F64)
    assert choose(scores, RouterOptions(3)).experts.tolist() == [[0, 1, 2]] * 40
    bias = torch.tensor([0.0, 1, 0, 1, 1, 0], **F64)
    assert choose(scores, RouterOptions(4), bias).experts.tolist() == [[1, 3, 4, 0]] * 40


def test_biases_choose_and_do_not_weigh() -> None:
    scores = torch.rand(50, E, **F64)
    bias = torch.linspace(1, -1, E, **F64)
    routing = choose(scores, RouterOptions(2, normalize=False), bias)
    assert torch.equal(routing.gates, scores.gather(1, routing.experts))
    assert torch.equal(routing.experts.sort().values, (scores + bias).topk(2).indices.sort().values)


def test_the_router_computes_in_fp32_in_bfloat16_runs() -> None:
    layer = build(RouterOptions(2)).to(torch.bfloat16)
    x = tokens().bfloat16().requires_grad_()
    logits = layer.router(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(x.float(), layer.router.weight.float()))
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert layer.router.weight.grad.any()


def balance(shares: SequenceShares, scores: Tensor, options: RouterOptions) -> float:
    experts = choose(scores, options).experts
    return auxiliary_loss(scores.log(), scores, experts, shares, options).item()


def test_the_balance_loss_is_its_coefficient_at_balance_and_more_otherwise() -> None:
    options = RouterOptions(2, balance_loss=0.3)
    shares = batch_of(torch.zeros(1, 6, dtype=torch.int64), 6.0)
    even = torch.full((6, E), 0.1, **F64)
    for token in range(6):
        even[token, [token, (token + 1) % 6]] = 0.3
    assert balance(shares, even, options) == pytest.approx(0.3, rel=1e-12)
    skewed = even[:1].expand(6, E)
    assert balance(shares, skewed, options) == pytest.approx(0.3 * 6 / 2 * 0.6, rel=1e-12)


def test_padding_counts_for_nothing() -> None:
    options = RouterOptions(2, "sigmoid", balance_loss=0.3, z_loss=0.1, bias_rate=1.0)
    layer = build(options)
    shares = batch_of(with_padding(), 16.0)
    found = []
    for change in (0.0, 3.0):
        x = tokens()
        x[1, 5:] += change
        x[2] -= change
        x.requires_grad_()
        gradients = torch.autograd.grad(
            0 * layer(x, None, shares).sum(), [layer.router.weight, layer.bias, x]
        )
        assert not gradients[2][1, 5:].any()
        assert not gradients[2][2].any()
        assert gradients[2][0].any()
        found.append(gradients[:2])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-12, atol=1e-15)
    assert torch.equal(found[1][1], found[0][1])


def test_a_document_is_a_sequence() -> None:
    """A packed row has the auxiliary gradients of its documents alone."""
    layer = build(RouterOptions(2, balance_loss=0.3, z_loss=0.1))
    x = tokens()[:1]
    cuts = (0, 4, 5, 9, 11)
    starts = torch.tensor([[0, 0, 0, 0, 4, 5, 5, 5, 5, 9, 10]], dtype=torch.int32)
    labels = torch.zeros(1, 11, dtype=torch.int64)
    labels[0, 9:] = IGNORE_INDEX  # the row's padding
    labels[0, 3] = IGNORE_INDEX  # a last token has no next one

    def gradient(part: Tensor, **batch: Tensor) -> Tensor:
        shares = batch_of(num_targets=7.0, **batch)
        return torch.autograd.grad(0 * layer(part, None, shares).sum(), layer.router.weight)[0]

    packed = gradient(x, labels=labels, document_start=starts)
    alone = [gradient(x[:, a:b], labels=labels[:, a:b]) for a, b in pairwise(cuts)]
    torch.testing.assert_close(packed, torch.stack(alone).sum(0), rtol=1e-12, atol=1e-15)
    assert packed.any()


def test_evaluations_have_no_auxiliary_gradients_and_count_no_loads() -> None:
    layer = build(RouterOptions(2, balance_loss=9.0, z_loss=9.0, bias_rate=1.0))
    x = tokens().requires_grad_()
    with torch.no_grad():
        y = layer(x)
    assert torch.equal(y, layer(x, None, batch_of(with_padding(), 16.0)))
    assert not y.requires_grad
    plain = torch.autograd.grad(layer(x).sum(), x)[0]
    assert not torch.equal(
        plain, torch.autograd.grad(layer(x, None, batch_of(with_padding(), 16.0)).sum(), x)[0]
    )


def test_loads_are_balanced_where_tensors_have_no_values() -> None:
    assert loads(torch.empty(7, 3, dtype=torch.int64, device="meta"), 5) == [5, 4, 4, 4, 4]


def test_selective_recomputation_has_the_bits_of_none() -> None:
    found = []
    for recomputes in (False, True):
        layer = build(RouterOptions(2, balance_loss=0.1), shared_ffn=5)
        if recomputes:
            layer.recompute()
        x = tokens().requires_grad_()
        y = layer(x, None, batch_of(with_padding(), 16.0))
        found.append(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))
    assert all(map(torch.equal, *found))


def max_violation(load: Tensor) -> float:
    """Return MaxVio: how much the largest load exceeds the mean, over the mean (arXiv 2408.15664)."""
    return (load.max() / load.mean() - 1).item()


def test_biases_balance_skewed_tokens() -> None:
    """Logits of two experts are higher by 1.5. 1,024 tokens an update, steps of 0.005, 150 updates:
    a bias can move by 0.75, and scores differ by 0.35 or so."""
    options = RouterOptions(2, "sigmoid", bias_rate=0.005)
    slot = ParameterSlot("bias", Placement((8,), Init("zeros"), sign_step=options.bias_rate))
    optimizer = build_optimizer(OptimConfig(), [slot], AXIS)
    bias = torch.zeros(8)
    skew = torch.tensor([1.5, 1.5, 0, 0, 0, 0, 0, -0.5])
    found = []
    for step in range(150):
        generator = torch.Generator().manual_seed(step)
        scores = torch.sigmoid(torch.randn(1024, 8, generator=generator) + skew)
        load = choose(scores, options, bias).experts.flatten().bincount(minlength=8).float()
        found.append((max_violation(load), choose(scores, options)))
        optimizer.step([bias], [8 * load - load.sum()], lr=1.0)
    unbiased = found[-1][1].experts.flatten().bincount(minlength=8).float()
    assert max_violation(unbiased) > 1
    assert sum(violation for violation, _ in found[-10:]) / 10 < 0.2

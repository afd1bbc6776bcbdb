"""Linear, MLP, embedding and replicated layers: equal to the same mathematics on whole tensors, for
every tp."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tensor_parallel import TOLERANCE, check_gradients, fill, leaf, traffic, values
from torch.nn import functional as F

from hybridpar.errors import ConfigError, DataError
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn import (
    ColumnParallelLinear,
    Dropout,
    LayerNorm,
    LearnedPositionEmbedding,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    named_placements,
)
from hybridpar.random import RandomKey

F64 = torch.float64


def whole_ends(axis: Axis, row: bool, features: int, bias: bool, *batch: int) -> None:
    """A column-parallel layer that gathers its output, or a row-parallel one whose input is
    whole."""
    layer = (
        RowParallelLinear(features, 5, axis, bias=bias, input_is_parallel=False, dtype=F64)
        if row
        else ColumnParallelLinear(5, features, axis, bias=bias, gather_output=True, dtype=F64)
    )
    whole = fill(layer, axis)
    shape = (*batch, features if row else 5)
    x = leaf("x", *shape)
    x_ref = leaf("x", *shape)
    with traffic(axis, all_gather=1 - row, all_reduce=row):
        y = layer(x)
    y_ref = F.linear(x_ref, whole["weight"], whole.get("bias"))
    torch.testing.assert_close(y, y_ref, **TOLERANCE)
    with traffic(axis, all_gather=row, all_reduce=1 - row):
        y.backward(values("dy", *y.shape))
    y_ref.backward(values("dy", *y.shape))
    torch.testing.assert_close(x.grad, x_ref.grad, **TOLERANCE)
    check_gradients(layer, whole, axis)


def column_strided_and_no_input_gradient(axis: Axis) -> None:
    layer = ColumnParallelLinear(5, 7, axis, dtype=F64)
    whole = fill(layer, axis)
    base = values("x", 5, 3, 2)
    x = base.permute(2, 1, 0)  # not contiguous, and not a leaf that requires a gradient
    y_ref = F.linear(x, whole["weight"], whole["bias"])
    part = (
        slice(*layer.placements["weight"].shard.ranges[axis.rank][0])
        if axis.size > 1
        else slice(None)
    )
    with traffic(axis):
        y = layer(x)
        y.sum().backward()  # an expanded gradient
    y_ref.sum().backward()
    torch.testing.assert_close(y, y_ref[..., part], **TOLERANCE)
    check_gradients(layer, whole, axis)

    layer.zero_grad()
    for w in whole.values():
        w.grad = None
    x = base.clone().requires_grad_()
    x_ref = base.clone().requires_grad_()
    dy = values("dy", 7, 3, 2).permute(2, 1, 0)
    layer(x.permute(2, 1, 0)).backward(dy[..., part])
    F.linear(x_ref.permute(2, 1, 0), whole["weight"], whole["bias"]).backward(dy)
    torch.testing.assert_close(x.grad, x_ref.grad, **TOLERANCE)
    check_gradients(layer, whole, axis)


def column_backward_twice(axis: Axis) -> None:
    layer = ColumnParallelLinear(3, 4, axis, dtype=F64)
    fill(layer, axis)
    x = leaf("x", 2, 3)
    y = layer(x).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def mlp(axis: Axis, ffn: int, activation: str, bias: bool, *batch: int) -> None:
    layer = ParallelMLP(6, ffn, axis, activation=activation, bias=bias, dtype=F64)
    whole = fill(layer, axis)
    x = leaf("x", *batch, 6)
    x_ref = leaf("x", *batch, 6)
    with traffic(axis, all_reduce=1):
        y = layer(x)
    z = F.linear(x_ref, whole["up.weight"], whole.get("up.bias"))
    z = {
        "gelu": lambda: F.gelu(z, approximate="tanh"),
        "gelu_exact": lambda: z * torch.special.ndtr(z),
        "swiglu": lambda: F.silu(z[..., :ffn]) * z[..., ffn:],
    }[activation]()
    y_ref = F.linear(z, whole["down.weight"], whole.get("down.bias"))
    torch.testing.assert_close(y, y_ref, **TOLERANCE)
    with traffic(axis, all_reduce=1):
        y.backward(values("dy", *y.shape))
    if axis.size > 1:
        assert axis.traffic.num_bytes["all_reduce"] == x.numel() * 8
    y_ref.backward(values("dy", *y.shape))
    torch.testing.assert_close(x.grad, x_ref.grad, **TOLERANCE)
    check_gradients(layer, whole, axis)


def embedding(axis: Axis, num_embeddings: int, *batch: int) -> None:
    layer = VocabParallelEmbedding(num_embeddings, 4, axis, dtype=F64)
    whole = fill(layer, axis)
    ids = torch.randint(num_embeddings, batch, generator=torch.Generator().manual_seed(0))
    with traffic(axis, all_reduce=1):
        y = layer(ids)
    y_ref = whole["weight"][ids]
    torch.testing.assert_close(y, y_ref, rtol=0, atol=0)  # x + 0 + 0 is exact
    with traffic(axis):
        y.backward(values("dy", *y.shape))
    y_ref.backward(values("dy", *y.shape))
    check_gradients(layer, whole, axis)
    for bad in (-1, num_embeddings):
        with pytest.raises(DataError, match=f"token id {bad} at"):
            layer(torch.tensor([[0], [bad]]))


def low_precision(axis: Axis) -> None:
    """bf16 and fp32 give the float64 result to their precision, and gradients of their own type."""
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float32, 1e-5)):
        layer = ParallelMLP(6, 9, axis, activation="swiglu", dtype=dtype)
        reference = ParallelMLP(6, 9, Axis("tp"), activation="swiglu", dtype=F64)
        fill(layer, axis)
        fill(reference, Axis("tp"))
        x = values("x", 3, 6).to(dtype).requires_grad_()
        x_ref = leaf("x", 3, 6)
        y = layer(x)
        y_ref = reference(x_ref)
        y.sum().backward()
        y_ref.sum().backward()
        for a, b in ((y, y_ref), (x.grad, x_ref.grad)):
            assert a.dtype == dtype
            assert (a.double() - b).abs().max() < tolerance * b.abs().max()
        assert all(p.grad.dtype == dtype for p in layer.parameters())


def replicated(axis: Axis) -> None:
    """Norms, positions and dropout speak to nobody and agree with torch; dropout is a function of
    the key alone."""
    x = leaf("x", 2, 3, 6)
    x_ref = leaf("x", 2, 3, 6)
    layer_norm = LayerNorm(6, axis, dtype=F64)
    rms_norm = RMSNorm(6, axis, dtype=F64)
    positions = LearnedPositionEmbedding(5, 6, axis, dtype=F64)
    whole = [fill(m, axis) for m in (layer_norm, rms_norm, positions)]
    with traffic(axis):
        y = rms_norm(layer_norm(x) + positions(3))
        y.backward(values("dy", *y.shape))
    z = (
        F.layer_norm(x_ref, (6,), whole[0]["weight"], whole[0]["bias"], 1e-5)
        + whole[2]["weight"][:3]
    )
    y_ref = F.rms_norm(z, (6,), whole[1]["weight"], 1e-6)
    y_ref.backward(values("dy", *y.shape))
    torch.testing.assert_close(y, y_ref, **TOLERANCE)
    torch.testing.assert_close(x.grad, x_ref.grad, **TOLERANCE)
    for module, w in zip((layer_norm, rms_norm, positions), whole, strict=True):
        check_gradients(module, w, axis)
        for name, _, placement in named_placements(module):
            assert placement.weight_decay == (module is positions), name
    with pytest.raises(ConfigError, match=r"max_positions = 5: must be at least 6, .*; try 6"):
        positions(6)


def replicated_in_a_grid(axis: Axis) -> None:
    """A layer on an axis of its own, of size 1, is whole on every rank, and its placement says
    so."""
    layer = VocabParallelEmbedding(2, 4, Axis("segments"), dtype=F64)
    ((_, parameter, placement),) = named_placements(layer)
    assert placement.local_shape(axis.rank) == tuple(parameter.shape) == (2, 4)


CASES = {
    "column gathered 7": (whole_ends, False, 7, True, 2, 3),
    "column gathered, fewer features than ranks": (whole_ends, False, 2, False, 3),
    "column gathered, one vector": (whole_ends, False, 7, True),
    "column gathered, empty batch": (whole_ends, False, 7, True, 0, 3),
    "column strided, no input gradient": (column_strided_and_no_input_gradient,),
    "column, backward twice": (column_backward_twice,),
    "row 7": (whole_ends, True, 7, True, 2, 3),
    "row, fewer features than ranks": (whole_ends, True, 2, True, 3),
    "row, one vector, no bias": (whole_ends, True, 7, False),
    "row, empty batch": (whole_ends, True, 7, True, 0, 3),
    "mlp gelu": (mlp, 13, "gelu", True, 2, 3),
    "mlp gelu_exact": (mlp, 13, "gelu_exact", True, 2, 3),
    "mlp swiglu": (mlp, 13, "swiglu", False, 2, 3),
    "mlp swiglu bias": (mlp, 8, "swiglu", True, 4),
    "mlp, fewer features than ranks": (mlp, 3, "swiglu", True, 2, 3),
    "mlp, empty batch": (mlp, 13, "gelu", True, 0, 3),
    "embedding 7": (embedding, 7, 3, 5),
    "embedding, fewer rows than ranks": (embedding, 2, 6),
    "embedding, one id": (embedding, 7),
    "embedding, empty batch": (embedding, 7, 0, 3),
    "low precision": (low_precision,),
    "replicated": (replicated,),
    "replicated in a grid": (replicated_in_a_grid,),
}


def run_cases(tp: int) -> None:
    axis = ProcessGrid(tp=tp).tp
    for name, (case, *args) in CASES.items():
        try:
            case(axis, *args)
        except Exception as error:
            raise AssertionError(f"case {name!r} at tp {tp}: {error}") from error


def test_layers_on_one_process() -> None:
    run_cases(1)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("tp", [3, 4])
def test_layers_split(tp: int) -> None:
    run_ranks(run_cases, tp, tp)


def test_layers_are_built_on_meta() -> None:
    layer = ParallelMLP(4, 6, Axis("tp"), device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    assert [(n, p.init.kind, p.weight_decay) for n, _, p in named_placements(layer)] == [
        ("up.weight", "normal", True),
        ("up.bias", "zeros", False),
        ("down.weight", "normal", True),
        ("down.bias", "zeros", False),
    ]


def test_out_init_std() -> None:
    layer = ParallelMLP(4, 6, Axis("tp"), init_std=0.1, out_init_std=0.01, device="meta")
    assert (layer.up.placements["weight"].init.std, layer.down.placements["weight"].init.std) == (
        0.1,
        0.01,
    )


def test_unchecked_ids_still_read_the_table() -> None:
    layer = VocabParallelEmbedding(3, 4, Axis("tp"), check_ids=False)
    with pytest.raises(IndexError):
        layer(torch.tensor([3]))


def test_dropout() -> None:
    x = torch.ones(4, 8, 16)
    key = RandomKey.of(seed=1, step=2, sample=10)
    layer = Dropout(0.25, "blocks.0.dropout")
    y = layer(x, key)
    assert layer(x, None) is x
    torch.testing.assert_close(y.unique(), torch.tensor([0.0, 4 / 3]))
    assert 0.15 < (y == 0).double().mean() < 0.35
    halves = [layer(x[:2], key), layer(x[2:], RandomKey.of(1, 2, 12))]  # any micro-batch size
    assert torch.equal(torch.cat(halves), y)
    assert not torch.equal(Dropout(0.25, "blocks.1.dropout")(x, key), y)
    with pytest.raises(ConfigError, match="below 1"):
        Dropout(1.0, "x")

import gc
import weakref

import pytest
import torch

from hybridpar.comm import Work
from hybridpar.grid import Axis
from hybridpar.nn.binding import ParameterBinding
from hybridpar.nn.embedding import _LocalRows
from hybridpar.nn.linear import column_linear, row_linear
from hybridpar.prediction.fake_neighbours import silent_axis, silent_group
from hybridpar.state import AccumulationRules, GradientAccumulator
from hybridpar.state.layout import FlatLayout

AXIS = Axis("tp")
SHAPES = {"w": (4, 3), "b": (3,), "tied": (5, 4), "unused": (2,)}


def make_leaves(dtype, seed=0):
    """Leaves that are views into one flat buffer, as the weight store makes them."""
    layout = FlatLayout(SHAPES, dtype)
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return {name: view.detach().requires_grad_() for name, view in layout.views(flat).items()}


def make_accumulator(dtype, num_buffers=1):
    return GradientAccumulator(FlatLayout(SHAPES, dtype), num_buffers=num_buffers)


def loss(leaves, ids):
    """Uses `tied` twice and `unused` not at all."""
    x = leaves["tied"][ids]
    y = torch.tanh(x @ leaves["w"] + leaves["b"])
    return (y @ leaves["w"].t() @ leaves["tied"].t()).square().mean()


IDS = [torch.tensor([0, 1, 1]), torch.tensor([4, 2]), torch.tensor([3])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_autograd_adds_into_the_flat_buffer(dtype):
    """In place where that has the parameters' type; gradients of low precision add up in
    float32."""
    low = dtype.itemsize < 4
    leaves = make_leaves(dtype)
    accumulator = make_accumulator(torch.float32 if low else dtype)
    wanted = {name: torch.zeros_like(view) for name, view in accumulator.views(0).items()}
    for ids in IDS:
        for name, g in zip(
            leaves,
            torch.autograd.grad(loss(leaves, ids), list(leaves.values()), allow_unused=True),
            strict=True,
        ):
            if g is not None:
                wanted[name] += g
    accumulator.bind(leaves, 0)
    for ids in IDS:
        loss(leaves, ids).backward()
    for name, view in accumulator.views(0).items():
        assert leaves[name].grad is None if low else leaves[name].grad.data_ptr() == view.data_ptr()
        assert torch.equal(view, wanted[name])
    assert view.untyped_storage().data_ptr() == accumulator.buffers[0].tensors[0].data_ptr()


@pytest.mark.parametrize("leaf_dtype", [torch.float32, torch.bfloat16])
def test_reports_each_used_parameter_once_and_only_when_armed(leaf_dtype):
    leaves = make_leaves(leaf_dtype)
    accumulator = make_accumulator(torch.float32)
    accumulator.bind(leaves, 0)
    final = []
    loss(leaves, IDS[0]).backward()
    accumulator.arm(final.append)
    accumulator.bind(leaves, 0)  # binding again registers no second hook
    loss(leaves, IDS[1]).backward()
    accumulator.finish(0)
    loss(leaves, IDS[2]).backward()
    assert sorted(final) == ["b", "tied", "w"]


def test_the_gradient_is_final_when_reported():
    leaves = make_leaves(torch.float32)
    accumulator = make_accumulator(torch.float32)
    accumulator.bind(leaves, 0)
    seen = {}
    accumulator.arm(lambda name: seen.__setitem__(name, accumulator.views(0)[name].clone()))
    loss(leaves, IDS[0]).backward()
    assert set(seen) == {"w", "b", "tied"}
    for name, value in seen.items():
        assert torch.equal(value, accumulator.views(0)[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("late", "axis"), [(0, AXIS), (1, AXIS), (3, AXIS), (1, silent_axis("tp", 2))]
)
def test_parts_that_wait_are_added_to_the_same_bits(dtype, late, axis):
    """Also where some do not, beside a sum over the axis."""
    layers = {name: leaf.detach().clone() for name, leaf in make_leaves(dtype).items()}
    buffer = torch.float32 if dtype == torch.bfloat16 else dtype
    results = []
    reports = []
    for defers in (False, True):
        leaves = {name: x.clone().requires_grad_() for name, x in layers.items()}
        accumulator = GradientAccumulator(
            FlatLayout(SHAPES, buffer),
            rules=AccumulationRules(defers=defers),
        )
        final = []
        waiting = []
        for batch in range(2):
            for view in accumulator.views(0).values():
                view.fill_(float("nan"))
            accumulator.begin(0)
            accumulator.bind(leaves, 0)
            for k, ids in enumerate(IDS):
                accumulator.arm(final.append if k == len(IDS) - 1 else None)
                accumulator.bind(leaves, 0)
                if defers:
                    accumulator.collect((batch, k))
                    waiting.append((batch, k))
                deep(leaves, ids, axis, accumulator).backward()
                while len(waiting) > late:
                    apply(accumulator, waiting.pop(0), final)
            while waiting:
                apply(accumulator, waiting.pop(0), final)
            accumulator.finish(0)
        results.append(accumulator.buffers[0].tensors[0].clone())
        reports.append(sorted(final))
    assert torch.equal(*results)
    assert reports[0] == reports[1]


def apply(accumulator, key, final):
    accumulator.arm(final.append if key[1] == len(IDS) - 1 else None)
    accumulator.apply(key)


def linear(x, leaves, name, axis, accumulator, layer=column_linear):
    """A linear layer whose weight's gradient goes to the accumulator."""
    binding = ParameterBinding(accumulator.consumer(name))
    return layer(x, leaves[name], None, axis, binding=binding)


def deep(leaves, ids, axis, accumulator):
    """Parts of `tied` come from an embedding, a linear layer, and autograd itself; of `w` from two
    linear layers."""
    bound = axis, accumulator
    x = _LocalRows.apply(ids, leaves["tied"], None, "auto", accumulator.consumer("tied"))
    y = torch.tanh(column_linear(x, leaves["w"].new_ones(3, 4), leaves["b"], axis))
    z = linear(linear(y, leaves, "w", *bound), leaves, "tied", *bound)
    again = linear(z[:, :3], leaves, "w", *bound)
    return (again @ leaves["tied"].t()).square().mean() + z.square().mean()


def test_the_sum_of_an_input_gradient_runs_beside_a_product(monkeypatch):
    """In a backward to the input alone: a column-parallel layer's own, from when the sum has begun
    until it is waited for; others wait. Where an earlier part of the weight waits, so does this
    one: the order of sums stays."""
    log = []
    axis = Axis("tp", 0, (0, 1), silent_group(0, 2, lambda op, *_: log.append(op)))
    monkeypatch.setattr(Work, "wait", lambda self: log.append("wait"))
    layers = {"column": torch.randn(6, 4), "row": torch.randn(4, 6)}
    leaves = {name: x.requires_grad_() for name, x in layers.items()}
    accumulator = GradientAccumulator(
        FlatLayout({name: x.shape for name, x in layers.items()}, torch.float32),
        rules=AccumulationRules(defers=True),
    )
    take = accumulator.take
    monkeypatch.setattr(
        accumulator, "take", lambda name, *rest: [log.append(name), take(name, *rest)]
    )
    accumulator.begin(0)
    for key in (0, 1):
        accumulator.bind(leaves, 0)
        x = torch.randn(3, 4, requires_grad=True)
        y = linear(x, leaves, "column", axis, accumulator)
        y = linear(y, leaves, "row", axis, accumulator, row_linear)
        accumulator.collect(key)
        if key:
            accumulator.collecting["column"] = []
        log.clear()
        y.sum().backward()
        assert log == ["c10d::allreduce_", *["column"] * (not key), "wait"]
    accumulator.apply(0)
    assert log[3 - key :] == ["row"]


def test_waiting_parts_keep_no_graph_alive():
    leaves = make_leaves(torch.float32)
    accumulator = GradientAccumulator(
        FlatLayout(SHAPES, torch.float32),
        rules=AccumulationRules(defers=True),
    )
    accumulator.begin(0)
    accumulator.bind(leaves, 0)
    accumulator.collect(0)
    y = linear(torch.randn(2, 3), leaves, "w", AXIS, accumulator)
    gone = weakref.ref(y.grad_fn)
    linear(y, leaves, "tied", AXIS, accumulator).sum().backward()
    del y
    gc.collect()
    assert gone() is None
    with pytest.raises(AssertionError, match="still wait"):
        accumulator.finish(0)
    accumulator.apply(0)
    accumulator.finish(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_versions_share_the_buffers_of_two_batches(dtype):
    """2BW: versions alternate with buffers; batches 0 and 1 both run on the first version."""
    versions = [make_leaves(dtype, seed) for seed in (0, 1)]
    accumulator = make_accumulator(torch.float32, num_buffers=2)
    for batch, version in [(0, 0), (1, 0), (2, 1), (3, 0)]:
        index = accumulator.buffer_index(batch)
        other = accumulator.buffers[1 - index].tensors[0].clone()
        for view in accumulator.views(
            index
        ).values():  # what is there is overwritten, or emptied if nothing comes
            view.fill_(float("nan"))
        accumulator.begin(index)
        accumulator.bind(versions[version], index)
        alone = make_accumulator(torch.float32)
        copy = {
            name: leaf.detach().clone().requires_grad_() for name, leaf in versions[version].items()
        }
        alone.bind(copy, 0)
        for ids in IDS:
            loss(versions[version], ids).backward()
            loss(copy, ids).backward()
        accumulator.finish(index)
        assert torch.equal(accumulator.buffers[index].tensors[0], alone.buffers[0].tensors[0])
        assert torch.equal(accumulator.buffers[1 - index].tensors[0], other)


def test_recomputation_reports_once():
    leaves = make_leaves(torch.float32)
    accumulator = make_accumulator(torch.float32)
    accumulator.bind(leaves, 0)
    final = []
    accumulator.arm(final.append)
    torch.utils.checkpoint.checkpoint(loss, leaves, IDS[0], use_reentrant=False).backward()
    assert sorted(final) == ["b", "tied", "w"]


def test_leaves_are_not_kept_alive():
    leaves = make_leaves(torch.bfloat16)
    accumulator = make_accumulator(torch.float32)
    accumulator.bind(leaves, 0)
    gone = weakref.ref(leaves["w"])
    del leaves
    accumulator.bind(make_leaves(torch.bfloat16), 0)
    gc.collect()
    assert gone() is None


def test_leaves_must_match_the_layout():
    leaves = make_leaves(torch.float32)
    accumulator = make_accumulator(torch.float32)
    del leaves["b"]
    with pytest.raises(AssertionError, match=r"\['b'\]"):
        accumulator.bind(leaves, 0)

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpar import native, random
from hybridpar.errors import ConfigError
from hybridpar.ops import dropout
from hybridpar.ops.dropout import DropoutSpec
from hybridpar.random import CounterBlock, RandomKey

SEED = 2**35 + 11
STEP = 7
SAMPLE = 100
KEY, SITE = RandomKey.of(SEED, STEP, SAMPLE), random.site("test.dropout")
needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
BACKENDS = ["torch", pytest.param("cpp", marks=needs_native)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_what_the_bits_say(backend, dtype):
    p = 0.3
    x = torch.randn(3, 2, 5, 41).to(dtype)
    block = CounterBlock(rows=10, cols=41, stride=41, start=0, num_samples=3)
    bits = random.random_bits(SEED, SITE, STEP, SAMPLE, block)
    keep = (bits.long() & 0xFFFFFFFF).view(x.shape) >= round(p * 2**32)
    expected = torch.where(keep, x * (1 / (1 - p)), 0.0)
    assert torch.equal(dropout(x, DropoutSpec(p, KEY, SITE), backend=backend), expected)


@needs_native
@given(
    b=st.integers(0, 3),
    rows=st.integers(0, 5),
    cols=st.integers(0, 1300),
    gap=st.integers(0, 40),
    start=st.integers(0, 2**36),
    p=st.floats(0.0, 1.0, exclude_max=True),
    dtype=st.sampled_from(DTYPES),
)
def test_cpp_equals_the_reference(b, rows, cols, gap, start, p, dtype):
    x = torch.randn(b, rows, cols).to(dtype)
    spec = DropoutSpec(p, KEY, SITE, inner_size=cols + gap, inner_start=start)
    outs = [dropout(x, spec, backend=name) for name in ("cpp", "torch")]
    assert torch.equal(*outs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values_pass(backend):
    for dtype in DTYPES:
        special = torch.tensor(
            [float("nan"), float("inf"), -float("inf"), torch.finfo(dtype).max, -0.0], dtype=dtype
        )
        x = special.repeat(40).view(1, -1)
        out = dropout(x, DropoutSpec(0.5, KEY, SITE), backend=backend)
        keep = dropout(torch.ones_like(x), DropoutSpec(0.5, KEY, SITE), backend=backend) != 0
        torch.testing.assert_close(
            out, torch.where(keep, x * 2, 0.0), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_and_a_micro_batch_see_their_part_of_the_mask(backend):
    x = torch.randn(6, 3, 20)
    whole = dropout(x, DropoutSpec(0.4, KEY, SITE), backend=backend)
    for first, last in ((0, 2), (2, 3), (3, 6)):
        for start, stop in ((0, 7), (7, 8), (8, 20), (20, 20)):
            key = RandomKey.of(SEED, STEP, SAMPLE + first)
            spec = DropoutSpec(0.4, key, SITE, inner_size=20, inner_start=start)
            part = dropout(x[first:last, :, start:stop], spec, backend=backend)
            assert torch.equal(part, whole[first:last, :, start:stop])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_goes_through_the_same_mask(backend):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    out = dropout(x, DropoutSpec(0.25, KEY, SITE), backend=backend)
    grad = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(got, dropout(grad, DropoutSpec(0.25, KEY, SITE), backend=backend))

    def function(x):
        return dropout(x, DropoutSpec(0.25, KEY, SITE), backend=backend) ** 2

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_nothing_is_saved_for_backward():
    x = torch.randn(2, 3, 4, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(x, DropoutSpec(0.5, KEY, SITE))
    assert not saved


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_memory_layout(backend):
    x = torch.randn(5, 4, 3).permute(2, 0, 1)
    assert torch.equal(
        dropout(x, DropoutSpec(0.5, KEY, SITE), backend=backend),
        dropout(x.contiguous(), DropoutSpec(0.5, KEY, SITE), backend=backend),
    )
    grad = torch.ones(1).expand(3, 5, 4)
    y = x.clone().requires_grad_()
    dropout(y, DropoutSpec(0.5, KEY, SITE), backend=backend).backward(grad)
    assert torch.equal(
        y.grad, dropout(grad.contiguous(), DropoutSpec(0.5, KEY, SITE), backend=backend)
    )


def test_rate_and_independence():
    x = torch.ones(8, 100, 1000)
    keys = [
        (KEY, SITE),
        (RandomKey.of(SEED, 8, 100), SITE),
        (RandomKey.of(SEED + 1, 7, 100), SITE),
        (KEY, SITE + 1),
        (RandomKey.of(SEED, 7, 108), SITE),
    ]
    masks = [
        (dropout(x, DropoutSpec(0.1, key, site)) == 0).double().flatten() for key, site in keys
    ]
    for mask in masks:
        assert abs(mask.mean() - 0.1) < 5 * (0.09 / x.numel()) ** 0.5
    assert torch.corrcoef(torch.stack(masks)).fill_diagonal_(0).abs().max() < 5 / x.numel() ** 0.5


def test_identity():
    x = torch.randn(2, 3)
    assert dropout(x, DropoutSpec(0.0, KEY, SITE)) is x
    assert dropout(x, DropoutSpec(0.9, None, SITE)) is x
    assert torch.equal(dropout(x, DropoutSpec(1e-12, KEY, SITE)), x)  # rounds to a threshold of 0


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_bad_probability(p):
    with pytest.raises(ConfigError, match="less than 1"):
        dropout(torch.ones(2, 3), DropoutSpec(p, KEY, SITE))


def test_bad_input():
    with pytest.raises(ValueError, match="samples"):
        dropout(torch.ones(3), DropoutSpec(0.5, KEY, SITE))
    with pytest.raises(ValueError, match="out of range"):
        RandomKey.of(0, 0, 2**32 - 2, num_samples=3)
    with pytest.raises(ValueError, match="negative"):
        dropout(torch.ones(3, 3), DropoutSpec(0.5, KEY, SITE, inner_start=-1))


@needs_native
def test_operators_are_complete():
    for dtype in DTYPES:
        x = torch.randn(2, 3, 5).to(dtype)
        torch.library.opcheck(
            torch.ops.hybridpar.philox_dropout.default, (x, 1, 2, KEY.counter, 2**31, 2.0, 5, 6)
        )
    torch.library.opcheck(torch.ops.hybridpar.philox_bits.default, (1, 2, 3, 4, 2, 3, 5, 6, 7))
    torch.library.opcheck(torch.ops.hybridpar.philox_normal.default, (1, 2, 3, 5, 6, 7, True))


@needs_native
def test_operator_refuses_bad_input():
    op = torch.ops.hybridpar.philox_dropout
    mask = (1, 2, KEY.counter, 2**31, 2.0, 5, 6)
    with pytest.raises(RuntimeError, match="contiguous"):
        op(torch.ones(2, 3), *mask)
    with pytest.raises(RuntimeError, match="contiguous"):
        op(torch.ones(2, 3, 4).transpose(1, 2), *mask)
    with pytest.raises(RuntimeError, match="float32, float64, bfloat16 or float16"):
        op(torch.ones(2, 3, 4, dtype=torch.int32), *mask)
    with pytest.raises(RuntimeError, match="32 bits"):
        op(torch.ones(2, 3, 4), 1, 2, KEY.counter, 2**32, 2.0, 5, 6)
    for counter in (
        None,
        KEY.counter.int(),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 9], [2, 9]])[:, 0],
    ):
        with pytest.raises(RuntimeError, match="needs a counter"):
            op(torch.ones(2, 3, 4), 1, 2, counter, 2**31, 2.0, 5, 6)
    for step, sample in ((2**32, 0), (-1, 0), (0, -1), (0, 2**32 - 1)):
        with pytest.raises(RuntimeError, match="must be within"):
            op(torch.ones(2, 3, 4), 1, 2, torch.tensor([step, sample]), 2**31, 2.0, 5, 6)


def test_compiles_once_for_all_steps():
    graphs = []

    def count(module, _inputs):
        graphs.append(module)
        return module.forward

    @torch.compile(fullgraph=True, backend=count)
    def compiled(x, key):
        return dropout(x, DropoutSpec(0.5, key, SITE)).sin()

    x = torch.randn(2, 3, 4, requires_grad=True)
    for step in range(5):
        key = RandomKey.of(1, step, 8 * step)
        out, expected = compiled(x, key), dropout(x, DropoutSpec(0.5, key, SITE)).sin()
        assert torch.equal(out, expected)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)))
    assert len(graphs) == 1

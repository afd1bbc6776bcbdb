"""Cases that tests/ops/test_backends.py does not reach; test_interpreter.py runs them with
TRITON_INTERPRET=1."""

from __future__ import annotations

import math

import pytest
import torch
from nn.test_context import same_as_torch
from ops.test_backends import DROPS, KEY, SITE, Case, compute, tensors_of

from hybridpar import native, ops, random
from hybridpar.autograd import recomputed
from hybridpar.config import KernelsConfig, from_mapping
from hybridpar.grid import Axis
from hybridpar.nn import ParallelAttention
from hybridpar.ops.attention import DEFAULT_OPTIONS, AttentionMask, AttentionOptions
from hybridpar.ops.backends import registry
from hybridpar.ops.dropout import DropoutMask, DropoutSpec, dropout_torch
from hybridpar.ops.norm import NormWeights
from hybridpar.ops.split_qkv import RotarySettings, sums_bias
from hybridpar.prediction.ghost import Tracker
from hybridpar.train.autotuning import kernel_options


def test_triton_runs_here():
    """Otherwise the tests of all backends would pass without it."""
    reasons = {
        op: registry.report(op, "cpu", torch.float32).rejected.get("triton")
        for op in registry.ops()
    }
    assert {op: reason for op, reason in reasons.items() if reason} == {}


@pytest.mark.skipif(native.missing() is not None, reason="needs hybridpar._C")
def test_arguments_and_results_are_those_of_csrc():
    def signature(library, name):
        schema = getattr(library, name).default._schema
        arguments = [
            (a.name, str(a.type).replace("SymInt", "int"), a.is_write) for a in schema.arguments
        ]
        return arguments, [str(r.type) for r in schema.returns]

    names = [name for name in native.operators() if hasattr(torch.ops.hybridpar_triton, name)]
    for name in names:
        assert signature(torch.ops.hybridpar_triton, name) == signature(
            torch.ops.hybridpar, name
        ), name
    assert set(native.operators()) - set(names) == {
        "attention_hopper",
        "few_rows_linear",
        "next_token_attention",
        "philox_bits",
        "philox_normal",
        "placement_best_loads",
    }


def wide_cases():
    for shape in (
        (2, 3, 264),
        (2, 1, 4104),
        (1, 16388),
    ):  # in one kernel; dropout apart; rows by blocks
        h = shape[-1:]
        yield Case(
            "add_norm",
            f"{h[0]}-dropout",
            (shape, h, shape, h, h),
            lambda x, c, r, w, b, k: ops.add_norm(
                x, r, NormWeights(w, b), bias_of_x=c, dropout=DROPS, backend=k
            ),
        )
    for cols in (8200, 16388):  # by blocks backward only, and both ways
        yield Case(
            "rms_norm",
            f"{cols}",
            ((3, cols), (cols,)),
            lambda x, w, k: ops.rms_norm(x, w, backend=k),
        )


@pytest.mark.parametrize("case", [*wide_cases()], ids=str)
def test_other_widths_against_float64(case):
    tensors = tensors_of(case, torch.float32)
    exact = compute(case, [t.double() for t in tensors], "torch")
    for got, want in zip(compute(case, tensors, "triton"), exact, strict=True):
        assert (got.double() - want).abs().max() <= 3e-6 * max(want.abs().max().item(), 1.0)


def test_norms_have_the_same_bits_where_fewer_stages_fit(monkeypatch):
    """A GPU with less shared memory, which Triton says before anything runs."""
    from triton.runtime.errors import OutOfResources

    from hybridpar.kernels import norm, options

    case = Case("rms_norm", "", ((20, 40), (40,)), lambda x, w, k: ops.rms_norm(x, w, backend=k))
    tensors = tensors_of(case, torch.float32)
    launch = norm.launch
    tried = []

    def limited(kernel, *args, **constants):
        tried.append(constants.get("STAGES", 0))
        if tried[-1] > 1:
            raise OutOfResources(147_612, 101_376, "shared memory")
        launch(kernel, *args, **constants)

    want = compute(case, tensors, "triton")
    monkeypatch.setattr(norm, "launch", limited)
    for _ in range(2):
        assert all(map(torch.equal, compute(case, tensors, "triton"), want))
    assert [stages for stages in tried if stages] == [4, 2, 1, 1], (
        "the second time it is known what fits"
    )
    options.OPTIONS.use({})


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("length", [37, 40])
def test_dropout_of_a_ring(length, documents):
    """A counter for each key, and where 4 divides the length for four of some blocks' keys."""
    same_as_torch("triton", torch.float32, length, documents, softcap=2.0 * documents)


def test_cross_entropy_of_several_blocks():
    """The largest logit comes last, minus infinity fills a block; the sum is of large numbers close
    to each other."""
    logits = torch.randn(3, 9000, generator=torch.Generator().manual_seed(1)) + 500
    logits[0] += torch.linspace(0, 30, 9000)
    logits[1, :5000] = -torch.inf
    column = torch.tensor([8999, 4, 7000])
    got, want = (
        ops.cross_entropy(x, k).statistics(x, column, 8990, True)
        for x, k in ((logits, "triton"), (logits.double(), "torch"))
    )
    torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("positions", [None, torch.tensor([100_003, 2**31 + 5, 0])])
def test_rotary_of_large_positions_and_strides(positions, tmp_path):
    """2^31 elements and more apart, in a file of which three pages exist."""
    apart = 2**30 + 24
    x = torch.from_file(
        str(tmp_path / "sparse"), shared=True, size=2 * apart + 64, dtype=torch.float16
    )
    x = x.as_strided((1, 3, 3, 8), (1, apart, 16, 1))
    x.copy_(torch.randn(1, 3, 3, 8, generator=torch.Generator().manual_seed(1)))
    got, want = (
        ops.rotary(x.to(t), offset=1_000_000, positions=positions, backend=k)
        for t, k in ((torch.float16, "triton"), (torch.float64, "torch"))
    )
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5)
    got = ops.rotary(x.float(), offset=1_000_000, positions=positions, backend="triton")
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=5e-7)


def test_compiled_without_breaks():
    """torch.compile sees the operators from outside, and their gradients."""

    def block(x, w, b, c, k):
        y, total = ops.add_norm(
            x,
            ops.rms_norm(x, w, backend=k),
            NormWeights(w, b),
            bias_of_x=c,
            dropout=DROPS,
            backend=k,
        )
        z = ops.swiglu(torch.cat((ops.gelu(y, b, backend=k), y), -1), backend=k)
        total = ops.bias_dropout_add(z, total, b, dropout=DROPS, backend=k)
        return ops.rotary(total[:, None], backend=k)

    case = Case(
        "",
        "",
        ((2, 4, 8), (8,), (8,), (8,)),
        torch.compile(block, fullgraph=True, backend="aot_eager"),
    )
    tensors = tensors_of(case, torch.float32)
    for got, want in zip(
        compute(case, tensors, "triton"),
        compute(Case("", "", case.shapes, block), tensors, "torch"),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["by position", "by head", "in one product"])
def test_attention_by_the_copy_engine(layout, monkeypatch):
    """Bits are equal to a load through pointers, whatever matrix the tensors are."""
    from hybridpar.kernels import attention

    b = 2
    n = 2
    s = 128
    d = 16
    g = torch.Generator().manual_seed(1)
    if layout == "in one product":
        q, k, v = torch.randn(b, s, 3, n, d, generator=g, dtype=torch.float16).permute(
            2, 0, 3, 1, 4
        )
    else:
        shape = (b, s, n, d) if layout == "by position" else (b, n, s, d)
        q, k, v = (torch.randn(shape, generator=g, dtype=torch.float16) for _ in range(3))
        q, k, v = (x.transpose(1, 2) if layout == "by position" else x for x in (q, k, v))
    case = Case(
        "attention",
        layout,
        (),
        lambda q, k, v, backend: ops.attention(q, k, v, causal=True, backend=backend),
    )
    wanted = compute(case, [q, k, v], "triton")
    used = []
    matrix = attention.matrix
    monkeypatch.setattr(attention, "has_copy_engine", lambda major: True)
    monkeypatch.setattr(attention, "matrix", lambda *args: used.append(args) or matrix(*args))
    got = compute(case, [q, k, v], "triton")
    assert len(used) == 6, "two tensors in each of three kernels"
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("count", [1, 40, 300])
def test_few_ids_are_ordered_like_many(count, monkeypatch):
    from hybridpar.kernels import embedding

    ids = torch.randint(90, (count,), generator=torch.Generator().manual_seed(count))
    few = embedding._sorted(ids, 20, 50)
    monkeypatch.setattr(embedding, "_MOST_RANKED", 0)
    assert all(torch.equal(a, b) for a, b in zip(few, embedding._sorted(ids, 20, 50), strict=True))


def test_dropout_has_the_mask_of_the_reference():
    from hybridpar.kernels import philox

    for shape, stride, start in [
        ((2, 3, 7), 13, 4),
        ((1, 1, 2500), 2500, 2**34 - 3),
        ((3, 2, 1), 1, 1),
        ((2, 2, 130), 131, 0),
        ((2, 3, 5), 5, 2**40 + 2),
        ((1, 2, 1026), 1026, 3),
        ((0, 2, 3), 3, 0),
    ]:
        key = random.philox_key(2**63 + 9, 0xDEADBEEF)
        counter = torch.tensor((2**32 - 1, 2**31 - 1))
        for dtype in (torch.float32, torch.float16):
            x = torch.randn(shape).to(dtype)
            mask = DropoutMask(*key, counter, round(0.7 * 2**32), 1 / 0.3, stride, start)
            assert torch.equal(philox.philox_dropout(x, *mask), dropout_torch(x, mask)), (
                shape,
                stride,
                start,
                dtype,
            )


@pytest.mark.parametrize("s", [52, 53, 54])
def test_attention_drops_what_the_reference_drops(s):
    """Rows of the mask begin at multiples of 4, anywhere, at multiples of 2."""
    from hybridpar.kernels import attention

    b = 2
    n = 2
    d = 64
    start = 2**36 + 12 * (s == 52)
    mask = (0x9ABCDEF0, 0x12345678, torch.tensor([2**32 - 1, 2**31 - 1]), round(0.3 * 2**32))
    q = torch.zeros(b, n, s, d, dtype=torch.float16)
    v = torch.eye(s, d, dtype=torch.float16).expand(
        b, n, s, d
    )  # so that out is the matrix of probabilities
    settings = (None, None, None, [0, 1], 0.5, 0.0, False, 0, *mask, 1 / 0.7, start)
    out, lse = attention.attention(q, q, v, *settings)
    kept = dropout_torch(torch.ones(b, n * s, s), DropoutMask(*mask, 1.0, s, start))
    kept = kept.view(b, n, s, s)
    probabilities = (kept / 0.7 / s).half()
    assert torch.equal(out.transpose(1, 2)[..., :s] > 0, kept > 0)
    torch.testing.assert_close(out.transpose(1, 2)[..., :s], probabilities, rtol=2e-3, atol=0)
    _, _, dv = attention.attention_backward(v, q, q, v, out, lse, *settings)
    assert torch.equal(dv.transpose(1, 2)[..., :s] > 0, kept.mT > 0)


def agrees(b, n, n_kv, s, d, mask, options=DEFAULT_OPTIONS):
    case = Case(
        "attention",
        "",
        ((b, n, s, d), (b, n_kv, s, d), (b, n_kv, s, d)),
        lambda q, k, v, backend: ops.masked_attention(q, k, v, mask, options, backend=backend),
    )
    tensors = tensors_of(case, torch.float32)
    for got, want in zip(
        compute(case, tensors, "triton"),
        compute(case, [t.double() for t in tensors], "torch"),
        strict=True,
    ):  # sums of up to a hundred terms in float32
        assert (got.double() - want).abs().max() <= 6e-6 * want.abs().max().clamp(min=1), (
            mask,
            options,
        )


@pytest.mark.parametrize(
    ("d", "kv_index"), [(130, [2, 0, 2, 3]), (96, [1, 1, 0, 0]), (16, [0, 1, 2, 3])]
)
def test_attention_of_heads_that_share_keys(d, kv_index):
    """A kv head serves none, once."""
    agrees(1, 4, max(kv_index) + 1, 40, d, AttentionMask(True), AttentionOptions(kv_index))


NO_DROPOUT = (0, 0, None, 0, 1.0, 0)
NO_MASK = (None, None, None)


def test_attention_of_nothing():
    from hybridpar.kernels import attention

    for b, n, s in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        q = torch.empty(b, n, s, 8)
        out, lse = attention.attention(
            q, q, q, *NO_MASK, list(range(n)), 1.0, 0.0, True, 0, *NO_DROPOUT
        )
        assert (out.shape, lse.shape) == ((b, s, n, 8), (b, n, s))
        gradients = attention.attention_backward(
            q, q, q, q, out, lse, *NO_MASK, list(range(n)), 1.0, 0.0, True, 0, *NO_DROPOUT
        )
        assert {x.shape for x in gradients} == {(b, s, n, 8)}


def test_attention_of_queries_that_see_no_key():
    """Zero, no gradient, infinite lse."""
    from hybridpar.kernels import attention

    q = torch.randn(1, 1, 3, 8)
    real = torch.tensor([[True, False, True]])
    out, lse = attention.attention(q, q, q, ~real, None, None, [0], 1.0, 0.0, True, 0, *NO_DROPOUT)
    assert torch.equal(out[0, 0], torch.zeros(1, 8))
    assert lse[0, 0, 0] == torch.inf
    assert lse[0, 0, 1:].isfinite().all()
    dq, dk, dv = attention.attention_backward(
        q, q, q, q, out, lse, ~real, None, None, [0], 1.0, 0.0, True, 0, *NO_DROPOUT
    )
    assert (dq[0, 0] == 0).all()
    assert (dk[real] == 0).all()
    assert (dv[real] == 0).all()
    assert (dv[~real] != 0).any()


@pytest.mark.parametrize(("rows", "keys"), [(32, 64), (64, 16), (16, 128)])
def test_attention_in_tiles_of_all_sizes(rows, keys, monkeypatch):
    from hybridpar.kernels import attention, tiles

    monkeypatch.setattr(attention, "tiles_of", lambda *args: (tiles.Tile(rows, keys, 4, 1),))
    real = (
        torch.arange(180).view(2, 90) < 120
    )  # the second sample has blocks of keys without a real one
    for causal in (False, True):
        agrees(
            2,
            1,
            1,
            90,
            16,
            AttentionMask(causal, real),
            AttentionOptions(
                dropout=DropoutSpec(0.3, random.RandomKey.of(1, 2, 3), 4), head_start=1
            ),
        )


def test_options_are_timed_on_the_shapes_of_a_layer_and_compute_the_same(monkeypatch):
    """Each kernel of training, and the forward of an evaluation; a choice changes the order of sums
    alone."""
    from hybridpar.kernels import attention, options, tiles

    sizes = tiles.Tile(32, 16, 4, 1), tiles.Tile(16, 32, 4, 1)
    monkeypatch.setattr(attention, "tiles_of", lambda *args: sizes)
    monkeypatch.setattr(kernel_options, "_WARM", 0)
    monkeypatch.setattr(kernel_options, "_ROUNDS", 1)
    config = from_mapping(
        {
            "model": {
                "num_layers": 1,
                "hidden_size": 32,
                "num_heads": 4,
                "num_kv_heads": 2,
                "seq_length": 24,
                "vocab_size": 61,
                "attention_dropout": 0.1,
            },
            "parallel": {"tp": 2},
            "pipeline": {"num_microbatches": 1},
            "kernels": {"attention": "triton"},
            "train": {"micro_batch_size": 2, "dtype": "fp16", "eval_interval": 5, "device": "cpu"},
        }
    )
    clock = iter(range(100, 0, -1))

    def time(launch):
        launch()
        return float(next(clock))

    before = torch.get_rng_state()
    found = kernel_options.time_candidates(
        lambda: kernel_options.attend(config, config.model, torch.device("cpu")), time, {}
    )
    assert torch.equal(before, torch.get_rng_state())
    assert {key: entry.chosen for key, entry in found.items()} == dict.fromkeys(
        [
            f"{kernel} float16 d16 s32 causal dropout"
            for kernel in ("forward_kernel", "dq_kernel", "dkdv_kernel")
        ]
        + ["forward_kernel float16 d16 s32 causal plain"],
        sizes[0],
    ), "a hundredth is no reason to leave the default"

    x = [
        torch.randn(1, 2, 24, 16, generator=torch.Generator().manual_seed(i), dtype=torch.float16)
        for i in range(3)
    ]
    results = []
    used = []
    monkeypatch.setattr(attention, "Tile", lambda *sizes: used.append(sizes) or tiles.Tile(*sizes))
    for chosen in ({}, dict.fromkeys(found, sizes[1])):
        options.OPTIONS.use(chosen)
        leaves = [t.clone().requires_grad_() for t in x]
        out = ops.masked_attention(
            *leaves,
            AttentionMask(True),
            AttentionOptions(dropout=DropoutSpec(0.1, random.RandomKey.of(1, 2, 3), 4)),
            backend="triton",
        )
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    options.OPTIONS.use({})
    assert used == [sizes[0]] * 3 + [sizes[1]] * 3
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_attention_compiled_once_for_all_steps():
    def f(q, k, v, step):
        return ops.masked_attention(
            q,
            k,
            v,
            AttentionMask(True),
            AttentionOptions(dropout=DropoutSpec(0.3, random.RandomKey.of(1, step, 3), 4)),
            backend="triton",
        )

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    x = [torch.randn(1, heads, 36, 8) for heads in (2, 1, 1)]
    for step in (1, 2, 3):
        results = []
        for function in (f, compiled):
            leaves = [t.clone().requires_grad_() for t in x]
            out = function(*leaves, step)
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), step


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fraction"), [(4, 4, None), (4, 2, 1.0), (6, 2, 0.5)]
)
@pytest.mark.parametrize("frozen", ["", "bias", "weight"])
def test_layers_take_the_bias_gradient_from_the_split(
    heads, kv_heads, fraction, frozen, monkeypatch
):
    """Gradients equal torch's operators', recomputed or not; the linear layer sums no bias."""

    def gradients(backend, again):
        layer = ParallelAttention(
            16 * heads,
            heads,
            Axis("tp"),
            num_kv_heads=kv_heads,
            rotary_fraction=fraction or 1.0,
            rotary_base=100.0 if fraction else None,
            kernels=KernelsConfig(split_qkv=backend),
        )
        g = torch.Generator().manual_seed(5)
        for name, p in layer.named_parameters():
            torch.nn.init.normal_(p, std=0.3, generator=g).requires_grad_(name != f"qkv.{frozen}")
        x = torch.randn(2, 9, 16 * heads, generator=g).requires_grad_()
        y = recomputed(layer, x) if again else layer(x)
        y.backward(torch.randn(y.shape, generator=g))
        return {"y": y, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}

    want = gradients("torch", False)
    passes = []
    run = torch.ops.hybridpar_triton.split_qkv_backward
    monkeypatch.setattr(
        torch.ops.hybridpar_triton,
        "split_qkv_backward",
        lambda *args: passes.append(args[4]) or run(*args),
    )
    for again in (False, True):
        for name, got in gradients("triton", again).items():
            assert (got is None) == (want[name] is None) == (name == f"qkv.{frozen}"), name
            if got is not None:
                torch.testing.assert_close(got, want[name], rtol=1e-5, atol=1e-5, msg=name)
    assert passes == [frozen != "bias"] * 2


def test_split_of_heads_compiled_without_breaks():
    def f(x, w, b):
        qkv = torch.nn.functional.linear(x, w, b.detach())
        assert sums_bias(x)
        return torch.cat(ops.split_qkv(qkv, (2, 1), bias=b, turn=RotarySettings(1e4, 4)), 1)

    g = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=g) for shape in ((2, 5, 6), (28, 6), (28,))]
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results = []
    for function in (f, compiled):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = function(*leaves)
        results.append(
            [
                out,
                *torch.autograd.grad(
                    out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape)
                ),
            ]
        )
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_split_of_heads_on_ghosts():
    """Memory is predicted with the same code. The backward takes its results, and nothing
    besides."""
    b = 2
    s = 64
    d = 16
    groups = (2, 2)
    with Tracker(torch.device("cpu")) as tracker:
        qkv = torch.zeros(b, s, d * 8, requires_grad=True)
        bias = torch.zeros(d * 8, requires_grad=True)
        outputs = ops.split_qkv(qkv, groups, bias=bias, turn=RotarySettings(1e4, d))
        gradients = [torch.zeros(b, s, n, d).transpose(1, 2) for n in (4, 2, 2)]
        tracker.restart_peak()
        before = tracker.read().current
        torch.autograd.backward(outputs, gradients)
        assert (qkv.grad.shape, bias.grad.shape) == (qkv.shape, bias.shape)
        assert tracker.read().peak == before + 4 * (qkv.numel() + bias.numel())


def test_the_bias_gradient_of_the_split_is_summed_before_rounding():
    """Every row is rounded the same way, so a sum of rounded rows would be off by hundreds of
    roundings."""
    rows = 900
    cos = math.cos(1.0)
    dq = torch.zeros(1, 1, rows, 2, dtype=torch.float16)
    dq[..., 0] = 1.0
    positions = torch.ones(rows, dtype=torch.int64)
    dqkv, dbias = torch.ops.hybridpar_triton.split_qkv_backward(
        dq, dq, dq, [1], True, 1e4, [], 1.0, 2, positions
    )
    want = torch.tensor(rows * cos).half()
    assert dqkv[..., 0].double().sum().half() != want, "rounding can be seen here"
    assert dbias[0] == want
    assert dbias[4:].tolist() == [rows, 0]


FIRST = torch.tensor([[0] * 40 + [40] + [41] * 43 + [84] * 6, [0] * 90], dtype=torch.int32)
"""The start of each token's document, in two rows of 90."""


@pytest.mark.parametrize(
    ("limits", "p", "rows", "keys"),
    [
        ({"first_key": FIRST}, 0.0, 32, 64),
        ({"window": 20}, 0.0, 64, 16),
        ({"first_key": FIRST, "window": 30}, 0.3, 32, 32),
        ({"first_key": FIRST.clone().fill_(90)}, 0.0, 32, 64),
        ({"padding_mask": torch.arange(180).view(2, 90) % 7 > 0, "first_key": FIRST}, 0.0, 64, 64),
    ],
    ids=["documents", "window", "all", "nothing", "padded"],
)
def test_attention_within_limits(limits, p, rows, keys, monkeypatch):
    from hybridpar.kernels import attention, tiles

    monkeypatch.setattr(attention, "tiles_of", lambda *args: (tiles.Tile(rows, keys, 4, 1),))
    dropout = DropoutSpec(p, KEY, SITE)
    agrees(2, 2, 1, 90, 16, AttentionMask(True, **limits), AttentionOptions(dropout=dropout))


def test_attention_of_queries_from_two_places():
    """Queries of a rank that has two pieces of a sequence, with keys of all of it."""
    places = torch.cat([torch.arange(5, 27), torch.arange(60, 90)]).int()
    tensors = tensors_of(Case("", "", ((2, 2, 90, 16),) * 3, None), torch.float32)
    mask = AttentionMask(True, None, 33, FIRST[:, places.long()], places)
    options = AttentionOptions(dropout=DropoutSpec(0.3, KEY, SITE))

    def code(q, k, v, backend):
        q = q[:, :, places.long()]
        return ops.masked_attention(q, k, v, mask, options, backend=backend)

    case = Case("attention", "", (), code)
    got = compute(case, tensors, "triton")
    exact = compute(case, [t.double() for t in tensors], "torch")
    for a, b in zip(got, exact, strict=True):
        assert (a.double() - b).abs().max() <= 6e-6 * b.abs().max().clamp(min=1)


def test_another_document_changes_no_bit_of_attention():
    results = []
    for factor in (1.0, -50.0):
        q, k, v = tensors_of(Case("", "", ((2, 2, 90, 16),) * 3, None), torch.float32)
        for x in (q, k, v):
            x[0, :, :41] *= factor
            x[0, :, 84:] *= factor
        case = Case(
            "attention",
            "",
            (),
            lambda q, k, v, backend: ops.masked_attention(
                q, k, v, AttentionMask(True, first_key=FIRST), backend=backend
            ),
        )
        results.append([x[0, :, 41:84] for x in compute(case, [q, k, v], "triton")])
    assert all(map(torch.equal, *results))

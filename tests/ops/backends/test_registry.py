import importlib
import json
import sys
from dataclasses import fields
from types import ModuleType

import pytest
import torch
from torch.autograd.function import Function

from benchmarks import gpu_ops
from hybridpar import native, ops
from hybridpar.cli import doctor
from hybridpar.config import KernelsConfig
from hybridpar.errors import ConfigError
from hybridpar.ops.attention import attention_class
from hybridpar.ops.backends import hopper, libraries, measured, registry
from hybridpar.ops.backends.registry import Backend, report, select


def test_every_row_names_code_that_exists():
    for row in registry.TABLE:
        for path in (*row.path.split(), *row.check.split()):
            assert registry._load(path) is not None, path


def test_a_wrong_path_in_the_table_is_no_missing_library():
    """It would be the reference, without a word."""
    row = Backend("gelu", "cpp", "hybridpar.ops.absent:gelu_fused")
    with pytest.raises(ImportError, match=r"hybridpar\.ops\.absent"):
        row.unsupported()
    assert "absent_library" in str(Backend("gelu", "cpp", "absent_library:gelu").unsupported())


class Doubled(Function):
    @staticmethod
    def forward(ctx, library, x):
        ctx.library = library
        return library.double_it(x)

    @staticmethod
    def backward(ctx, dy):
        return None, ctx.library.double_it(dy)


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_an_operation_is_added_by_a_module_and_a_row(monkeypatch):
    module = ModuleType("hybridpar.ops.made_up")
    module.double_torch = lambda x: 2 * x
    module.double_fused = Doubled.apply
    module.PASSES = {"double_it": libraries.like}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "TABLE", (*registry.TABLE, *registry._rows("double", "made_up")))
    with torch.library._scoped_library(
        "hybridpar", "FRAGMENT"
    ) as passes:  # what csrc/cpu/double.cpp would register
        passes.define("double_it(Tensor x) -> Tensor")
        passes.impl("double_it", lambda x: x + x, "CPU")
        x = torch.ones(3, requires_grad=True)
        registry.resolve("double", "auto", x)(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))
        assert select("double", "auto", "cpu", torch.float32).name == "cpp"
        assert torch.equal(registry.resolve("double", "torch", x)(x), 2 * x)
        assert torch.ops.hybridpar.double_it(x.to("meta")).shape == x.shape
        with pytest.raises(
            ConfigError,
            match=r"kernels\.double = 'cuda': unknown backend .* cpp, triton, torch; try auto",
        ):
            select("double", "cuda")


def test_every_pass_says_what_it_returns():
    modules = {row.path.partition(":")[0] for row in registry.TABLE if row.name == "torch"}
    passes = [name for module in modules for name in importlib.import_module(module).PASSES]
    assert len(passes) == len(set(passes))
    in_triton_only = {"split_qkv_backward", "quantize_fp8", "quantize_fp8_weight_"}
    assert (
        native.missing()
        or set(native.operators()) - {"placement_best_loads"} == set(passes) - in_triton_only
    )


def test_the_configuration_has_every_operation_of_a_model():
    """Quantization to fp8 and generation have one backend for each device, so there is nothing to
    choose."""
    fixed = {"quantize_fp8", "few_rows_linear", "next_token_attention"}
    assert {field.name for field in fields(KernelsConfig)} == set(registry.ops()) - fixed


def test_every_op_is_public_and_ends_with_its_reference():
    # masked_attention is the operation attention, with a mask and options
    assert set(registry.ops()) == set(ops.__all__) - {"masked_attention"}
    for op in registry.ops():
        assert registry.backends(op)[-1].name == "torch"
        assert not registry.backends(op)[-1].check


def test_auto_takes_the_first_that_can(monkeypatch):
    rows = [
        Backend("op", "broken", "hybridpar.nowhere:f"),
        Backend("op", "picky", "math:sqrt", check="tests_only:check"),
        Backend("op", "good", "math:sqrt"),
        Backend("op", "torch", "math:floor"),
    ]
    monkeypatch.setattr(registry, "TABLE", tuple(rows))
    monkeypatch.setattr(registry, "_load", fake_load)
    assert select("op").name == "good"
    assert select("op", device_type="tpu").name == "picky"
    found = report("op")
    assert (found.op, found.active) == ("op", "good")
    assert found.rejected == {
        "broken": "cannot be imported (no nowhere)",
        "picky": "wants a tpu, not None",
    }


def test_auto_takes_the_fastest_where_it_was_measured(monkeypatch):
    rows = [Backend("op", name, "math:sqrt") for name in ("first", "slow", "fast", "torch")]
    rows.insert(0, Backend("op", "broken", "hybridpar.nowhere:f"))
    times = {
        "cpu": {"op": {"float32": {"broken": 1, "fast": 2, "slow": 3}, "float16": {"slow": 3}}}
    }
    monkeypatch.setattr(registry, "TABLE", tuple(rows))
    monkeypatch.setattr(registry, "_load", fake_load)
    monkeypatch.setattr(measured, "_table", lambda: times)
    assert select("op", "auto", "cpu", torch.float32).name == "fast"
    for where in (
        ("cpu", torch.float16),
        ("cpu", torch.float64),
        ("cuda", torch.float32),
        (None, None),
    ):
        assert select("op", "auto", *where).name == "first", (
            "one measured alone is compared with nothing"
        )
    assert [report("op", "cpu", t).measured for t in (torch.float32, torch.float16)] == [
        True,
        False,
    ]


def test_the_table_names_what_there_is():
    for device, table in measured._table().items():
        for op, types in table.items():
            names = {row.name for row in registry.backends(op.partition(" ")[0])}
            for dtype, times in types.items():
                assert isinstance(getattr(torch, dtype), torch.dtype), (device, op, dtype)
                assert times.keys() <= names, (device, op, dtype)
                assert min(times.values()) > 0


def test_the_class_of_a_shape_and_the_kind_of_gpu_decide(monkeypatch):
    """An H100 has an H200's times, but for its own; what was not measured has the first row that
    can."""
    monkeypatch.setattr(
        Backend,
        "unsupported",
        lambda row, device=None, *others: "for CPUs" if row.device == "cpu" else None,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        measured,
        "_table",
        lambda: {
            "NVIDIA H200": {
                "attention d128": {"bfloat16": {"sdpa": 3.0, "cuda": 2.0}},
                "attention d96": {"bfloat16": {"sdpa": 1.0, "triton": 2.0}},
                "rotary": {"bfloat16": {"cuda": 1.0, "triton": 2.0, "torch": 3.0}},
                "gelu": {"bfloat16": {"torch": 1.0, "triton": 2.0}},
            },
            "NVIDIA H100 PCIe": {"gelu": {"bfloat16": {"torch": 3.0, "triton": 2.0}}},
        },
    )

    def chosen(op, shape, name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        return select(op, "auto", "cuda", torch.bfloat16, shape).name

    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        assert [
            chosen("attention", shape, name, (9, 0))
            for shape in ("d128", "d96", "d72", "d128 grouped")
        ] == ["cuda", "sdpa", "sdpa", "sdpa"]
        assert chosen("rotary", "", name, (9, 0)) == "triton", "cuda is a fallback"
        assert chosen("gelu", "", name, (9, 0)) == "torch", "if it was the fastest there"
    assert chosen("attention", "d128", "NVIDIA H100 PCIe", (9, 0)) == "cuda"
    assert chosen("gelu", "", "NVIDIA H100 PCIe", (9, 0)) == "triton"
    assert chosen("attention", "d128", "NVIDIA A100-SXM4-80GB", (8, 0)) == "sdpa"
    assert chosen("rotary", "", "NVIDIA A100-SXM4-80GB", (8, 0)) == "triton"
    assert attention_class(128, grouped=True) == "d128 grouped"


SAME = "measured on NVIDIA H200, the same architecture: Hopper"
NEAREST = "measured on NVIDIA H200, the nearest to "
# name, compute capability; where times of operators bound by memory come from, and those of
# attention
CARDS = [
    ("NVIDIA H200", (9, 0), "measured on NVIDIA H200", "measured on NVIDIA H200"),
    ("NVIDIA H100 80GB HBM3", (9, 0), SAME, SAME),
    ("NVIDIA H100 PCIe", (9, 0), SAME, SAME),
    ("NVIDIA H800", (9, 0), SAME, SAME),
    ("NVIDIA GH200 480GB", (9, 0), SAME, SAME),
    ("NVIDIA A100-SXM4-80GB", (8, 0), f"{NEAREST}Ampere", "not measured on Ampere"),
    (
        "NVIDIA GeForce RTX 3090",
        (8, 6),
        f"{NEAREST}Ampere for graphics",
        "not measured on Ampere for graphics",
    ),
    ("NVIDIA L40S", (8, 9), f"{NEAREST}Ada", "not measured on Ada"),
    ("NVIDIA GeForce RTX 4090", (8, 9), f"{NEAREST}Ada", "not measured on Ada"),
    ("NVIDIA B200", (10, 0), f"{NEAREST}Blackwell", "not measured on Blackwell"),
    (
        "NVIDIA GeForce RTX 5090",
        (12, 0),
        f"{NEAREST}Blackwell for graphics",
        "not measured on Blackwell for graphics",
    ),
    (
        "NVIDIA of the future",
        (13, 1),
        f"{NEAREST}compute capability 13.1",
        "not measured on compute capability 13.1",
    ),
    ("Tesla V100-SXM2-32GB", (7, 0), "not measured: Volta", "not measured on Volta"),
    ("Tesla T4", (7, 5), "not measured: Turing", "not measured on Turing"),
]


@pytest.mark.parametrize(
    ("name", "capability", "memory", "attention"), CARDS, ids=[card[0] for card in CARDS]
)
def test_a_gpu_that_was_not_measured_goes_by_its_class(
    name, capability, memory, attention, monkeypatch
):
    monkeypatch.setattr(
        Backend,
        "unsupported",
        lambda row, device=None, *others: "for CPUs" if row.device == "cpu" else None,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = report("gelu", "cuda", torch.bfloat16)
    assert found.source.startswith(memory), found.source
    assert found.measured == memory.startswith("measured")
    found = report("attention", "cuda", torch.bfloat16, "d128")
    assert found.source.startswith(attention), found.source
    assert (found.active, found.measured) == (
        ("cuda", True) if attention.startswith("measured") else ("sdpa", False)
    )
    assert report("gelu", "cuda", torch.float32).source.startswith("not measured")
    found = {
        "operators": {"cuda": {op: doctor._choices(op, "cuda") for op in registry.ops()}},
        "built": {},
        "triton": None,
        "versions": {},
        "machine": {
            **dict.fromkeys(("cpu", "cores", "memory_gib", "system", "c++", "nvcc")),
            "instructions": [],
            "gpus": [],
        },
    }
    text = "\n".join(doctor.lines(found))
    assert memory in text
    assert attention in text


def test_a_gpu_of_another_vendor_has_no_class(monkeypatch):
    """An MI250 says that its capability is 9.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI250X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    for op in ("gelu", "attention"):
        assert measured.find(op, "cuda", torch.bfloat16, "d128") == measured.Times(
            {}, "not measured: an AMD GPU, and the table has none"
        )


def test_the_nearest_of_several_gpus_counts(monkeypatch):
    table = {
        "NVIDIA H200": {"capability": [9, 0], "gelu": {"bfloat16": {"triton": 1.0}}},
        "NVIDIA L40S": {"capability": [8, 9], "gelu": {"bfloat16": {"triton": 2.0}}},
        "NVIDIA A100": {"capability": [8, 0], "swiglu": {"bfloat16": {"triton": 3.0}}},
        "Tesla V100": {"capability": [7, 0], "gelu": {"bfloat16": {"triton": 4.0}}},
    }
    monkeypatch.setattr(measured, "_read", lambda: table)
    monkeypatch.setattr(measured, "_table", measured._table.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")

    def times(op, capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        return measured.medians(op, "cuda", torch.bfloat16).get("triton")

    capabilities = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
    assert [times("gelu", capability) for capability in capabilities] == [
        4.0,
        None,
        2.0,
        2.0,
        2.0,
        1.0,
        1.0,
    ]
    assert [times("swiglu", capability) for capability in capabilities] == [
        None,
        None,
        3.0,
        3.0,
        3.0,
        3.0,
        3.0,
    ]


def test_every_gpu_of_the_table_has_its_capability():
    assert set(measured._table()) - {"cpu"} == set(measured._capabilities())
    assert set(measured._capabilities().values()) <= set(measured.GENERATIONS)


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes this machine look like one with an H200, with or without Triton and our
    CUDA extension."""

    def pretend(triton, extension=True, capability=(9, 0)):
        failure = "" if triton else "Triton cannot be imported (a test)"
        monkeypatch.setattr(
            libraries, "triton_library", lambda: libraries.TritonLibrary(failure, is_told=True)
        )
        monkeypatch.setattr(
            libraries, "_known", lambda reason, library, op: reason
        )  # registers shapes of passes
        monkeypatch.setattr(libraries, "triton_is_interpreted", lambda: False)
        monkeypatch.setattr(native, "missing", lambda: None if extension else "not built")
        monkeypatch.setattr(native, "missing_cuda", lambda: None if extension else "not built")
        ours = ("rotary", "cross_entropy", "attention_hopper")
        for module in (libraries, hopper):
            monkeypatch.setattr(module, "has_cuda", lambda name: name in ours)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        # names of passes that a machine without Triton does not have
        monkeypatch.setattr(
            registry,
            "_load",
            lambda path, load=registry._load: None if path.startswith("torch:") else load(path),
        )

    return pretend


def chosen_on_gpu(dtype=torch.bfloat16):
    return {
        op: select(
            op,
            "auto",
            "cuda",
            torch.float32 if op == "optimizer" else dtype,
            "d128" if op == "attention" else "",
        ).name
        for op in registry.ops()
    }


def test_without_triton_our_cuda_kernels_run(gpu):
    """`auto` takes kernels that are no faster than Triton's then, and only then."""
    gpu(triton=False)
    without = chosen_on_gpu()
    assert {op: name for op, name in without.items() if name != "torch"} == {
        "rotary": "cuda",
        "cross_entropy": "cuda",
    }
    assert (
        "cannot be imported (a test)"
        in report("attention", "cuda", torch.bfloat16).rejected["triton"]
    )
    gpu(triton=True)
    with_triton = chosen_on_gpu()
    assert with_triton["rotary"] == with_triton["cross_entropy"] == "triton", (
        "whatever measured.json says"
    )
    assert with_triton["attention"] == "cuda", "Hopper's kernel leads"
    assert select("rotary", "cuda", "cuda", torch.bfloat16).name == "cuda", "it can still be named"
    gpu(triton=True, capability=(10, 0))
    assert chosen_on_gpu()["attention"] == "sdpa"
    assert report("attention", "cuda", torch.bfloat16).rejected["cuda"] == (
        "needs a GPU of compute capability 9.0, not 10.0"
    )
    gpu(triton=False, capability=(7, 5))
    assert set(chosen_on_gpu().values()) == {"torch"}, "the extension has no code for it"
    gpu(triton=False, extension=False)
    assert set(chosen_on_gpu().values()) == {"torch"}, (
        "every operation can run without any compiler"
    )


def test_measured_times_do_not_promote_a_fallback(monkeypatch):
    rows = [
        Backend("op", "first", "math:sqrt"),
        Backend("op", "fallback", "math:sqrt", fallback=True),
        Backend("op", "torch", "math:floor"),
    ]
    times = {
        "cpu": {
            "op": {
                "float32": {"fallback": 1, "first": 2, "torch": 3},
                "float64": {"fallback": 1, "first": 2},
            }
        }
    }
    monkeypatch.setattr(registry, "TABLE", tuple(rows))
    monkeypatch.setattr(registry, "_load", fake_load)
    monkeypatch.setattr(measured, "_table", lambda: times)
    assert [
        select("op", "auto", "cpu", dtype).name for dtype in (torch.float32, torch.float64)
    ] == ["first", "first"]
    monkeypatch.setattr(registry, "TABLE", tuple(rows[1:]))
    assert [
        select("op", "auto", "cpu", dtype).name for dtype in (torch.float32, torch.float64)
    ] == ["fallback"] * 2


def test_measurements_are_added_to_the_table(monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"cpu": {"gelu": {"float32": {"cpp": 1.0}}}}))
    monkeypatch.setattr(measured, "TABLE", path)
    gpu_ops.write_table(
        [
            {
                "settings": {"op": "bias + gelu", "dtype": "bf16"},
                "us": {"cpp": [1.0, 2.0, 3.0], "eager": [4.0, 5.0, 6.0]},
            },
            {"settings": {"op": "swiglu", "dtype": "fp32"}, "us": {"torch": [1.0, 3.0, 4.0]}},
            {
                "settings": {"op": "causal attention", "shape": "d64-grouped", "dtype": "bf16"},
                "us": {"sdpa": [1.0, 5.0, 6.0]},
            },
            {
                "settings": {"op": "gradient norm", "dtype": "fp32"},
                "us": {"foreach": [1.0, 2.0, 3.0]},
            },
        ],
        "cpu",
    )
    assert json.loads(path.read_text()) == {
        "cpu": {
            "gelu": {"float32": {"cpp": 1.0}, "bfloat16": {"cpp": 2.0}},
            "swiglu": {"float32": {"torch": 3.0}},
            "attention d64 grouped": {"bfloat16": {"sdpa": 5.0}},
        }
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    gpu_ops.write_table(
        [{"settings": {"op": "swiglu", "dtype": "bf16"}, "us": {"torch": [1.0, 3.0, 4.0]}}], "cuda"
    )
    assert json.loads(path.read_text())["NVIDIA L40S"] == {
        "capability": [8, 9],
        "swiglu": {"bfloat16": {"torch": 3.0}},
    }


def fake_load(path):
    if path == "tests_only:check":
        return lambda op, device, dtype: None if device == "tpu" else f"wants a tpu, not {device}"
    if "nowhere" in path:
        raise ImportError("no nowhere")
    return abs


def test_a_named_backend_that_cannot_run_says_why():
    with pytest.raises(
        ConfigError, match=r"kernels\.dropout = 'triton': cannot run here: .*; try auto or"
    ):
        select("dropout", "triton", "cpu", torch.float32)
    with pytest.raises(
        ConfigError, match=r"'apex': unknown backend of dropout. Backends: cpp, triton, torch"
    ):
        select("dropout", "apex")
    with pytest.raises(ConfigError, match="unknown operation"):
        select("convolution")
    with pytest.raises(ConfigError, match=r"has no torch\.int32 version"):
        select("dropout", "cpp", "cpu", torch.int32)


def test_triton_and_cuda_say_why_they_cannot():
    def reason(op, name, *where):
        (row,) = (row for row in registry.backends(op) if row.name == name)
        return row.unsupported(*where)

    for name in ("triton", "cuda"):
        for op in {row.op for row in registry.TABLE if row.name == name}:
            assert "GPU" in reason(op, name, "cpu", torch.float32)
            assert reason(op, name, "cuda", torch.int32) == "has no torch.int32 version"


def test_without_the_extension_everything_runs_on_torch(monkeypatch):
    monkeypatch.setattr(native, "missing", lambda: "the extension is not built")
    assert select("dropout", "auto", "cpu", torch.float32).name == "torch"
    with pytest.raises(ConfigError, match="not built"):
        select("dropout", "cpp", "cpu", torch.float32)


def test_the_choice_is_logged_once(caplog):
    registry._selected.cache_clear()
    x = torch.ones(2, 3)
    with caplog.at_level("INFO", "hybridpar.ops.backends.registry"):
        for _ in range(3):
            ops.gelu(x)
    assert [r.getMessage() for r in caplog.records] == [
        f"gelu on cpu torch.float32: {select('gelu').name} backend"
    ]

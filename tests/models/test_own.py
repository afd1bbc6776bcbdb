"""Blocks of models of one's own: ordinary modules start alike everywhere, and what cannot be right
is said."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar import ModelSpec
from hybridpar.config import AUTO, Config, from_mapping, import_spec, spec_name, to_mapping
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks, recomputed_blocks
from hybridpar.models.cost import forward_flops_per_token
from hybridpar.models.custom_blocks import Build, adopt
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements
from hybridpar.validate import problems

WIDTH = 6


class First(nn.Module):
    def __init__(self, inner: nn.Module | None = None):
        super().__init__()
        self.project, self.inner = nn.Linear(3, WIDTH), inner or nn.Identity()
        self.register_buffer("scale", torch.linspace(1, 2, WIDTH))

    def forward(self, x: None, batch: dict[str, Tensor], key: Any) -> Tensor:
        out: Tensor = self.inner(self.project(batch["x"])) * self.scale
        return out


class Last(nn.Module):
    def __init__(self, name: str = "loss"):
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)
        self.name = name

    def forward(self, x: Tensor, batch: dict[str, Tensor], key: Any) -> dict[str, Tensor]:
        return {
            self.name: (self.out(x).squeeze(1) - batch["y"]).square().sum() / batch["num_samples"]
        }


class Mean(Last):
    def forward(self, x: Tensor, batch: dict[str, Tensor], key: Any) -> dict[str, Tensor]:
        return {"loss": (self.out(x).squeeze(1) - batch["y"]).square().mean()}


class Inner(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.layer = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor, batch: dict[str, Tensor], key: Any) -> Tensor:
        out: Tensor = self.layer(x).tanh()
        return out


@dataclass(frozen=True)
class Small(ModelSpec):
    depth: int = 2
    what: str = ""

    @property
    def num_blocks(self) -> int:
        return self.depth + 2

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return (WIDTH + (self.what == "shapes" and number == 1),)

    def block(self, number: int, build: Any) -> nn.Module:
        made: dict[str, Callable[[], Any]] = {
            "alpha dropout": lambda: First(nn.AlphaDropout(0.1)),
            "batch norm": lambda: First(nn.BatchNorm1d(WIDTH)),
            "convolution": lambda: First(nn.Sequential(nn.Conv1d(1, 6, 1), nn.BatchNorm1d(6))),
            "images": lambda: First(nn.BatchNorm2d(64)),
            "dropout": lambda: First(nn.Dropout(0.1)),
            "no module": lambda: print,
            "attention": lambda: First(nn.MultiheadAttention(WIDTH, 1, dropout=0.1)),
        }
        if number == 0:
            return made.get(self.what, First)()
        if number == self.num_blocks - 1:
            return (
                Mean()
                if self.what == "mean"
                else Last("other" if self.what == "losses" else "loss")
            )
        return Inner(WIDTH + 1 if self.what == "width" and number == 1 else WIDTH)

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        random = np.random.default_rng([seed, number])
        return {"x": random.normal(size=3).astype(np.float32), "y": np.float32(random.normal())}


def blocks_of(
    model: ModelSpec, device: str = "meta", dtype: torch.dtype = torch.float32
) -> dict[int, nn.Module]:
    return build_blocks(model, Axis("tp"), range(model.num_blocks), device=device, dtype=dtype)


def initialized(
    model: ModelSpec, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    blocks = blocks_of(model, "cpu", dtype)
    named = [
        (f"blocks.{n}.{name}", parameter.data, place)
        for n, block in blocks.items()
        for name, parameter, place in named_placements(block)
    ]
    initialize(named, seed)
    return {name: tensor for name, tensor, _ in named}


def test_ordinary_modules_start_as_constructed_from_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, again, other = initialized(Small(), 1), initialized(Small(), 1), initialized(Small(), 2)
    assert torch.equal(before, torch.random.get_rng_state()), (
        "nobody else's random numbers are drawn"
    )
    assert all(torch.equal(again[name], value) for name, value in one.items())
    assert not any(
        torch.equal(other[name], value) for name, value in one.items() if value.numel() > 1
    )
    assert not torch.equal(one["blocks.1.layer.weight"], one["blocks.2.layer.weight"])
    bound = WIDTH**-0.5  # what torch's Linear draws from
    assert 0.5 * bound < one["blocks.1.layer.weight"].abs().max() <= bound
    wide = initialized(Small(), 1, torch.float64)
    assert all(torch.equal(wide[name].float(), value) for name, value in one.items()), (
        "every type from one point"
    )


def test_blocks_are_built_without_memory_and_buffers_have_values() -> None:
    first = blocks_of(Small())[0]
    assert all(parameter.is_meta for parameter in first.parameters())
    assert torch.equal(first.get_buffer("scale"), torch.linspace(1, 2, WIDTH))
    assert blocks_of(Small(), dtype=torch.float64)[0].project.weight.dtype == torch.float64
    placements = {name: place for name, _, place in named_placements(blocks_of(Small())[1])}
    assert placements["layer.weight"].matrices == (((0, WIDTH),),), "a hidden matrix, for Muon"
    assert placements["layer.weight"].weight_decay
    assert not placements["layer.bias"].weight_decay
    assert pickle.loads(pickle.dumps(placements)) == placements, "ranks send them"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "alpha dropout",
            r"has a AlphaDropout \(inner\) in block 0, which is not supported: it draws its "
            r"mask.*try nn.Dropout\(0.1\)",
        ),
        ("batch norm", r"has a BatchNorm1d \(inner\) in block 0.*try nn.LayerNorm\(6\)"),
        ("convolution", r"has a BatchNorm1d \(inner.1\) in block 0.*try nn.GroupNorm\(2, 6\)"),
        ("images", r"has a BatchNorm2d \(inner\) in block 0.*try nn.GroupNorm\(8, 64\)"),
        (
            "attention",
            r"has a MultiheadAttention.*try inner.dropout = 0.0; nn.Dropout on its output works",
        ),
        (
            "no module",
            r"block\(0\) must return a torch.nn.Module; it returns <built-in function print>",
        ),
    ],
)
def test_blocks_that_cannot_be_right(what: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.spec = .*{text}"):
        blocks_of(Small(what=what))
    blocks_of(Small(what="dropout"))


def test_dropout_of_torch_is_refused_where_a_tensor_may_be_divided() -> None:
    class Divided(Small):
        max_tp = 2

    with pytest.raises(
        ConfigError,
        match=r"has a Dropout \(inner\) in block 0.*try hybridpar.Dropout\(p, build.name",
    ):
        blocks_of(Divided(what="dropout"))


def run(model: ModelSpec, dtype: torch.dtype = torch.float32) -> Any:
    blocks = blocks_of(model, "cpu", dtype)
    batch = {"x": torch.randn(2, 3), "y": torch.randn(2), "num_samples": torch.tensor(2.0)}
    x = None
    for block in blocks.values():
        x = block(x, batch, None)
    return x


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("width", r"activation_shape = \(6,\).*block 1 \(Inner\) of Small.*: \(7,\)"),
        ("losses", r"model\.losses = \['loss'\].*block 3 \(Last\) of Small returns: \['other'\]"),
        (
            "mean",
            r"block 3 \(Mean\) of Small reads neither batch\['num_samples'\] nor .*; try "
            r"cross_entropy",
        ),
    ],
)
def test_blocks_that_return_something_else(what: str, text: str) -> None:
    assert run(Small())["loss"].dim() == 0
    with pytest.raises(ConfigError, match=text):
        run(Small(what=what))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_samples_come_in_the_working_precision_and_labels_in_no_narrower_one(
    dtype: torch.dtype,
) -> None:
    loss = run(Small(), dtype)["loss"]
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    first = blocks_of(Small(), "cpu", dtype)[0]
    given, cast = (
        first(None, {"x": x}, None) for x in (torch.ones(1, 3), torch.ones(1, 3, dtype=dtype))
    )
    assert torch.equal(given, cast)


def test_messages_of_one_shape_alone_are_compressed() -> None:
    for what, wrong in (("", False), ("shapes", True)):
        found = problems(
            from_mapping({"compression": {"messages": "bf16"}}, Config(model=Small(what=what))), 1
        )
        assert any("requires that every block returns one tensor" in str(p) for p in found) == wrong


def test_work_is_counted_from_weights_or_said() -> None:
    class Told(Small):
        def forward_flops(self, number: int) -> int:
            return number

    assert forward_flops_per_token(Small()) == (2 * 3 * WIDTH, *[2 * WIDTH**2] * 2, 2 * WIDTH)
    assert forward_flops_per_token(Told()) == (0, 1, 2, 3)


def test_options_that_need_our_layers_are_refused() -> None:
    config = Config(model=Small())
    with pytest.raises(
        ConfigError, match=r"'selective'.*First has none|'selective'.*Inner has none"
    ):
        recomputed_blocks("selective", config.model, [range(2), range(2, 4)])
    found = {
        p.field: p
        for p in problems(from_mapping({"parallel": {"tp": 2, "sequence": True}}, config), 2)
    }
    assert {"parallel.tp", "parallel.sequence"} <= found.keys()
    assert "Small.max_tp" in str(found["parallel.tp"])
    with pytest.raises(ConfigError, match="supported for GPT and BERT only"):
        _ = config.transformer


def test_a_configuration_names_the_class_and_has_its_keys() -> None:
    config = Config(model=Small(depth=5))
    plain = to_mapping(config)
    assert plain["model"] == {"spec": spec_name(Small), "depth": 5, "what": ""}
    assert from_mapping(plain) == config
    assert from_mapping({"model": {"depth": 3}}, config).model == Small(depth=3)
    with pytest.raises(ConfigError, match=r"model\.dept .*unknown key.*did you mean model.depth"):
        from_mapping({"model": {"dept": 3}}, config)
    with pytest.raises(ConfigError, match=r"model\.depth = 'a'.*must be of type int"):
        from_mapping({"model": {"depth": "a"}}, config)
    with pytest.raises(
        ConfigError,
        match=r"model\.spec = 'nowhere:Model'.*unknown model.*try importing the "
        r"module, or a configuration",
    ):
        from_mapping({"model": {"spec": "nowhere:Model"}})
    with pytest.raises(ConfigError, match=r"model\.spec = 3.*must be of type str"):
        from_mapping({"model": {"spec": 3}})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no colon", "must be a module and a class, as module:class"),
        ("nowhere_at_all:Model", "cannot be imported"),
        ("json:JSONDecoder", "must name a subclass of hybridpar.ModelSpec"),
        ("json:missing", "must name a subclass"),
        ("bare_specs:Thawed", "must be a frozen dataclass"),
        ("bare_specs:Bare", "must have a default for every field; depth has none"),
        ("bare_specs:Unnamed", r"in its annotations.*\(name 'Width' is not defined\)"),
        ("bare_specs:Listed", r"all its values must be hashable.*try tuple\[int"),
    ],
)
def test_names_that_are_no_model(name: str, text: str, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "bare_specs.py").write_text(
        "from dataclasses import dataclass, field\nfrom hybridpar import ModelSpec\n"
        "@dataclass\nclass Thawed(ModelSpec):\n    depth: int = 1\n"
        "@dataclass(frozen=True)\nclass Bare(ModelSpec):\n    depth: int\n"
        "@dataclass(frozen=True)\nclass Unnamed(ModelSpec):\n    width: 'Width' = 3\n"
        "@dataclass(frozen=True)\nclass Listed(ModelSpec):\n"
        "    widths: list[int] = field(default_factory=list)\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", [*__import__("sys").path])
        with pytest.raises(ConfigError, match=text):
            import_spec(name, [tmp_path])


def test_undefined_members_are_named() -> None:
    class Nothing(ModelSpec):
        pass

    for use in (
        lambda m: m.num_blocks,
        lambda m: m.block(0, None),
        lambda m: m.activation_shape(0),
        lambda m: m.sample(0, 0),
    ):
        with pytest.raises(
            ConfigError, match=r"model\.spec = .*Nothing'.*must define \w+; try .*(def|=) "
        ):
            use(Nothing())
    assert Nothing().dataset("train") is None
    assert replace(Small(), depth=1).kind == "Small"


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.thin, self.table = (
            nn.Parameter(torch.ones(1, 1, WIDTH)),
            nn.Parameter(torch.ones(2, WIDTH)),
        )


@pytest.mark.parametrize(
    ("module", "decaying"),
    [
        (nn.LayerNorm((4, 8)), set()),
        (nn.RMSNorm((4, 8)), set()),
        (nn.GroupNorm(2, 4), set()),
        (nn.InstanceNorm1d(4, affine=True), set()),
        (nn.Linear(1, 8), {"weight"}),
        (nn.Linear(8, 1), {"weight"}),
        (nn.Embedding(8, 1), {"weight"}),
        (nn.Conv1d(1, 1, 3), {"weight"}),
        (nn.PReLU(8), set()),
        (nn.LSTM(1, 2), {"weight_ih_l0", "weight_hh_l0"}),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), {"in_proj_weight", "out_proj.weight"}),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            {"parametrizations.weight.original1"},
        ),
        (Scales(), {"table"}),
    ],
)
def test_the_owner_of_a_parameter_decides_whether_it_decays(
    module: nn.Module, decaying: set[str]
) -> None:
    adopt(module, Small(), 1, Build(Axis("tp"), "blocks.1", AUTO, False, "meta", torch.float32))
    assert {
        name for name, _, placement in named_placements(module) if placement.weight_decay
    } == decaying

"""The configuration: what is read is what was written, and every mistake is named, with what would
work."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.config import (
    JOB,
    MAX_TOML,
    Config,
    Launch,
    from_mapping,
    load_toml,
    to_mapping,
    to_short_toml,
    to_toml,
)
from hybridpar.config.old_keys import REMOVED, translate_flags
from hybridpar.config.rules import conflicts
from hybridpar.errors import ConfigError
from hybridpar.reading import read_toml

CONFIGS = sorted((Path(__file__).parent.parent / "scripts" / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_toml_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_toml(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(to_toml(config))
    assert load_toml(copy) == config
    assert config.run.name == path.stem
    copy.write_text(to_short_toml(config))
    assert load_toml(copy) == config


def test_a_short_file_has_what_differs_and_what_a_user_changes_first(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    config = from_mapping({"optim": {"betas": [0.9, 0.99]}, "data": {"valid_sets": {"a": ["b"]}}})
    path.write_text(to_short_toml(config))
    found = read_toml(path, MAX_TOML)
    assert found["optim"] == {"name": "adamw", "lr": config.optim.lr, "betas": [0.9, 0.99]}
    assert found["data"]["valid_sets"] == {"a": ["b"]}
    assert {"num_layers", "seq_length"} <= found["model"].keys()
    assert not {"kernels", "anomalies"} & found.keys()


@given(
    lr=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    split=st.lists(st.integers(1, 9)),
)
def test_values_survive(lr: float, betas: tuple[float, float], split: list[int]) -> None:
    changes = {"optim": {"lr": lr, "betas": list(betas)}, "pipeline": {"split": split}}
    config = from_mapping(changes)
    assert config.optim.lr == lr
    assert config.optim.betas == betas
    assert config.pipeline.split == tuple(split)
    assert from_mapping(to_mapping(config)) == config


def test_a_file_changes_only_what_it_names() -> None:
    base = from_mapping({"model": {"num_layers": 7}})
    assert from_mapping({"model": {"hidden_size": 64}}, base).model.num_layers == 7


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (
            {"modle": {}},
            "modle = '...': unknown section; did you mean [model]?",
        ),
        (
            {"hidden_size": 64},
            "hidden_size = 64: is a key of [model], but is in no section here; try "
            "model.hidden_size",
        ),
        ({"model": 3}, "is a section, so it must have keys below it"),
        (
            {"model": {"num_layer": 3}},
            "model.num_layer = 3: unknown key; did you mean model.num_layers?",
        ),
        (
            {"train": {"lr": 0.1}},
            "train.lr = 0.1: unknown key; did you mean optim.lr or outer.lr?",
        ),
        (
            {"parallel": {"tensor_model_parallel_size": 2}},
            "flag of Megatron-LM (docs/coming_from.md); try parallel.tp",
        ),
        (
            {"train": {"bf16": True}},
            'flag of Megatron-LM (docs/coming_from.md); try train.dtype = "bf16"',
        ),
        ({"model": {"num_attention_heads": 8}}, "(docs/coming_from.md); try model.num_heads"),
        ({"train": {"overlap-grad-reduce": True}}, "(docs/coming_from.md); try without it"),
        ({"model": {"num_layers": "3"}}, "model.num_layers = '3': must be of type int; try 3"),
        ({"model": {"num_layers": True}}, "must be of type int"),
        ({"model": {"num_layers": 3.0}}, "must be of type int; try 3"),
        (
            {"model": {"kind": "gtp"}},
            "model.kind = 'gtp': must be one of gpt, bert; did you mean \"gpt\"?",
        ),
        ({"optim": {"betas": [0.9]}}, "optim.betas = [0.9]: must have 2 entries; try [0.9, 0.999]"),
        (
            {"model": {"kind": "Brt"}},
            "model.kind = 'Brt': must be one of gpt, bert; did you mean \"bert\"?",
        ),
        ({"model": {"bias": 1}}, "model.bias = 1: must be of type bool; try true"),
        ({"model": {"bias": "off"}}, "model.bias = 'off': must be of type bool; try false"),
        ({"optim": {"lr": "1e-3"}}, "optim.lr = '1e-3': must be of type float; try 0.001"),
        ({"optim": {"lr": "fast"}}, "must be of type float; try 0.0003"),
        ({"optim": {"learning_rate": 0.1}}, "did you mean optim.lr?"),
        ({"model": {"n_layer": 2}}, "did you mean model.num_layers?"),
        (
            {"model": {"colour": 2}},
            "model.colour = 2: unknown key of [model]; `hybridpar train --help` lists all keys",
        ),
        ({"memory": {"colour": 2}}, "unknown key. Keys of [memory]: limit, budget, folder,"),
        (
            {"batch_size": 2},
            "unknown key, outside of any section; did you mean train.micro_batch_size?",
        ),
        ({"optimizer": {}}, "did you mean [optim]?"),
        (
            {"colour": {}},
            "unknown section. Sections: model, parallel, pipeline, optim, train,",
        ),
        ({"optim": "sgd"}, 'try the line [optim], then the line name = "adamw"'),
        (
            {"run": {"trackers": "wand"}},
            "run.trackers = 'wand': must be one of wandb, mlflow; did you mean \"wandb\"?",
        ),
        ({"pipeline": {"split": "3,4"}}, "must be a list; try [3, 4]"),
        ({"pipeline": {"split": [3, "4"]}}, "must be of type int"),
        (
            {"train": {"planned_memory": True}},
            "train.planned_memory = True: was removed: losses and weights are the same without it; try false",
        ),
    ],
)
def test_mistakes_are_named(document: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(document)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"head_dim": 7, "position": "rotary"}, "model.head_dim = 7: must be even with rotary"),
        (
            {"position": "rotary", "rotary_pattern": "12"},
            "model.rotary_pattern = '12': must be digits 0 and 1, one per layer",
        ),
        (
            {"window_pattern": "10101"},
            "model.window_pattern = '10101': must have at most model.num_layers = 4 digits; try "
            '"1010"',
        ),
        ({"rotary_scaling": "linear"}, 'requires model.position = "rotary", whose frequencies'),
        (
            {"position": "rotary", "rotary_scaling": "yarn"},
            "model.rotary_original_positions = 0: must be above 0 with model.rotary_scaling = yarn",
        ),
        (
            {
                "position": "rotary",
                "rotary_scaling": "llama3",
                "rotary_original_positions": 8,
                "rotary_low_factor": 4.0,
            },
            "model.rotary_high_factor = 4.0: must be above model.rotary_low_factor = 4.0",
        ),
        (
            {
                "position": "rotary",
                "rotary_scaling": "longrope",
                "rotary_original_positions": 8,
                "rotary_long_factors": [1.0] * 16,
            },
            "model.rotary_short_factors = []: must have 16 numbers with longrope",
        ),
        ({"window": 4, "kind": "bert"}, 'model.window = 4: requires model.kind = "gpt"'),
        ({"window_rotary_base": 5.0}, "model.window_rotary_base = 5.0: requires model.window"),
        ({"qk_norm": "head"}, "model.qk_norm = 'head': requires model.norm = \"rms_norm\""),
        ({"norm_zero_centered": True}, "model.norm_zero_centered = True: requires model.norm"),
        (
            {"num_experts": 4, "router_topk": 5},
            "model.router_topk = 5: must be at most model.num_experts = 4; try 4",
        ),
        (
            {"num_experts": 4, "moe_layers": "00"},
            "model.moe_layers = '00': must have a 1: no layer has the model.num_experts = 4",
        ),
        ({"moe_layers": "2"}, "model.moe_layers = '2': must be digits 0 and 1, one per layer"),
        (
            {"num_experts": 4, "lora_rank": 2},
            "model.lora_rank = 2: not supported with model.num_experts above 0",
        ),
        (
            {"parallel_residual": True, "norm_position": "sandwich"},
            "requires pre-norm layers; model.norm_position is sandwich (gpt)",
        ),
    ],
)
def test_rules_of_attention_and_norms(model: dict, says: str) -> None:
    problems = "\n".join(map(str, conflicts(from_mapping({"model": model}))))
    assert says in problems


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({"model": {"a": 1, "kind": "x"}, "trian": {}})
    assert len(caught.value.problems) == 3


def test_removed_keys_are_dropped_at_their_old_defaults() -> None:
    """Keys in the form in which every run folder and checkpoint lists them."""
    document: dict = {}
    flags = ["runs/a.toml", "--train.num_steps", "5"]
    for name, removed in REMOVED.items():
        section, _, key = name.partition(".")
        document.setdefault(section, {})[key] = removed.works
        flags += [f"--{name}", str(removed.works), f"--{name.replace('_', '-')}={removed.works}"]
    assert from_mapping(document) == Config()
    assert translate_flags([*flags, "--json"]) == [*flags[:3], "--json"]
    with pytest.raises(ConfigError, match=r"train\.planned_memory = True: was removed"):
        translate_flags(["--train.planned_memory", "True"])


def test_renamed_keys_keep_their_old_names() -> None:
    new = {"split_backward": True, "stage_layout": "v", "virtual_stages": 4}
    old = {"split_backward": True, "placement": "v", "chunks": 4}
    assert from_mapping({"pipeline": old}) == from_mapping({"pipeline": new})
    assert from_mapping({"pipeline": old | new}) == from_mapping({"pipeline": new})
    with pytest.raises(ConfigError, match=r"chunks = 4: is the old name of pipeline\.virtual_stag"):
        from_mapping({"pipeline": old | {"virtual_stages": 2}})
    flags = ["--pipeline.chunks", "4", "--pipeline.placement=v"]
    assert translate_flags(flags) == [
        "--pipeline.virtual_stages",
        "4",
        "--pipeline.stage_layout=v",
    ]


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\r\nnum_layers = 7\r\n")
    assert load_toml(path).model.num_layers == 7


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "gpt_tiny.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_toml(tmp_path / "gpt_tiny.toml")
    with pytest.raises(ConfigError, match=r"cannot be read .*; try .*gpt_tiny\.toml"):
        load_toml(tmp_path / "gpt_tny.toml")
    (tmp_path / "deep.toml").write_text("[model]\n" + "a." * 50_000 + "b = 1\n")
    with pytest.raises(ConfigError, match="the key at line 2 has more than 16 parts"):
        load_toml(tmp_path / "deep.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_toml(tmp_path / "bytes.toml")


def test_a_file_that_says_nothing_is_a_mistake(tmp_path: Path) -> None:
    for text in ("", "# only this\n"):
        (tmp_path / "empty.toml").write_text(text)
        with pytest.raises(ConfigError, match="the file is empty; try"):
            load_toml(tmp_path / "empty.toml")


def test_one_value_of_a_list_may_stand_alone() -> None:
    assert from_mapping({"data": {"corpus": "a.txt"}}).data.corpus == ("a.txt",)


def test_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GLOO_SOCKET_IFNAME",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_environment() == Launch(0, 0, 1, 1)
    for name, value in (
        ("RANK", "5"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_WORLD_SIZE", "4"),
    ):
        monkeypatch.setenv(name, value)
    assert Launch.from_environment() == Launch(5, 1, 8, 4, launched=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Launch.from_environment(["train"]) == Launch(
        5, 1, 8, 8, launched=True, loopback=True, args=("train",)
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert not Launch.from_environment().loopback
    for name, supervisor in (("hybridpar", 0), (f"{JOB}17", 17)):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        assert Launch.from_environment().supervisor == supervisor
        assert Launch.from_environment().agent == 0  # this test's parent is no torchrun
    for name, value, rule in (
        ("RANK", "8", "below WORLD_SIZE = 8"),
        ("LOCAL_RANK", "-1", "a whole number"),
        ("LOCAL_RANK", "8", "below LOCAL_WORLD_SIZE = 8"),
        ("LOCAL_WORLD_SIZE", "0", "a whole number from 1 to 8"),
        ("WORLD_SIZE", "two", "a whole number"),
        ("WORLD_SIZE", "0", "a whole number from 1"),
        ("MASTER_PORT", "99999", "a whole number from 1 to 65535"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"{name} = .*{rule}"):
            Launch.from_environment()
        monkeypatch.setenv(name, "1")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"RANK": "1"}, "RANK = '1': .*below WORLD_SIZE = 1"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE = '2': .*at most WORLD_SIZE = 1"),
        ({"WORLD_SIZE": "4"}, (0, 0, 4, 4)),
        ({"LOCAL_RANK": "1"}, (0, 1, 1, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, (5, 5, 8, 8)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, 1, 8, 4)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 1, 8, 8)),
    ],
    ids=str,
)
def test_launch_without_a_variable(
    given: dict[str, str], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            Launch.from_environment()
    else:
        found = Launch.from_environment()
        assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == expected
        assert not found.loopback


def test_batch_sizes() -> None:
    config: Config = from_mapping(
        {
            "model": {"seq_length": 10},
            "parallel": {"dp": 3},
            "pipeline": {"num_microbatches": 5},
            "train": {"micro_batch_size": 2},
        }
    )
    assert config.global_batch_size == 30
    assert config.batch_tokens == 300


EXPERTS = {"num_experts": 4, "router_bias_rate": 0.001}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"train": {"dtype": "fp16"}}, "train.dtype = 'fp16': not supported with model.router_bal"),
        (
            {"train": {"dtype": "bf16", "fp8": True}},
            "not supported with model.num_experts above 0; try false",
        ),
        (
            {"compression": {"gradients": "int8"}},
            'not supported with compression.gradients = "int8", which changes the sign of small',
        ),
        (
            {"parallel": {"sites": 2}},
            "model.router_bias_rate = 0.001: not supported with parallel.sites above 1",
        ),
    ],
)
def test_rules_of_experts_and_other_sections(sections: dict, says: str) -> None:
    problems = "\n".join(map(str, conflicts(from_mapping({"model": EXPERTS, **sections}))))
    assert says in problems


def test_experts_go_with_fp16_without_losses() -> None:
    """Biases move by signs, which a loss scale does not change."""
    model = EXPERTS | {"router_balance_loss": 0.0}
    assert not list(conflicts(from_mapping({"model": model, "train": {"dtype": "fp16"}})))


def test_a_dense_model_does_not_depend_on_keys_of_experts() -> None:
    dense = from_mapping({}).model
    named = from_mapping({"model": {"router_topk": 7, "moe_layers": "01"}}).model
    assert named.canonical() == dense.canonical()
    assert named.layers_are_alike
    assert named.layers_field

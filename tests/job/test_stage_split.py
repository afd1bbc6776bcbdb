"""The default split: embedding, head and optimizer count, by shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.cli.planning import resolved
from hybridpar.config import Config, from_mapping, load_toml
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.job.block_times import block_times
from hybridpar.job.stage_split import inference_split, stage_split
from hybridpar.prediction import predict
from hybridpar.validate import resolve

CONFIGS = Path("scripts/configs")
GPT3 = {
    "model": {
        "num_layers": 96,
        "hidden_size": 12288,
        "num_heads": 96,
        "seq_length": 2048,
        "vocab_size": 51200,
    },
    "train": {"dtype": "bf16", "micro_batch_size": 1},
    "pipeline": {"num_microbatches": 64},
}


def sizes(config: Config, **sections: dict[str, Any]) -> list[int]:
    return [len(blocks) for blocks in stage_split(from_mapping(sections, config))]


def loads(config: Config) -> list[float]:
    """The estimated time of each rank over that of the slowest."""
    pp = config.parallel.pp
    times = block_times(config)
    found = [0.0] * pp
    for stage, blocks in enumerate(stage_split(config)):
        turn, rank = divmod(stage, pp)
        if config.pipeline.stage_layout == "v" and turn % 2:
            rank = pp - 1 - rank
        found[rank] += sum(times[number] for number in blocks)
    return [load / max(found) for load in found]


def test_gpt_tiny_has_two_layers_on_each_of_two_stages() -> None:
    """Muon's update of a layer takes half as long as its micro-batches; by operations alone it was
    4 + 2."""
    config = load_toml(CONFIGS / "gpt_tiny.toml")
    assert sizes(config, parallel={"pp": 2}) == [3, 3]


def test_the_optimizer_counts_where_the_stage_runs_it() -> None:
    config = from_mapping(
        {"parallel": {"pp": 2}, "model": {"vocab_size": 6000}}, load_toml(CONFIGS / "gpt_tiny.toml")
    )
    assert sizes(config) == [3, 3]
    assert sizes(config, optim={"name": "sgd"}) == [4, 2]
    assert sizes(config, memory={"host_optimizer": True}) == [4, 2]
    assert sizes(config, parallel={"dp": 8}) == [3, 3]
    assert sizes(config, parallel={"dp": 8, "zero": 1}) == [4, 2]
    assert sizes(config, pipeline={"num_microbatches": 64}) == [4, 2], "of more micro-batches"


@pytest.mark.parametrize(("pp", "layers"), [(4, 24), (8, 12), (16, 6)])
def test_stages_of_a_large_model_are_near_equal(pp: int, layers: int) -> None:
    """The head is a third of a layer: no stage has room for a layer more."""
    assert sizes(from_mapping(GPT3), parallel={"pp": pp}) == [
        layers + 1,
        *[layers] * (pp - 2),
        layers + 1,
    ]


def test_the_head_takes_the_place_of_layers() -> None:
    """GPT 345M: a head of three layers."""
    assert sizes(load_toml(CONFIGS / "gpt_345m.toml"), parallel={"pp": 4}) == [8, 7, 7, 4]
    model = {
        "num_layers": 7,
        "hidden_size": 512,
        "num_heads": 8,
        "seq_length": 256,
        "vocab_size": 6656,
    }
    assert sizes(from_mapping({"model": model, "parallel": {"pp": 2}})) == [5, 4]


def test_bert_projects_few_positions() -> None:
    config = load_toml(CONFIGS / "bert_large.toml")
    assert sizes(config, parallel={"pp": 2}) == [13, 13]
    assert sizes(config, parallel={"pp": 4}) == [7, 6, 6, 7]


def test_a_wide_embedding_weighs_by_its_update() -> None:
    """A vocabulary of 50,000 and short steps: the embedding's update is as long as two layers of 64
    features."""
    config = from_mapping(
        {
            "model": {
                "num_layers": 8,
                "hidden_size": 64,
                "num_heads": 4,
                "seq_length": 16,
                "vocab_size": 50_000,
            },
            "parallel": {"pp": 2},
            "train": {"micro_batch_size": 1},
            "pipeline": {"num_microbatches": 2},
        }
    )
    embedding, layer, *_ = block_times(config)
    assert embedding > 1.5 * layer
    assert max(loads(config)) / min(loads(config)) < 1.2


def test_recomputed_layers_weigh_more_than_the_head() -> None:
    config = from_mapping({"parallel": {"pp": 2}, "model": {"vocab_size": 8192}})
    plain = block_times(config)
    again = block_times(from_mapping({"pipeline": {"recompute": "all"}}, config))
    assert again[1] > 1.2 * plain[1]
    assert again[-1] == plain[-1]


@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "interleaved", "virtual_stages": 2},
        {"schedule": "2bw", "virtual_stages": 3},
        {"stage_layout": "v", "split_backward": True},
    ],
)
def test_ranks_with_several_stages_are_balanced(pipeline: dict[str, Any]) -> None:
    model = {"num_layers": 24, "hidden_size": 256, "seq_length": 128, "vocab_size": 8192}
    config = from_mapping(
        {"model": model, "parallel": {"pp": 2}, "optim": {"name": "muon"}, "pipeline": pipeline}
    )
    assert sum(sizes(config)) == 26
    assert min(loads(config)) > 0.93


def test_tied_ends_are_updated_once_where_they_are_one_parameter() -> None:
    config = from_mapping({"model": {"vocab_size": 50_000}, "parallel": {"pp": 2}})
    v = from_mapping({"pipeline": {"stage_layout": "v", "split_backward": True}}, config)
    untied = from_mapping({"model": {"tie_embeddings": False}}, config)
    assert block_times(v)[-1] < block_times(config)[-1] == block_times(untied)[-1]
    assert block_times(v)[0] == block_times(config)[0]


@dataclass(frozen=True)
class Row(hp.SequentialSpec):
    """Eight equal layers, of which the first ones are frozen."""

    frozen: int = 0

    def layers(self) -> Any:
        for number in range(8):
            yield nn.Linear(64, 64).requires_grad_(number >= self.frozen)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return out.square().mean()

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"x": np.ones(64, np.float32)}


def test_custom_models_are_split_by_their_work_and_their_updates() -> None:
    config = replace(Config(), model=Row())
    assert sizes(config, parallel={"pp": 2}) == [4, 4]
    frozen = replace(config, model=Row(frozen=4))
    assert sizes(frozen, parallel={"pp": 2}) == [6, 2], "without gradients and updates"


def test_the_split_depends_on_the_configuration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine is, a resumed run has the stages that it began with; all commands have
    the same."""
    config = resolve(from_mapping({"parallel": {"pp": 2}}, load_toml(CONFIGS / "gpt_tiny.toml")), 2)
    before = stage_split(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    other = from_mapping(
        {"train": {"device": "cuda", "threads": 3}, "run": {"name": "again"}}, config
    )
    assert stage_split(other) == before


def test_predicted_memory_is_of_these_stages() -> None:
    config = resolved(from_mapping({"parallel": {"pp": 2}}, load_toml(CONFIGS / "gpt_tiny.toml")))
    given = from_mapping({"pipeline": {"split": sizes(config)}}, config)
    cpu = torch.device("cpu")
    assert predict(JobPlan(config), device=cpu) == predict(JobPlan(given), device=cpu)


def test_generation_balances_forward_operations() -> None:
    model = from_mapping({"optim": {"name": "muon"}}, load_toml(CONFIGS / "gpt_tiny.toml")).model
    assert [*map(len, inference_split(model, 2))] == [4, 2]


@pytest.mark.parametrize("split", [(3, 4), (6,), (0, 6), (2, 2, 2)])
def test_a_split_must_cover_the_blocks(split: tuple[int, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"pipeline\.split .* try \[3, 3\]|pipeline\.split .*\[4, 2\]"
    ):
        sizes(Config(), parallel={"pp": 2}, pipeline={"split": list(split)})


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ConfigError, match="has only 6 blocks; try 6"):
        sizes(Config(), parallel={"pp": 7})


def test_all_stages_have_blocks() -> None:
    config = load_toml(CONFIGS / "gpt_345m.toml")
    for pp in range(1, 27):
        split = sizes(config, parallel={"pp": pp})
        assert min(split) >= 1
        assert [b - a for a, b in pairwise((0, *accumulate(split)))] == split
        assert sum(split) == config.model.num_blocks

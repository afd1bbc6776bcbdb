"""A dense checkpoint becomes one with experts, which computes the same and trains on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.exchange import OURS, same_bits, save_ours

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface.verify import our_logits, random_batch
from hybridpar.checkpoint.stages import whole_model
from hybridpar.checkpoint.upcycle import upcycle
from hybridpar.cli import main
from hybridpar.config import load_toml
from hybridpar.errors import ConfigError, HybridparError

DENSE = replace(OURS["llama"], num_layers=3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("experts", "topk", "layers"), [(5, 2, "1"), (4, 4, "010"), (3, 1, "01")])
def test_the_loss_at_the_start_is_the_dense_one(
    tmp_path: Path, experts: int, topk: int, layers: str, tied: bool
) -> None:
    """1e-12: gates sum to 1 up to rounding."""
    dense = replace(DENSE, tie_embeddings=tied)
    folder = save_ours(tmp_path / "dense", dense)
    made = upcycle(folder, tmp_path / "new", num_experts=experts, topk=topk, layers=layers)
    config, weights = checkpoint.load_full(made.checkpoint)
    model = config.transformer
    assert (model.num_experts, model.router_topk, model.moe_layers) == (experts, topk, layers)
    _, before = checkpoint.load_full(folder)
    batch = random_batch(dense)
    wanted = our_logits(dense, whole_model(dense, before, torch.float64), batch)["words"]
    found = our_logits(model, whole_model(model, weights, torch.float64), batch)["words"]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert made.num_parameters == sum(
        tensor.numel() for name, tensor in weights.items() if not (tied and "projection" in name)
    )
    number = layers.index("1") + 1
    copies = [weights[f"blocks.{number}.mlp.experts.{e}.up.weight"] for e in range(experts)]
    assert all(torch.equal(one, before[f"blocks.{number}.mlp.up.weight"]) for one in copies)
    routers = [tensor for name, tensor in weights.items() if "router" in name]
    assert len(routers) == sum(model.layer_has_experts(n) for n in range(3))
    assert all(router.std() > 0 for router in routers)
    shared = {name: x for name, x in before.items() if name in weights}
    same_bits({name: weights[name] for name in shared}, shared)


def test_the_command_makes_a_folder_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_ours(tmp_path / "dense", DENSE, torch.float32)
    out = tmp_path / "new"
    assert main(["upcycle", str(folder), str(out), "--num_experts", "3", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["num_active"] < plain["num_parameters"]
    config = load_toml(out / "config.toml")
    assert config.train.start_from == str(out.resolve())
    assert main(["check", str(out / "config.toml")]) == 0


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ({"bias": True}, {}, "model.bias = True: must be false in the checkpoint"),
        ({"num_experts": 2}, {}, "model.num_experts = 2: must be 0 in the checkpoint"),
        ({}, {"num_experts": 1}, "model.router_topk = 2: must be at most model.num_experts = 1"),
        ({}, {"num_experts": 0}, "num_experts = 0: must be at least 1"),
        ({}, {"layers": "000"}, "model.moe_layers = '000': must have a 1"),
        ({}, {"layers": "0x"}, "model.moe_layers = '0x': must be digits 0 and 1"),
    ],
)
def test_impossible_upcycling_is_refused(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    folder = save_ours(tmp_path / "dense", replace(DENSE, **model))
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        upcycle(folder, tmp_path / "new", **{"num_experts": 4, **settings})
    assert not (tmp_path / "new").exists()


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    folder = save_ours(tmp_path / "dense", DENSE)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").touch()
    with pytest.raises(HybridparError, match="new"):
        upcycle(folder, tmp_path / "new", num_experts=4)

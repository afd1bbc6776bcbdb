"""A mixture of experts on any grid equals one process: loss, gradients, loads, norm, weights and
biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import gpt

from hybridpar.config import Config, from_mapping
from hybridpar.verify.run import run_grid, verify

pytestmark = pytest.mark.ranks

EXPERTS = {
    "num_experts": 5,
    "router_topk": 2,
    "expert_ffn_hidden_size": 22,
    "router_balance_loss": 0.1,
    "router_z_loss": 0.01,
    "router_bias_rate": 0.01,
    "activation": "swiglu",
    "position": "rotary",
    "norm": "rms_norm",
    "bias": False,
}
DEEPSEEK = {
    "router_score": "sigmoid",
    "router_scale": 1.7,
    "shared_expert_ffn_hidden_size": 11,
    "moe_layers": "011",
}
GELU = {
    "activation": "gelu",
    "norm": "layer_norm",
    "bias": True,
    "position": "learned",
    "router_normalize": False,
    "dropout": 0.1,
}
BERT = {**GELU, "kind": "bert", "vocab_size": 67, "expert_ffn_hidden_size": 0}


def make(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """3 layers of 5 experts with 22 features each, 14 tokens: nothing divides."""
    own = {
        "model": EXPERTS | (model or {}),
        "train": {"num_steps": 10},
        "optim": {"warmup_steps": 2, "clip_grad": 0.5},
    }
    return gpt((3, 48, 6, 14, 61), own, sections)


def holds(grid: dict[str, int], config: Config, num_batches: int = 3) -> None:
    report = verify(config, grid, num_batches)
    assert report.ok, report.first_divergence


def named(grid: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in grid.items())


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "model", [{}, DEEPSEEK, GELU, BERT], ids=["mixtral", "deepseek", "gelu", "bert"]
)
@pytest.mark.parametrize(
    "grid", [{"tp": 3}, {"tp": 4}, {"dp": 3}, {"tp": 2, "pp": 2, "dp": 2}], ids=named
)
def test_models_on_grids(grid: dict[str, int], model: dict[str, Any], sequence: bool) -> None:
    """22 features over 3 and 4 ranks; with sequence parallelism 14 rows over as many."""
    holds(grid, make(model, parallel={"sequence": sequence and "tp" in grid}), num_batches=2)


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", ["none", "all", "selective", "stage"])
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "naive"},
        {"schedule": "gpipe"},
        {"schedule": "1f1b", "split_backward": True},
        {"schedule": "2bw"},
        {"schedule": "2bw", "split_backward": True},
        {"schedule": "pipedream"},
        {"schedule": "interleaved", "split": (1, 1, 2, 1)},
        {"schedule": "1f1b", "stage_layout": "v", "split_backward": True},
    ],
    ids=lambda p: "-".join(map(str, p.values())),
)
def test_schedules(pipeline: dict[str, Any], recompute: str) -> None:
    """A recomputed forward routes by the weights and the bias of its version, and no load counts
    twice."""
    config = make(DEEPSEEK, pipeline={**pipeline, "recompute": recompute})
    holds({"pp": 2, "dp": 2} if recompute == "none" else {"pp": 2}, config, num_batches=4)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("model", [{}, DEEPSEEK], ids=["mixtral", "deepseek"])
def test_sharded_state(zero: int, model: dict[str, Any]) -> None:
    holds({"dp": 3, "tp": 2}, make(model, parallel={"zero": zero}), num_batches=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "optim",
    [
        {"name": "muon"},
        {"name": "lamb"},
        {"name": "sgd", "momentum": 0.9},
        {"staleness": "extrapolation"},
        {"staleness": "prediction"},
        {"staleness": "nesterov"},
    ],
    ids=str,
)
def test_optimizers(optim: dict[str, Any]) -> None:
    """Each expert is a matrix for Muon; biases move by sign steps under every rule."""
    schedule = "2bw" if "staleness" in optim else "1f1b"
    holds({"tp": 2, "pp": 2}, make(DEEPSEEK, optim=optim, pipeline={"schedule": schedule}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("sequence", [False, True])
def test_documents_are_sequences(packing: str, sequence: bool) -> None:
    config = make(data={"packing": packing}, parallel={"sequence": sequence})
    holds({"tp": 2, "dp": 2}, config, num_batches=2)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("model", [{}, DEEPSEEK], ids=["mixtral", "deepseek"])
@pytest.mark.parametrize("memory", [{"host_optimizer": True}, {"offload_activations": 1}], ids=str)
def test_memory_that_leaves_the_device(memory: dict[str, Any], model: dict[str, Any]) -> None:
    if "offload_activations" in memory:
        holds({"dp": 2}, make(model, memory=memory), num_batches=2)
    else:
        holds({"pp": 2}, make(model, memory=memory, pipeline={"schedule": "2bw"}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("m", [1, 2, 6])
def test_micro_batches_and_replicas_do_not_change_gradients(m: int) -> None:
    """Auxiliary losses and loads of a batch of 12 samples, which is always the same."""

    def gradients(dp: int, b: int, num_microbatches: int) -> dict[str, torch.Tensor]:
        config = make(train={"micro_batch_size": b, "dtype": "fp64"}, parallel={"dp": dp})
        config = from_mapping({"pipeline": {"num_microbatches": num_microbatches}}, config)
        return run_grid(config, 1).gradients[0]

    want = gradients(1, 12, 1)
    got = gradients(2, 6 // m, m)
    assert any("bias" in name for name in want)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)
        if name.endswith("mlp.bias"):
            assert torch.equal(got[name], gradient), "loads are whole numbers"
            assert gradient.any()
            assert not gradient.sum()


def test_biases_of_a_step_come_from_the_loads_of_its_batch() -> None:
    """Down by the rate where an expert has more tokens than the mean, else up."""
    config = make(train={"dtype": "fp64"}, parallel={"dp": 1})
    run = run_grid(config, 3)
    name = "blocks.2.mlp.bias"
    before = torch.zeros(5, dtype=torch.float64)
    for gradient, weights in zip(run.gradients, run.weights, strict=True):
        torch.testing.assert_close(weights[name], before - 0.01 * gradient[name].sign())
        before = weights[name]
    assert before.any()

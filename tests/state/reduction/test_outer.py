"""The arithmetic of the outer step: Nesterov's rule, and the same bits wherever an element lies."""

from __future__ import annotations

import pytest
import torch

from hybridpar.config import OuterConfig, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.nn.placement import Init, Placement, Shard
from hybridpar.ops.update import Weights
from hybridpar.optim import ParameterSlot
from hybridpar.prediction import predict
from hybridpar.prediction.fake_neighbours import silent_axis
from hybridpar.state.reduction.outer import OuterStep
from hybridpar.state.residency.chunks import Memory
from hybridpar.validate import resolve


def step(settings: OuterConfig, weights: list[torch.Tensor]) -> OuterStep:
    """An outer step of one of two sites, whose axis sends nothing: the other site's differences are
    zero."""
    slots = [
        ParameterSlot(f"blocks.{i}.x", Placement(tuple(w.shape), Init("zeros")))
        for i, w in enumerate(weights)
    ]
    outer = OuterStep(settings, silent_axis("site", 2), slots, weights[0].dtype, Memory())
    outer.begin(weights)
    return outer


@pytest.mark.parametrize("mix", [0.0, 0.25])
def test_it_is_torch_sgd_with_nesterov_momentum(mix: float) -> None:
    start = [torch.randn(3, 5, dtype=torch.float64), torch.randn(70_001, dtype=torch.float64)]
    outer = step(OuterConfig(every=1, lr=0.4, momentum=0.8, mix=mix), start)
    anchors = [w.clone().requires_grad_() for w in start]
    sgd = torch.optim.SGD(anchors, lr=0.4, momentum=0.8, nesterov=True)
    weights = start
    for version in (1, 2, 3):
        trained = [w + 0.1 * torch.randn_like(w) for w in weights]
        for anchor, w in zip(anchors, trained, strict=True):
            anchor.grad = (
                anchor.detach() - w
            ) / 2  # of two sites, one of which says that nothing has changed
        sgd.step()
        weights = [w.clone() for w in trained]
        outer.step(version, Weights.in_place(weights))
        for anchor, kept, w, own in zip(
            anchors, outer.buffers["anchor"].views().values(), weights, trained, strict=True
        ):
            torch.testing.assert_close(kept, anchor.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(
                w, mix * own + (1 - mix) * anchor.detach(), rtol=1e-12, atol=1e-12
            )


def test_an_element_has_the_same_bits_wherever_it_lies() -> None:
    """Kernels that fuse a product and a sum in vectors only would not give that: sites may have
    other threads."""
    x = torch.randn(2, 1009).unbind()
    start = torch.randn(1009)
    found = []
    for offset in (0, 3):
        begun = [torch.cat([torch.zeros(offset), start])]
        outer = step(OuterConfig(every=1, lr=0.3, momentum=0.7, mix=0.3), begun)
        weights = begun
        for version, change in enumerate(x, 1):
            weights = [torch.cat([torch.zeros(offset), weights[0][offset:] + change])]
            outer.step(version, Weights.in_place(weights))
        found.append((weights[0][offset:], outer.buffers["anchor"][offset : offset + 1009]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("precision", ["full", "int4"])
def test_rows_of_several_ranks_stay_equal(precision: str) -> None:
    """They lie at other places of other ranks' tensors, whose tiles begin elsewhere."""
    placement = Placement((5, 70), Init("zeros"), Shard(0, (((0, 3),), ((2, 5),))))
    start = torch.randn(5, 70)
    trained = torch.randn(5, 70)
    found = []
    for rank in range(2):
        slot = ParameterSlot("blocks.0.x", placement, {"tp": rank})
        outer = OuterStep(
            OuterConfig(every=1, precision=precision),  # type: ignore[arg-type]
            silent_axis("site", 2),
            [slot],
            torch.float32,
            Memory(),
        )
        outer.begin([placement.take(start, rank)])
        weights = [placement.take(trained, rank).clone()]
        outer.step(1, Weights.in_place(weights))
        found.append(weights[0][2 if rank == 0 else 0])
    assert torch.equal(*found)


@pytest.mark.parametrize(("precision", "share"), [("int8", 1 / 254), ("int4", 1 / 7)])
def test_rounding_of_an_integer_message_goes_with_the_next(precision: str, share: float) -> None:
    """The mean message of constant differences is right to a last rounding, one alone to half a
    step of its tiles."""
    settings = OuterConfig(every=1, lr=1e-9, momentum=0.0, precision=precision)  # type: ignore[arg-type]
    outer = step(settings, [torch.zeros(70_001)])
    anchor, mean, kept = (buffer.views()["blocks.0.x"] for buffer in outer.buffers.values())
    change = torch.randn(70_001, generator=torch.Generator().manual_seed(3))
    sent = torch.zeros(70_001)
    for version in range(1, 41):
        weights = [anchor + change]
        outer.step(version, Weights.in_place(weights))
        sent -= 2 * mean  # momentum 0 keeps the mean: of two sites, one of which sends nothing
        if version == 1:
            first = float((sent - change).abs().max())
            assert 0 < first <= share * float(change.abs().max()) * 1.05
    torch.testing.assert_close(sent - kept, 40 * change, rtol=0, atol=1e-3)
    assert float((sent / 40 - change).abs().max()) < first / 10


def test_check_counts_what_an_outer_step_keeps() -> None:
    document = {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "seq_length": 16,
            "vocab_size": 128,
            "tie_embeddings": False,
        },
        "parallel": {"dp": 1},
        "train": {"device": "cpu"},
        "outer": {"fragments": 2, "precision": "bf16"},
    }
    one = resolve(from_mapping(document), 1)
    two = resolve(from_mapping({"parallel": {"sites": 2}}, one), 2)
    kept = predict(JobPlan(two))[0].state - predict(JobPlan(one))[0].state
    parameters = predict(JobPlan(one))[0].weights // 4
    largest = (12 * 64 * 64 + 13 * 64) + (
        128 + 16
    ) * 64  # a layer and the embedding: more than a layer and the head
    room = 2 * 4 * 4 * 64 * 64  # two of the largest parameter
    assert kept == 2 * 4 * parameters + 2 * 2 * largest + room


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"outer": {"every": 4, "fragments": 5}},
            "outer.fragments = 5: must be at most outer.every = 4; try 4",
        ),
        (
            {"outer": {"every": 9, "fragments": 2, "delay": 5}},
            "outer.delay = 5: must be at most .* = 4",
        ),
        (
            {"parallel": {"dp": 2}},
            "parallel.zero = 0: must be at least 1 with parallel.sites > 1",
        ),
        (
            {"parallel": {"zero": 2}},
            "parallel.zero = 2: not supported with parallel.sites above 1; try 1",
        ),
        (
            {"memory": {"host_optimizer": True}},
            "memory.host_optimizer = True: not supported with parallel.sites",
        ),
        (
            {"pipeline": {"schedule": "2bw"}, "optim": {"staleness": "prediction"}},
            "an outer step cannot be predicted",
        ),
        (
            {"pipeline": {"schedule": "pipedream"}, "optim": {"clip_grad": 0.0}},
            "optim.clip_grad = 0.0: must be above 0",
        ),
        (
            {
                "anomalies": {"audit_interval": 5, "on_divergence": "roll_back"},
                "train": {"save_interval": 5},
            },
            "go back over steps of its own",
        ),
    ],
)
def test_settings_unsupported_with_sites_name_others(
    changed: dict[str, dict[str, object]], text: str
) -> None:
    config = from_mapping({"parallel": {"sites": 2, "dp": 1}})
    config = from_mapping(changed, config)
    with pytest.raises(ConfigError, match=text):
        resolve(config, config.parallel.num_ranks)

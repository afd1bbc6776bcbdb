"""Compressed gradients: the bits of one process that keeps the feedback of all replicas, and
nothing is lost.

Every run hands out what came into each sum and what went out of it, and the sum is computed anew by
other means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import pytest
import torch
from engines import start
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import CompressionConfig, Config, from_mapping
from hybridpar.job import JobPlan
from hybridpar.ops import quantize
from hybridpar.ops.quantize import dequantize_
from hybridpar.state import find_divergence
from hybridpar.state.compression.methods.powersgd import orthonormal
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.batches.step_result import StepResult

DCT = {"gradients": "dct", "gradients_kept": 0.05, "gradients_period": 2, "gradients_smallest": 100}
BF16 = {"gradients": "bf16", "gradients_smallest": 100}
INT4 = {"gradients": "int4", "gradients_smallest": 100}
POWER = {"gradients": "powersgd", "gradients_rank": 3, "gradients_smallest": 100}
PCA = {"gradients": "sbpca", "gradients_rank": 3, "gradients_blocks": 3, "gradients_smallest": 100}
SKIPPED = 2
"""A batch that makes no step, and sets new thresholds."""


def make(
    compression: dict[str, Any], parallel: dict[str, int], schedule: str = "2bw", **sections: Any
) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 24,
                "num_heads": 3,
                "seq_length": 8,
                "vocab_size": 31,
            },
            "parallel": {"dp": 1} | parallel,
            "pipeline": {"num_microbatches": 6 // parallel.get("dp", 1), "schedule": schedule}
            | sections.pop("pipeline", {}),
            "train": {"micro_batch_size": 1} | sections.pop("train", {}),
            "compression": compression,
            **sections,
        }
    )


class Skips(BatchPolicy):
    """Makes no step of one batch."""

    def result(self, batch: int, *numbers: Any) -> StepResult:
        result = super().result(batch, *numbers)
        return replace(result, skipped=batch == SKIPPED)


class Scaled(BatchPolicy):
    """Losses are scaled, by another factor in every batch."""

    def loss_scale(self, batch: int) -> float:
        return 2.0 ** (9 - 2 * (batch % 3))


@dataclass
class Ran:
    """One rank's gradients of every batch, by parameter."""

    rank: int
    axes: dict[str, tuple[int, ...]]
    given: list[dict[str, Tensor]] = field(default_factory=list)
    sums: list[dict[str, Tensor]] = field(default_factory=list)
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    sent: Any = None
    diverged: str = ""
    traffic: int = 0
    dense: int = 0


def run(config: Config, steps: int, policy: type[BatchPolicy] = BatchPolicy) -> Ran:
    """Trains, and notes all that goes into the sums of the compressed parameters and comes out of
    them."""
    engine, samples = start(config, policy=policy(JobPlan(config)))
    state = engine.state
    compression = engine.state.compression
    ran = Ran(engine.grid.rank, {})
    if compression.packed:
        names = list(compression.feedback.kept)
        ran.axes = {name: state.partition.axis_of(name).ranks for name in names}
        sums: Callable[..., Any] = compression.start

        def note(bucket: Any, flat: Tensor) -> Any:
            index = state.gradients.buffer_index(compression._batch)
            if len(ran.given) == compression._batch:
                ran.given.append({})
                ran.kept.append({name: x.clone() for name, x in compression.feedback.kept.items()})
            views = state.gradients.views(index)
            ran.given[-1] |= {name: views[name].clone() for name in bucket.names if name in names}
            return sums(bucket, flat)

        compression.start = note  # type: ignore[method-assign]
    before = engine.grid.dp.traffic.num_bytes["broadcast"]

    def on_step(step: StepResult) -> None:
        ran.losses.append(step.loss)
        ran.norms.append(step.grad_norm)
        ran.skipped.append(step.skipped)

    engine.train(
        samples,
        steps,
        on_step,
        lambda batch, gradients: ran.sums.append(
            {name: x.clone() for name, x in gradients.items()}
        ),
    )
    ran.traffic = engine.grid.dp.traffic.num_bytes["broadcast"] - before
    if compression.packed:
        ran.kept.append({name: x.clone() for name, x in compression.feedback.kept.items()})
        ran.sent = compression.sent()
        ran.dense = sum(
            entry.numel for method in compression._methods.values() for entry in method.dense
        )
    ran.state = {key: x.clone() for key, x in state.tensors().items()}
    ran.diverged = find_divergence(state.placed(), engine.grid)
    return ran


Method = Callable[[int, list[Tensor], dict[str, Any]], tuple[Tensor, list[Tensor]]]
"""Takes the number of a batch, G + E of each replica, and a place to keep things in; the sum, and E
of each."""


def rounded(
    batch: int, wanted: list[Tensor], memory: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    sent = [x.bfloat16().to(x.dtype) for x in wanted]
    return in_order(sent), [x - s for x, s in zip(wanted, sent, strict=True)]


def thresholds_of(settings: CompressionConfig) -> Method:
    """Thresholds that are set every period, and in each batch of a warm-up."""
    kept = settings.gradients_kept
    warmup = settings.gradients_warmup

    def found(
        batch: int, wanted: list[Tensor], memory: dict[str, Any]
    ) -> tuple[Tensor, list[Tensor]]:
        done = batch - settings.gradients_start
        sent = []
        for replica, x in enumerate(wanted):
            sizes = x.abs().view(-1).sort(descending=True).values
            share = (
                (1 / 8) ** (1 - done / warmup) * kept ** (done / warmup) if done < warmup else kept
            )
            k = ceil(share * x.numel())
            before = memory.get(replica)
            if done <= warmup or batch % settings.gradients_period == 0 or before is None:
                before = sizes[k - 1]
            memory[f"next {replica}"] = before
            most = max(k, 2 * ceil(kept * x.numel()))
            least = max(before, sizes[most - 1])
            mask = (x.abs() >= least) & (x != 0)
            mask.view(-1)[mask.view(-1).nonzero()[most:]] = False  # of equal ones the first
            sent.append(x * mask)
        return in_order(sent), [x - s for x, s in zip(wanted, sent, strict=True)]

    return found


def in_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def integers(
    batch: int, wanted: list[Tensor], memory: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    rows = [x.reshape(1, -1) for x in wanted]
    sent = [
        dequantize_(torch.empty_like(x), quantize(x, 4, rotate=True), 4, rotate=True) for x in rows
    ]
    sent = [s.view_as(x) for s, x in zip(sent, wanted, strict=True)]
    return in_order(sent), [x - s for x, s in zip(wanted, sent, strict=True)]


def whole_until(start: int, method: Method) -> Method:
    """The method from batch `start` on, of two replicas, whose sums have one order."""

    def found(
        batch: int, wanted: list[Tensor], memory: dict[str, Any]
    ) -> tuple[Tensor, list[Tensor]]:
        return (
            method(batch, wanted, memory)
            if batch >= start
            else (in_order(wanted), [x * 0 for x in wanted])
        )

    return found


def oracle_of(settings: CompressionConfig) -> Method:
    """Return what two replicas do with these settings."""
    if settings.gradients == "dct":
        return whole_until(settings.gradients_start, thresholds_of(settings))
    method = {"bf16": rounded, "int4": integers}[settings.gradients]
    return whole_until(settings.gradients_start, method)


def check_against_oracle(ran: list[Ran], method: Method, skipped: int = -1) -> Iterator[str]:
    """Compares every sum and all feedback, to the bit; the names of what was compared."""
    for name, ranks in {name: of for one in ran for name, of in one.axes.items()}.items():
        # a tied weight has another name on the other end
        group = [
            (
                one,
                name if name in one.axes else next(n for n, of in one.axes.items() if of == ranks),
            )
            for one in (ran[rank] for rank in ranks)
        ]
        memory: dict[Any, Any] = {}
        kept = [torch.zeros_like(one.given[0][own]) for one, own in group]
        for batch in range(len(ran[0].given)):
            for (one, own), expected in zip(group, kept, strict=True):
                assert torch.equal(one.kept[batch][own], expected), (own, batch, "before")
            wanted = [
                one.given[batch][own] + left for (one, own), left in zip(group, kept, strict=True)
            ]
            total, left = method(batch, wanted, memory)
            for one, own in group:
                assert torch.equal(one.sums[batch][own], total), (own, batch)
            if batch != skipped:
                kept = left
                memory |= {replica: memory.get(f"next {replica}") for replica in range(len(group))}
        for (one, own), expected in zip(group, kept, strict=True):
            assert torch.equal(one.kept[-1][own], expected), (own, "after")
        yield name


DEEP = {
    "model": {"num_layers": 4, "hidden_size": 24, "num_heads": 3, "seq_length": 8, "vocab_size": 31}
}
CASES = {
    "dct, three replicas, a step is skipped": (DCT, {"dp": 3}, "2bw", {}),
    "dct, a warm-up from the second batch on": (
        DCT | {"gradients_start": 1, "gradients_warmup": 3, "gradients_period": 100},
        {"dp": 2},
        "2bw",
        {},
    ),
    "dct, tied weights, bf16": (
        DCT,
        {"dp": 2, "pp": 2},
        "2bw",
        {"pipeline": {"split_backward": True}, "train": {"dtype": "bf16"}},
    ),
    "dct, interleaved, ZeRO-1": (DCT, {"dp": 2, "pp": 2, "zero": 1}, "interleaved", DEEP),
    "dct, on the host": (
        DCT,
        {"dp": 2, "pp": 2},
        "2bw",
        DEEP | {"memory": {"host_optimizer": True}},
    ),
    "bf16, on the host, a step is skipped": (
        BF16,
        {"dp": 3},
        "1f1b",
        {"memory": {"host_optimizer": True}},
    ),
    "int4 from the third batch on, in parts": (
        INT4 | {"gradients_start": 2},
        {"dp": 2},
        "2bw",
        DEEP | {"memory": {"parts": 3}},
    ),
    "dct, ZeRO-2, three replicas, a step is skipped": (
        DCT,
        {"dp": 3, "zero": 2},
        "2bw",
        {"train": {"dtype": "bf16"}},
    ),
    "int4, ZeRO-3, from the third batch on": (
        INT4 | {"gradients_start": 2},
        {"dp": 2, "zero": 3},
        "2bw",
        DEEP,
    ),
    "bf16, ZeRO-3, tp, muon": (
        BF16,
        {"dp": 2, "tp": 2, "zero": 3},
        "1f1b",
        {"optim": {"name": "muon"}},
    ),
    "int4, pipedream": (INT4, {"dp": 2, "pp": 2}, "pipedream", {"optim": {"clip_grad": 0.0}}),
}


@pytest.mark.thorough(keep=3)
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_replicas_are_one_process_with_all_feedback(case: str) -> None:
    compression, parallel, schedule, more = CASES[case]
    config = make(compression, parallel, schedule, **more)
    skips = "skipped" in case
    ran = run_ranks(run, config.parallel.num_ranks, config, 5, Skips if skips else BatchPolicy)
    assert {one.diverged for one in ran} == {""}
    oracle = oracle_of(config.compression)
    compared = set(check_against_oracle(ran, oracle, SKIPPED if skips else -1))
    assert len(compared) >= 4 * config.model.num_layers
    assert all(any(x.any() for x in one.kept[-1].values()) for one in ran)
    assert all(0 < one.sent.elements <= one.sent.whole_elements for one in ran)
    if (
        config.parallel.num_ranks == config.parallel.dp
    ):  # what is clipped by is of the sums that came out
        squares = [
            sum(float(x.double().square().sum()) for x in sums.values()) for sums in ran[0].sums
        ]
        assert [norm**2 for norm in ran[0].norms] == pytest.approx(squares, rel=1e-5)


@pytest.mark.ranks
def test_all_of_it_is_the_run_without_compression() -> None:
    """Extrapolated gradients, too: what came out of the sum is."""
    parallel = {"dp": 2}
    whole = {
        "train": {"dtype": "fp64"},
        "pipeline": {"num_microbatches": 6},
        "optim": {"staleness": "extrapolation"},
        "model": DEEP["model"] | {"num_layers": 2, "tie_embeddings": False},
    }
    plain, *others = (
        run_ranks(run, 2, make(compression, parallel, **whole), 4)
        for compression in (
            {"gradients": "none"},
            DCT | {"gradients_kept": 1.0},
            POWER | {"gradients_rank": 31},
            PCA | {"gradients_start": 4},
        )
    )
    for number, ran in enumerate(others):
        for one, other in zip(ran, plain, strict=True):
            for key, tensor in other.state.items():
                if number == 0:  # two addends have one order
                    assert torch.equal(one.state[key], tensor), key
                else:  # rounding of float64, through bases whose condition is some 1e3
                    torch.testing.assert_close(one.state[key], tensor, rtol=1e-9, atol=1e-9)
            if number == 0:
                assert not any(x.any() for x in one.kept[-1].values())


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("compression", [DCT, POWER, PCA], ids=lambda c: c["gradients"])
def test_another_scale_of_the_loss_in_every_batch_changes_no_bit(
    compression: dict[str, Any],
) -> None:
    config = make(compression, {"dp": 2, "zero": 2 if compression is DCT else 0})
    plain, scaled = run_ranks(run_both, 2, config)[0]
    assert plain.losses == scaled.losses
    assert all(torch.equal(x, scaled.state[key]) for key, x in plain.state.items())
    assert any(x.any() for x in scaled.state.values())


def run_both(config: Config) -> list[Ran]:
    return [run(config, 6, policy) for policy in (BatchPolicy, Scaled)]


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("compression", [DCT, POWER, PCA], ids=lambda c: c["gradients"])
def test_half_precision_scales_its_losses_and_skips_what_overflows(
    compression: dict[str, Any],
) -> None:
    """The scale that it begins with is too large, and is halved until it is not."""
    config = make(
        compression,
        {"dp": 2},
        "1f1b",
        train={"dtype": "fp16"},
        optim={"loss_scale": 2.0**22, "lr": 1e-2},
    )
    ran = run_ranks(run, 2, config, 12)
    assert {one.diverged for one in ran} == {""}
    assert ran[0].skipped[0] > ran[0].skipped[-1]
    assert all(
        x.isfinite().all() for one in ran for x in one.state.values() if x.is_floating_point()
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(("values", "off", "zero"), [("full", 1e-8, 2), ("int8", 0.05, 0)])
def test_factors_are_a_step_of_power_iteration(values: str, off: float, zero: int) -> None:
    """In fewer bits, too: what rounding takes off is kept with the rest."""
    ran = run_ranks(
        run,
        3,
        make(
            POWER | {"gradients_values": values}, {"dp": 3, "zero": zero}, train={"dtype": "fp64"}
        ),
        4,
    )
    assert {one.diverged for one in ran} == {""}
    if not zero:  # else weights are gathered, too
        assert ran[0].traffic == sum(one.sent.num_bytes for one in ran)
    for name in ran[0].axes:
        factor = None
        lost = []
        for batch in range(4):
            wanted = [one.given[batch][name] + one.kept[batch][name] for one in ran]
            total = sum(wanted)
            if factor is not None:
                basis = torch.linalg.qr(total @ (factor / factor.norm(dim=0))).Q
                assert (
                    ran[0].sums[batch][name] - basis @ (basis.t() @ total)
                ).norm() <= off * total.norm()
            factor = torch.linalg.lstsq(
                _basis_of(ran[0].sums[batch][name]), ran[0].sums[batch][name]
            ).solution.t()
            left = sum(one.kept[batch + 1][name] for one in ran)
            torch.testing.assert_close(
                ran[0].sums[batch][name] + left, total, rtol=0, atol=1e-12
            )  # nothing is lost
            lost.append(float(left.norm() / total.norm()))
        assert lost[0] < 1
        assert torch.linalg.matrix_rank(ran[0].sums[-1][name]) == 3


def _basis_of(x: Tensor) -> Tensor:
    u, _, _ = torch.linalg.svd(x)
    return u[:, :3]


def test_bases_are_orthonormal_where_columns_are_not_independent() -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    x[:, 2] = 0
    basis = orthonormal(x)
    torch.testing.assert_close(
        basis.t() @ basis, torch.diag(torch.tensor([1.0, 1, 0, 1])), rtol=0, atol=1e-6
    )
    assert orthonormal(torch.full((3, 2), torch.nan)).isnan().all()


@pytest.mark.ranks
def test_messages_have_the_bytes_that_are_stated() -> None:
    ran = run_ranks(run, 2, make(DCT, {"dp": 2}), 3)
    expected = 0
    for one in ran:
        for batch in range(3):
            for name in one.axes:
                # what a rank sends is what it had less what it keeps
                had = one.given[batch][name] + one.kept[batch][name]
                count = int((had != one.kept[batch + 1][name]).sum())
                n = had.numel()
                expected += 4 + 4 * count + min(ceil(n / 8), ceil(n / 255) + count)
            expected += 4 * one.dense
    assert ran[0].traffic == ran[1].traffic == sum(one.sent.num_bytes for one in ran) == expected

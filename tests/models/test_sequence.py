"""Sequence parallelism: blocks on parts of the sequence equal blocks on all of it, and send what
formulas say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from tensor_parallel import TOLERANCE, check_gradients, fill, traffic, values

from hybridpar.config import ModelConfig
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.models.build import BlockOptions, build_blocks
from hybridpar.nn import Dropout, named_placements, split_sizes
from hybridpar.nn.sequence import SequencePart
from hybridpar.random import RandomKey

F64 = torch.float64
KEY = RandomKey.of(seed=3, step=1, sample=5)
GPT = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    seq_length=11,
    vocab_size=37,
    dropout=0.2,
    attention_dropout=0.1,
)
BERT = replace(GPT, kind="bert", num_kv_heads=0, sentence_head="nsp")
MODELS = [
    GPT,
    replace(
        GPT, position="rotary", norm="rms_norm", activation="swiglu", bias=False, logits_chunk=5
    ),
    replace(GPT, parallel_residual=True, seq_length=2),
    BERT,
]


def microbatch(model: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (3, model.seq_length)
    batch = {
        name: torch.randint(model.vocab_size, shape, generator=generator)
        for name in ("tokens", "labels")
    }
    batch |= {
        "num_targets": torch.tensor(7.0, dtype=F64),
        "num_samples": torch.tensor(3.0, dtype=F64),
    }
    if model.kind == "bert":
        batch["token_types"] = torch.randint(2, shape, generator=generator)
        batch["padding_mask"] = torch.arange(model.seq_length) < torch.tensor([[11], [7], [1]])
        batch["sentence_labels"] = torch.tensor([0, 1, 1])
        batch["labels"][:, 1::2] = -100
    return batch


def blocks_are_whole_ones(axis: Axis, model: ModelConfig) -> None:
    model = replace(model, tie_embeddings=False)
    batch = microbatch(model)
    part = SequencePart.of(model.seq_length, axis, True)
    own = build_blocks(
        model, axis, range(3), options=BlockOptions(sequence=True), device="cpu", dtype=F64
    )
    alone = build_blocks(model, Axis("tp"), range(3), device="cpu", dtype=F64)
    x = x_ref = None
    for number, block in own.items():
        whole = fill(block, axis)
        for name, parameter, _ in named_placements(alone[number]):
            parameter.data.copy_(whole[name].detach())
        y = block(x, batch, KEY)
        y_ref = alone[number](x_ref, batch, KEY)
        if isinstance(y, dict):
            for name in y:
                torch.testing.assert_close(y[name], y_ref[name], **TOLERANCE)
            sum(y.values()).backward()
            sum(y_ref.values()).backward()
        else:
            torch.testing.assert_close(y, y_ref.narrow(1, part.start, part.length), **TOLERANCE)
            dy = values(f"dy{number}", *y_ref.shape)
            y.backward(dy.narrow(1, part.start, part.length))
            y_ref.backward(dy)
        if x is not None:
            torch.testing.assert_close(
                x.grad, x_ref.grad.narrow(1, part.start, part.length), **TOLERANCE
            )
        for name, parameter, _ in named_placements(alone[number]):
            whole[name].grad = parameter.grad
        check_gradients(block, whole, axis)
        with torch.no_grad():  # the same without a graph
            again = block(x, batch, KEY)
            assert (
                all(map(torch.equal, again.values(), y.values()))
                if isinstance(y, dict)
                else torch.equal(again, y)
            )
        if not isinstance(y, dict):
            x_ref = values(f"x{number}", *y_ref.shape).requires_grad_()
            x = x_ref.detach().narrow(1, part.start, part.length).clone().requires_grad_()


def counts_and_bytes(axis: Axis) -> None:
    """A layer sends 4(t-1)/t u forward and 6(t-1)/t u backward, where u = b s h e; all-reduces
    would be 8 in all."""
    t, model = axis.size, replace(GPT, seq_length=12)
    block = build_blocks(
        model, axis, [1], options=BlockOptions(sequence=True), device="cpu", dtype=F64
    )[1]
    fill(block, axis)
    u = 3 * 12 * 16 * 8
    x = values("x", 3, 12 // t, 16).requires_grad_()

    def ring() -> int:
        sizes = axis.traffic.num_bytes
        return (t - 1) * sizes["all_gather"] + (t - 1) * sizes["reduce"] // t

    with traffic(axis, all_gather=2, reduce=2 * t):
        y = block(x, microbatch(model), KEY)
    assert ring() == 4 * (t - 1) * u // t
    with traffic(axis, all_gather=4, reduce=2 * t):
        y.sum().backward()
    assert ring() == 6 * (t - 1) * u // t


def run_cases(tp: int) -> None:
    axis = ProcessGrid(tp=tp).tp
    for model in MODELS:
        blocks_are_whole_ones(axis, model)
    counts_and_bytes(axis)


def test_on_one_rank_nothing_changes() -> None:
    run_cases(1)
    for model in (GPT, BERT):
        split, whole = (
            build_blocks(model, Axis("tp"), range(3), options=BlockOptions(sequence=on))
            for on in (True, False)
        )
        for number, block in whole.items():
            assert [p for *_, p in named_placements(split[number])] == [
                p for *_, p in named_placements(block)
            ]


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("tp", [3, 4])
def test_blocks_on_parts_of_the_sequence(tp: int) -> None:
    run_ranks(run_cases, tp, tp)


@pytest.mark.parametrize("tp", [2, 3, 5])
def test_dropout_is_that_of_all_rows(tp: int) -> None:
    x = torch.ones(2, 37, 6)
    layer, bias = Dropout(0.3, "blocks.1.dropout"), torch.ones(6)
    parts = x.split(split_sizes(37, tp), 1)
    starts = [sum(split_sizes(37, tp)[:rank]) for rank in range(tp)]
    for function in (
        lambda part, start: layer(part, KEY, start),
        lambda part, start: layer.add(part, bias, part, KEY, start),
    ):
        got = torch.cat(
            [function(part, start) for part, start in zip(parts, starts, strict=True)], 1
        )
        assert torch.equal(got, function(x, 0))


def test_few_rows_over_many_ranks() -> None:
    assert [tuple(part_of(rank)) for rank in range(3)] == [
        (0, 1, (1, 1, 0)),
        (1, 1, (1, 1, 0)),
        (2, 0, (1, 1, 0)),
    ]


def part_of(rank: int) -> SequencePart:
    return SequencePart.of(2, Axis("tp", rank, (0, 1, 2), object()), True)

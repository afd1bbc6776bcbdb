"""Rows that move to the experts of other ranks: rounds of bounded size, and products that hide them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.grid import EXPERTS, Axis
from hybridpar.nn.expert_exchange import (
    RowExchange,
    Transfer,
    _bounded_rounds,
    order_by_round,
    own_experts,
    plan_rounds,
)


def axis(rank: int, size: int) -> Axis:
    return Axis(EXPERTS, rank, tuple(range(size)), object())  # type: ignore[arg-type]


def test_rounds_take_a_ranks_first_expert_first_and_each_rank_in_turn() -> None:
    """Rank 0 has experts 0 and 1 and receives 2 rows a round, rank 1 expert 2 and 1 row: 1.0 times
    their shares of 3 rows."""
    rows = torch.tensor([[1, 0, 0], [0, 2, 0]])
    assert _bounded_rounds(rows, 1.0).tolist() == [
        [[1, 0, 0], [0, 1, 0]],
        [[0, 0, 0], [0, 1, 0]],
    ]


@pytest.mark.parametrize("bound", [1.0, 1.3, 4.0])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_rank_receives_more_than_its_bound(num_ranks: int, bound: float) -> None:
    torch.manual_seed(0)
    for rows in (
        torch.randint(0, 9, (num_ranks, 6)),
        torch.zeros(num_ranks, 6, dtype=torch.int64).index_fill(1, torch.tensor(4), 7),
        torch.zeros(num_ranks, 6, dtype=torch.int64),
    ):
        rounds = _bounded_rounds(rows, bound)
        assert torch.equal(rounds.sum(0), rows), "every row moves once"
        for rank in range(num_ranks):
            own = own_experts(6, axis(rank, num_ranks))
            limit = max(1, math.ceil(bound * int(rows.sum()) * len(own) / 6))
            received = rounds[:, :, own.start : own.stop].sum((1, 2)).tolist()
            assert max(received) <= limit
            assert received == sorted(received, reverse=True), "the first rounds are full"


def test_rows_are_sent_round_by_round_and_by_expert_within_one() -> None:
    rounds = torch.tensor([[[2, 1, 1], [0, 0, 0]], [[1, 0, 2], [9, 9, 9]]])
    experts = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    order = order_by_round(rounds, 0)
    assert experts[order].tolist() == [0, 0, 1, 2, 0, 2, 2]
    assert order.tolist() == [0, 1, 3, 4, 2, 5, 6]


def test_received_rows_are_sorted_by_expert() -> None:
    """Rank 1 of 2 has expert 2; rank 0 sends experts 0 and 1."""
    rows = torch.tensor([[1, 2, 3], [2, 0, 1]])
    first = RowExchange.of(rows, axis(0, 2), torch.device("cpu"))
    assert (first.sent, first.received, first.loads) == ((3, 3), (3, 2), (3, 2))
    assert first.order.tolist() == [0, 3, 4, 1, 2]
    assert first.place[first.order].tolist() == [0, 1, 2, 3, 4]
    second = RowExchange.of(rows, axis(1, 2), torch.device("cpu"))
    assert (second.sent, second.received, second.loads) == ((2, 1), (3, 1), (4,))


@pytest.mark.parametrize("bound", [0.0, 1.5])
def test_memory_is_predicted_at_the_balanced_load_or_at_the_bound(
    bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 ranks share 6 experts: the first receives a third of 4 * 12 rows; with a bound that many
    times 1.5 in each of two rounds."""
    for name in ("all_gather", "all_to_all"):
        monkeypatch.setattr(f"hybridpar.nn.expert_exchange.{name}", lambda x, *_: x)
    rounds = plan_rounds([2] * 6, axis(0, 4), torch.empty(1, device="meta"), bound)
    assert rounds[:, :, :2].sum((1, 2)).tolist() == ([24, 24] if bound else [16])
    assert rounds[:, 0].sum().item() == 12, "its own rows move once"


def test_what_is_computed_between_start_and_arrival_hides_both_ways() -> None:
    log: list[str] = []

    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            log.append("product")
            return 3 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            log.append("gradient of the product")
            return 3 * grad

    def moving(what: str, factor: int) -> Any:
        def start(rows: Tensor) -> Any:
            log.append(f"{what} leave")

            def receive() -> Tensor:
                log.append(f"{what} arrive")
                return factor * rows

            return receive

        return start

    x = torch.ones(4, 2, requires_grad=True)
    transfer = Transfer(moving("rows", 10), moving("gradients", 100))
    ticket = transfer.start(2 * x)
    product: Tensor = Product.apply(x)
    y = transfer.arrive(ticket) + product
    assert torch.equal(y, torch.full((4, 2), 23.0))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 2), 203.0))
    assert log == [
        "rows leave",
        "product",
        "rows arrive",
        "gradients leave",
        "gradient of the product",
        "gradients arrive",
    ]

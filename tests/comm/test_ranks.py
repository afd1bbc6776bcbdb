"""A function on local ranks: results in order, however large; the rank to blame where one fails."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from hybridpar.comm.ranks import run_on_ranks
from hybridpar.errors import HybridparError

pytestmark = pytest.mark.ranks


def large(value: float) -> tuple[int, torch.Tensor]:
    return dist.get_rank(), torch.full((1 << 20,), value + dist.get_rank())


def test_results_come_in_the_order_of_ranks() -> None:
    for i, (rank, tensor) in enumerate(run_on_ranks(large, 3, 0.5)):
        assert rank == i
        assert tensor.unique().tolist() == [0.5 + i]


def fail(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("no such luck")
        os._exit(3)
    dist.all_reduce(torch.zeros(1))  # which rank 1 never joins


@pytest.mark.parametrize(
    ("how", "says"), [("raise", "ValueError: no such luck"), ("exit", "the process ended")]
)
def test_the_rank_that_failed_is_named_and_the_others_are_ended(how: str, says: str) -> None:
    """Long before the collective's time is over, which is longer than pytest's."""
    with pytest.raises(HybridparError, match=rf"(?s)rank 1 of 3 failed:\n.*{says}"):
        run_on_ranks(fail, 3, how, timeout_s=600.0)


def test_ranks_over_nccl_start_with_a_hardware_queue_for_each_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number that `hybridpar train` sets; CUDA reads it when a rank sets it up."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    seen = []

    def start(*args: object, **options: object) -> None:
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridpar.comm.ranks.mp.start_processes", start)
    for backend in ("gloo", "nccl"):
        with pytest.raises(KeyboardInterrupt):
            run_on_ranks(print, 2, backend=backend)
    assert seen == [None, "32"]

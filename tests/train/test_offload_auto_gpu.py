"""memory.offload_activations = "auto" on a GPU: the numbers that it finds, and the bits of training
with them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from train.test_gpu import make, trained

from hybridpar.config import Config
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.runtime.slow_tier import HostTier
from hybridpar.train.autotuning.autotune import autotune
from hybridpar.train.engine import Engine
from hybridpar.train.forecasts.offload_room import reserved_bytes, with_away

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

GPU = torch.device("cuda:0")
MICROBATCHES = 6
MOST = 4
MIB = 1 << 20


def settled() -> tuple[Config, str]:
    """A configuration with the numbers that are found for it here, and what is said of them."""
    config = make({}, {"pipeline": {"schedule": "gpipe", "num_microbatches": MICROBATCHES}})
    said = list[str]()
    found = autotune(with_away(config, "auto"), ProcessGrid(), GPU, said.append)  # type: ignore[arg-type]
    return found, "\n".join(said)


def test_equal_bits_with_the_found_number() -> None:
    """Equal to a run with none away, and no CUDA graphs."""
    found, said = settled()
    (number,) = found.memory.offload_activations  # type: ignore[misc]
    assert 0 <= number <= MOST
    assert f"memory.offload_activations: [{number}]" in said
    assert "ms a step" in said
    kept = with_away(replace(found, train=replace(found.train, cuda_graphs=False)), 0)
    resident = trained(kept, ProcessGrid(), "cuda:0")
    for away in {number, MOST}:
        one = replace(found, train=replace(found.train, cuda_graphs=False))
        assert trained(with_away(one, (away,)), ProcessGrid(), "cuda:0") == resident


def test_pinned_memory_is_taken_before_training_and_is_enough() -> None:
    config = with_away(
        make({}, {"pipeline": {"schedule": "gpipe", "num_microbatches": MICROBATCHES}}), MOST
    )
    engine = Engine(JobPlan(config), ProcessGrid(), GPU)
    tier = engine.moves.activations.tier
    assert isinstance(tier, HostTier)
    assert len(tier._stores) == 1
    assert tier._stores[0].item(0).is_pinned()
    assert len(tier._free) * tier._piece == reserved_bytes(JobPlan(config), 0)
    trained(config, ProcessGrid(), "cuda:0")
    engine.close()


@pytest.mark.parametrize("num_mib", [16, 64])
def test_the_time_of_a_move_is_that_of_its_copies(num_mib: int) -> None:
    """Not of kernels before it: these take ten times as long."""
    num_bytes = num_mib * MIB
    tier = HostTier(GPU, 2 * num_bytes)
    content = [
        torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device=GPU) for _ in range(2)
    ]
    before = [tensor.clone() for tensor in content]

    def round_trip() -> None:
        place, written = tier.write(content)
        written.result()
        for tensor in content:
            tensor.zero_()
        tier.read(place, content).result()

    round_trip()  # sets up streams
    tier.restart()
    round_trip()
    alone = max(tier.times().write, tier.times().read)
    tier.restart()
    torch.cuda._sleep(10**8)  # cycles: some 50 ms
    since = time.perf_counter()
    place, written = tier.write(content)
    written.result()
    waited = time.perf_counter() - since
    took = tier.times().write
    tier.read(place, content).result()
    tier.close()
    assert all(map(torch.equal, content, before))
    assert 0 < took < waited
    assert took < 0.02 + 2 * alone  # else it has the 50 ms of the kernel
    assert num_bytes / took < 1e12, "no link is as fast"

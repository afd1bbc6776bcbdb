"""Training continues on fewer ranks."""

from __future__ import annotations

import pytest

from hybridpar.config import Config, from_mapping
from hybridpar.train.faults.shrink import shrink


@pytest.mark.parametrize(
    ("grid", "microbatches", "min_ranks", "left", "expected"),
    [
        ((1, 2, 2), 2, 2, 3, (1, 4)),
        ((1, 2, 4), 3, 2, 7, (3, 4)),
        ((1, 1, 4), 1, 1, 3, (2, 2)),  # four micro-batches are not three replicas'
        ((2, 2, 3), 2, 4, 11, (2, 3)),
        ((1, 2, 2), 2, 0, 3, None),
        ((1, 2, 2), 2, 3, 3, None),
        ((1, 4, 1), 4, 1, 3, None),
        ((1, 1, 3), 1, 2, 2, None),
    ],
)
def test_the_batch_is_kept(
    grid: tuple[int, int, int],
    microbatches: int,
    min_ranks: int,
    left: int,
    expected: tuple[int, int] | None,
) -> None:
    tp, pp, dp = grid
    config = from_mapping(
        {
            "parallel": {"tp": tp, "pp": pp, "dp": dp},
            "faults": {"min_ranks": min_ranks},
            "pipeline": {"num_microbatches": microbatches},
        },
        Config(),
    )
    found = shrink(config, left)
    assert (found and (found.parallel.dp, found.pipeline.num_microbatches)) == expected
    if found:
        assert found.global_batch_size == config.global_batch_size
        assert (found.parallel.tp, found.parallel.pp) == (tp, pp)


@pytest.mark.parametrize(
    ("sites", "dp", "microbatches", "left", "expected"),
    [
        (2, 1, 2, 1, (1, 1, 4)),
        (3, 1, 2, 2, (2, 1, 3)),
        (2, 2, 3, 3, (2, 1, 6)),
        (3, 1, 1, 2, (1, 1, 3)),
    ],
)
def test_a_site_may_leave(
    sites: int, dp: int, microbatches: int, left: int, expected: tuple[int, int, int]
) -> None:
    config = from_mapping(
        {
            "parallel": {"sites": sites, "dp": dp},
            "faults": {"min_ranks": 1},
            "pipeline": {"num_microbatches": microbatches},
        },
        Config(),
    )
    found = shrink(config, left)
    assert found is not None
    assert (found.parallel.sites, found.parallel.dp, found.pipeline.num_microbatches) == expected
    assert found.global_batch_size == config.global_batch_size

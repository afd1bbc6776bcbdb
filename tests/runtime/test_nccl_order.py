"""No plan deadlocks in the order in which NCCL runs what ranks issue, by the model of
nccl_order.py."""

from __future__ import annotations

import runpy
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from nccl_order import (
    Call,
    Device,
    Event,
    Group,
    all_issued,
    by_pair,
    find_deadlock,
    shared_direction,
)

from hybridpar.config import Config, from_mapping, require_gpu_queues, use_all_gpu_queues
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid, lines_of
from hybridpar.runtime import stage_transport
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.validate import resolve

GALLERY = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "schedule_gallery.py"))
SCHEDULES: dict[str, dict[str, Any]] = {}
for _title, _name, _options in GALLERY["SCHEDULES"]:
    _split = {"split_backward": True} if _options.keys() & {"zero_bubble", "stage_layout"} else {}
    SCHEDULES[_title] = {"schedule": _name, **_options, **_split}
STEPS = 3

Link = tuple[str, int, int]
"""Name of the communicator, sender and receiver."""

ON_ONE_QUEUE = Device(one_queue=True)


def config_of(pipeline: dict[str, Any], num_microbatches: int, **parallel: Any) -> Config:
    """Return a tiny GPT that can be cut into the stages of the pipeline."""
    parallel = {"tp": 1, "dp": 1, **parallel}
    holds_several = pipeline["schedule"] == "interleaved" or "stage_layout" in pipeline
    layers = parallel["pp"] * pipeline.get("virtual_stages", 2 if holds_several else 1)
    config = from_mapping(
        {
            "model": {
                "num_layers": layers,
                "hidden_size": 4,
                "num_heads": 2,
                "seq_length": 2,
                "vocab_size": 5,
            },
            "parallel": parallel,
            "pipeline": {"num_microbatches": num_microbatches, **pipeline},
            "train": {"micro_batch_size": 1},
        }
    )
    return resolve(config, prod(parallel[name] for name in ("tp", "pp", "dp")))


def shared_turns(call: Call) -> Group:
    """A bad arrangement: all turns of a V have the same two communicators."""
    name, ranks = call.group
    return name.partition(" ")[0], ranks


def transfers(issued: list[list[Event]]) -> Counter[Link]:
    """Return how many transfers each link has."""
    calls = (
        event for own in issued for event in own if isinstance(event, Call) and event.is_transfer
    )
    return Counter((call.group[0], call.source, call.target) for call in calls)


def links(config: Config) -> set[Link]:
    """Return the links that `StageTransport.of` connects."""
    sizes = PipelineShape.of(config)
    found = set()
    for turn in range(sizes.virtual_stages if sizes.is_v else 1):
        for name, flow in (("pp", 1), ("pp_reverse", -1)):
            axis = f"{name} {turn}" if turn else name
            found |= {
                (axis, source, target)
                for source, target in stage_transport.links_of(sizes, turn, flow)
            }
    return found


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks connect at the first transfer between them, as on GPUs."""
    monkeypatch.setattr(stage_transport, "has_connections", lambda grid: grid.pp.size > 1)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("title", SCHEDULES)
def test_no_plan_of_the_gallery_deadlocks(connected: None, title: str, pp: int) -> None:
    """Neither with `device_id` nor without; each does if both directions, or all turns of a V,
    share a communicator."""
    pipeline = SCHEDULES[title]
    config = config_of(pipeline, 2 * pp, pp=pp)
    issued = all_issued(config, STEPS)
    assert min(transfers(issued).values()) > 1, "a link was connected that the plan does not use"
    assert transfers(issued).keys() == links(config), "a link was not connected"
    assert find_deadlock(issued) == ""
    assert find_deadlock(issued, Device(by_pair)) == ""
    assert "on pp" in find_deadlock(issued, Device(shared_direction))
    is_v = pipeline.get("stage_layout") == "v"
    assert bool(find_deadlock(issued, Device(shared_turns))) is is_v


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2, "tp": 2, "sequence": True},
        {"pp": 2, "dp": 2, "zero": 1},
        {"pp": 2, "dp": 2, "zero": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("title", ["1F1B", "2BW"])
def test_collectives_of_other_axes_do_not_deadlock(
    connected: None, title: str, parallel: dict[str, Any]
) -> None:
    issued = all_issued(config_of(SCHEDULES[title], 4, **parallel), 2)
    calls = [event for event in issued[0] if isinstance(event, Call)]
    assert {call.group[0] for call in calls} >= {
        "pp",
        "pp_reverse",
        "world",
        *(parallel.keys() & {"tp", "dp"}),
    }
    assert not [
        str(call) for call in calls if call.group[0].startswith("pp") and not call.is_transfer
    ]
    assert find_deadlock(issued) == ""


@cache
def naive() -> list[list[Event]]:
    return all_issued(config_of(SCHEDULES["Naive"], 2, pp=2), 1)


def test_ranks_that_connect_in_the_first_batch_deadlock() -> None:
    """So `StageTransport.of` connects them before. Rank 0 posts a gradient's receive before it sends the
    first activation."""
    found = find_deadlock(naive())
    assert "rank 0: host at event 0" in found
    assert "(transfer 1 -> 0 on pp_reverse)" in found


def test_one_hardware_queue_deadlocks(connected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that is refused, and by default each stream has a queue of its own."""
    issued = all_issued(config_of(SCHEDULES["GPipe"], 4, pp=2), STEPS)
    assert find_deadlock(issued) == ""
    assert "allreduce on world" in find_deadlock(issued, ON_ONE_QUEUE)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    use_all_gpu_queues()  # which the environment has decided
    require_gpu_queues(pp=1)
    with pytest.raises(ConfigError, match=r"must be unset .* with parallel\.pp = 2"):
        require_gpu_queues(pp=2)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    use_all_gpu_queues()
    require_gpu_queues(pp=2)


@pytest.mark.parametrize(
    "sizes", [{"pp": 2, "dp": 2, "tp": 2}, {"site": 2, "pp": 3, "dp": 1, "tp": 2}], ids=str
)
def test_all_ranks_create_all_groups_in_one_order(sizes: dict[str, int]) -> None:
    """A split is a call of all ranks of the job, also of those that get no communicator by it."""
    made = []
    for rank in range(prod(sizes.values())):
        groups: list[tuple[str, tuple[int, ...]]] = []

        def group(name: str, ranks: list[int], groups: list[Any] = groups) -> object:
            groups.append((name, tuple(ranks)))
            return object()

        grid = ProcessGrid.imagined(sizes, rank, lambda *_: object())
        grid._connect(rank, lines_of(sizes), group, via_host=False)
        for name in ("pp", "pp_reverse"):
            axis = grid.again(name)
            assert axis.ranks == grid.axis(name).ranks
        made.append(groups)
    assert all(groups == made[0] for groups in made)
    assert len(made[0]) > len(dict.fromkeys(ranks for _, ranks in made[0]))

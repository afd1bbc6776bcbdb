"""The objectives that the authors' programs, and an integer program that was proven optimal, give
for their graphs."""

from __future__ import annotations

import pytest

from hybridpar.placement import Options, place, read_split, read_workload
from hybridpar.placement.classes import class_graph
from hybridpar.placement.ideals import enumerate_ideals
from hybridpar.placement.solvers.baselines import pipedream_groups
from hybridpar.placement.solvers.linear import solve_linear

from .graphs import paper_graph

TIMES = {  # name: ideals, pairs of them, dp, dpl, pipedream, one accelerator
    "bert24_inference": (30, 464, 17.7899, 17.7899, 17.7899, 92.406),
    "bert24_training": (30, 464, 41.7458, 41.7458, 187.914, 217.813),
    "resnet50_inference": (242, 28971, 33.7747, 33.7747, 39.3981, 201.45),
    "resnet50_training": (242, 28971, 78.6318, 78.6498, 83.6744, 462.381),
    "bert_l-3_inference": (1428, 675546, 27.9186, 27.9186, 37.4557, 49.3526),
    "bert_l-3_training": (2774, 1966176, 65.3031, 65.3031, 122.987, 122.987),
}
LOCAL_SEARCH = {
    "bert24_inference": 17.7776,
    "bert24_training": 39.9432,
    "resnet50_inference": 35.8893,
    "bert_l-3_inference": 27.5741,
    "bert_l-3_training": 68.0629,
}
NOT_CONTIGUOUS = {
    "bert24_inference": 17.7147,
    "bert_l-3_inference": 21.9084,
    "bert_l-3_training": 54.2074,
}


def printed(value: float) -> float:
    """Numbers with six digits, like the authors' program's."""
    return float(f"{value:.6g}")


@pytest.mark.parametrize("name", TIMES)
def test_programs_and_baselines(name: str) -> None:
    workload = read_workload(paper_graph(name))
    num_ideals, num_pairs, *known = TIMES[name]
    roomy = workload.with_devices(
        memory=1e12
    )  # the authors' one accelerator has memory without limit
    dp = place(workload, "dp")
    found = [
        printed(p.objective)
        for p in (
            dp,
            place(workload, "dpl"),
            place(workload, "pipedream"),
            place(roomy, "one-accelerator"),
        )
    ]
    assert found == known
    assert dp.proven
    assert dp.stats["ideals"] == num_ideals
    if num_pairs < 1e6:
        ideals = enumerate_ideals(class_graph(workload).predecessors)
        assert sum(len(ideals.subsets(i)) for i in range(len(ideals))) == num_pairs


@pytest.mark.parametrize("name", LOCAL_SEARCH)
def test_local_search_is_in_range(name: str) -> None:
    """Random starts: a few percent either way."""
    workload = read_workload(paper_graph(name))
    assert place(workload, "local-search").objective <= 1.04 * LOCAL_SEARCH[name]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", NOT_CONTIGUOUS)
def test_integer_programs(name: str) -> None:
    workload = read_workload(paper_graph(name))
    free = place(workload, "milp")
    assert free.proven
    assert free.objective == pytest.approx(NOT_CONTIGUOUS[name], rel=3e-6)
    assert not free.contiguous


def test_contiguous_integer_program_agrees_with_the_dynamic_program() -> None:
    workload = read_workload(paper_graph("bert_l-3_inference"))
    placement = place(workload, "milp-contiguous")
    assert placement.proven
    assert printed(placement.objective) == 27.9186
    assert placement.contiguous


def test_pipedream_without_both_masks() -> None:
    """Left out forward and backward, the mask no longer ties the layers together: better than the
    authors' result."""
    workload = read_workload(paper_graph("bert24_training"))
    graph = class_graph(workload, merge=pipedream_groups(workload, ignored=(4, 37)))
    assert printed(solve_linear(graph)[0]) == 41.7458


def test_an_expert_split_of_the_forward_graph_serves_training(tmp_path) -> None:
    workload = read_workload(paper_graph("bert24_training"))
    dp = place(workload, "dp")
    forward = {i: d for i, d in zip(dp.workload.ids, dp.devices.tolist(), strict=True) if i <= 32}
    split = {
        "cpus": [{"nodes": []}],
        "fpgas": [{"nodes": [i for i, d in forward.items() if d == device]} for device in range(6)],
    }
    (path := tmp_path / "split.json").write_text(str(split).replace("'", '"'))
    expert = place(workload, "expert", Options(split=read_split(workload, path)))
    assert expert.objective == pytest.approx(dp.objective)


def test_dp_splits_several_orders_if_ideals_are_too_many() -> None:
    workload = read_workload(paper_graph("resnet50_training"))
    placement = place(workload, "dp", Options(max_ideals=200))
    assert placement.note == (
        "the graph has more than 200 ideals, too many for the exact program: this is the best "
        "split of 21 orders"
    )
    assert not placement.proven
    assert placement.bound < 78.6318 <= placement.objective <= place(workload, "dpl").objective

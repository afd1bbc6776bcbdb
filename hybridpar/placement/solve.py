"""`place`: one entry point to every solver that minimizes the largest load."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from hybridpar.errors import ConfigError, config_error
from hybridpar.placement.classes import ClassGraph, class_graph
from hybridpar.placement.ideals import MAX_IDEALS, Ideals, OutOfTime, enumerate_ideals
from hybridpar.placement.result import Assignment, SolverResult, make_assignment
from hybridpar.placement.scoring import score
from hybridpar.placement.solvers.baselines import one_accelerator, packed_evenly, pipedream_groups
from hybridpar.placement.solvers.bound import check_possible, work_bound
from hybridpar.placement.solvers.exact import best_loads, trace
from hybridpar.placement.solvers.highs import OUT_OF_TIME, Highs
from hybridpar.placement.solvers.latency_milp import minimise_latency
from hybridpar.placement.solvers.linear import MAX_TABLE, solve_linear, solve_orders
from hybridpar.placement.solvers.local_search import MAX_NUMBERS, LocalSearch, local_search
from hybridpar.placement.solvers.milp import solve_max_load
from hybridpar.placement.workload import OBJECTIVES, Floats, Ints, Workload

SOON = 5_000
"""Number of ideals up to which the dynamic program is tried before integer programming."""
LONG = 0.9
"""Share of the time limit after which dp falls back to splits of some linear orders."""
ONE_MORE = 1.0
"""Seconds beyond the time limit that the split of one order may take."""


@dataclass(frozen=True)
class Options:
    """Options of solvers; each solver reads the options that concern it."""

    time_limit: float = 60.0
    """Time limit in seconds, after which the best result so far counts. Greedy solvers need hardly
    any time."""
    max_ideals: int = MAX_IDEALS
    """Limit of dp, whose memory and time grow with it."""
    restarts: int = 10
    seed: int = 0
    """Seed of the random starts of local-search."""
    slots: int = 1
    """latency-milp: how many times each accelerator may be called."""
    split: Ints | None = None
    """expert: a device for each node, from `read_split`."""
    objective: str = "serial"
    """The minimized quantity: one of OBJECTIVES (workload.py)."""

    def check(self) -> None:
        """Raise a ConfigError if an option is not valid."""
        for name, least in (("max_ideals", 2), ("restarts", 0), ("seed", 0), ("slots", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise config_error(
                    name, value, f"must be an integer of {least} or more", str(least)
                )
        if self.objective not in OBJECTIVES:
            raise config_error(
                "objective", self.objective, f"must be one of {', '.join(OBJECTIVES)}", "serial"
            )
        if not 0 < self.time_limit < 1e9:  # also false for NaN
            raise config_error(
                "time_limit", self.time_limit, "must be above 0 seconds, and finite", "60"
            )


def place(workload: Workload, solver: str = "dpl", options: Options | None = None) -> Assignment:
    """Place the operators so that the largest load, the time per sample of a full pipeline, is
    small; or another of `OBJECTIVES`.

    dp               the best pipeline: exact, over all ideals
    dpl              the best split of one linear order of the operators; nearly always as good, and
                     fast
    milp             the best placement, contiguous or not, by integer programming
    milp-contiguous  the best contiguous placement, by integer programming
    pipedream, greedy, local-search, one-accelerator, expert    baselines
    latency-milp, latency-greedy    minimize the latency of one sample; CPUs form one unlimited pool

    A solver that cannot finish (in time, or within `max_ideals`) returns its best result with a
    bound, and says so in the placement's `note`.

    Raises:
        ConfigError: Nothing can be placed.
    """
    options = options or Options()
    options.check()
    if solver not in SOLVERS:
        raise config_error("solver", solver, f"must be one of {', '.join(SOLVERS)}", "dpl")
    if options.objective != "serial":
        workload = replace(workload, objective=options.objective)
    if workload.objective not in _MINIMISES.get(solver, OBJECTIVES):
        raise config_error(
            "objective",
            workload.objective,
            f"the solver {solver} minimizes {' and '.join(_MINIMISES[solver])} loads only",
            f"{_MINIMISES[solver][0]}, or --solver milp",
        )
    if solver == "expert":
        return SOLVERS[solver](workload, options)
    return _renumbered(SOLVERS[solver](_with_devices_in_use(workload), options), workload)


def _with_devices_in_use(w: Workload) -> Workload:
    """Limit the devices of each kind to the number of colour classes, because more would stay
    empty."""
    count = len(np.unique(w.colour))
    return replace(
        w, num_accelerators=min(w.num_accelerators, count), num_cpus=min(w.num_cpus, count)
    )


def _renumbered(placement: Assignment, w: Workload) -> Assignment:
    """Return a result on all devices of a workload, renumbering CPUs after the unused
    accelerators."""
    more = w.num_accelerators - placement.workload.num_accelerators
    devices = placement.devices + more * (placement.devices >= placement.workload.num_accelerators)
    return replace(
        placement,
        workload=w,
        devices=devices,
        score=replace(score(w, devices), objective=placement.objective),
    )


@dataclass
class _Clock:
    limit: float

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        self.deadline = self.start + self.limit

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start


def _no_fit(workload: Workload, what: str) -> Exception:
    return config_error(
        "maxSizePerFPGA",
        workload.memory,
        f"{what} fits {workload.num_accelerators} accelerators of "
        f"that and {workload.num_cpus} CPUs",
        "maxCPUs = 1, which has no limit, or more memory",
    )


class _Unfinished(Exception):
    """Signal that there is no exact result, and why. `split`: the split of one linear order of the
    operators, if there was time for it."""

    def __init__(self, reason: str, split: Ints | None = None):
        super().__init__(reason)
        self.split = split


def _linear(w: Workload, graph: ClassGraph, solver: str, clock: _Clock) -> Assignment:
    check_possible(graph)
    try:
        value, device = solve_linear(graph, clock.deadline + ONE_MORE)
    except OutOfTime:
        return _packed(w, graph, solver, clock, OUT_OF_TIME)
    if not np.isfinite(value):
        raise _no_fit(w, "no split of the order of operators")
    found = SolverResult(graph.devices(device), work_bound(class_graph(w)))
    return make_assignment(w, solver, found, clock.seconds)


def _packed(w: Workload, graph: ClassGraph, solver: str, clock: _Clock, reason: str) -> Assignment:
    """Return the fallback of a solver that had no time even for one split."""
    device = packed_evenly(graph)
    if device is None:
        raise config_error(
            "time_limit",
            clock.limit,
            f"{reason} before any placement was found",
            f"{10 * clock.limit:g}",
        )
    found = SolverResult(
        graph.devices(device),
        work_bound(class_graph(w)),
        note=f"{reason}: this is packed greedily, in order",
    )
    return make_assignment(w, solver, found, clock.seconds)


def _dpl(w: Workload, options: Options) -> Assignment:
    clock = _Clock(options.time_limit)
    return _linear(w, class_graph(w), "dpl", clock)


def _pipedream(w: Workload, options: Options) -> Assignment:
    clock = _Clock(options.time_limit)
    return _linear(w, class_graph(w, merge=pipedream_groups(w)), "pipedream", clock)


def _table(
    graph: ClassGraph, max_ideals: int, deadline: float, last: float
) -> tuple[Ideals, Floats]:
    """Return all ideals, and the exact program's table over them.

    Args:
        graph: The classes.
        max_ideals: Largest number of ideals.
        deadline: Time limit (monotonic).
        last: Time limit of the split of the first order: without it only a greedy placement would
            be known.

    Raises:
        _Unfinished: It cannot finish.
    """
    w = graph.workload
    split = None
    try:
        # the load of a known placement bounds the search
        known, found = solve_linear(graph, last)
        split = found if np.isfinite(known) else None
        ideals = enumerate_ideals(graph.predecessors, max_ideals, deadline)
        if len(ideals) * (w.num_accelerators + 1) * (w.num_cpus + 1) <= MAX_TABLE:
            return ideals, best_loads(graph, ideals, known, deadline)
        reason = (
            f"the exact program's table for {len(ideals)} ideals and so many devices is too large"
        )
    except OutOfTime:
        reason = OUT_OF_TIME
    except ConfigError:
        reason = f"the graph has more than {max_ideals} ideals, too many for the exact program"
    raise _Unfinished(reason, split)


def _dp(w: Workload, options: Options) -> Assignment:
    clock = _Clock(options.time_limit)
    graph = class_graph(w)
    check_possible(graph)
    try:
        deadline = clock.start + LONG * options.time_limit
        ideals, best = _table(graph, options.max_ideals, deadline, clock.deadline + ONE_MORE)
    except _Unfinished as reason:
        return _of_orders(w, graph, clock, reason)
    if not np.isfinite(best[-1, -1, -1]):
        raise _no_fit(w, "no pipeline")
    found = SolverResult(
        graph.devices(trace(graph, ideals, best)),
        bound=0.0,
        exact=True,
        stats={"classes": graph.num_classes, "ideals": len(ideals)},
    )
    return make_assignment(w, "dp", found, clock.seconds)


def _of_orders(w: Workload, graph: ClassGraph, clock: _Clock, reason: _Unfinished) -> Assignment:
    """Return dp's fallback for when it cannot finish, with the reason: the best of all placements
    that are known by then.
    """
    tried = 0 if reason.split is None else 1
    split = reason.split
    with suppress(OutOfTime):
        value, device, tried = solve_orders(graph, clock.deadline, clock.deadline + ONE_MORE)
        if np.isfinite(value):
            split = _best_of(graph, split, device)
    if not tried:
        return _packed(w, graph, "dp", clock, str(reason))
    best = _best_of(graph, split, packed_evenly(graph))
    if best is None:
        raise config_error(
            "solver",
            "dp",
            f"{reason}, and no split of {tried} orders of the operators fits",
            "milp-contiguous",
        )
    found = SolverResult(
        graph.devices(best),
        work_bound(graph),
        note=f"{reason}: this is the best split of {tried} order{'s' * (tried > 1)}",
        stats={"classes": graph.num_classes},
    )
    return make_assignment(w, "dp", found, clock.seconds)


def _pipeline(w: Workload, deadline: float, last: float) -> Ints | None:
    """Return the device of each node in a good pipeline, or None if nothing fits.

    This is the best pipeline if it is found until `deadline`; else the best of some linear orders,
    the first of which may take until `last`; else a greedy packing.
    """
    graph = class_graph(w)
    device: Ints | None = None
    try:
        ideals, best = _table(graph, SOON, deadline, last)
        device = trace(graph, ideals, best) if np.isfinite(best[-1, -1, -1]) else None
    except _Unfinished as reason:
        device = reason.split
        with suppress(OutOfTime, ConfigError):
            value, split, _ = solve_orders(graph, deadline, last)
            device = _best_of(graph, device, split) if np.isfinite(value) else device
    device = _best_of(graph, device, packed_evenly(graph))
    return None if device is None else graph.devices(device)


def _best_of(graph: ClassGraph, *known: Ints | None) -> Ints | None:
    """Return the placement of classes with the lowest objective, the first of several; None if
    there is none."""
    devices = [device for device in known if device is not None]
    w = graph.workload
    return min(devices, key=lambda x: score(w, graph.devices(x)).objective, default=None)


def _start(
    w: Workload, graph: ClassGraph, options: Options, clock: _Clock, contiguous: bool
) -> list[Ints]:
    """Return up to two placements (a device for each node) that integer programming can start
    from."""
    deadline = clock.start + options.time_limit / 4
    found = _pipeline(w, deadline, clock.deadline)
    starts = [] if found is None else [found]
    searches = w.objective in _MINIMISES["local-search"]
    if not contiguous and searches and LocalSearch.size(graph) <= MAX_NUMBERS:
        of_class = tuple(graph.of_classes(x) for x in starts)
        value, moved = local_search(
            graph, restarts=options.restarts, seed=options.seed, starts=of_class, deadline=deadline
        )
        if np.isfinite(value):
            starts.append(graph.devices(moved))
    return [x for x in starts if np.array_equal(graph.devices(graph.of_classes(x)), x)]


def _milp(w: Workload, options: Options, contiguous: bool) -> Assignment:
    clock = _Clock(options.time_limit)
    graph = class_graph(w, pipeline=False)
    check_possible(graph)
    with Highs() as highs:
        candidates = _start(w, graph, options, clock, contiguous)
        best = min(candidates, key=lambda x: score(w, x).objective, default=None)
        start = np.empty(0, np.int64) if best is None else graph.of_classes(best)
        solution = solve_max_load(
            graph, highs, start, contiguous=contiguous, deadline=clock.deadline
        )
    if not len(solution.device) and solution.proven:
        raise _no_fit(w, f"no {'contiguous ' * contiguous}placement")
    if not len(solution.device):
        raise config_error(
            "time_limit",
            options.time_limit,
            f"{solution.note} before any placement was found",
            f"{10 * options.time_limit:g}",
        )
    solver = "milp-contiguous" if contiguous else "milp"
    found = SolverResult(
        graph.devices(solution.device), solution.bound, solution.proven, solution.note
    )
    return make_assignment(w, solver, found, clock.seconds)


def _greedy(w: Workload, options: Options) -> Assignment:
    clock = _Clock(options.time_limit)
    graph = class_graph(w)
    check_possible(graph)
    device = packed_evenly(graph)
    if device is None:
        raise _no_fit(w, "what is greedily packed in order never")
    found = SolverResult(graph.devices(device), work_bound(graph))
    return make_assignment(w, "greedy", found, clock.seconds)


def _local_search(w: Workload, options: Options) -> Assignment:
    clock = _Clock(options.time_limit)
    graph = class_graph(w, pipeline=False)
    check_possible(graph)
    if LocalSearch.size(graph) > MAX_NUMBERS:
        raise config_error(
            "solver", "local-search", "the graph is too large for it on so many devices", "dpl"
        )
    value, device = local_search(
        graph, restarts=max(options.restarts, 1), seed=options.seed, deadline=clock.deadline
    )
    if not np.isfinite(value):
        raise config_error(
            "restarts",
            options.restarts,
            "no local optimum fits the memory of the accelerators",
            "solver = 'dpl', or more restarts",
        )
    note = OUT_OF_TIME if time.monotonic() > clock.deadline else ""
    found = SolverResult(graph.devices(device), work_bound(graph), note=note)
    return make_assignment(w, "local-search", found, clock.seconds)


def _one_accelerator(w: Workload, options: Options) -> Assignment:
    clock = _Clock(options.time_limit)
    found = SolverResult(one_accelerator(w), work_bound(class_graph(w, pipeline=False)))
    return make_assignment(w, "one-accelerator", found, clock.seconds)


def _expert(w: Workload, options: Options) -> Assignment:
    clock = _Clock(options.time_limit)
    if options.split is None:
        raise config_error(
            "split", None, "the expert's placement must be given", "read_split(workload, path)"
        )
    found = SolverResult(options.split, work_bound(class_graph(w, pipeline=False)))
    return make_assignment(w, "expert", found, clock.seconds)


SOLVERS: dict[str, Callable[[Workload, Options], Assignment]] = {
    "dp": _dp,
    "dpl": _dpl,
    "milp": lambda w, options: _milp(w, options, False),
    "milp-contiguous": lambda w, options: _milp(w, options, True),
    "pipedream": _pipedream,
    "greedy": _greedy,
    "local-search": _local_search,
    "one-accelerator": _one_accelerator,
    "expert": _expert,
    "latency-milp": lambda w, options: minimise_latency(w, options.slots, options.time_limit),
    "latency-greedy": lambda w, options: minimise_latency(w, 1, options.time_limit, search=False),
}

_MINIMISES: dict[str, tuple[str, ...]] = {
    "dp": ("serial", "overlapped"),
    "local-search": ("serial",),
    "latency-milp": ("serial",),
    "latency-greedy": ("serial",),
}
"""The objectives of solvers that do not take all. dpl and pipedream split for the largest load if
the objective is "gpipe", and baselines do not look at it."""

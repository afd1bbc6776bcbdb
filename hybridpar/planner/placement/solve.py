"""`place`: one call for every solver of the largest load."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hybridpar.errors import ConfigError, config_error
from hybridpar.planner.placement.baselines import greedy, one_accelerator, pipedream_groups
from hybridpar.planner.placement.bound import check_possible, work_bound
from hybridpar.planner.placement.classes import ClassGraph, class_graph
from hybridpar.planner.placement.exact import OutOfTime, best_loads, trace
from hybridpar.planner.placement.ideals import MAX_IDEALS, enumerate_ideals
from hybridpar.planner.placement.latency_milp import minimise_latency
from hybridpar.planner.placement.linear import solve_linear, solve_orders
from hybridpar.planner.placement.load import score
from hybridpar.planner.placement.milp import solve_max_load
from hybridpar.planner.placement.result import Placement, make_placement
from hybridpar.planner.placement.search import local_search
from hybridpar.planner.placement.workload import Ints, Workload

SOON = 5_000
"""Ideals whose dynamic program is worth a try before integer programming."""
LONG = 0.9
"""Share of the time limit after which dp gives way to splits of some orders."""


@dataclass(frozen=True)
class Options:
    """What solvers can be told. Each takes what concerns it."""

    time_limit: float = 60.0
    """Seconds for dp, milp, milp-contiguous, local-search, latency-milp; then the best that was found counts."""
    max_ideals: int = MAX_IDEALS
    """Of dp, whose memory and time grow with them."""
    restarts: int = 10
    seed: int = 0
    """Of the random starts of local-search."""
    slots: int = 1
    """latency-milp: how many times each accelerator may be called."""
    split: Ints | None = None
    """expert: a device for each node, from `read_split`."""

    def check(self) -> None:
        """Raises: ConfigError."""
        for name, least in (("max_ideals", 2), ("restarts", 0), ("seed", 0), ("slots", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise config_error(name, value, f"must be an integer of {least} or more", str(least))
        if not 0 < self.time_limit < 1e9:  # false for NaN
            raise config_error("time_limit", self.time_limit, "must be above 0 seconds, and finite", "60")


def place(workload: Workload, solver: str = "dpl", options: Options | None = None) -> Placement:
    """Places the operators so that the largest load is small: the time per sample of a pipeline that is kept full.

        dp               the best pipeline: exact, over all ideals
        dpl              the best split of one order of the operators; nearly always as good, and fast
        milp             the best placement, contiguous or not, by integer programming
        milp-contiguous  the same among contiguous ones
        pipedream, greedy, local-search, one-accelerator, expert    baselines
        latency-milp, latency-greedy    the least time of one sample instead; CPUs are one pool without limit

    What a solver cannot finish (in time, or within `max_ideals`) it says in the placement's `note`, and gives the best
    that it has, with a bound.

    Raises: ConfigError if nothing can be placed.
    """
    options = options or Options()
    options.check()
    if solver not in SOLVERS:
        raise config_error("solver", solver, f"must be one of {', '.join(SOLVERS)}", "dpl")
    return SOLVERS[solver](workload, options)


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
    return config_error("maxSizePerFPGA", workload.memory, f"{what} fits {workload.num_accelerators} accelerators of "
                        f"that and {workload.num_cpus} CPUs", "maxCPUs = 1, which has no limit, or more memory")


def _linear(w: Workload, graph: ClassGraph, solver: str, clock: _Clock) -> Placement:
    check_possible(graph)
    value, device = solve_linear(graph)
    if not np.isfinite(value):
        raise _no_fit(w, "no split of the order of operators")
    return make_placement(w, solver, graph.devices(device), work_bound(class_graph(w)), clock.seconds)


def _dpl(w: Workload, options: Options) -> Placement:
    clock = _Clock(options.time_limit)
    return _linear(w, class_graph(w), "dpl", clock)


def _pipedream(w: Workload, options: Options) -> Placement:
    clock = _Clock(options.time_limit)
    return _linear(w, class_graph(w, merge=pipedream_groups(w)), "pipedream", clock)


def _dp(w: Workload, options: Options) -> Placement:
    clock = _Clock(options.time_limit)
    graph = class_graph(w)
    check_possible(graph)
    stats = {"classes": graph.num_classes}
    try:
        ideals = enumerate_ideals(graph.predecessors, options.max_ideals)
        known, _ = solve_linear(graph)  # no placement of more load need be looked at
        best = best_loads(graph, ideals, known, clock.start + LONG * options.time_limit)
    except (ConfigError, OutOfTime) as error:
        reason = "the time limit was reached" if isinstance(error, OutOfTime) else (
            f"the graph has more than {options.max_ideals} ideals, too many for the exact program")
        return _of_orders(w, graph, clock, reason)
    stats["ideals"] = len(ideals)
    if not np.isfinite(best[-1, -1, -1]):
        raise _no_fit(w, "no pipeline")
    return make_placement(w, "dp", graph.devices(trace(graph, ideals, best)), 0.0, clock.seconds, exact=True,
                          stats=stats)


def _of_orders(w: Workload, graph: ClassGraph, clock: _Clock, reason: str) -> Placement:
    """What dp gives where it cannot finish, for that reason."""
    value, device, tried = solve_orders(graph, clock.deadline)
    if not np.isfinite(value):
        raise config_error("solver", "dp", f"{reason}, and no split of {tried} orders of the operators fits",
                           "milp-contiguous")
    return make_placement(w, "dp", graph.devices(device), work_bound(graph), clock.seconds,
                          note=f"{reason}: this is the best split of {tried} order{'s' * (tried > 1)}",
                          stats={"classes": graph.num_classes})


def _pipeline(w: Workload, deadline: float) -> Ints | None:
    """The best pipeline, a device for each node, if it is soon found; else that of one order; None if there is none."""
    graph = class_graph(w)
    known, device = solve_linear(graph)
    try:
        ideals = enumerate_ideals(graph.predecessors, SOON)
        best = best_loads(graph, ideals, known, deadline)
        if np.isfinite(best[-1, -1, -1]):
            device = trace(graph, ideals, best)
    except (ConfigError, OutOfTime):
        pass
    return graph.devices(device) if len(device) else None


def _start(w: Workload, graph: ClassGraph, options: Options, clock: _Clock, contiguous: bool) -> list[Ints]:
    """Placements to begin integer programming with, a device for each node: none, one or two."""
    deadline = clock.start + options.time_limit / 4
    found = _pipeline(w, deadline)
    starts = [] if found is None else [found]
    if not contiguous:
        of_class = tuple(graph.of_classes(x) for x in starts)
        value, moved = local_search(graph, restarts=options.restarts, seed=options.seed, starts=of_class,
                                    deadline=deadline)
        if np.isfinite(value):
            starts.append(graph.devices(moved))
    return starts


def _milp(w: Workload, options: Options, contiguous: bool) -> Placement:
    clock = _Clock(options.time_limit)
    graph = class_graph(w, pipeline=False)
    check_possible(graph)
    candidates = _start(w, graph, options, clock, contiguous)
    known = min((score(w, x).objective for x in candidates), default=np.inf)
    solution = solve_max_load(graph, contiguous=contiguous, known=known, seconds=clock.deadline - time.monotonic())
    if len(solution.device):
        candidates.append(graph.devices(solution.device))
    if not candidates and solution.proven:
        raise _no_fit(w, f"no {'contiguous ' * contiguous}placement")
    if not candidates:
        raise config_error("time_limit", options.time_limit, "was not enough to find any placement",
                           f"{10 * options.time_limit:g}")
    name = "milp-contiguous" if contiguous else "milp"
    placed = [make_placement(w, name, x, solution.bound, clock.seconds) for x in candidates]
    best = min(placed, key=lambda p: p.objective)
    if solution.proven:
        return make_placement(w, name, best.devices, solution.bound, clock.seconds, exact=True)
    return make_placement(w, name, best.devices, solution.bound, clock.seconds,
                          note="" if best.proven else "the time limit was reached")


def _greedy(w: Workload, options: Options) -> Placement:
    clock = _Clock(options.time_limit)
    graph = class_graph(w)
    check_possible(graph)
    finite = graph.accelerator_time[np.isfinite(graph.accelerator_time)]
    device = greedy(graph, float(finite.sum()) / w.num_accelerators)
    if device is None:
        raise _no_fit(w, "what is greedily packed in order never")
    return make_placement(w, "greedy", graph.devices(device), work_bound(graph), clock.seconds)


def _local_search(w: Workload, options: Options) -> Placement:
    clock = _Clock(options.time_limit)
    graph = class_graph(w, pipeline=False)
    check_possible(graph)
    value, device = local_search(graph, restarts=max(options.restarts, 1), seed=options.seed, deadline=clock.deadline)
    if not np.isfinite(value):
        raise config_error("restarts", options.restarts, "no local optimum fits the memory of the accelerators",
                           "solver = 'dpl', or more restarts")
    note = "the time limit was reached" if time.monotonic() > clock.deadline else ""
    return make_placement(w, "local-search", graph.devices(device), work_bound(graph), clock.seconds, note=note)


def _one_accelerator(w: Workload, options: Options) -> Placement:
    clock = _Clock(options.time_limit)
    devices, bound = one_accelerator(w), work_bound(class_graph(w, pipeline=False))
    return make_placement(w, "one-accelerator", devices, bound, clock.seconds)


def _expert(w: Workload, options: Options) -> Placement:
    clock = _Clock(options.time_limit)
    if options.split is None:
        raise config_error("split", None, "the expert's placement must be given", "read_split(workload, path)")
    return make_placement(w, "expert", options.split, work_bound(class_graph(w, pipeline=False)), clock.seconds)


SOLVERS: dict[str, Callable[[Workload, Options], Placement]] = {
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
    "latency-greedy": lambda w, options: minimise_latency(w, 1, 0.0),
}

"""Minimize the latency of one sample by integer programming, starting from greedy packing and a
dynamic program.

Accelerators run their nodes in `slots` calls each; every operator on the CPUs has a core of its
own. `scoring.latency` defines the latency. A unit is placed as one: with one slot, a colour class;
with more slots, a single node.

x[u, j]          unit u runs in call j (0: on the CPUs)
comes, goes[v]   node v's output is moved into call j, out of it
start[j] >= done[v] if v's output comes;   finish[j] = start[j] + times + transfers
done[v] >= finish[j] if v is in j;   done[v] >= done[u] + CPU's time if v is on a CPU and reads u

Source: arXiv 2006.16423, figure 3 and appendix A; the greedy baseline of appendix F.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybridpar.errors import config_error
from hybridpar.placement.classes import ClassGraph, class_graph
from hybridpar.placement.ideals import OutOfTime
from hybridpar.placement.result import GAP, Assignment, SolverResult, make_assignment
from hybridpar.placement.scoring import latency, problems
from hybridpar.placement.solvers.bound import check_possible
from hybridpar.placement.solvers.highs import Highs
from hybridpar.placement.solvers.latency_bound import cut_bound, path_bound
from hybridpar.placement.solvers.latency_gates import SCALE, gate_bound
from hybridpar.placement.solvers.latency_search import searched_placements, simple_placements
from hybridpar.placement.solvers.program import ProgramBuilder, TooLargeError
from hybridpar.placement.workload import Floats, Ints, Workload

SLACK = 1e-6
GATES_SHARE = 0.6
"""Largest share of the time limit for the program over gates."""
SEARCH_SHARE = 0.4
"""Largest share of the remaining time for the search that integer programming starts from."""


def minimise_latency(
    workload: Workload, slots: int, seconds: float, *, search: bool = True
) -> Assignment:
    """Return the placement of the least latency found within `seconds`; without `search`, the best
    simple one.

    Raises:
        ConfigError: The graph is a training graph, or nothing fits.
    """
    start = time.monotonic()
    deadline = start + seconds
    if workload.training:
        node = int(workload.backward.argmax())
        raise config_error(
            f"nodes[{node}].isBackwardNode",
            True,
            "must be false: latency is computed for inference, which has no backward nodes",
            "solver = 'dp', for the throughput of training",
        )
    colours, graph = (class_graph(workload, pipeline=x, merge_leaves=False) for x in (False, True))
    # Classes on a common cycle need each other's outputs, so on accelerators they must be in one
    # call.
    check_possible(graph if slots == 1 else colours)
    name = "latency-milp" if search else "latency-greedy"
    found = [(x, np.zeros_like(x)) for x in simple_placements(graph, deadline)]
    bound = max(path_bound(colours, deadline), cut_bound(colours, slots, deadline))
    if not search:
        if not found and time.monotonic() > deadline:
            raise config_error(
                "time_limit", seconds, "was not enough to find any placement", f"{10 * seconds:g}"
            )
        if not found:
            raise config_error(
                "solver", name, "what is packed in order does not fit", "latency-milp"
            )
        best = min(found, key=lambda x: latency(workload, *x))
        result = SolverResult(best[0], bound, slots=best[1])
        return make_assignment(workload, name, result, time.monotonic() - start)
    with Highs() as highs:
        simple = [x for x, _ in found]
        known = min((latency(workload, *x) for x in found), default=np.inf)
        if known > bound * (1 + GAP):
            other, more = gate_bound(workload, slots, known, start + GATES_SHARE * seconds, highs)
            bound = max(bound, other)
            simple = simple + [x for x in more if not problems(workload, x)]
        better_ones = searched_placements(
            graph, colours, simple, time.monotonic() + SEARCH_SHARE * (deadline - time.monotonic())
        )
        found += [(x, np.zeros_like(x)) for x in better_ones]
        known = min((latency(workload, *x) for x in found), default=np.inf)
        solution = _Problem(workload, colours, slots, known, bound, deadline).solve(highs)
    found += solution.placements
    if not found:
        wrong, rule = (
            (("maxSizePerFPGA", workload.memory), "nothing fits")
            if solution.proven
            else (("time_limit", seconds), "was not enough to find any placement")
        )
        raise config_error(*wrong, rule, "maxCPUs = 1, which has no limit")
    best = min(found, key=lambda x: latency(workload, *x))
    result = SolverResult(
        best[0],
        max(bound, solution.bound),
        exact=solution.proven,
        note=solution.note,
        slots=best[1],
    )
    return make_assignment(workload, name, result, time.monotonic() - start)


# -- integer program


class _Solution(NamedTuple):
    """Placements that were found (none or one), a bound, and whether nothing is better than they or
    the known one. `note`: reason why that is not proven."""

    placements: list[tuple[Ints, Ints]]
    bound: float
    proven: bool
    note: str = ""


@dataclass(eq=False)
class _Problem:
    """The integer program. `known`: the least latency found before, within which everything must
    end."""

    workload: Workload
    colours: ClassGraph
    slots: int
    known: float
    bound: float
    deadline: float

    def solve(self, highs: Highs) -> _Solution:
        w = self.workload
        k = self.workload.num_accelerators
        q = self.slots
        if self.known <= self.bound * (1 + GAP):
            return _Solution([], self.bound, True)
        try:
            horizon = self._horizon() or 1.0
            model, x, unit = self._model(horizon)
        except (TooLargeError, OutOfTime) as error:
            return _Solution([], self.bound, False, str(error))
        answer = highs.solve(model.program(), self.deadline)
        bound = answer.bound * horizon / SCALE
        if answer.infeasible:
            return _Solution([], self.known, True)
        if not len(answer.values):
            return _Solution([], bound, False, answer.note)
        call = answer.values[x].argmax(1)[unit]
        devices = np.where(call == 0, k, (call - 1) // q)
        slots = np.where(call == 0, 0, (call - 1) % q)
        if problems(w, devices) or not np.isfinite(latency(w, devices, slots)):
            return _Solution([], bound, False, "the best was so only within HiGHS's tolerances")
        return _Solution([(devices, slots)], bound, answer.proven, answer.note)

    def _horizon(self) -> float:
        """Return a time within which there are placements of the least latency."""
        w = self.workload
        return (
            self.known * (1 + SLACK)
            if np.isfinite(self.known)
            else float(
                np.where(w.supported, w.accelerator_time, w.cpu_time).sum()
                + 2 * w.transfer_time.sum() * w.num_accelerators * self.slots
                + w.cpu_time.sum() * bool(w.num_cpus)
            )
        )

    def _model(self, horizon: float) -> tuple[ProgramBuilder, Ints, Ints]:
        w = self.workload
        q = self.slots
        k = w.num_accelerators
        n = w.num_nodes
        calls = k * q
        unit = self.colours.class_of if q == 1 else np.arange(n)
        model = ProgramBuilder(self.deadline)
        model.expect((1 + calls) * n)
        x = model.variables(
            (int(unit.max()) + 1, 1 + calls), 0.0, self._allowed(unit), integer=True
        )
        of_node = x[unit]
        model.equal([(1.0, x)], 1.0)
        if w.size.sum() > w.memory:
            for d in range(k):
                mine = of_node[:, 1 + d * q : 1 + (d + 1) * q]
                model.at_most(
                    [(np.repeat(np.minimum(w.size / w.memory, 2.0), q)[None], mine.reshape(1, -1))],
                    1.0,
                )
        if q > 1:
            self._colocate(model, of_node)
        comes, goes = self._transfers(model, of_node, unit)
        self._contiguous(model, of_node, unit)
        self._times(model, of_node, comes, goes, horizon / SCALE)
        return model, x, unit

    def _allowed(self, unit: Ints) -> Floats:
        w = self.workload
        q = self.slots
        count = int(unit.max()) + 1
        upper = np.ones((count, 1 + w.num_accelerators * q))
        upper[:, 0] = float(w.num_cpus > 0)
        upper[np.bincount(unit, ~w.supported, count) > 0, 1:] = 0.0
        upper[np.bincount(unit, w.size, count) > w.room, 1:] = 0.0
        largest = np.argsort(-np.bincount(unit, w.cpu_time, count), kind="stable")
        for i, u in enumerate(
            largest[: w.num_accelerators]
        ):  # break the symmetry between equal accelerators
            upper[u, 1 + (i + 1) * q :] = 0.0
        return upper

    def _colocate(self, model: ProgramBuilder, of_node: Ints) -> None:
        w = self.workload
        q = self.slots
        first: dict[int, int] = {}
        for v, colour in enumerate(w.colour.tolist()):
            u = first.setdefault(colour, v)
            if u == v:
                continue
            groups = [
                [0],
                *([*range(1 + d * q, 1 + (d + 1) * q)] for d in range(w.num_accelerators)),
            ]
            for group in groups:
                model.equal([(1.0, of_node[None, u, group]), (-1.0, of_node[None, v, group])], 0.0)

    def _edges(self, unit: Ints) -> tuple[Ints, Ints]:
        u, v = self.workload.edges.T
        apart = unit[u] != unit[v]
        pairs = np.unique(np.stack([u, v], 1)[apart], axis=0)
        return pairs[:, 0], pairs[:, 1]

    def _transfers(self, model: ProgramBuilder, of_node: Ints, unit: Ints) -> tuple[Ints, Ints]:
        calls = of_node.shape[1] - 1
        comes = model.variables((self.workload.num_nodes, calls), 0.0, 1.0)
        goes = model.variables((self.workload.num_nodes, calls), 0.0, 1.0)
        u, v = self._edges(unit)
        for j in range(calls if len(u) else 0):
            inside = of_node[:, j + 1]
            model.at_most([(1.0, inside[v]), (-1.0, inside[u]), (-1.0, comes[u, j])], 0.0)
            model.at_most([(1.0, inside[u]), (-1.0, inside[v]), (-1.0, goes[u, j])], 0.0)
        return comes, goes

    def _contiguous(self, model: ProgramBuilder, of_node: Ints, unit: Ints) -> None:
        u, v = self._edges(unit)
        edges = self.workload.edges.T
        if not len(u):
            return
        z = model.variables((self.workload.num_nodes, of_node.shape[1] - 1), 0.0, 1.0)
        for j in range(z.shape[1]):
            inside = of_node[:, j + 1]
            model.at_most([(1.0, inside), (-1.0, z[:, j])], 0.0)
            model.at_most([(1.0, z[edges[1], j]), (-1.0, z[edges[0], j])], 0.0)
            model.at_most([(1.0, z[v, j]), (-1.0, inside[v]), (1.0, inside[u])], 1.0)

    def _times(
        self, model: ProgramBuilder, of_node: Ints, comes: Ints, goes: Ints, unit: float
    ) -> None:
        w = self.workload
        n = self.workload.num_nodes
        q = self.slots
        horizon = SCALE
        # times that are too long count as twice too long
        cpu_time, accelerator_time, transfer_time = (
            np.minimum(times / unit, 2 * horizon)
            for times in (w.cpu_time, w.accelerator_time, w.transfer_time)
        )
        done = model.variables((n,), 0.0, horizon)
        calls = comes.shape[1]
        start = model.variables((calls,), 0.0, horizon)
        finish = model.variables((calls,), 0.0, horizon)
        end = model.variables((1,), min(self.bound / unit, horizon), horizon)
        model.objective = int(end[0])
        ran = np.where(w.supported, accelerator_time, 0.0)
        reads = np.unique(w.edges[:, 0])
        for j in range(calls):
            if len(reads):
                model.at_most(
                    [
                        (1.0, done[reads]),
                        (-1.0, np.full(len(reads), start[j])),
                        (horizon, comes[reads, j]),
                    ],
                    horizon,
                )
            model.equal(
                [
                    (1.0, start[None, j]),
                    (-1.0, finish[None, j]),
                    (ran, of_node[None, :, j + 1]),
                    (transfer_time, comes[None, :, j]),
                    (transfer_time, goes[None, :, j]),
                ],
                0.0,
            )
            model.at_most(
                [(1.0, np.full(n, finish[j])), (-1.0, done), (horizon, of_node[:, j + 1])], horizon
            )
            if j % q:
                model.at_most([(1.0, finish[None, j - 1]), (-1.0, start[None, j])], 0.0)
        model.at_most([(cpu_time, of_node[:, 0]), (-1.0, done)], 0.0)
        if len(w.edges):
            u, v = w.edges.T
            model.at_most([(1.0, done[u]), (cpu_time[v], of_node[v, 0]), (-1.0, done[v])], 0.0)
        model.at_most([(1.0, done), (-1.0, np.full(n, end[0]))], 0.0)

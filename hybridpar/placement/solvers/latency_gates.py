"""A lower bound on the latency of a branching graph, and a placement near it: a program over gates.

A gate is a node of a path that no other path bypasses; a section is everything between two gates.
Only gates and sections are counted. A call that has both gates of a section has the section, too,
or it would wait for itself. If two consecutive gates are in different units, a node between them is
in the call of the earlier gate (`before`, with its inputs), in the call of the later gate
(`behind`, with its readers), on the CPUs (`cpu`), or in a separate call, which then lies in this
section alone (`apart`). So the units of gates run one after the other:

time of a sample >= times of the units that hold gates + for each section the delay of its nodes
                    in neither unit

Delays: ready[v] >= ready[u] + time of v (+ u's transfer if only one of them is apart). All separate
calls together take at most number x delay. A delay over D, the time of all the section's nodes on
CPUs, is useless, because nodes apart could run there as well. So that product is at most  delay +
(number - 1) D. Memory: filled[i] counts from where the call of gate i begins.

Colours, several calls that share an accelerator, and nodes that are on no path between two gates
are ignored. That only lowers the bound: a placement without them satisfies every row and takes no
longer.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from hybridpar.placement.ideals import OutOfTime
from hybridpar.placement.solvers.highs import Highs, Program
from hybridpar.placement.solvers.latency_bound import Order, heaviest, in_order, reach
from hybridpar.placement.solvers.program import ProgramBuilder, TooLargeError
from hybridpar.placement.workload import Bools, Ints, Workload

SCALE = 1e3
"""The known time, in the program's unit."""


def gate_bound(
    w: Workload, slots: int, known: float, deadline: float, highs: Highs
) -> tuple[float, list[Ints]]:
    """Return the bound, and at most one placement (a device for each node, one call per
    accelerator) that may break rules.

    Returns 0 and no placement if there are no CPUs, no branches or no time.

    Args:
        w: The workload.
        slots: Calls of each accelerator.
        known: Latency of a known placement.
        deadline: Time limit (monotonic).
        highs: The solver process.
    """
    order = in_order(w)
    compute = np.where(w.supported, w.accelerator_time, w.cpu_time)
    path = heaviest(compute / (compute.sum() or 1.0) + w.size / (w.size.sum() or 1.0), order)[1]
    if w.num_cpus and 0 < known < np.inf:
        with suppress(TooLargeError, OutOfTime):
            gates = _Gates(
                w, np.array(path), order, w.num_accelerators * slots, known / SCALE, deadline
            )
            answer = highs.solve(gates.program(), deadline if len(gates.inner) else -np.inf)
            found = [gates.placed(answer.values > 0.5)] if len(answer.values) else []
            return max(answer.bound * known / SCALE, 0.0), found
    return 0.0, []


class _Gates:
    """Numbers of variables: [g] for gates, [g - 1] for sections, [n] for nodes (`zero`: no
    variable).

    `of`: [n] the section of a node, or the section after a gate. `inner`: nodes in sections.
    `edges`: the edges that count.
    """

    def __init__(
        self, w: Workload, path: Ints, order: Order, calls: int, unit: float, deadline: float
    ) -> None:
        self.w = w
        self.calls = calls
        self.model = ProgramBuilder(deadline)
        self.cpu_time, self.took, self.moving, self.size = (
            np.minimum(x, 2 * SCALE)
            for x in (  # `took`: number of accelerators
                w.cpu_time / unit,
                np.where(w.supported, w.accelerator_time, 0.0) / unit,
                w.transfer_time / unit,
                w.size / w.room,
            )
        )
        last, first = reach(path, order, w.num_nodes)
        between = (last >= 0) & (first < len(path))
        length = len(path)
        edges = w.edges[between[w.edges].all(1)]
        # an edge bypasses these positions
        after = last[edges[:, 0]] + 1
        until = first[edges[:, 1]]
        around = np.bincount(after, minlength=length + 1) - np.bincount(
            np.maximum(after, until), minlength=length + 1
        )
        at = np.flatnonzero(np.cumsum(around)[:length] == 0)
        self.gates = path[at]
        self.of = np.searchsorted(at, last, side="right") - 1
        counted = between & (self.of >= 0) & (self.of < len(at) - 1)
        counted[self.gates] = True
        self.edges = edges[counted[edges].all(1)].T
        counted[self.gates] = False
        self.inner = np.flatnonzero(counted)
        inner = self.inner
        n = w.num_nodes
        g = len(self.gates)
        variables = self.model.variables
        zero = variables((1,), 0.0, 0.0)[0]
        self.cut, self.alone, self.more = (
            variables((g - 1,), 0.0, x, integer=True) for x in (1.0, 1.0, float(calls))
        )
        self.delay = variables((g - 1,))
        self.filled = variables((g,), 0.0, 1 + 1e-9)
        # times at which the call of the gate begins and ends
        self.begins, self.ends = variables((2, g), 0.0, 1.0)
        self.on_cpu = variables((g,), ~w.supported[self.gates], 1.0, integer=True)
        self.before, self.behind, self.apart, self.cpu, self.ready = self.roles = np.full(
            (5, n), zero
        )
        allowed = w.supported[inner] | (np.arange(4) == 3)[:, None]
        self.roles[:4, inner] = variables((4, len(inner)), 0.0, allowed, integer=True)
        self.ready[inner] = variables((len(inner),))
        self.leaves, self.enters, self.comes, self.goes = variables(
            (4, n), 0.0, 1.0
        )  # outputs; the last two, of separate calls

    def program(self) -> Program:
        """Return the complete program."""
        self._along_edges()
        self._in_sections()
        model = self.model
        gates = self.gates
        inner = self.inner
        took = self.took
        at = self.of[self.inner]
        model.equal([(1.0, self.roles[:4, inner].T), (-1.0, self.cut[at])], 0.0)
        model.at_most([(1.0, self.apart[inner]), (-1.0, self.alone[at])], 0.0)
        model.equal([(1.0, self.begins[1:]), (1.0, self.on_cpu[1:]), (-1.0, self.cut)], 0.0)
        model.equal([(1.0, self.ends[:-1]), (1.0, self.on_cpu[:-1]), (-1.0, self.cut)], 0.0)
        model.equal([(1.0, self.begins[:1]), (1.0, self.on_cpu[:1])], 1.0)
        model.at_most([(1.0, x[None]) for x in (self.begins, self.alone, self.more)], self.calls)
        model.objective = int(model.variables((1,))[0])
        model.at_most(
            [
                (-1.0, np.array([[model.objective]])),
                (1.0, self.delay[None]),
                ((self.cpu_time - took)[gates], self.on_cpu[None]),
                (np.tile(took[inner], 2), self.roles[:2, inner].reshape(1, -1)),
                (-took[inner], self.cut[at][None]),
                *((self.moving, x[None]) for x in (self.leaves, self.enters)),
            ],
            -took[gates].sum() - took[inner].sum(),
        )
        return model.program()

    def _along_edges(self) -> None:
        model = self.model
        u, v = self.edges
        first = self.before.copy()
        last = self.behind.copy()
        late = self.ready.copy()
        first[self.gates] = self.ends
        last[self.gates] = self.begins
        late[self.gates[1:]] = self.delay
        model.at_most([(1.0, self.before[v]), (-1.0, first[u])], 0.0)
        model.at_most([(1.0, self.behind[u]), (-1.0, last[v])], 0.0)
        for here, there, moved in (
            (first[u], self.before[v], self.leaves),
            (last[v], self.behind[u], self.enters),
            (self.apart[v], self.apart[u], self.comes),
            (self.apart[u], self.apart[v], self.goes),
        ):
            model.at_most([(1.0, here), (-1.0, there), (-1.0, moved[u])], 0.0)
        for moving in (self.moving[u], -self.moving[u]):
            model.at_most(
                [
                    (1.0, self.ready[u]),
                    (self.cpu_time[v], self.cpu[v]),
                    (-1.0, late[v]),
                    (self.took[v] + moving, self.apart[v]),
                    (-moving, self.apart[u]),
                ],
                0.0,
            )

    def _in_sections(self) -> None:
        model = self.model
        filled = self.filled
        on_cpu = self.on_cpu
        source = self.edges[0]
        model.at_most(
            [(-1.0, filled[:1]), (-self.size[self.gates[0]], on_cpu[:1])], -self.size[self.gates[0]]
        )
        for i, own in enumerate(self.size[self.gates[1:]].tolist()):
            one = slice(i, i + 1)
            two = slice(i + 1, i + 2)
            mine = self.inner[self.of[self.inner] == i]
            sources = np.unique(source[self.of[source] == i])
            total = self.size[mine].sum()
            before, behind = ((self.size[mine], x[mine][None]) for x in (self.before, self.behind))
            model.at_most(
                [
                    (1.0, filled[one]),
                    (-1.0, filled[two]),
                    (-1.0, self.ends[one]),
                    (-total, self.cut[one]),
                    (-own, on_cpu[two]),
                    before,
                    behind,
                ],
                -total - own,
            )
            model.at_most([(1.0, filled[one]), before], 1 + 1e-9)
            model.at_most([(-1.0, filled[two]), (-own, on_cpu[two]), behind], -own)
            model.at_most(
                [
                    (-1.0, self.delay[one]),
                    (-self.cpu_time[mine].sum(), self.more[one]),
                    (self.took[mine], self.apart[mine][None]),
                    *((self.moving[sources], x[sources][None]) for x in (self.comes, self.goes)),
                ],
                0.0,
            )

    def placed(self, on: Bools) -> Ints:
        """Return a device for each node, by whether each variable is 1. Nodes outside of sections
        are on the CPUs."""
        begins = on[self.begins]
        cpu = self.w.num_accelerators
        at = self.of[self.inner]
        call = np.cumsum(begins) - 1
        alone = begins.sum() + np.cumsum(on[self.alone]) - 1
        call[on[self.on_cpu]] = cpu
        device = np.full(self.w.num_nodes, cpu)
        device[self.gates] = call
        before, behind, apart = on[self.roles[:3, self.inner]]
        device[self.inner] = np.select(
            [~on[self.cut][at] | before, behind, apart], [call[at], call[at + 1], alone[at]], cpu
        )
        return np.minimum(device, cpu)

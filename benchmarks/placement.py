"""Claim: hybridpar's placement solvers find what the authors' programs find, or better, and take
seconds.

    python -m benchmarks.placement

Workloads: those of Tarnawski et al. (NeurIPS 2020) and of Piper (NeurIPS 2021) in `--data`, where
that folder is, and synthetic training graphs. `known`: what the authors' programs print (dp, dpl,
pipedream, one-accelerator, piper and its baselines), what their random local search found, and for
milp the least load of any placement, or the best known. A ratio of known over found above 1 is
better than known. Times cover the whole call, from the graph to the placement.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import arguments, parse, report
from hybridpar import native
from hybridpar.errors import ConfigError
from hybridpar.placement import Options, Workload, make_workload, place, read_workload
from hybridpar.placement.piper import (
    Allowed,
    Instance,
    plan_equal_stages,
    plan_stages,
    read_instance,
)

GIB = 2**30
KNOWN: Mapping[str, Mapping[str, float]] = {
    "bert24_inference": {
        "dp": 17.7899,
        "dpl": 17.7899,
        "pipedream": 17.7899,
        "local-search": 17.7776,
        "one-accelerator": 92.406,
        "milp": 17.7147,
    },
    "bert24_training": {
        "dp": 41.7458,
        "dpl": 41.7458,
        "pipedream": 187.914,
        "local-search": 39.9432,
        "one-accelerator": 217.813,
        "milp": 39.7895,
        "milp-contiguous": 41.7458,
    },
    "resnet50_inference": {
        "dp": 33.7747,
        "dpl": 33.7747,
        "pipedream": 39.3981,
        "local-search": 35.8893,
        "one-accelerator": 201.45,
    },
    "resnet50_training": {
        "dp": 78.6318,
        "dpl": 78.6498,
        "pipedream": 83.6744,
        "one-accelerator": 462.381,
        "milp": 76.6414,
    },
    "bert_l-3_inference": {
        "dp": 27.9186,
        "dpl": 27.9186,
        "pipedream": 37.4557,
        "local-search": 27.5741,
        "one-accelerator": 49.3526,
        "milp": 21.9084,
    },
    "bert_l-3_training": {
        "dp": 65.3031,
        "dpl": 65.3031,
        "pipedream": 122.987,
        "local-search": 68.0629,
        "one-accelerator": 122.987,
        "milp": 54.2074,
    },
}
PIPER = {  # devices, GiB of each
    (8, 8): {"piper": 0.165856, "equi": 0.230978, "noAR": 0.259752},
    (8, 80): {"piper": 0.122007, "noDP": 0.164516},
    (16, 8): {"piper": 0.082962, "equi": 0.102604, "noDP": 0.100427, "noAR": 0.117829},
    (16, 80): {"piper": 0.061232},
    (32, 2): {
        "piper": 0.066550,
        "equi": math.inf,
        "noDP": 0.073906,
        "noTP": math.inf,
        "noAR": math.inf,
    },
    (32, 8): {"piper": 0.041515, "equi": 0.051351},
    (32, 80): {"piper": 0.030844},
}
PIPER_GRAPHS = {  # of the paper's other graphs: devices, GiB of each
    "gnmt": (
        (2, 2.5),
        (2, 3.5),
        (4, 1.2),
        (4, 2.5),
        (8, 0.6),
        (8, 1.2),
        (8, 2.4),
        (16, 0.3),
        (16, 0.6),
        (16, 1.2),
    ),
}
PLANNERS: Mapping[str, Callable[[Instance], Any]] = {
    "piper": plan_stages,
    "equi": plan_equal_stages,
    "noDP": lambda x: plan_stages(x, Allowed(data=False)),
    "noTP": lambda x: plan_stages(x, Allowed(tensor=False)),
    "noAR": lambda x: plan_stages(x, Allowed(recompute=False)),
}
SOLVERS = (
    "dp",
    "dpl",
    "milp",
    "milp-contiguous",
    "pipedream",
    "greedy",
    "local-search",
    "one-accelerator",
)
MEANING = (
    "objective: largest load in ms (piper: seconds a micro-batch, latency: ms of one sample); "
    "seconds: median "
    "of the rounds; ratio: known / objective"
)


@dataclass(frozen=True)
class Synthetic:
    """A training graph: layers of parallel branches of operators, and as many backward nodes.
    Transfers are uneven."""

    num_layers: int
    branches: int
    operators: int
    """In each branch."""

    def workload(self, seed: int = 0) -> Workload:
        generator = np.random.default_rng(seed)
        edges: list[tuple[int, int]] = []
        last = -1
        n = 0
        for _ in range(self.num_layers):
            join = n + self.branches * self.operators
            for _ in range(self.branches):
                edges += [(last, n)] * (last >= 0) + [
                    (v, v + 1) for v in range(n, n + self.operators - 1)
                ]
                edges.append((n + self.operators - 1, join))
                n += self.operators
            last = join
            n = join + 1

        def backward(v: int) -> int:
            return 2 * n - 1 - v

        edges += [(backward(v), backward(u)) for u, v in edges] + [
            (v, backward(v)) for v in range(n)
        ]
        times = generator.uniform(0.1, 2, n).round(3)
        cost = generator.uniform(0.01, 0.3, 2 * n).round(3)
        nodes = [
            {
                "id": v,
                "supportedOnFpga": True,
                "cpuLatency": 10 * t,
                "fpgaLatency": t,
                "size": 1e6,
                "isBackwardNode": v >= n,
                "colorClass": min(v, backward(v)),
            }
            for v, t in enumerate([*times.tolist(), *(2 * times[::-1]).tolist()])
        ]
        return make_workload(
            {
                "maxSizePerFPGA": 16e9,
                "maxFPGAs": 6,
                "maxCPUs": 1,
                "nodes": nodes,
                "edges": [{"sourceId": u, "destId": v, "cost": float(cost[u])} for u, v in edges],
            }
        )


SHAPES = {
    "gnmt-sized": Synthetic(2, 3, 20),  # 18,523 ideals
    "wide": Synthetic(1, 3, 24),  # 15,626 ideals
    "2000 nodes": Synthetic(50, 4, 5),
    "paper": Synthetic(0, 0, 0),  # what the paper's own graphs are listed under
}


def run(
    name: str,
    solve: Callable[[], Any],
    value: Callable[[Any], float],
    known: float | None,
    rounds: int,
) -> dict[str, Any]:
    """One entry of the result file."""
    times = []
    note = ""
    found = math.nan
    bound = None
    proven = None
    for _ in range(rounds):
        start = time.perf_counter()
        try:
            result = solve()
        except ConfigError as error:
            note = str(error)
            break
        times.append(time.perf_counter() - start)
        found = value(result)
        note = getattr(result, "note", "")
        bound = getattr(result, "bound", None)
        proven = getattr(result, "proven", None)
    seconds = float(np.median(times)) if times else math.nan
    ratio = known / found if known is not None and math.isfinite(known) and found else math.nan

    def number(x: float | None) -> float | str | None:
        return x if x is None or math.isfinite(x) else str(x)

    return {
        "case": name,
        "objective": number(found),
        "known": number(known),
        "ratio": number(ratio),
        "seconds": number(seconds),
        "bound": bound,
        "proven": proven,
        "note": note,
    }


def placements(
    name: str, workload: Workload, solvers: tuple[str, ...], shape: str, args: Namespace
) -> Iterator[dict[str, Any]]:
    known = KNOWN.get(name, {})
    for solver in wanted(solvers, args):
        # the authors' one accelerator has memory without limit
        w = workload.with_devices(memory=1e15) if solver == "one-accelerator" else workload
        slow = solver in ("milp", "milp-contiguous", "latency-milp")
        options = Options(time_limit=args.time_limit if slow else 300.0)
        entry = run(
            f"{name} {solver}",
            lambda w=w, solver=solver, options=options: place(w, solver, options),
            lambda p: p.objective,
            known.get(solver),
            1 if slow else args.rounds,
        )
        yield entry | {
            "settings": {
                "shape": shape,
                "solver": solver,
                "nodes": w.num_nodes,
                "accelerators": w.num_accelerators,
                "cpus": w.num_cpus,
            }
        }


def wanted(solvers: Iterable[str], args: Namespace) -> list[str]:
    """The solvers that --solvers names, all where it names none."""
    return [solver for solver in solvers if not args.solvers or solver in args.solvers]


def latency_workload(workload: Workload, memory: float) -> Workload:
    return workload.with_devices(memory=memory, num_cpus=8)


def cases(args: Namespace, data: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((data / "device_placement").glob("*/*.json")):
        yield from placements(path.stem, read_workload(path), SOLVERS, "paper", args)
        if path.stem.endswith("inference"):
            small = latency_workload(read_workload(path), 0.6 * GIB)
            yield from placements(
                f"{path.stem} 0.6 GiB", small, ("latency-greedy", "latency-milp"), "paper", args
            )
    for file in args.latency_graphs:
        name = f"{Path(file).parent.name} {Path(file).stem}"
        yield from placements(
            name, read_workload(file), ("latency-greedy", "latency-milp"), "paper", args
        )
    for name in ("wide", "gnmt-sized"):
        yield from placements(name, SHAPES[name].workload(), ("dp", "dpl"), name, args)
    yield from placements(
        "2000 nodes",
        SHAPES["2000 nodes"].workload(),
        ("dpl", "pipedream", "greedy"),
        "2000 nodes",
        args,
    )
    if (path := data / "piper" / "bert32a100.json").exists():
        for (devices, gib), known in PIPER.items():
            yield from stages(
                "bert32",
                read_instance(path).with_devices(num_microbatches=1920),
                devices,
                gib,
                known,
                args,
            )
    for file in args.piper_graphs:
        for devices, gib in PIPER_GRAPHS[Path(file).stem]:
            yield from stages(Path(file).stem, read_instance(file), devices, gib, {}, args)


def stages(
    name: str,
    instance: Instance,
    devices: int,
    gib: float,
    known: Mapping[str, float],
    args: Namespace,
) -> Iterator[dict[str, Any]]:
    on = instance.with_devices(num_devices=devices, memory=gib * GIB, bandwidth=25 * GIB)
    for planner in wanted(PLANNERS, args):
        entry = run(
            f"{name} {devices} x {gib} GiB {planner}",
            lambda planner=planner: PLANNERS[planner](on),
            lambda p: p.time,
            known.get(planner),
            1,
        )
        yield entry | {"settings": {"shape": "paper", "solver": planner, "accelerators": devices}}


def show(entry: dict[str, Any]) -> None:
    known = "" if entry["known"] is None else f"{float(entry['known']):.6g}"
    print(
        f"{entry['case']:<38} {float(entry['objective']):>12.6g} {known:>10} "
        f"{float(entry['seconds']):>9.3f} s  "
        f"{'proven ' * bool(entry['proven'])}{entry['note'][:70]}",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__, rounds=3, shapes=[])
    beside = [folder / "shared" / "data" for folder in Path(__file__).resolve().parents]
    parser.add_argument(
        "--data",
        default=str(next((x for x in beside if x.is_dir()), beside[0])),
        help="folder with device_placement/ and piper/",
    )
    parser.add_argument(
        "--latency-graphs",
        nargs="*",
        default=[],
        help="files of the authors' latency-inputs, with the devices that they name",
    )
    parser.add_argument("--piper-graphs", nargs="*", default=[], help="Piper's gnmt.json")
    parser.add_argument(
        "--time-limit", type=float, default=20.0, help="seconds of each integer program"
    )
    parser.add_argument(
        "--solvers", nargs="+", help="those alone; with --add the others' results stay"
    )
    args = parse(parser)
    native.missing()  # loads the extension, which is in no one's time
    print(f"{'':<38} {'objective':>12} {'known':>10} {'time':>9}")
    report(
        "placement",
        cases(args, Path(args.data)),
        Namespace(
            **vars(args)
            | {
                "data": Path(args.data).name,
                "piper_graphs": [Path(x).name for x in args.piper_graphs],
                "latency_graphs": [Path(x).name for x in args.latency_graphs],
            }
        ),
        show=show,
        meaning=MEANING,
        shapes=SHAPES,
    )


if __name__ == "__main__":
    main()

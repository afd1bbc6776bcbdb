"""Torch's own tools beside hybridpar's recorder: what each shows of the same step of the engine, as
counts.

python -m benchmarks.memory_tools

recorder    hybridpar.memory_behaviour.recording.memory_trace.EngineRecorder
predicted   hybridpar.memory_behaviour.recording.memory_trace.predict_trace, before anything runs
profiler    torch.profiler, profile_memory and record_shapes, and the categories of its memory
            timeline
history     torch.cuda.memory._record_memory_history, which memory_viz shows: needs CUDA
MemTracker  torch.distributed._tools.mem_tracker
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.common import SHAPES, OurStep, arguments, engine_config, parse, report
from hybridpar.config import Config
from hybridpar.grid import ProcessGrid
from hybridpar.memory_behaviour.events import Span, lives
from hybridpar.memory_behaviour.recording.memory_trace import EngineRecorder, predict_trace
from hybridpar.validate import resolve

COLUMNS = (
    "mallocs",
    "frees",
    "reads",
    "writes",
    "categories",
    "peak_bytes",
    "micro_batches",
    "layers",
    "before_the_run",
)
Counts = dict[str, Any]


def of_spans(spans: Iterable[Span], step: int, *, predicted: bool) -> Counts:
    """Counts of one step."""
    spans = list(spans)
    now = peak = 0
    for event in (event for span in spans for event in span.events):
        now += event.num_bytes * ((event.what.value == "malloc") - (event.what.value == "free"))
        peak = max(peak, now)
    events = [(span, event) for span in spans if span.step == step for event in span.events]
    kinds = Counter(event.what.value for _, event in events)
    forwards = {span.action for span, _ in events if span.action.startswith("F")}
    seen = {life.category for life in lives(spans)}
    return {
        **{f"{kind}s": kinds[kind] for kind in ("malloc", "free", "read", "write")},
        "categories": len(seen),
        "peak_bytes": peak,
        "micro_batches": len(forwards),
        "layers": len({event.layer for _, event in events if event.layer >= 0}),
        "before_the_run": predicted,
    }


def by_recorder(step: OurStep) -> Counts:
    spans: list[Span] = []
    recorder = EngineRecorder(step.engine, spans.append)
    step.loader = recorder.loader(step.loader)  # type: ignore[arg-type, assignment]
    with recorder.active():
        step()
        step()
    recorder.close()
    return of_spans(spans, max(span.step for span in spans), predicted=False)


def by_prediction(config: Config) -> Counts:
    return of_spans(predict_trace(resolve(config, 1), steps=2)[1], 2, predicted=True)


def counts(**found: Any) -> Counts:
    """A row of the table; 0 for columns that a tool does not show."""
    return {column: found.get(column, 0) for column in COLUMNS}


def by_profiler(step: OurStep) -> Counts:
    """The timeline of torch's memory profiler; a new version of a tensor is a write."""
    step()
    with torch.profiler.profile(
        profile_memory=True, record_shapes=True, with_stack=True
    ) as profiler:
        step()
    memory = profiler._memory_profile()
    actions = Counter[str]()
    names = set()
    now = 0
    peak = 0
    for _, action, (key, version), num_bytes in memory.timeline:
        actions[action.name] += 1
        names.add(memory._categories.get(key, version))
        now += num_bytes * ((action.name in ("PREEXISTING", "CREATE")) - (action.name == "DESTROY"))
        peak = max(peak, now)
    return counts(
        mallocs=actions["CREATE"],
        frees=actions["DESTROY"],
        writes=actions["INCREMENT_VERSION"],
        categories=len(names - {None}),
        peak_bytes=peak,
    )


def by_history(step: OurStep) -> Counts | str:
    if not torch.cuda.is_available():
        return "needs CUDA"
    step()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    step()
    rows = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    kinds = Counter(row["action"] for row in rows)
    return counts(mallocs=kinds["alloc"], frees=kinds["free_requested"])


def by_mem_tracker(step: OurStep) -> Counts | str:
    from torch.distributed._tools.mem_tracker import MemTracker  # slow to import

    step()
    tracker = MemTracker()
    tracker.track_external(*step.engine.stage.blocks.values())
    try:
        with tracker:
            step()
    except NotImplementedError as error:
        return f"stops: {error}"
    peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
    return counts(categories=len(peak) - 1, peak_bytes=peak["Total"])


def show(entry: dict[str, Any]) -> None:
    found = entry["shows"]
    row = [found] if isinstance(found, str) else [f"{found[column]:>14}" for column in COLUMNS]
    print(f"{entry['case']:<12}", *row, flush=True)


def main() -> None:
    parser = arguments(__doc__, rounds=1, shapes=["tiny"])
    parser.add_argument("--microbatches", type=int, default=2)
    args = parse(parser)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = engine_config(
        shape := SHAPES[args.shapes[0]], num_microbatches=args.microbatches, device=device
    )
    tools: dict[str, Callable[[], Counts | str]] = {"predicted": lambda: by_prediction(config)} | {
        name: lambda tool=tool: tool(OurStep(config, shape, ProcessGrid()))  # type: ignore[misc]
        for name, tool in {
            "recorder": by_recorder,
            "profiler": by_profiler,
            "history": by_history,
            "MemTracker": by_mem_tracker,
        }.items()
    }
    print(f"{'':<12}", *(f"{column:>14}" for column in COLUMNS))
    settings = {"shape": args.shapes[0], "microbatches": args.microbatches}
    entries = (
        {"case": name, "settings": settings, "shows": tool()} for name, tool in tools.items()
    )
    report(
        "memory_tools", entries, args, show=show, meaning="counts of one step as each tool shows it"
    )


if __name__ == "__main__":
    main()

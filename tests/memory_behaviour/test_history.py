"""The allocator's history beside a recording: births, deaths and scratch, by entries as torch's
docs show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.memory_behaviour.events import Header, MemoryEvent, Span, What
from hybridpar.memory_behaviour.recording.allocator_history import Agreement, compare
from hybridpar.memory_behaviour.recording.memory_trace import AllocatorHistory
from hybridpar.memory_behaviour.recording.recorder import Recorder
from hybridpar.memory_behaviour.trace_file import header_line, span_line

M = What.MALLOC
F = What.FREE
R = What.READ


def entry(action: str, addr: int, size: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": 1726183881020000,
        "frames": [],
    }


def span(*rows: tuple[What, int, int]) -> list[Span]:
    return [
        Span(
            1,
            "",
            0,
            1,
            [
                MemoryEvent(what, block, size, "" if what is F else "aten::mm", 0.5)
                for what, block, size in rows
            ],
        )
    ]


HISTORY = [
    entry("segment_alloc", 0, 2 << 20),
    entry("alloc", 0, 1024),
    entry("alloc", 1024, 4096),  # the second is cuBLAS's own
    entry("free_requested", 1024, 4096),
    entry("free_completed", 1024, 4096),
    entry("alloc", 1024, 512),
    entry("free_requested", 0, 1024),
    entry("free_completed", 0, 1024),
    entry("alloc", 0, 1024),
    entry("free_requested", 1024, 512),
    entry("free_completed", 1024, 512),
]


def test_agreement_with_the_allocator() -> None:
    found = compare(
        span((M, 0, 1000), (R, 0, 1000), (M, 1, 4), (F, 0, 1000), (M, 2, 1024), (F, 1, 4)), HISTORY
    )
    assert found == Agreement(
        births=3,
        found_births=3,
        deaths=2,
        found_deaths=2,
        scratch=1,
        peak=1536,
        allocator_peak=1024 + 4096,
    )
    assert "3 of 3 recorded births and 2 of 2 deaths, and 1 blocks" in str(found)


def test_events_unseen_by_the_allocator() -> None:
    found = compare(span((M, 0, 1000), (M, 1, 9000), (M, 2, 1024)), HISTORY)
    assert (found.births, found.found_births, found.scratch) == (3, 2, 2)


def test_a_death_that_comes_late() -> None:
    """Recorded before the third birth, and given back by the allocator behind it."""
    late = [*HISTORY[:6], HISTORY[8] | {"addr": 9000}, HISTORY[6], HISTORY[7]]
    found = compare(span((M, 0, 1000), (M, 1, 4), (F, 0, 1000), (M, 2, 1024)), late)
    assert (found.found_births, found.deaths, found.found_deaths) == (3, 1, 0)


def test_blocks_from_before_are_in_neither() -> None:
    before = [
        Span(
            1,
            "",
            0,
            1,
            [MemoryEvent(M, 0, 512, "", 0.5, name="weights 0"), MemoryEvent(F, 0, 512, "", 0.5)],
        )
    ]
    assert compare(before, [entry("free_requested", 7, 512)]) == Agreement(0, 0, 0, 0, 0, 0, 0)


def test_a_recorded_run_on_a_gpu_says_whether_it_agrees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rank0.jsonl"
    calls = []
    history = list(HISTORY)
    path.write_text(
        header_line(Header(device="cuda:1"))
        + "".join(
            map(span_line, span((M, 0, 1000), (M, 1, 4), (F, 0, 1000), (M, 2, 1024), (F, 1, 4)))
        )
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options)
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], history]})
    found = AllocatorHistory(torch.device("cuda", 1))
    assert "3 of 3 recorded births and 2 of 2 deaths" in found.compare(path)
    assert [*calls[0]] == ["context", "max_entries"]
    assert calls[1] == {"enabled": None}
    history *= calls[0]["max_entries"] // len(history) + 1
    assert "was not compared" in AllocatorHistory(torch.device("cuda", 1)).compare(path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu() -> None:
    def run() -> None:
        a = torch.ones(100, 100, device="cuda")
        for _ in range(3):
            a = (a @ a).tanh() + 1

    run()  # libraries take their space
    torch.cuda.synchronize()
    spans: list[Span] = []
    recorder = Recorder(spans.append)
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000)
    try:
        with recorder:
            run()
        recorder.close()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found = compare(spans, history)
    assert found.births == found.found_births > 0
    assert found.deaths == found.found_deaths > 0
    assert found.peak <= found.allocator_peak

"""Planned memory: what follows from two recorded cycles, and the allocators that go by it, of CPUs
and, with a stand-in for CUDA's runtime, of GPUs."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridpar import native
from hybridpar.errors import DataError
from hybridpar.memory.arena import Block, plan
from hybridpar.memory.planned import FREE, MALLOC, TURN, Allocator, Counts, CycleError, plan_cycle

ROOT = Path(__file__).parents[2]
on_cpu = pytest.mark.skipif(
    native.missing_recorder() is not None, reason=str(native.missing_recorder())
)


# -- plans


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 39), st.integers(1, 40)), max_size=40),
)
def test_no_two_blocks_of_a_cycle_overlap(period: int, given: list[tuple[int, int, int]]) -> None:
    blocks = [
        Block(num_bytes, start % period, start % period + 1 + (length - 1) % period)
        for num_bytes, start, length in given
    ]
    arena = plan(blocks, period)
    alive = [{int(t) % period for t in range(int(b.start), int(b.end or 0))} for b in blocks]
    size = [-(-block.num_bytes // 512) * 512 for block in blocks]
    for i, j in combinations(range(len(blocks)), 2):
        if alive[i] & alive[j]:
            assert (
                arena.offsets[i] + size[i] <= arena.offsets[j]
                or arena.offsets[j] + size[j] <= arena.offsets[i]
            )
    assert arena.bound == max(
        sum(size[i] for i in range(len(blocks)) if t in alive[i]) for t in range(period)
    )
    assert (
        arena.bound
        <= arena.num_bytes
        == max((o + s for o, s in zip(arena.offsets, size, strict=True)), default=0)
    )


def test_micro_batches_in_flight_share_their_places() -> None:
    """Two are in flight at a time, and each lives into the next cycle: four blocks in the room of
    two."""
    blocks = [Block(1 << 20, 2 * i, 2 * i + 4) for i in range(4)]
    assert plan(blocks, 8).num_bytes == 2 << 20


def events(*cycle: tuple[int, int], again: tuple[tuple[int, int], ...] | None = None) -> np.ndarray:
    """A cycle twice; numbers of blocks in the second one go on."""
    count = sum(what == MALLOC for what, _ in cycle)
    second = again or tuple((what, number + count * (what == FREE)) for what, number in cycle)
    return np.array([*cycle, *second], np.int64)


def test_a_plan_of_two_cycles() -> None:
    found = plan_cycle(
        events(
            (TURN, 0),
            (MALLOC, 1000),
            (MALLOC, 8),
            (FREE, 0),
            (TURN, 1),
            (MALLOC, 600),
            (FREE, 1),
            (FREE, 2),
            (MALLOC, 50),
        )
    )
    assert found.sizes.tolist() == [1000, 8, 600, 50]
    assert found.firsts.tolist() == [0, 2, 4]
    assert found.offsets[3] == -1  # never given back
    assert found.offsets[0] == found.offsets[2] != found.offsets[1]
    assert found.arena.num_bytes == found.arena.bound == 1536


def test_nothing_to_plan() -> None:
    assert plan_cycle(events((TURN, 0), (TURN, 1))).arena.num_bytes == 0


def test_a_block_that_lives_into_the_next_cycle_keeps_out_of_the_way() -> None:
    cycle = ((TURN, 0), (MALLOC, 512), (FREE, 0), (TURN, 1), (MALLOC, 512))
    again = ((TURN, 0), (MALLOC, 512), (FREE, 2), (FREE, 1), (TURN, 1), (MALLOC, 512))
    found = plan_cycle(events(*cycle, again=again))
    assert sorted(found.offsets.tolist()) == [0, 512]


@pytest.mark.parametrize(
    "again",
    [
        ((TURN, 0), (MALLOC, 9), (TURN, 1)),
        ((TURN, 0), (TURN, 1), (MALLOC, 8)),
        ((TURN, 1), (MALLOC, 8)),
    ],
    ids=str,
)
def test_cycles_that_are_not_equal(again: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(CycleError, match=r"did not ask for the same|cycles were noted"):
        plan_cycle(events((TURN, 0), (MALLOC, 8), (TURN, 1), again=again))


@pytest.mark.parametrize(
    "text", ["[]", '{"hits": "1"}', '{"hits": 1, "mine": 2}', '{"hits": -1}', "{"]
)
def test_counts_of_a_damaged_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "planned0.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"planned0\.json: is no count of planned memory"):
        Counts.read(path)


# -- CPUs


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    found = Allocator.of_cpu()
    yield found
    found.turn_to(-1)
    found.forget()


def step(allocator: Allocator, size: int = 1000) -> Tensor:
    allocator.turn_to(0)
    x = torch.ones(size)
    y = x.mul(2).add_(x)
    allocator.turn_to(1)
    del x
    z = y.exp()
    allocator.turn_to(-1)
    return z


def planned(allocator: Allocator, step: Callable[[Allocator], Tensor] = step) -> None:
    allocator.record(True)
    result = step(allocator)
    result = step(allocator)
    noted = allocator.events()
    allocator.record(False)
    del result
    assert allocator.plan(plan_cycle(noted))


@on_cpu
def test_blocks_get_their_places(allocator: Allocator) -> None:
    planned(allocator)
    for number in range(1, 4):
        result = step(allocator)
        assert torch.equal(result, torch.full((1000,), 3.0).exp())
        counts = allocator.counts()
        assert (counts.missed, counts.hits % number) == (0, 0)
        assert counts.hits > 0
    assert counts.living <= counts.most_living <= counts.top <= counts.num_bytes


@on_cpu
def test_what_departs_gets_memory_elsewhere(allocator: Allocator) -> None:
    planned(allocator)
    assert torch.equal(step(allocator, 1001), torch.full((1001,), 3.0).exp())
    counts = allocator.counts()
    assert counts.hits == 0
    assert counts.departed >= 3
    step(allocator)
    assert allocator.counts().departed == counts.departed
    assert allocator.counts().hits > 0


@on_cpu
def test_a_place_that_is_still_taken(allocator: Allocator) -> None:
    planned(allocator)
    held = []
    allocator.turn_to(0)
    held.append(torch.full((1000,), 7.0))
    for _ in range(3):
        step(allocator)
    assert allocator.counts().occupied > 0
    assert torch.equal(held[0], torch.full((1000,), 7.0))


@on_cpu
def test_other_threads_are_served_elsewhere_and_may_give_back(allocator: Allocator) -> None:
    planned(allocator)
    allocator.turn_to(0)
    other = []
    thread = threading.Thread(target=lambda: other.append(torch.ones(1000)))
    thread.start()
    thread.join()
    assert allocator.counts() == Counts(num_bytes=allocator.counts().num_bytes)
    held = [torch.ones(1000)]
    living = allocator.counts().living
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert (living, allocator.counts().living) == (4000, 0)


@on_cpu
def test_a_block_outlives_its_arena_and_may_grow(allocator: Allocator) -> None:
    planned(allocator)
    allocator.turn_to(0)
    held = torch.full((1000,), 5.0)
    assert allocator.counts().living == 4000
    allocator.forget()
    planned(allocator)
    assert torch.equal(held, torch.full((1000,), 5.0))
    held.resize_(2000)
    assert torch.equal(held[:1000], torch.full((1000,), 5.0))


# -- CUDA, with a stand-in for its runtime


class StandIn:
    """csrc/planned/cuda.cpp on the host's memory. Streams are numbers."""

    def __init__(self, path: Path):
        self.allocator = Allocator(str(path))
        library = ctypes.CDLL(str(path))
        self._log = library.stand_in_log
        self._log.restype = ctypes.c_char_p
        self.install = library.hybridpar_planned_install
        self.install.argtypes = (ctypes.c_int, ctypes.c_void_p)
        self._alloc = library.hybridpar_planned_alloc
        self._free = library.hybridpar_planned_free
        self._alloc.restype = ctypes.c_void_p
        self._alloc.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self._free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.record_stream = library.hybridpar_planned_record_stream
        self.record_stream.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    def alloc(self, num_bytes: int, stream: int = 5, device: int = 0) -> int:
        return int(self._alloc(num_bytes, device, stream))

    def free(self, block: int, num_bytes: int, stream: int = 5) -> None:
        self._free(block, num_bytes, 0, stream)

    def called(self) -> list[str]:
        return str(self._log().decode()).splitlines()


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    if not (ROOT / "csrc").exists():
        pytest.skip("runs in a checkout")
    path = tmp_path_factory.mktemp("planned") / "planned.so"
    sources = [ROOT / "csrc" / "planned" / f"{name}.cpp" for name in ("planned", "cuda")]
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run(
        [
            *shlex.split(os.environ.get("CXX", "c++")),
            *flags,
            f"-I{ROOT / 'tests' / 'csrc' / 'emulated'}",
            "-o",
            path,
            *sources,
        ],
        check=True,
    )
    found = StandIn(path)
    found.install(0, 5)
    return found


def cuda_step(cuda: StandIn) -> list[int]:
    cuda.allocator.turn_to(0)
    a = cuda.alloc(1000)
    b = cuda.alloc(600)
    cuda.free(a, 1000)
    cuda.allocator.turn_to(1)
    c = cuda.alloc(900)
    cuda.free(b, 600)
    cuda.free(c, 900)
    cuda.allocator.turn_to(-1)
    return [a, b, c]


def test_cuda(cuda: StandIn) -> None:
    cuda.allocator.record(True)
    cuda_step(cuda)
    cuda_step(cuda)
    events = cuda.allocator.events()
    cuda.allocator.record(False)
    one = [
        "malloc 1000 on 5",
        "malloc 600 on 5",
        "free on 5",
        "malloc 900 on 5",
        "free on 5",
        "free on 5",
    ]
    assert cuda.called() == ["keep", *one * 2]
    cycle = plan_cycle(events)
    assert cuda.allocator.plan(cycle)
    assert cuda.called() == ["malloc 2048"]
    first = cuda_step(cuda)
    second = cuda_step(cuda)
    assert first == second
    assert first[0] == first[2]
    assert cuda.called() == []
    assert (cuda.allocator.counts().hits, cuda.allocator.counts().missed) == (6, 0)

    cuda.allocator.turn_to(0)
    other = cuda.alloc(1000, stream=9)  # of messages
    block = cuda.alloc(1000)
    assert block == first[0]
    cuda.record_stream(block, 9)
    cuda.record_stream(other, 5)
    assert cuda.called() == ["malloc 1000 on 9"]
    cuda.free(block, 1000)  # whose place the stream 5 may use once 9 is through
    assert cuda.called() == ["record on 9", "wait on 5"]
    cuda.free(other, 1000, stream=9)
    assert cuda.called() == ["record on 5", "wait on 9", "free on 9"]
    elsewhere = cuda.alloc(600, device=1)
    assert cuda.called() == ["device 1", "malloc 600 on 5", "device 0"]
    cuda.free(elsewhere, 600)
    held = cuda.alloc(600)
    cuda.allocator.forget()
    cuda.called()
    cuda.free(held, 600)
    assert cuda.called() == ["free"]

"""Capture work on a GPU as a CUDA graph without waiting for the device, and undo a capture that
fails.

`torch.cuda.graph` first synchronizes the device and empties the allocator's cache, whose cudaFree
synchronizes it too. A rank of a pipeline must do neither: its posted NCCL receives are kernels that
wait for their senders, and a sender that captures as well would wait for its own receives.
`capture` leaves both out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_KEPT: list[torch.cuda.CUDAGraph] = []
"""Graphs that nobody replays. From torch 2.12 on, the end of a graph frees the cuBLAS workspaces of
its stream, which other graphs captured there still write to (pytorch issue 193402)."""


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture in `graph` what is launched on `stream` while in this context; memory comes from
    `pool`.

    Only this thread's own calls can break the capture, so other threads may save or copy during it.
    After an exception the allocator and the generator are as before the capture. `graph` must then
    be kept, unused: the allocator of pinned memory may ask it whether a stream belongs to its
    capture.

    Args:
        graph: A new graph.
        pool: A `torch.cuda.graph_pool_handle()`.
        stream: A stream other than the default stream of its device.
    """
    with torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # which only says that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            _undo(pool, stream.device)
            raise


def first_cause(error: BaseException) -> BaseException:
    """Return the exception that came first; later ones only say that a capture has failed."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _undo(pool: Any, device: torch.device) -> None:
    """Make the allocator and the generator forget a capture.

    If CUDA refuses to end a capture, `capture_end` throws before it tells the allocator. The
    allocator would continue to look at the pool for every allocation, defer every free that waits
    for an event, and count the pool as in use.
    """
    index = device.index or 0
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        # Either the capture had not begun, or capture_end has told the allocator and the graph
        # releases the pool.
        pass
    else:
        torch._C._cuda_releasePool(index, pool)
    try:
        _clear_mark()
    except RuntimeError:
        for generator in torch.cuda.default_generators[index : index + 1]:
            generator.graphsafe_set_state(
                generator.clone_state()
            )  # a copy has no mark, but earlier graphs keep theirs


def _clear_mark() -> None:
    """Clear the mark of a failed capture in the state of the generator, by a capture that succeeds.

    Up to torch 2.11 a capture marks the state that it shares with all graphs captured before, and
    capture_end does not clear the mark if it throws. Replaying one of these graphs would then
    throw, too.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # torch warns of an empty graph
    graph.capture_end()
    _KEPT.append(graph)

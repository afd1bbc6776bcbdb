"""The recorder's events of single operators, whichever observer stands at dispatch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from memory_behaviour.test_user_models import residual, train
from memory_behaviour.traces import events, recording
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from hybridpar import native
from hybridpar.memory_behaviour.events import MemoryEvent, Span, What
from hybridpar.memory_behaviour.recording.recorder import Recorder
from hybridpar.memory_behaviour.trace_file import span_line
from hybridpar.prediction import measure

pytestmark = pytest.mark.usefixtures("observer")
CPU = torch.device("cpu")


def test_blocks_of_this_span_are_named_from_birth() -> None:
    spans, recorder = recording()
    with recorder:
        a = torch.ones(3)
        recorder.step = 2
        b = torch.ones(4)
        recorder.adopt("gradients", [a, b, torch.empty(0)])
    recorder.close()
    assert [(e.num_bytes, e.op, e.name) for e in events(spans) if e.what is What.MALLOC] == [
        (12, "aten::ones", ""),
        (16, "aten::ones", "gradients"),
    ]
    assert a.sum() + b.sum() == 7


def told(run: Callable[[], Any], *before: Tensor) -> list[str]:
    """Events of a call, such as "read 0"; blocks of `before` have the first numbers. What it
    returns lives."""
    spans, recorder = recording()
    recorder.adopt("x", before)
    with recorder:
        kept = run()
    recorder.close()
    del kept
    return [f"{e.what.value} {e.block}" for e in events(spans)][
        sum(t.layout is torch.strided for t in before) :
    ]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4, 4), dtype=dtype)


def foreach(a: Tensor, b: Tensor) -> None:
    torch._foreach_add_([a, b], [b, a])


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda a, b: (a.t(), a[1:].view(-1), a.detach(), a.expand(2, 4, 4), a.unbind()), []),
        (lambda a, b: a.squeeze_().t_().unsqueeze_(0), []),
        (lambda a, b: torch.empty_like(a), ["malloc 2"]),
        (lambda a, b: a.new_zeros(3), ["malloc 2", "write 2"]),
        (lambda a, b: torch.ones_like(a), ["malloc 2", "write 2"]),
        (lambda a, b: a + b, ["malloc 2", "read 0", "read 1", "write 2"]),
        (lambda a, b: a * a, ["malloc 2", "read 0", "write 2"]),
        (lambda a, b: a[0].add_(b[0]), ["read 0", "read 1", "write 0"]),
        (lambda a, b: a.copy_(b), ["read 1", "write 0"]),
        (lambda a, b: a.zero_(), ["write 0"]),
        (lambda a, b: a.exponential_(), ["write 0"]),
        (lambda a, b: torch.add(a, a, out=b), ["read 0", "write 1"]),
        (lambda a, b: a.sum().item(), ["malloc 2", "read 0", "write 2", "read 2", "free 2"]),
        (foreach, ["read 0", "read 1", "write 0", "write 1"]),
        (lambda a, b: torch._foreach_zero_([a, b]), ["write 0", "write 1"]),
        (lambda a, b: torch.cat([a, b, a]), ["malloc 2", "read 0", "read 1", "write 2"]),
        (lambda a, b: torch.tensor([1.0, 2.0]), ["malloc 2", "write 2"]),
        (lambda a, b: torch.empty(0) + torch.ones(0), []),
        (lambda a, b: a.max(dim=0), ["malloc 2", "malloc 3", "read 0", "write 2", "write 3"]),
        (
            lambda a, b: a.index_put_((torch.tensor(0),), b[0]),
            ["malloc 2", "write 2", "read 0", "read 2", "read 1", "write 0", "free 2"],
        ),
    ],
)
def test_events_of_an_operator(run: Callable[[Tensor, Tensor], Any], expected: list[str]) -> None:
    a, b = x(), x()
    assert told(lambda: run(a, b), a, b) == expected


def test_named_tensors_of_a_block() -> None:
    flat = torch.zeros(16)
    weight = flat[:8].view(2, 4)
    bias = flat[8:12]  # 16 bytes of padding follow

    def run() -> None:
        with torch.no_grad():
            bias + weight.t()[:, 0]
            weight[:, 1:3].mul_(2)  # not contiguous
            flat[6:10].add_(1)
            flat.zero_()
            flat[13:].fill_(3)
            torch._foreach_mul_([bias, weight, bias[1:]], 2)

    spans, recorder = recording()
    recorder.adopt("weights 0", [flat])
    recorder.name_tensors({"weights/0/bias": bias, "weights/0/weight": weight})
    with recorder:
        run()
    recorder.close()
    found = [
        (e.what.value, e.op, e.name, e.num_bytes)
        for e in events(spans)
        if e.block == 0 and e.what is not What.MALLOC
    ]
    of_bias = "weights/0/bias", 16
    of_weight = "weights/0/weight", 32
    assert found == [
        ("read", "aten::add", *of_bias),
        ("read", "aten::add", *of_weight),
        ("read", "aten::mul_", *of_weight),
        ("write", "aten::mul_", *of_weight),
        ("read", "aten::add_", *of_weight),
        ("read", "aten::add_", *of_bias),
        ("write", "aten::add_", *of_weight),
        ("write", "aten::add_", *of_bias),
        ("write", "aten::zero_", *of_weight),
        ("write", "aten::zero_", *of_bias),
        ("write", "aten::fill_", "", 64),
        ("read", "aten::_foreach_mul_", *of_bias),
        ("read", "aten::_foreach_mul_", *of_weight),
        ("write", "aten::_foreach_mul_", *of_bias),
        ("write", "aten::_foreach_mul_", *of_weight),
    ]


def test_tensors_keep_their_names_in_a_block_that_comes_back() -> None:
    flat = torch.zeros(8)
    spans, recorder = recording()
    recorder.name_tensors({"a": flat[:4], "b": flat[4:]})
    with recorder:
        recorder.resized("weights 0", flat)
        flat[4:].add_(1)
        flat.untyped_storage().resize_(0)
        recorder.resized("weights 0", flat)
        flat.untyped_storage().resize_(32)
        recorder.resized("weights 0", flat)
        flat[:4].zero_()
    recorder.close()
    assert [(e.what.value, e.block, e.name) for e in events(spans)] == [
        ("malloc", 0, "weights 0"),
        ("read", 0, "b"),
        ("write", 0, "b"),
        ("free", 0, ""),
        ("malloc", 1, "weights 0"),
        ("write", 1, "a"),
    ]


def test_a_block_from_before_is_seen_at_its_first_access() -> None:
    a = x()
    spans, recorder = recording()
    with recorder:
        view = a[0]
        kept = view * 2
    recorder.close()
    assert [(e.what.value, e.block, e.num_bytes, e.name) for e in events(spans)] == [
        ("malloc", 0, 64, "other"),
        ("malloc", 1, 16, ""),
        ("read", 0, 64, ""),
        ("write", 1, 16, ""),
    ]
    del kept


@pytest.mark.parametrize(
    ("wide", "narrow"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("operator", [torch.add, torch.mul, torch.sub, torch.div])
def test_scratch_of_mixed_arithmetic_is_the_allocator_s(
    operator: Callable[[Tensor, Tensor], Tensor], wide: torch.dtype, narrow: torch.dtype
) -> None:
    a = x(64, 64, dtype=wide)
    b = x(64, 64, dtype=narrow)
    spans, recorder = recording()
    with recorder:
        operator(a, b)
    recorder.close()
    now = peak = 0
    for event in events(spans):
        if not event.name:
            now += event.num_bytes * ((event.what is What.MALLOC) - (event.what is What.FREE))
            peak = max(peak, now)
    with measure(CPU) as meter:
        operator(a, b)
        assert peak == meter.read().peak


def test_a_resized_block_is_another_one() -> None:
    def grow(a: Tensor) -> Tensor:
        a.resize_(8)
        return a.add_(1)

    a, b = x(4), x(4)
    assert told(lambda: grow(a), a) == ["free 0", "malloc 1", "read 1", "write 1"]

    def by_storage() -> None:
        b.untyped_storage().resize_(0)
        b.untyped_storage().resize_(64)
        b.add_(1)

    assert told(by_storage, b)[-2:] == ["read 1", "write 1"]
    empty = torch.empty(0)
    assert "write 1" in told(lambda: torch.add(a, 1, out=empty), a)


def test_sparse_tensors_are_their_parts() -> None:
    dense, sparse = x(3, 3), torch.eye(3).to_sparse()
    spans, recorder = recording()
    recorder.adopt("x", [dense, sparse])
    with recorder:
        product = torch.sparse.mm(sparse, dense)
    recorder.close()
    assert product.sum() == 9
    assert {
        e.block for e in events(spans) if (e.what, e.op) == (What.READ, "aten::_sparse_addmm")
    } >= {0, 1, 2}
    table = nn.Embedding(10, 4, sparse=True)
    sgd = torch.optim.SGD(table.parameters(), lr=0.1)

    def step() -> None:
        table(torch.tensor([1, 2, 1])).sum().backward()
        sgd.step()
        sgd.zero_grad()

    assert Counter(what.split()[0] for what in told(step, table.weight))["malloc"] > 3
    assert "write 0" in told(step, table.weight)
    csr = torch.eye(3).to_sparse_csr()
    assert "read 0" in told(lambda: csr @ dense, dense)


def test_recomputed_blocks_are_made_twice() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    a = x(5, 8)
    for again in (False, True):
        spans, recorder = recording()
        with recorder:
            (checkpoint(layers, a, use_reentrant=False) if again else layers(a)).sum().backward()
        recorder.close()
        assert (
            sum(e.op == "aten::tanh" and e.what is What.MALLOC for e in events(spans)) == 1 + again
        )


def test_an_error_inside_an_operator_leaves_the_trace_whole() -> None:
    spans, recorder = recording()
    a = x()
    kept = a

    def fails() -> None:
        nonlocal kept
        with recorder:
            kept = a * 2
            kept @ torch.ones(3, 3)

    with pytest.raises(RuntimeError):
        fails()
    assert stands_at_dispatch() is None
    assert not recorder.is_active
    with recorder, torch.no_grad():
        with pytest.raises(IndexError):
            a[9]
        kept = kept + 1
    recorder.close()
    assert check(spans)[-1] == ("free", "")


def check(spans: list[Span]) -> list[tuple[str, str]]:
    """(kind, operator) of all events, of which each has its block between malloc and free, and
    times that grow."""
    living: dict[int, int] = {}
    last = 0.0
    for event in events(spans):
        assert event.time >= last - 1e-9
        last = event.time
        if event.what is What.MALLOC:
            assert event.block not in living
            living[event.block] = event.num_bytes
        assert living[event.block] == event.num_bytes
        if event.what is What.FREE:
            del living[event.block]
    return [(event.what.value, event.op) for event in events(spans)]


def test_a_pause_and_the_end() -> None:
    spans, recorder = recording()
    with recorder:
        a = x()
        b = x()
        c = x()
        recorder.pause(True)
        unseen = x()
        del a
        recorder.pause(False)
        unseen += 1
    del b
    recorder.close()
    count = len(check(spans))
    del c, unseen
    assert len(events(spans)) == count
    assert [e.name for e in events(spans) if e.what is What.MALLOC] == ["", "", "", "other"]
    assert sum(e.what is What.FREE for e in events(spans)) == 2


def stands_at_dispatch() -> str | None:
    """The observer that operators of this thread meet."""
    if torch._C._dispatch_tls_is_dispatch_key_included("Fake"):
        return "C++"
    return "Python" if _get_current_dispatch_mode() is not None else None


def test_off_costs_nothing(observer: str) -> None:
    recorder = Recorder(lambda span: None)
    assert stands_at_dispatch() is None
    with recorder:
        assert stands_at_dispatch() == observer
    recorder.close()
    assert stands_at_dispatch() is None


class KeepsGradient(torch.autograd.Function):
    """Keeps a view of the gradient that it gives, which autograd then cannot add to in place."""

    kept: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dx = dy + dy
        KeepsGradient.kept.append(dx[1:])
        return dx


def sums_of_gradients() -> None:
    KeepsGradient.kept = []
    a = torch.ones(4, 8, requires_grad=True)
    for function in (torch.sin, KeepsGradient.apply):
        y = a * 3
        y.register_hook(lambda dy: dy + 1)
        (y.cos() + function(y) + y.index_select(0, torch.tensor([1, 0, 0, 1]))).sum().backward()


def sparse_sums() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    (
        table(torch.tensor([1, 2, 1])).sum() + table(torch.tensor([3])).sum() + table.weight.sum()
    ).backward()


@pytest.mark.parametrize("observer", ["C++"], indirect=True)
def test_both_observers_tell_the_same(observer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def record() -> list[Span]:
        spans, recorder = recording()
        with recorder:
            for part in (sums_of_gradients, sparse_sums):
                part()
        recorder.close()
        found = [*spans, *train("alexnet", "Adam foreach"), *train("mlp", model=residual())]
        KeepsGradient.kept.clear()
        return found

    def told(spans: list[Span]) -> list[MemoryEvent]:
        return [e._replace(time=0.0) for e in events(spans)]

    by_native = record()
    monkeypatch.setattr(native, "missing_recorder", lambda: "the other one is wanted")
    assert told(by_native) == told(record())
    assert any(e.op == "aten::add_" for e in events(by_native))
    for span in by_native:
        plain = replace(span, events=list(span.events))
        assert span_line(span) == span_line(plain)
        assert len(span.events) == len(plain.events)


def test_memory_from_elsewhere() -> None:
    for make in (lambda: torch.from_numpy(np.ones(4, np.float32)), lambda: x(4).share_memory_()):
        spans, recorder = recording()
        held = [make()]
        recorder.adopt("x", held)
        with recorder:
            b = held[0] + 1
            held.clear()
            b.add_(1)
        recorder.close()
        assert [f"{e.what.value} {e.block}" for e in events(spans)] == [
            "malloc 0",
            "malloc 1",
            "read 0",
            "write 1",
            "free 0",
            "read 1",
            "write 1",
        ]
        assert b.sum() == 12
    a = x(4)
    b = torch._lazy_clone(a)  # which copies when it is written
    spans, recorder = recording()
    recorder.adopt("x", [a, b])
    with recorder:
        b.add_(1)
    recorder.close()
    assert (a.sum(), b.sum()) == (4, 8)


def test_other_threads() -> None:
    spans, recorder = recording()
    box: list[Tensor] = []

    def make() -> None:
        box.append(x(7))

    def drop(held: list[Tensor]) -> None:
        held.clear()

    def on_a_thread(target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        thread.start()
        thread.join()

    with recorder:
        on_a_thread(make)
        held = [x(9)]
        on_a_thread(drop, held)
        kept = box[0] + 1
    recorder.close()
    assert check(spans) == [
        ("malloc", "aten::ones"),
        ("write", "aten::ones"),
        ("free", ""),
        ("malloc", ""),
        ("malloc", "aten::add"),
        ("read", "aten::add"),
        ("write", "aten::add"),
    ]
    del kept


def test_many_threads_give_back_while_others_are_made() -> None:
    spans, recorder = recording()
    handed: list[Tensor] = []
    done = threading.Event()

    def drop() -> None:
        while not done.is_set() or handed:
            with suppress(IndexError):  # the other one has taken it
                handed.pop()

    threads = [threading.Thread(target=drop) for _ in range(2)]
    with recorder:
        for thread in threads:
            thread.start()
        for i in range(400):
            if i % 50 == 0:
                recorder.step = 1 + i // 50
            handed.append(torch.ones(16))
    done.set()
    for thread in threads:
        thread.join()
    recorder.close()
    check(spans)
    assert Counter(e.what for e in events(spans)) == {
        What.MALLOC: 400,
        What.WRITE: 400,
        What.FREE: 400,
    }

"""Accumulates the gradients of all micro-batches of a batch in one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hybridpar.config.compression_methods import other_gradients
from hybridpar.errors import config_error
from hybridpar.nn.binding import GradientPart
from hybridpar.nn.matmul import add_
from hybridpar.state.layout import FlatLayout
from hybridpar.state.residency.chunks import Buffer, Chunk, Memory

BlockParts = dict[tuple[str, int], list[GradientPart]]
"""Parts of gradients, by parameter and block of micro-batches."""


@dataclass(frozen=True)
class AccumulationRules:
    """Rules for accumulating gradients.

    Attributes:
        defers: Parts of weight gradients may be added after the backward.
        tied: Parameters that are used in several places.
        factored: Parameters whose parts are never added up: `GradientAccumulator.parts` has them
            by block of micro-batches, in the order of the backwards, and the caller who takes them writes the view.
        absent: Parameters without a view and without memory.
        method: The value of compression.gradients, for the error that is raised if a `factored`
            parameter gets a dense gradient.
    """

    defers: bool = False
    tied: frozenset[str] = frozenset()
    factored: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    method: str = "none"


class GradientAccumulator:
    """Connects parameter leaves to flat gradient buffers, one for each batch that may be
    accumulating or reducing.

    Leaves of the buffers' dtype (`layout.dtype`) get a view as their `.grad`, and autograd adds
    into it in place. For leaves of lower precision, a hook adds the gradient to the view and frees
    it, in every backward. Several sets of leaves (weight versions) may be bound to one buffer in
    turn.

    For each batch call `begin(i)`, `bind(leaves, i)` before its first backward, `arm(callback)`
    before its last, and `finish(i)` after it. A parameter's first gradient of a batch overwrites
    the old one, which saves a pass to zero the buffer. A parameter used several times in a graph is
    reported once in each backward, when its gradient is complete; a parameter that gets no gradient
    is not reported. Backward must not build a graph itself (create_graph), and gradients must come
    from `backward`, not from torch.autograd.grad.

    With `rules.defers`, `bind` comes before every backward, and gradient parts that layers hand to a
    `consumer` may be deferred: the parts of the backward that follows `collect(key)` are added by
    `apply(key)`, in the same order, to the same bits. Some parts are still added at once, but none
    of the tied parameters.

    Args:
        layout: Places of the trained parameters in the flat buffers.
        memory: Allocates the buffers.
        num_buffers: Batches that may accumulate or reduce at the same time.
        chunks: The buffers' chunks.
        rules: Which gradients are added up, and when.
    """

    def __init__(
        self,
        layout: FlatLayout,
        memory: Memory | None = None,
        num_buffers: int = 1,
        *,
        chunks: Sequence[Chunk] = (),
        rules: AccumulationRules = AccumulationRules(),
    ):
        assert num_buffers in (1, 2), num_buffers
        self.layout = layout
        self.rules = rules
        self.buffers = tuple(
            Buffer(layout, layout.dtype, memory or Memory(), chunks, f"gradients/{i}")
            for i in range(num_buffers)
        )
        self.collecting: dict[str, list[GradientPart]] | None = None
        """Parts deferred by the backward that runs, by parameter; None: nothing is deferred."""
        self._waiting: dict[Hashable, tuple[int, dict[str, list[GradientPart]]]] = {}
        """Deferred parts: buffer number, and the parts by parameter."""
        self.on_final: Callable[[str], None] | None = None
        """Called with the name of each parameter that becomes final in the armed backward."""
        self._apply_with: (
            Callable[[dict[str, list[GradientPart]], int, Callable[[], None]], None] | None
        ) = None
        self._block = 0
        """Block of micro-batches that the parts of `factored` parameters are kept with."""
        self._parts: tuple[BlockParts, ...] = tuple({} for _ in self.buffers)
        self._views = tuple(
            buffer.views(set(layout.names) - rules.absent) for buffer in self.buffers
        )
        self._void: tuple[set[str], ...] = tuple(set() for _ in self.buffers)
        """Parameters without a gradient so far, by buffer."""
        self._bound_leaves: Mapping[str, Tensor] | None = None
        self._bound_index = 0
        self._hooks: MutableMapping[Tensor, list[_Report]] = WeakTensorKeyDictionary()
        """Hooks of each version's leaves, by the first of these."""

    def consumer(self, name: str) -> LayerGradients:
        """Return the consumer that a layer hands parts of a parameter's gradient to."""
        return LayerGradients(self, name)

    def buffer_index(self, batch: int) -> int:
        """Return the number of the buffer that a batch accumulates in."""
        return batch % len(self.buffers)

    def views(self, index: int) -> dict[str, Tensor]:
        """Return every parameter's gradient in buffer `index`, in the order of the layout, without
        the `absent` parameters.
        """
        return self._views[index]

    def missing(self, index: int) -> set[str]:
        """Return the parameters that have no gradient of the batch in buffer `index` yet; live."""
        return self._void[index]

    def begin(self, index: int) -> None:
        """Begin a batch: the content of buffer `index` is void."""
        self._parts[index].clear()
        self._void[index].update(self.layout.names)
        self._bound_leaves = None

    def bind(self, leaves: Mapping[str, Tensor], index: int) -> None:
        """Make backward through these leaves add to buffer `index` from now on.

        Binding again costs nothing, so it may be done before every micro-batch. No part is deferred
        unless `collect` is called again. Shapes: one leaf for each parameter of the layout, of its
        shape.
        """
        self.collecting = None
        if leaves is self._bound_leaves and index == self._bound_index:
            return
        self._bound_leaves = leaves
        self._bound_index = index
        views = self._views[index]
        names = views.keys() | self.rules.absent
        assert leaves.keys() == names, f"leaves and layout differ: {sorted(leaves.keys() ^ names)}"
        for hook, (name, leaf) in zip(self._hooks_of(leaves), leaves.items(), strict=True):
            hook.point_at(views.get(name), self._void[index])
            leaf.grad = hook.view if type(hook) is _Report and name not in hook.void else None

    def _hooks_of(self, leaves: Mapping[str, Tensor]) -> list[_Report]:
        """Return the hooks of a version's leaves, registered once."""
        first = next(iter(leaves.values()), None)
        if first is None:
            return []
        if first not in self._hooks:
            self._hooks[first] = [self._register(name, leaf) for name, leaf in leaves.items()]
        return self._hooks[first]

    def _register(self, name: str, leaf: Tensor) -> _Report:
        in_place = leaf.dtype == self.layout.dtype and not self.rules.defers
        hook = (_Report if in_place else _AddAndReport)(self, name)
        leaf.register_post_accumulate_grad_hook(hook)
        return hook

    def waits(self, name: str) -> bool:
        """Return whether parts of a parameter are deferred, or may come from other uses of it."""
        return name in self.rules.tied or any(name in parts for _, parts in self._waiting.values())

    def collect(self, key: Hashable) -> None:
        """Defer the parts that consumers take in the next backward through the bound leaves, until
        `apply`.
        """
        assert self.rules.defers, "parts of gradients are added at once"
        assert key not in self._waiting, f"parts of {key} wait already"
        self.collecting = {}
        self._waiting[key] = self._bound_index, self.collecting

    @torch.no_grad()
    def apply(self, key: Hashable) -> None:
        """Add the parts that were deferred since `collect(key)`, and report each parameter after
        its last part.
        """
        index, waiting = self._waiting.pop(key)

        def add() -> None:
            for name in list(waiting):
                for part in waiting.pop(name):
                    self.take(name, part, index)
                if self.on_final is not None:
                    self.on_final(name)

        if self._apply_with is None:
            add()
        else:
            self._apply_with(waiting, index, add)

    def apply_with(
        self, add: Callable[[dict[str, list[GradientPart]], int, Callable[[], None]], None]
    ) -> None:
        """Call `add` instead of adding deferred parts directly. It gets the parts, the number of
        their buffer, and a function that adds them.
        """
        self._apply_with = add

    def take(self, name: str, part: GradientPart, index: int | None = None) -> None:
        """Add a part to buffer `index` (None: the bound one), or keep it if the parameter is
        `factored`.
        """
        index = self._bound_index if index is None else index
        void = self._void[index]
        if name in self.rules.factored:
            self._parts[index].setdefault((name, self._block), []).append(_detached(part))
        else:
            part.add_to(self._views[index][name], name in void)
        void.discard(name)

    def parts(self, index: int) -> BlockParts:
        """Return the parts that are not added up, of the batch in buffer `index`. The caller removes
        them.
        """
        return self._parts[index]

    def arm(self, on_final: Callable[[str], None] | None, block: int | None = None) -> None:
        """Announce the next backward.

        Args:
            on_final: In the last backward of a batch, called with each parameter's name as its
                gradient becomes final. None: the next backward is not the last.
            block: Block of micro-batches that the backward is of. None: the same as before.
        """
        self.on_final = on_final
        if block is not None:
            self._block = block

    def report(self, name: str) -> None:
        """Note that a backward has completed a parameter's gradient."""
        if self.on_final is not None:
            self.on_final(name)

    def renew(self, index: int, names: Iterable[str]) -> None:
        """Mark the gradients of these parameters in buffer `index` as void, in the middle of a
        batch.
        """
        names = list(names)
        self._void[index].update(names)
        if self._bound_leaves is not None and self._bound_index == index:
            for name in names:
                self._bound_leaves[name].grad = None

    def finish(self, index: int, names: Iterable[str] | None = None) -> None:
        """End the batch: zero the gradient of each parameter that got none (all parameters, or
        `names`). No backward reports until `arm` is called again.
        """
        assert all(buffer != index for buffer, _ in self._waiting.values()), (
            "parts of this batch still wait"
        )
        self.on_final = None
        self.settle(index, self.layout.names if names is None else names)

    def settle(self, index: int, names: Iterable[str]) -> None:
        """Make the gradients of these parameters final: zero the gradient of each one that got
        none.
        """
        void = self._void[index]
        for name in void.intersection(names) - self.rules.absent:
            self._views[index][name].zero_()
        void.difference_update(names)


class LayerGradients:
    """Takes the parts of a parameter's gradient from its layers: a `GradientConsumer`."""

    def __init__(self, owner: GradientAccumulator, name: str):
        self._owner = owner
        self._name = name
        self.wants_factors = name in owner.rules.factored or name in owner.rules.tied
        """Parts of a tied parameter are added in the order of its uses, in one backward or more."""

    def add(self, part: GradientPart, now: bool = False) -> None:
        """Add a part to the buffer, at once or deferred. now: at once, unless earlier parts are
        deferred.
        """
        owner = self._owner
        waiting = owner.collecting
        if waiting is not None and (not now or owner.waits(self._name)):
            waiting.setdefault(self._name, []).append(_detached(part))
            return
        owner.take(self._name, part)


class _Report:
    """Hook that runs after autograd has accumulated into a leaf's `.grad`. Cost: 0.7 us for each
    parameter in each backward.
    """

    __slots__ = ("name", "owner", "view", "void")

    def __init__(self, owner: GradientAccumulator, name: str):
        self.owner = owner
        self.name = name
        self.view: Tensor | None = None
        self.void: set[str] = set()

    def point_at(self, view: Tensor | None, void: set[str]) -> None:
        """Add to this view from now on; None: only factors are kept."""
        self.view = view
        self.void = void

    def __call__(self, leaf: Tensor) -> None:
        gradient = leaf.grad
        assert gradient is not None
        # In the batch's first backward the gradient is not the view. A consumer's part is in the
        # view already.
        if gradient is not self.view:
            self._store(gradient)
            leaf.grad = self.view
        self.owner.report(self.name)

    def _store(self, gradient: Tensor) -> None:
        if not gradient.is_sparse and self.name in self.owner.rules.factored:
            rule = (
                f"requires the gradient of {self.name} as factors, but a block uses this "
                f"weight outside its layer's forward"
            )
            other = other_gradients(lambda row: not row.takes_factors)
            raise config_error("compression.gradients", self.owner.rules.method, rule, other)
        if self.view is None:
            return
        if self.name in self.void:
            self.view.copy_(gradient)
            self.void.remove(self.name)
        elif not gradient.is_sparse:  # sparse: empty, in place of what a consumer took
            add_(self.view, gradient)


def _detached(part: Any) -> GradientPart:
    """Return the part with tensors detached from the graph, which they would keep alive."""
    return type(part)._make(x.detach() if isinstance(x, Tensor) else x for x in part)


class _Dense(NamedTuple):
    """A part from autograd, deferred because the parameter's other parts are: this keeps their
    order.
    """

    gradient: Tensor

    def add_to(self, gradient: Tensor, overwrite: bool) -> None:
        gradient.copy_(self.gradient) if overwrite else add_(gradient, self.gradient)


class _AddAndReport(_Report):
    """Hook for leaves of lower precision than the buffer, and for leaves whose parts may be
    deferred.
    """

    __slots__ = ()

    def __call__(self, leaf: Tensor) -> None:
        gradient = leaf.grad
        leaf.grad = None
        assert gradient is not None
        if (waiting := self.owner.collecting) is not None and self.name in waiting:
            if not gradient.is_sparse:
                waiting[self.name].append(_Dense(gradient))
            return
        self._store(gradient)
        self.owner.report(self.name)

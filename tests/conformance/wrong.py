"""Modules with the bugs of the catalogue, as frameworks have had them: plain torch, without a layer
of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hybridpar.conformance import Built, Factory
from hybridpar.conformance.cases import (
    EXPERTS,
    GROUPS,
    HEADS,
    HIDDEN,
    ROWS,
    VOCAB,
    Layout,
    balance,
    heads_of,
    routed,
    through,
)
from hybridpar.nn import split_ranges
from hybridpar.nn.attention import HeadLayout


class Sum(Function):
    """A sum over ranks whose gradient is what came, or summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.backward = backward
        x = x.clone()
        if forward:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone()
        if ctx.backward:
            dist.all_reduce(grad)
        return grad, None, None


class Mlp(nn.Module):
    """Columns, then rows; `wrong` says what is not as it should be."""

    def __init__(self, plain: Any, wrong: str = ""):
        super().__init__()
        size = dist.get_world_size()
        rank = dist.get_rank()
        start, stop = split_ranges(plain.up.out_features, size)[rank]
        self.up = plain.up
        self.down = plain.down
        self.wrong = wrong
        self.up.weight = nn.Parameter(plain.up.weight[start:stop].detach().clone())
        self.up.bias = nn.Parameter(plain.up.bias[start:stop].detach().clone())
        self.down.weight = nn.Parameter(plain.down.weight[:, start:stop].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = Sum.apply(x, False, self.wrong != "input")
        y = functional.linear(functional.gelu(self.up(x)), self.down.weight)
        if self.wrong == "bias":
            y = y + self.down.bias
        y = y if self.wrong == "sum" else Sum.apply(y, True, self.wrong == "twice")
        return y if self.wrong == "bias" else y + self.down.bias


class Block(nn.Module):
    def __init__(self, plain: Any):
        super().__init__()
        self.norm, self.mlp = plain.norm, Mlp(plain.mlp)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def layout(name: str, parameter: nn.Parameter) -> Layout:
    return Layout(0 if "up." in name else 1 if name.endswith("down.weight") else None)


def mlp(wrong: str) -> Factory:
    return lambda plain, group: Built(Mlp(plain, wrong), layout=layout)


def block(wrong: str) -> Factory:
    """The norm of all gradients counts what all hold once a rank, or leaves one parameter out."""

    def factory(plain: nn.Module, group: dist.ProcessGroup) -> Built:
        module = Block(plain)

        def norm() -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                if (
                    layout(name, parameter).dim is not None
                    or wrong == "twice"
                    or dist.get_rank() == 0
                ):
                    total += 0 if wrong == name else parameter.grad.square().sum()
            dist.all_reduce(total)
            return total.sqrt()

        return Built(module, norm=norm, layout=layout)

    return factory


def accumulated(plain: nn.Module, group: dist.ProcessGroup) -> Built:
    """Every backward sums all that has been accumulated."""
    for parameter in plain.parameters():
        parameter.register_hook(lambda grad: grad / group.size())
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return Built(plain)


class Of(nn.Module):
    """A module whose forward is given."""

    def __init__(self, plain: nn.Module, forward: Callable[..., Tensor]):
        super().__init__()
        self.inner = plain
        self.call = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.inner, *inputs)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return self.inner.named_parameters(*args, **options)

    def named_modules(self, *args: Any, **options: Any) -> Any:
        return self.inner.named_modules(*args, **options)


def _summed(plain: nn.Module, mean: bool = False) -> Callable[[], None]:
    def finish() -> None:
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            if mean:
                assert parameter.grad is not None
                parameter.grad /= dist.get_world_size()

    return finish


def of(forward: Callable[..., Tensor], finish: bool = False, mean: bool = False) -> Factory:
    return lambda plain, group: Built(
        Of(plain, forward), _summed(plain, mean) if finish else lambda: None
    )


def padded(plain: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The vocabulary is padded to 56 with rows of zeros, which take part."""
    return functional.cross_entropy(functional.pad(plain.head(x), (0, 56 - VOCAB)), labels)


def gathered(plain: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The denominator is summed over ranks that all have all logits."""
    logits = plain.head(x)
    total = Sum.apply(logits.exp().sum(-1), True, False).log()
    picked = logits.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return ((total - picked) * (labels >= 0)).sum() / (labels >= 0).sum()


def smoothed(plain: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The smoothing is over this rank's share of the vocabulary."""
    logits = plain.head(x)
    valid = labels >= 0
    (start, stop), logs = (
        split_ranges(VOCAB, dist.get_world_size())[dist.get_rank()],
        logits.log_softmax(-1),
    )
    losses = 0.9 * -logs.gather(1, labels.clamp_min(0)[:, None])[:, 0] - 0.1 * logs[
        :, start:stop
    ].mean(-1)
    return (losses * valid).sum() / valid.sum()


def mean_of_means(plain: Any, x: Tensor, labels: Tensor) -> Tensor:
    return (
        Sum.apply(functional.cross_entropy(plain.head(x), labels), True, False)
        / dist.get_world_size()
    )


def edge(plain: Any, ids: Tensor) -> Tensor:
    """The last id of every share belongs to nobody."""
    start, stop = split_ranges(VOCAB, dist.get_world_size())[dist.get_rank()]
    mine = ((ids >= start) & (ids < stop - 1))[:, None]
    return Sum.apply(functional.embedding(ids, plain.weight) * mine, True, False)


class Untied(nn.Module):
    def __init__(self, plain: Any):
        super().__init__()
        self.embedding, self.head = (
            plain.embedding,
            nn.Linear(8, VOCAB, bias=False, dtype=torch.float64),
        )
        self.head.weight = nn.Parameter(plain.embedding.weight.detach().clone())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embedding(ids)), labels)


class Heads(nn.Module):
    """Attention split by heads; `wrong` says what is not as it should be."""

    def __init__(self, plain: Any, wrong: str = ""):
        super().__init__()
        heads = HeadLayout(HIDDEN, HEADS, plain.groups, dist.get_world_size())
        self.rows, columns = (
            shard.index(dist.get_rank()) for shard in (heads.qkv_shard(), heads.out_shard())
        )
        self.queries = list(heads.group_heads(dist.get_rank()).values())
        self.qkv = plain.qkv
        self.out = plain.out
        self.columns = columns
        self.wrong = wrong
        for parameters, name in ((self.qkv, "weight"), (self.qkv, "bias")):
            setattr(
                parameters,
                name,
                nn.Parameter(getattr(parameters, name)[self.rows].detach().clone()),
            )
        self.out.weight = nn.Parameter(plain.out.weight[:, columns].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        slots = (
            self.qkv(Sum.apply(x, False, True)).unflatten(1, (-1, HIDDEN // HEADS)).transpose(0, 1)
        )
        outs = []
        at = 0
        for start, stop in self.queries:
            each = stop - start
            q = slots[at : at + each]
            k = slots[at + each]
            v = slots[at + each + 1]
            k = slots[-2] if self.wrong == "key" else k
            scale = (HIDDEN / HEADS) ** -0.5 / (
                dist.get_world_size() if self.wrong == "scale" else 1
            )
            outs.append(
                functional.scaled_dot_product_attention(
                    q, k.expand_as(q), v.expand_as(q), is_causal=self.wrong != "mask", scale=scale
                )
            )
            at += each + 2
        y = torch.cat(outs).transpose(0, 1).flatten(1)
        return Sum.apply(functional.linear(y, self.out.weight), True, False) + self.out.bias

    def finish(self) -> None:
        """Sums gradients of rows that several ranks hold."""
        for parameter in () if self.wrong == "shared" else self.qkv.parameters():
            total = torch.zeros(
                HIDDEN // HEADS * (HEADS + 2 * GROUPS), *parameter.shape[1:], dtype=torch.float64
            )
            dist.all_reduce(total.index_add_(0, self.rows, parameter.grad))
            parameter.grad = total[self.rows]

    def layout(self, name: str, parameter: nn.Parameter) -> Layout:
        return (
            Layout(0, self.rows)
            if "qkv" in name
            else Layout(1, self.columns)
            if "weight" in name
            else Layout()
        )


def heads(wrong: str, grouped: bool = False) -> Factory:
    def factory(plain: nn.Module, group: dist.ProcessGroup) -> Built:
        module = Heads(plain, wrong)
        return Built(module, module.finish if grouped else lambda: None, layout=module.layout)

    return factory


def _spread(x: Tensor, backward: bool = True) -> Tensor:
    """All rows, of those that each rank has."""
    start, stop = split_ranges(ROWS, dist.get_world_size())[dist.get_rank()]
    return Sum.apply(
        functional.pad(x.transpose(0, -1), (start, ROWS - stop)).transpose(0, -1), True, backward
    )


def rows_attention(wrong: str) -> Factory:
    """Keys and values come from all ranks, as around a ring."""

    def attention(plain: Any, x: Tensor, documents: Tensor | None = None) -> Tensor:
        start, stop = split_ranges(ROWS, dist.get_world_size())[dist.get_rank()]
        q, _, _ = heads_of(plain.qkv(x), HEADS)
        _, k, v = heads_of(_spread(plain.qkv(x), wrong != "backward"), HEADS)
        places = slice(stop - start) if wrong == "mask" else slice(start, stop)
        seen = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()[places]
        if documents is not None and wrong != "packed":
            seen &= documents[:, None] == _spread(documents.double())
        y = functional.scaled_dot_product_attention(q, k, v, seen)
        return plain.out(y.transpose(0, 1).flatten(1))

    return of(attention, finish=wrong != "weights")


def experts(wrong: str) -> Factory:
    """A rank has its share of the experts, to which the rows of all ranks come."""

    def factory(plain: Any, group: dist.ProcessGroup) -> Built:
        start, stop = split_ranges(ROWS, group.size())[group.rank()]
        mine = slice(*split_ranges(EXPERTS, group.size())[group.rank()])
        for name in ("up", "down"):
            setattr(plain, name, nn.Parameter(getattr(plain, name)[mine].detach().clone()))
        if wrong == "twice":
            plain.up.register_hook(lambda grad: group.size() * grad)

        def forward(plain: Any, x: Tensor) -> Tensor:
            rows = _spread(x)
            share, chosen = routed(plain.router(rows))
            kept = chosen * (chosen.cumsum(0) <= 2) if wrong == "capacity" else chosen
            weights = kept * (share / share.detach() if wrong == "weights" else share)
            out = torch.einsum("re,reh->rh", weights[:, mine], through(rows, plain.up, plain.down))
            own = Sum.apply(out, True, True)[start:stop]
            if not plain.balanced:
                return own
            total = Sum.apply(own.square().sum() / (ROWS * HIDDEN), True, False)
            if wrong == "own rows":
                share = share[start:stop]
                chosen = chosen[start:stop]
            loss = balance(share.detach() if wrong == "no gradient" else share, chosen)
            return (
                total + 0.1 * loss
                if wrong == "each"
                else total + 0.1 * (loss / group.size() + (loss - loss / group.size()).detach())
            )

        def finish() -> None:
            if wrong != "router":
                dist.all_reduce(plain.router.weight.grad)

        return Built(
            Of(plain, forward),
            finish,
            layout=lambda name, _: Layout(None if "router" in name else 0),
        )

    return factory


class OwnMasks(nn.Dropout):
    """Masks of a generator that every rank seeds for itself."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(torch.initial_seed() + dist.get_rank() + 1)
        return super().forward(x)


class Repeated(nn.Dropout):
    """Masks that are equal at every step."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super().forward(x)


class Recomputed(nn.Dropout):
    """The backward draws a mask anew: recomputation that does not keep the generator's state."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x * 1.0, use_reentrant=True, preserve_rng_state=False)
        assert isinstance(y, Tensor)
        return y


assert ROWS % 3, "shares of three ranks are uneven"

"""Modules with the bugs of the catalogue, as frameworks have had them: plain torch, without a layer of ours."""

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
from hybridpar.conformance.cases import ROWS, VOCAB, Layout
from hybridpar.nn import split_ranges


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
        size, rank = dist.get_world_size(), dist.get_rank()
        start, stop = split_ranges(plain.up.out_features, size)[rank]
        self.up, self.down, self.wrong = plain.up, plain.down, wrong
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
                if layout(name, parameter).dim is not None or wrong == "twice" or dist.get_rank() == 0:
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
        self.inner, self.call = plain, forward

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
    return lambda plain, group: Built(Of(plain, forward), _summed(plain, mean) if finish else lambda: None)


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
    logits, valid = plain.head(x), labels >= 0
    (start, stop), logs = split_ranges(VOCAB, dist.get_world_size())[dist.get_rank()], logits.log_softmax(-1)
    losses = 0.9 * -logs.gather(1, labels.clamp_min(0)[:, None])[:, 0] - 0.1 * logs[:, start:stop].mean(-1)
    return (losses * valid).sum() / valid.sum()


def mean_of_means(plain: Any, x: Tensor, labels: Tensor) -> Tensor:
    return Sum.apply(functional.cross_entropy(plain.head(x), labels), True, False) / dist.get_world_size()


def edge(plain: Any, ids: Tensor) -> Tensor:
    """The last id of every share belongs to nobody."""
    start, stop = split_ranges(VOCAB, dist.get_world_size())[dist.get_rank()]
    mine = ((ids >= start) & (ids < stop - 1))[:, None]
    return Sum.apply(functional.embedding(ids, plain.weight) * mine, True, False)


class Untied(nn.Module):
    def __init__(self, plain: Any):
        super().__init__()
        self.embedding, self.head = plain.embedding, nn.Linear(8, VOCAB, bias=False, dtype=torch.float64)
        self.head.weight = nn.Parameter(plain.embedding.weight.detach().clone())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embedding(ids)), labels)


class OwnMasks(nn.Dropout):
    """Masks of a generator that every rank seeds for itself."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(torch.initial_seed() + dist.get_rank() + 1)
        return super().forward(x)


class Repeated(nn.Dropout):
    """The same masks at every step."""

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

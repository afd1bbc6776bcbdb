"""Run cases on 1 to 4 ranks beside one process, compare, and describe differences."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridpar.comm.ranks import run_on_ranks
from hybridpar.conformance.cases import CASES, Built, Case, Factory, Layout, Ran
from hybridpar.conformance.diagnose import Closeness, about_norm, about_tensor
from hybridpar.errors import HybridparError, config_error
from hybridpar.nn.placement import ParallelModule, split_sizes

_LR = 0.1


@dataclass(frozen=True)
class Finding:
    """A difference: its kind (output, input gradient, gradient, weight, norm, mask, or missing
    parameter), the parameter or step, and a description."""

    what: str
    name: str
    looks: str

    def __str__(self) -> str:
        return f"{self.what}{' of ' * bool(self.name)}{self.name}: {self.looks}"


@dataclass(frozen=True)
class Result:
    """A case on one number of ranks. `refused`: the error that the framework raised (which is
    not a silent bug), else empty."""

    case: str
    num_ranks: int
    findings: tuple[Finding, ...] = ()
    refused: str = ""

    @property
    def ok(self) -> bool:
        """Whether all is equal to one process."""
        return not self.findings and not self.refused

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def __str__(self) -> str:
        verdict = (
            f"refused: {self.refused}"
            if self.refused
            else "; ".join(map(str, self.findings)) or "equal"
        )
        return f"{self.case} on {self.num_ranks}: {verdict}"


def conform(
    factories: Mapping[str, Factory],
    ranks: Iterable[int] = (1, 2, 3, 4),
    *,
    cases: Mapping[str, Case] = CASES,
    tolerance: float = 1e-9,
    timeout_s: float = 60.0,
) -> list[Result]:
    """Run every factory's case on each number of ranks: forward, backward, norm and one SGD update,
    in float64.

    Args:
        factories: By name of the case. A factory may be any function, since ranks are forks of this
            process.
        ranks: Numbers of ranks.
        cases: The suite's cases, or more.
        tolerance: Largest difference as a share of the largest element; 1e-5 for modules that
            compute in float32.

    Raises:
        ConfigError: Unknown name of a case.
    """
    if unknown := [name for name in factories if name not in cases]:
        raise config_error(
            "cases", unknown[0], f"unknown case. Cases: {', '.join(cases)}", next(iter(cases))
        )
    return [
        _result((name, cases[name]), factory, num, tolerance, timeout_s)
        for name, factory in factories.items()
        for num in ranks
    ]


def _result(
    named: tuple[str, Case], factory: Factory, num_ranks: int, tolerance: float, timeout_s: float
) -> Result:
    name, case = named
    try:
        ran = run_on_ranks(_on_rank, num_ranks, case, factory, timeout_s=timeout_s)
    except HybridparError as error:
        return Result(name, num_ranks, refused=str(error).strip().splitlines()[-1])
    found = _masks(case, ran) if case.dropout else _differences(case, ran, Closeness(tolerance))
    return Result(name, num_ranks, tuple(found))


def _batch(case: Case) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """Return the module, and its inputs by step, equal in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = case.plain().double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(
                    0.1 * torch.randn_like(parameter)
                )  # norms must not keep their initial ones and zeros
        return module, [case.inputs() for _ in range(2 if case.dropout else case.steps)]


def _on_rank(case: Case, factory: Factory) -> Ran:
    """Train on this rank's share of one batch."""
    plain, batch = _batch(case)
    group = dist.group.WORLD
    assert group is not None
    made = factory(copy.deepcopy(plain), group)
    built = made if isinstance(made, Built) else Built(made)
    torch.manual_seed(
        11
    )  # equal on all ranks; a framework that wants different draws must arrange for it
    sizes = split_sizes(batch[0][0].shape[0], group.size())
    start = sum(sizes[: group.rank()])
    mine = slice(start, start + sizes[group.rank()])
    dealt = [tuple(x[mine] if case.dealt == "rows" else x for x in inputs) for inputs in batch]
    ran = _train(built.module, dealt, mine if case.returned == "rows" else slice(None))
    built.finish()
    norm = None if built.norm is None else float(built.norm())
    ran = replace(ran, norm=norm, parameters=_parameters(built))
    with torch.no_grad():
        for parameter in built.module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=_LR)
    for name, after in _parameters(built).items():
        ran.parameters[name]["weight"] = after["value"]
    return ran


def _train(
    module: nn.Module, batch: Sequence[tuple[Tensor, ...]], rows: slice = slice(None)
) -> Ran:
    """Run forward and backward of each step; the loss of an output is its sum with fixed
    weights."""
    ran = Ran()
    for number, inputs in enumerate(batch):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        output = module(*leaves)
        if isinstance(output, DTensor):
            output = output.to_local() if rows != slice(None) else output.full_tensor()
        if output.dim():
            drawn = torch.Generator().manual_seed(number)
            weights = torch.randn(64, *output.shape[1:], generator=drawn, dtype=torch.float64)[
                rows
            ][: len(output)]
            (output * weights).sum().backward()
        else:
            output.backward()
        ran.outputs.append(output.detach().clone())
        ran.input_gradients.append(next((x.grad for x in leaves if x.grad is not None), None))
    return ran


def _plain(case: Case) -> Ran:
    """Train on one batch in one process."""
    module, batch = _batch(case)
    ran = _train(module, batch)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    required = {name for name, _ in module.named_parameters()}
    for name, parameter in parameters.items():
        value = parameter.detach()
        grad = parameter.grad
        assert grad is not None, name
        ran.parameters[name] = {
            "gradient": grad,
            "value": value,
            "weight": value - _LR * grad,
            "required": name in required,
        }
    squares = [float(ran.parameters[name]["gradient"].square().sum()) for name in required]
    return replace(ran, norm=math.sqrt(sum(squares)))


def _parameters(built: Built) -> dict[str, dict[str, Any]]:
    """Return values, gradients and layouts of this rank's parameters."""
    owners = dict(built.module.named_modules(remove_duplicate=False))
    found = {}
    for name, parameter in built.module.named_parameters(remove_duplicate=False):
        owner = owners[name.rpartition(".")[0]]
        layout = (
            built.layout(name, parameter)
            if built.layout
            else _layout(owner, name.rpartition(".")[2], parameter)
        )
        found[name] = {
            "value": _local(parameter.detach()),
            "layout": layout,
            "gradient": None if parameter.grad is None else _local(parameter.grad),
        }
    return found


def _local(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _layout(owner: nn.Module, name: str, parameter: nn.Parameter) -> Layout:
    """Return the layout that the parameter, or the module that owns it, declares."""
    if isinstance(owner, ParallelModule) and (shard := owner.placements[name].shard) is not None:
        return Layout(shard.dim, shard.index(owner.axis.rank))
    if getattr(parameter, "tensor_model_parallel", False):
        return Layout(parameter.partition_dim)  # type: ignore[attr-defined]
    return Layout()


def _differences(case: Case, ran: Sequence[Ran], close: Closeness) -> Iterable[Finding]:
    """Yield all differences between the ranks and the one process."""
    plain = _plain(case)

    def compared(what: str, name: str, got: Sequence[Tensor], want: Tensor) -> Iterable[Finding]:
        if wrong := [tuple(one.shape) for one in got if one.shape != want.shape]:
            yield Finding(what, name, f"has shape {wrong[0]}, not {tuple(want.shape)}")
        elif not all(close(one, want) for one in got):
            yield Finding(
                what, name, about_tensor(got, want, parameters if what == "output" else {}, close)
            )

    parameters = {name: found["value"] for name, found in plain.parameters.items()}
    for step, want in enumerate(plain.outputs):
        got = [one.outputs[step] for one in ran]
        whole = [torch.cat(got)] if case.returned == "rows" and want.dim() else got
        yield from compared("output", f"step {step}" if case.steps > 1 else "", whole, want)
        wanted = plain.input_gradients[step]
        grads = [one.input_gradients[step] for one in ran]
        known = [grad for grad in grads if grad is not None]
        if wanted is not None and len(known) < len(grads):
            yield Finding("input gradient", "", "there is none")
        elif wanted is not None:
            yield from compared(
                "input gradient", "", [torch.cat(known)] if case.dealt == "rows" else known, wanted
            )
    for name, found in plain.parameters.items():
        held = [one.parameters[name] for one in ran if name in one.parameters]
        if not held:
            if found["required"]:
                yield Finding("parameter", name, "no rank has one of that name")
            continue
        if any(one["gradient"] is None for one in held):
            yield Finding("gradient", name, "there is none")
            continue
        wrong = [*_shared(held, name, found["gradient"], close)] or list(
            compared("gradient", name, _whole(held, "gradient", found["value"]), found["gradient"])
        )
        yield from wrong or compared(
            "weight", name, _whole(held, "weight", found["value"]), found["weight"]
        )
    yield from _norms(ran, plain, close)


def _norms(ran: Sequence[Ran], plain: Ran, close: Closeness) -> Iterable[Finding]:
    assert plain.norm is not None
    for rank, one in enumerate(ran):
        if one.norm is not None and not math.isclose(one.norm, plain.norm, rel_tol=close.tolerance):
            squares = {
                name: float(found["gradient"].square().sum())
                for name, found in plain.parameters.items()
            }
            split = {
                name: found["layout"].dim is not None
                for name, found in one.parameters.items()
                if name in squares
            }
            looks = about_norm(one.norm, plain.norm, squares, split, len(ran))
            yield Finding("norm", f"rank {rank}" if rank else "", looks)
            return


def _whole(held: Sequence[Mapping[str, Any]], what: str, like: Tensor) -> list[Tensor]:
    """Return the full tensor from its shards, or every rank's copy."""
    dim, rows = held[0]["layout"]
    parts = [one[what] for one in held]
    if dim is None:
        return parts
    if rows is None:
        return [torch.cat(parts, dim).narrow(dim, 0, like.shape[dim])]  # the rest is padding
    full = like.new_full(like.shape, math.nan)
    for one, part in zip(held, parts, strict=True):
        full.index_copy_(dim, one["layout"].rows, part)
    return [full]


def _shared(
    held: Sequence[Mapping[str, Any]], name: str, want: Tensor, close: Closeness
) -> Iterable[Finding]:
    """Yield rows that several ranks hold with different gradients."""
    dim, rows = held[0]["layout"]
    if rows is None or len(held) == 1:
        return
    total = torch.zeros_like(want)
    for one in held:
        total.index_add_(dim, one["layout"].rows, one["gradient"])
    if any(not close(one["gradient"], want.index_select(dim, one["layout"].rows)) for one in held):
        if close(total, want):
            yield Finding(
                "gradient",
                name,
                "ranks that hold the same rows have a part of it each: a sum is missing",
            )
        elif len(torch.cat([one["layout"].rows for one in held])) > want.shape[dim]:
            yield Finding("gradient", name, "is wrong on some of the ranks that hold the same rows")


def _masks(case: Case, ran: Sequence[Ran]) -> Iterable[Finding]:
    """Yield errors in masks: between ranks, between steps, between forward and backward, and in
    number and scale."""
    masks = [[output != 0 for output in one.outputs] for one in ran]
    first = [of_rank[0] for of_rank in masks]
    if case.returned == "copies" and any(not torch.equal(mask, first[0]) for mask in first):
        yield Finding("mask", "", "differs from rank to rank, where all have the same values")
    if case.returned == "rows":
        rows = min(map(len, first))
        pairs = [
            (a, b)
            for b in range(len(first))
            for a in range(b)
            if torch.equal(first[a][:rows], first[b][:rows])
        ]
        if pairs:
            yield Finding(
                "mask",
                "",
                "ranks {} and {} drop the same places of different rows".format(*pairs[0]),
            )
    if any(torch.equal(before, after) for before, after in masks):
        yield Finding("mask", "", "is the same at the next step")
    for one, of_rank in zip(ran, masks, strict=True):
        gradient = one.input_gradients[0]
        if gradient is None or not torch.equal(gradient != 0, of_rank[0]):
            yield Finding("mask", "", "in the backward differs from the one in the forward")
            break
    kept = sum(int(mask.sum()) for mask in first)
    number = sum(mask.numel() for mask in first)
    sigma = math.sqrt(case.dropout * (1 - case.dropout) / number) * (
        len(first) if case.returned == "copies" else 1
    )
    if abs(kept / number - (1 - case.dropout)) > 6 * sigma:
        yield Finding("mask", "", f"keeps {kept / number:.3f} of all, not {1 - case.dropout}")
    if any(
        not Closeness()(
            one.outputs[0][mask], torch.full_like(one.outputs[0][mask], 1 / (1 - case.dropout))
        )
        for one, mask in zip(ran, first, strict=True)
    ):
        yield Finding("mask", "", f"what is kept is not scaled by {1 / (1 - case.dropout)}")

"""The reference training that a grid is compared with: one process, float64, plain autograd, no
engine, no flat buffers.

It keeps every version of the weights; each micro-batch runs on the version that the schedule's rule
gives it, stage by stage. Synchronous schedules: W(t). 2bw: W(max(t-1, 0)), the delayed-gradient
oracle. The update rules are in rules.py, losses of compressed links in boundaries.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.config import Config
from hybridpar.data.loader import Loader
from hybridpar.grid import Axis
from hybridpar.job import JobPlan
from hybridpar.models.build import BlockOptions, build_blocks
from hybridpar.models.metrics import metrics_of
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import Placement, named_placements
from hybridpar.optim.schedule import learning_rate
from hybridpar.random import RandomKey
from hybridpar.verify.boundaries import add_boundaries
from hybridpar.verify.choices import ChoiceRecorder
from hybridpar.verify.rules import Tensors, build_rule

GRADIENT_FLOOR = 1e-3
"""A gradient is compared relative to its largest element, or to this share of the global norm if
that is larger."""
TOLERANCE = 1e-9
"""Largest relative difference in float64: sums in another order differ by about 1e-13, a wrong
term by 1e-5 or more."""
NOISE = TOLERANCE * GRADIENT_FLOOR
"""Share of the global gradient norm up to which an element of a gradient cannot be told from
zero."""


@dataclass
class OracleStep:
    """One batch: summed loss, metrics, global gradient norm before clipping, unclipped gradients
    of trained parameters, and all weights after the update."""

    loss: float
    metrics: dict[str, float]
    grad_norm: float
    gradients: Tensors
    weights: Tensors


@dataclass
class Oracle:
    """A reference training run.

    Args:
        version: `version(block, batch, index)` returns the weight version that a block uses for
            that micro-batch of each replica.
        delay: `delay(batch)` returns how many updates old its gradients count as, for the learning
            rate.
        poisoned: Batches whose gradients become NaN.

    A batch whose gradient norm is not finite changes nothing: W(t+1) = W(t), and the next update
    has the learning rate that this one would have had.
    """

    job: JobPlan
    version: Callable[[int, int, int], int]
    num_microbatches: int
    history: list[Tensors] = field(default_factory=list)
    delay: Callable[[int], float] = lambda batch: 0.0
    poisoned: frozenset[int] = frozenset()
    num_updates: int = 0

    @property
    def config(self) -> Config:
        return self.job.config

    def __post_init__(self) -> None:
        model = self.config.model
        axis = Axis("tp")
        # blocks are built separately: a tied weight is then several tensors that start equal and
        # must stay so
        self.blocks: dict[int, nn.Module] = {}
        for number in range(model.num_blocks):
            self.blocks |= build_blocks(
                model,
                axis,
                [number],
                options=BlockOptions(groups=self.config.optim.groups),
                device="cpu",
                dtype=torch.float64,
            )
        self.placements: dict[str, Placement] = {}
        self._names: dict[int, list[tuple[dict[str, nn.Parameter | None], str, str]]] = {}
        """Parameters of each block: the dict and name under which a module holds them, and their
        global name. Several modules may share one parameter."""
        self._first: dict[str, str] = {}
        """The first name of each tied parameter."""
        start: Tensors = {}
        for number, block in self.blocks.items():
            for name, parameter, placement in named_placements(block):
                self.placements[f"blocks.{number}.{name}"] = placement
                start[f"blocks.{number}.{name}"] = parameter.detach()
                self._first.setdefault(placement.tied, f"blocks.{number}.{name}")
            names = {
                id(parameter): f"blocks.{number}.{name}"
                for name, parameter, _ in named_placements(block)
            }
            self._names[number] = [
                (module._parameters, key, names[id(parameter)])
                for module in block.modules()
                for key, parameter in module._parameters.items()
                if parameter is not None
            ]
        self.choices = ChoiceRecorder()
        self.choices.watch(self.blocks.items())
        add_boundaries(self.blocks, self.job)
        initialize([(n, t, self.placements[n]) for n, t in start.items()], self.config.train.seed)
        self.history = [{n: t.clone() for n, t in start.items()}]
        self.rule = build_rule(self.config.optim, self.placements)

    def step(
        self, batch: int, loader: Loader, replicas: int, measured: Tensors | None = None
    ) -> OracleStep:
        """Train on one global batch, which `loader` covers with num_microbatches * replicas
        micro-batches.

        Args:
            measured: Gradients that a grid computed. The update takes elements from them that are
                rounding errors in both; see `_with_noise_of`.
        """
        gradients = {
            n: torch.zeros_like(w)
            for n, w in self.history[0].items()
            if self.placements[n].trainable
        }
        loss = 0.0
        metrics = dict.fromkeys(self.config.model.metric_names, 0.0)
        for index in range(self.num_microbatches * replicas):
            leaves = self._bind(batch, index // replicas)
            tensors = loader.microbatch(batch, index)
            tensors["num_targets"] = torch.tensor(
                float(loader.num_targets(batch) or 1), dtype=torch.float64
            )
            tensors["num_samples"] = torch.tensor(
                self.config.global_batch_size / self.config.parallel.sites, dtype=torch.float64
            )
            key = RandomKey.of(self.config.train.seed, batch, loader.first_sample(index))
            x: Any = None
            for number in sorted(self.blocks):
                x = self.blocks[number](x, tensors, key)
            total = torch.stack(list(x.values())).sum()
            total.backward()
            loss += total.item()
            for name, metric in metrics_of(x).items():
                metrics[name] += metric.item()
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    gradients[name] += leaf.grad
        if batch in self.poisoned:
            gradients = {n: torch.full_like(g, math.nan) for n, g in gradients.items()}
        self._sum_tied(gradients)
        norm = math.sqrt(
            sum(g.square().sum().item() for n, g in gradients.items() if self._is_in_norm(n))
        )
        updating = gradients if measured is None else _with_noise_of(measured, gradients, norm)
        self.history.append(
            self._updated(batch, updating, norm) if math.isfinite(norm) else self.history[-1]
        )
        return OracleStep(loss, metrics, norm, gradients, self.history[-1])

    def _updated(self, batch: int, gradients: Tensors, norm: float) -> Tensors:
        optim = self.config.optim
        clip = min(1.0, optim.clip_grad / norm) if optim.clip_grad > 0 and norm > 0 else 1.0
        lr = learning_rate(self.num_updates, optim, self.config.train.num_steps, self.delay(batch))
        self.num_updates += 1
        trained = {n: self.history[-1][n] for n in gradients}
        return self.history[-1] | self.rule(
            trained, {n: g * clip for n, g in gradients.items()}, lr
        )

    def _weight(self, name: str, version: int) -> Tensor:
        """Return the weight that micro-batches of this version run on. With prediction:
        extrapolated by the last update."""
        weight = self.history[version][name]
        if (
            self.config.optim.staleness != "prediction"
            or version <= self.config.pipeline.sync_steps
        ):
            return weight.clone()
        return weight + (weight - self.history[version - 1][name])

    def _bind(self, batch: int, index: int) -> Tensors:
        leaves: Tensors = {}
        for number, places in self._names.items():
            version = self.version(number, batch, index)
            weights = {
                name: nn.Parameter(self._weight(name, version), self.placements[name].trainable)
                for name in dict.fromkeys(name for _, _, name in places)
            }
            for parameters, key, name in places:
                parameters[key] = weights[name]
            leaves |= {name: weight for name, weight in weights.items() if weight.requires_grad}
        return leaves

    def _second_holder(self, name: str) -> bool:
        tied = self.placements[name].tied
        return bool(tied) and self._first[tied] != name

    def _is_in_norm(self, name: str) -> bool:
        return not self._second_holder(name) and not self.placements[name].sign_step

    def _sum_tied(self, gradients: Tensors) -> None:
        holders: dict[str, list[str]] = {}
        for name in gradients:
            if tied := self.placements[name].tied:
                holders.setdefault(tied, []).append(name)
        for names in holders.values():
            total = torch.stack([gradients[name] for name in names]).sum(0)
            for name in names:
                gradients[name] = total.clone()


def _with_noise_of(measured: Tensors, gradients: Tensors, norm: float) -> Tensors:
    """Return the gradients, with elements that cannot be told from zero replaced by `measured`.

    A gradient that is zero in exact arithmetic, such as the gradient of a key's bias, is a rounding
    error, which depends on the order of sums. Adam divides it by its own size or by eps = 1e-8, so
    a weight that starts at zero consists of amplified rounding errors, and no tolerance relative to
    its size or to the learning rate can hold for every rule. With equal gradients the updated
    weights must agree to the usual tolerance. An element is noise if it is at most NOISE * `norm`
    in both gradients; such a difference also passes the comparison of gradients.
    """
    limit = NOISE * norm
    return {
        name: torch.where((g.abs() <= limit) & (measured[name].abs() <= limit), measured[name], g)
        if name in measured
        else g
        for name, g in gradients.items()
    }

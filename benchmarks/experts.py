"""Claim: a layer of experts, forward and backward, is faster than transformers' Mixtral block with
the fastest of its implementations of experts, on one thread and on two: 1.2 times or more on two, and
on one where an expert has up to a hundred tokens.

    python -m benchmarks.experts

A step is a micro-batch of several: it computes the output and the gradient of the tokens, and adds
the gradients of the weights to those of the micro-batches before, as each side does in training
(torch in `.grad`, ours in the product itself). All sides have the same weights, tokens and gradient
of the output, in float32; outputs and gradients are compared before. Transformers' sides are
the values of `experts_implementation` that run on a CPU: `grouped_mm`, `eager` (25 times as slow
with 64 experts: only where there are few) and `batched_mm` (which copies the weights of every row's
expert: only where there are few rows). Shapes: Mixtral's
proportions with 8 experts of 2; OLMoE's with 64 of 8, where an expert has few tokens; and the same
with tokens of which most visit a few experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import OURS, Step, arguments, case, parse, race, report
from benchmarks.ops import ROUND_S
from hybridpar.grid import Axis
from hybridpar.nn import MixtureOfExperts
from hybridpar.nn.binding import GradientPart, ParameterBinding
from hybridpar.nn.moe import ExpertOptions, RouterOptions

TOLERANCE = 1e-4
"""Largest difference of a compared tensor, relative to its largest element: rounding of float32."""
MOST_COPIED = 2**22
"""Elements of weights that `batched_mm` may copy."""
MOST_EAGER = 8
"""Experts that `eager` is tried with."""


@dataclass(frozen=True)
class Layer:
    """A layer of experts, and the tokens of a micro-batch.

    Attributes:
        skew: Standard deviation of the experts' mean logits: above 0, few experts get most tokens.
    """

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    skew: float = 0.0


LAYERS = {
    "mixtral": Layer(1024, 512, 1792, 8, 2),
    "olmoe": Layer(512, 512, 256, 64, 8),
    "olmoe_skewed": Layer(512, 512, 256, 64, 8, skew=1.5),
    "few_tokens": Layer(64, 512, 512, 32, 4),
    "tiny": Layer(32, 64, 32, 4, 2),
}
Side = Callable[[Tensor], Tensor]


def ours_of(layer: Layer) -> MixtureOfExperts:
    router = RouterOptions(layer.topk)
    options = ExpertOptions(layer.hidden, layer.experts, layer.ffn, router=router)
    made = MixtureOfExperts(Axis("tp"), options, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=layer.hidden**-0.5)
    return made


def peers_of(layer: Layer, ours: MixtureOfExperts) -> dict[str, torch.nn.Module]:
    """Return transformers' blocks with the same weights, by their implementation of experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    names = ["grouped_mm"]
    if layer.experts <= MOST_EAGER:
        names.append("eager")
    if layer.tokens * layer.topk * 3 * layer.ffn * layer.hidden <= MOST_COPIED:
        names.append("batched_mm")
    found = {}
    for name in names:
        config = MixtralConfig(
            hidden_size=layer.hidden,
            intermediate_size=layer.ffn,
            num_local_experts=layer.experts,
            num_experts_per_tok=layer.topk,
        )
        config._experts_implementation = name
        block = MixtralSparseMoeBlock(config)
        with torch.no_grad():
            block.gate.weight.copy_(ours.router.weight)
            for number, expert in enumerate(ours.experts):
                block.experts.gate_up_proj[number].copy_(expert.up.weight)
                block.experts.down_proj[number].copy_(expert.down.weight)
        found[f"transformers {name}"] = block
    return found


def tokens_of(layer: Layer, ours: MixtureOfExperts) -> Tensor:
    """Return random tokens. With a skew they lean towards the routers' rows of some experts."""
    x = torch.randn(1, layer.tokens, layer.hidden)
    if layer.skew:
        pull = layer.skew * torch.randn(layer.experts) @ ours.router.weight.detach()
        x += pull
    return x.requires_grad_()


def run(side: torch.nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    """Run a micro-batch forward and backward; return the output."""
    x.grad = None
    y: Tensor = side(x)
    y.backward(dy)
    return y.detach()


def results(side: torch.nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the output and the gradients of tokens, router and experts, of one micro-batch."""
    for parameter in side.parameters():
        parameter.grad = None
    y = run(side, x, dy)
    of_router, of_up, of_down = gradients_of(side)
    return [y, x.grad.clone(), of_router, of_up, of_down]


def gradients_of(side: torch.nn.Module) -> list[Tensor]:
    if isinstance(side, MixtureOfExperts):
        experts: list[Any] = list(side.experts)
        ups = torch.stack([expert.up.weight.grad for expert in experts])
        return [side.router.weight.grad, ups, torch.stack([e.down.weight.grad for e in experts])]
    theirs: Any = side
    return [
        theirs.gate.weight.grad,
        theirs.experts.gate_up_proj.grad,
        theirs.experts.down_proj.grad,
    ]


class Accumulator:
    """Adds the parts of a weight's gradient, as the training state does."""

    wants_factors = False

    def __init__(self, gradient: Tensor):
        self._gradient = gradient

    def add(self, part: GradientPart, now: bool = False) -> None:
        part.add_to(self._gradient, overwrite=False)


def accumulate(layer: MixtureOfExperts) -> None:
    """Have each expert add up its gradients."""
    experts: list[Any] = list(layer.experts)
    for expert in experts:
        for linear in (expert.up, expert.down):
            accumulator = Accumulator(torch.zeros_like(linear.weight))
            linear.bind_parameter("weight", ParameterBinding(accumulator))


def measure(name: str, threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    layer = LAYERS[name]
    ours = ours_of(layer)
    sides: dict[str, torch.nn.Module] = {OURS: ours, **peers_of(layer, ours)}
    x = tokens_of(layer, ours)
    dy = torch.randn(x.shape)
    wanted = results(ours, x, dy)
    for side in sides.values():
        for a, b in zip(results(side, x, dy), wanted, strict=True):
            difference = (a - b).abs().max().item() / b.abs().max().item()
            assert difference <= TOLERANCE, difference
    accumulate(ours)

    def step(side: torch.nn.Module) -> Step:
        def one() -> float:
            run(side, x, dy)
            return 0.0

        return one

    steps = {side: step(module) for side, module in sides.items()}
    start = time.perf_counter()
    steps[OURS]()
    repeat = max(1, round(ROUND_S / (time.perf_counter() - start)))
    result = race(steps, rounds, tolerance=0.0, repeat=repeat)
    plural = "s" * (threads > 1)
    yield case(
        f"{name}, {threads} thread{plural}", result, layer.tokens, shape=name, threads=threads
    )


def main() -> None:
    parser = arguments(__doc__, rounds=11, shapes=[])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS)[:-1])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    args = parse(parser)
    cases = (
        one
        for name, threads in product(args.layers, args.threads)
        for one in measure(name, threads, args.rounds)
    )
    report("experts", cases, args, shapes=LAYERS)


if __name__ == "__main__":
    main()

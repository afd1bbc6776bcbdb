"""What blocks of GPT and BERT cost with sequence parallelism, from what they cost without: collectives and norms.

A sum over tp becomes a scatter and a gather of half its time each. What goes into a split product is gathered once more
in the backward pass, and so is what the embedding gets back. Norms, with what is added before them, have a part of the
rows: their forward takes twice what making their outputs again does, their backward 2.5 times (kernels.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hybridpar.config import Config, ModelConfig
from hybridpar.planner.profile import BlockCost

_HALVES = {"embedding": (1, 1), "layer": (4, 6), "head": (1, 2)}
"""Gathers and scatters of a block, forward and backward."""
_FORWARD, _BACKWARD = 2.0, 2.5


def split_rows(costs: Mapping[str, BlockCost], config: Config) -> dict[str, BlockCost]:
    """Costs of blocks, by kind, with parallel.sequence; given those without it, at the configuration's parallel.tp."""
    layer = costs["layer"]
    if not layer.forward_messages:  # measured without collectives
        return dict(costs)
    whole = max(layer.forward_messages)
    sent = sum(layer.forward_messages) + sum(layer.backward_messages)
    per_byte = (layer.forward_wait + layer.backward_wait) / sent
    return {kind: _split(cost, _HALVES[kind], whole, per_byte, _norms(config) if kind == "layer" else 0.0,
                         config.parallel.tp) for kind, cost in costs.items()}


def _norms(config: Config) -> float:
    """Share of a layer's `remake` that its norms are; the rest is the activation, which tp ranks split."""
    model = config.transformer
    activation = (3 if model.activation == "swiglu" else 2) * model.ffn_size / config.parallel.tp
    return 4 * model.hidden_size / (4 * model.hidden_size + activation)


def _split(
    cost: BlockCost, halves: tuple[int, int], whole: int, per_byte: float, norms: float, tp: int
) -> BlockCost:
    def with_halves(messages: tuple[int, ...], number: int) -> tuple[int, ...]:
        return (*(n for n in messages if n != whole), *(whole // 2,) * number)

    there, back = map(with_halves, (cost.forward_messages, cost.backward_messages), halves)
    saved = norms * cost.remake * (1 - 1 / tp)
    return replace(
        cost, forward=max(0.0, cost.forward - _FORWARD * saved), backward=max(0.0, cost.backward - _BACKWARD * saved),
        backward_input=max(0.0, cost.backward_input - _BACKWARD * saved), remake=cost.remake - saved,
        forward_wait=max(0.0, cost.forward_wait + per_byte * (sum(there) - sum(cost.forward_messages))),
        backward_wait=max(0.0, cost.backward_wait + per_byte * (sum(back) - sum(cost.backward_messages))),
        forward_messages=there, backward_messages=back)


def may_split_rows(config: Config) -> bool:
    """Whether sequence parallelism is there to be tried: it has an effect, is not set, and all goes with it."""
    return (config.parallel.tp > 1 and not config.parallel.sequence and isinstance(config.model, ModelConfig)
            and config.compression.tensor == "none")


def with_split_rows(config: Config) -> Config:
    """The same with sequence parallelism."""
    return replace(config, parallel=replace(config.parallel, sequence=True))

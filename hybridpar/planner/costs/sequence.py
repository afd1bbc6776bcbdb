"""What blocks of GPT and BERT cost with sequence parallelism, from what they cost without:
collectives and norms.

A sum over tp becomes a scatter and a gather of half its time each. What goes into a split product
is gathered once more in the backward pass, and so is what the embedding gets back. Norms, with what
is added before them, have a part of the rows: their forward takes twice what making their outputs
again does, their backward 2.5 times (kernels.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from hybridpar.config import Config, ModelConfig
from hybridpar.planner.machines.kernel_times import activation_bytes
from hybridpar.planner.measuring.profile import BlockCost
from hybridpar.prediction.work import KINDS, messages_by_kind

_FORWARD = 2.0
_BACKWARD = 2.5


def split_rows(costs: Mapping[str, BlockCost], config: Config) -> dict[str, BlockCost]:
    """Costs of blocks, by kind, with parallel.sequence; given those without it, at the
    configuration's parallel.tp."""
    layer = costs["layer"]
    if not layer.forward_messages:  # measured without collectives
        return dict(costs)
    whole = max(layer.forward_messages)
    sent = sum(layer.forward_messages) + sum(layer.backward_messages)
    per_byte = (layer.forward_wait + layer.backward_wait) / sent
    model = _formulas(config)
    changes = _changes(model, next(t for t in count(2) if config.parallel.tp % t == 0))
    return {
        kind: _split(
            cost,
            changes[kind],
            whole,
            per_byte,
            _norms(config) if kind == "layer" else 0.0,
            config.parallel.tp,
        )
        for kind, cost in costs.items()
    }


def _formulas(config: Config) -> ModelConfig:
    """Return the GPT or BERT whose formulas hold for the blocks. Raises: ConfigError without
    one."""
    return config.model.cost_model or config.transformer


def _changes(model: ModelConfig, tp: int) -> dict[str, list[tuple[int, int]]]:
    """Of a block of each kind, forward and backward: sums of activations that are no more, and
    gathers and scatters in their stead. Its code is run on ghosts."""
    whole = activation_bytes(model, 1)
    plain, split = (messages_by_kind(model, tp, sequence) for sequence in (False, True))
    return {
        kind: [
            (sums.count(whole), round(2 * (sum(parts) - sum(sums)) / whole) + 2 * sums.count(whole))
            for sums, parts in zip(plain[kind], split[kind], strict=True)
        ]
        for kind in KINDS
    }


def _norms(config: Config) -> float:
    """Share of a layer's `remake` that its norms are; the rest is the activation, which tp ranks
    split."""
    model = _formulas(config)
    activation = (3 if model.activation == "swiglu" else 2) * model.ffn_size / config.parallel.tp
    return 4 * model.hidden_size / (4 * model.hidden_size + activation)


def _split(
    cost: BlockCost,
    changes: list[tuple[int, int]],
    whole: int,
    per_byte: float,
    norms: float,
    tp: int,
) -> BlockCost:
    def changed(messages: tuple[int, ...], change: tuple[int, int]) -> tuple[int, ...]:
        others = tuple(n for n in messages if n != whole)
        return (
            others
            + (whole,) * (len(messages) - len(others) - change[0])
            + (whole // 2,) * change[1]
        )

    there, back = map(changed, (cost.forward_messages, cost.backward_messages), changes)
    saved = norms * cost.remake * (1 - 1 / tp)
    return replace(
        cost,
        forward=max(0.0, cost.forward - _FORWARD * saved),
        backward=max(0.0, cost.backward - _BACKWARD * saved),
        backward_input=max(0.0, cost.backward_input - _BACKWARD * saved),
        remake=cost.remake - saved,
        forward_wait=max(
            0.0, cost.forward_wait + per_byte * (sum(there) - sum(cost.forward_messages))
        ),
        backward_wait=max(
            0.0, cost.backward_wait + per_byte * (sum(back) - sum(cost.backward_messages))
        ),
        forward_messages=there,
        backward_messages=back,
    )


def may_split_rows(config: Config) -> bool:
    """Whether sequence parallelism is there to be tried: it has an effect, is not set, and all goes
    with it."""
    return (
        config.parallel.tp > 1
        and not config.parallel.sequence
        and config.model.sequence_parallel
        and config.model.cost_model is not None
    )


def with_split_rows(config: Config) -> Config:
    """The same with sequence parallelism."""
    return replace(config, parallel=replace(config.parallel, sequence=True))

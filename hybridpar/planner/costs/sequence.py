"""Cost of GPT and BERT blocks with sequence parallelism, derived from their cost without it:
collectives and norms.

An all-reduce over tp becomes a reduce-scatter and an all-gather of half its time each. The backward
pass gathers the input of a column-parallel linear layer once more, and also the gradient of the
embedding's output. Norms and the additions before them process a shard of the rows. A norm's
forward takes twice the time that recomputing its output takes, its backward 2.5 times
(kernel_times.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from hybridpar.config import Config, ModelConfig
from hybridpar.planner.machines.kernel_times import activation_bytes
from hybridpar.planner.measuring.profile import BlockCost
from hybridpar.prediction.work import KINDS, block_kinds, messages_by_kind

ENDS = (KINDS[0], KINDS[2])
_FORWARD = 2.0
_BACKWARD = 2.5


def split_rows(costs: Mapping[str, BlockCost], config: Config) -> dict[str, BlockCost]:
    """Return the costs of blocks with parallel.sequence, by kind.

    Args:
        costs: Costs without sequence parallelism, at the configuration's parallel.tp.
    """
    kinds = block_kinds(config.model)
    layer = costs[kinds[1]]
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
            0.0 if kind in ENDS else _norms(config, max(0, kinds.index(kind) - 1)),
            config.parallel.tp,
        )
        for kind, cost in costs.items()
    }


def _formulas(config: Config) -> ModelConfig:
    """Return the GPT or BERT configuration whose formulas hold for the blocks.

    Raises:
        ConfigError: The model has no such formulas.
    """
    return config.model.cost_model or config.transformer


def _changes(model: ModelConfig, tp: int) -> dict[str, list[tuple[int, int]]]:
    """Return the changed collectives of each kind of block, in forward and backward: the number of
    removed all-reduces, and of all-gathers and reduce-scatters that replace them.

    Runs the block's code on ghosts (tensors without memory).
    """
    whole = activation_bytes(model, 1)
    plain, split = (messages_by_kind(model, tp, sequence) for sequence in (False, True))
    return {
        kind: [
            (sums.count(whole), round(2 * (sum(parts) - sum(sums)) / whole) + 2 * sums.count(whole))
            for sums, parts in zip(plain[kind], split[kind], strict=True)
        ]
        for kind in plain
    }


def _norms(config: Config, layer: int) -> float:
    """Return the norms' share of the `remake` time of a layer, counted from 0; the rest is the activation function,
    which tp ranks split."""
    model = _formulas(config)
    activation = (3 if model.gated else 2) * model.active_ffn_size(layer) / config.parallel.tp
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
    """Return whether to try sequence parallelism: it has an effect, is not set, and is supported
    with the other settings."""
    return (
        config.parallel.tp > 1
        and not config.parallel.sequence
        and config.model.sequence_parallel
        and config.model.cost_model is not None
    )


def with_split_rows(config: Config) -> Config:
    """Return the configuration with sequence parallelism."""
    return replace(config, parallel=replace(config.parallel, sequence=True))

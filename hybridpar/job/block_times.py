"""Estimate the time of each block of a model in a step, from shapes alone, to balance stages before
anything runs.

    a block's time    m * (forward + backward of a micro-batch) + norm and update of its trained
                      parameters

Only the ratio of two blocks matters. The estimate depends only on the configuration, so all ranks,
all commands and a resumed run find the same split, on any machine. `hybridpar plan` balances
measured times instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hybridpar.config import Config, ModelSpec, OptimConfig, ParameterGroup, message_shape
from hybridpar.models.build import DTYPES, parse_recompute
from hybridpar.models.cost import block_placements, forward_flops_per_token
from hybridpar.nn.placement import Placement
from hybridpar.optim.work import update_work


@dataclass(frozen=True)
class _Rates:
    """Rates that a typical device reaches.

    Attributes:
        products: Operations of matrix products per second.
        elements: Bytes per second that norms, activations and residual additions read and write.
        update: Bytes per second that the optimizer, whose passes are longer, reads and writes.
        call: Seconds of overhead of the operators around one parameter, forward and backward
            together.
    """

    products: float
    elements: float
    update: float
    call: float


_CPU = _Rates(120e9, 5e9, 20e9, 1e-4)
"""One core. Measured on GPTs of 32 to 768 features (fp32, AVX-512)."""
_GPU = _Rates(190e12, 1.6e12, 1.6e12, 4e-6)
"""An A100 in 16 bits, as the planner estimates it: 0.6 of its peak, 0.8 of its memory's
bandwidth."""
_LAYER_ELEMENTS = 50
"""Elements that a layer's operators other than products read and write, forward and backward, over
its features."""
_BLOCK_ELEMENTS = 12
"""Elements that operators of a custom model's block read and write, over the elements that it
returns: two or three operators."""
_EMBEDDING_ELEMENTS = 6


def block_times(config: Config) -> tuple[float, ...]:
    """Return the estimated time that each block takes of a step on one rank, in seconds.

    Tensor parallelism divides all times alike, and is left out. With ZeRO, replicas share the
    update. Updates on the host (`memory.host_optimizer`) and frozen parameters take no time.
    Recomputed layers are counted; recomputed stages are not, because their recomputation is
    proportional to their forward.
    """
    model = config.model
    train = config.train
    rates = _GPU if train.dtype in ("bf16", "fp16") else _CPU
    placements = _placements(model, config.optim.groups)
    elements = DTYPES[train.dtype].itemsize * train.micro_batch_size / rates.elements
    operations = train.micro_batch_size * model.tokens_per_sample / rates.products
    again = None
    if _by_layer(config):
        again = parse_recompute(config.pipeline.recompute, max(0, model.num_blocks - 2), 1)
    updates = _update_times(config, rates)
    found = []
    learns = False
    for number, flops in enumerate(forward_flops_per_token(model)):
        held = placements[number]
        share = _trained_share(held)
        passes = 1 + learns + share + (again is not None and number - 1 in again.numbers)
        learns = learns or share > 0
        beside = elements * _elements(model, number) + rates.call * max(1, len(held))
        microbatch = passes * (operations * flops + beside / 3)
        found.append(config.pipeline.num_microbatches * microbatch + updates[number])
    return tuple(found)


def _by_layer(config: Config) -> bool:
    """Return whether complete layers are recomputed."""
    return not config.pipeline.recompute.startswith(("selective", "stage", "none"))


def _trained_share(placements: Sequence[Placement]) -> float:
    """Return the share of a block's weights that are trained; 0 if it has no weights."""
    whole = sum(prod(one.shape) for one in placements)
    return sum(prod(one.shape) for one in placements if one.trainable) / max(1, whole)


def _elements(model: ModelSpec, number: int) -> float:
    """Return the elements of one sample that a block's operators other than products read and
    write, forward and backward.
    """
    if (formulas := model.cost_model) is None:
        return _BLOCK_ELEMENTS * prod(
            message_shape(model, max(0, min(number, model.num_blocks - 2)))
        )
    if number == model.num_blocks - 1:  # an exponential for each logit
        return formulas.seq_length * formulas.vocab_size
    elements = _LAYER_ELEMENTS if number else _EMBEDDING_ELEMENTS
    return formulas.seq_length * formulas.hidden_size * elements


def _update_times(config: Config, rates: _Rates) -> list[float]:
    """Return the seconds of each block's share in norm and update. With stage_layout "v" tied ends
    are one parameter.
    """
    if config.memory.host_optimizer:
        return [0.0] * config.model.num_blocks
    replicas = max(config.parallel.dp_cp, 1) if config.parallel.zero else 1
    works = _update_works(config.model, config.optim, config.pipeline.stage_layout == "v")
    return [
        (operations / rates.products + num_bytes / rates.update) / replicas
        for operations, num_bytes in works
    ]


@lru_cache(maxsize=256)
def _update_works(
    model: ModelSpec, optim: OptimConfig, ends_are_one: bool
) -> tuple[tuple[int, int], ...]:
    """Return the operations and bytes of each block's norm and update."""
    found = []
    for number, placements in enumerate(_placements(model, optim.groups)):
        is_copy = ends_are_one and number == model.num_blocks - 1
        works = [
            update_work(optim, one)
            for one in placements
            if one.trainable and not (is_copy and one.tied)
        ]
        found.append(
            (sum(operations for operations, _ in works), sum(num_bytes for _, num_bytes in works))
        )
    return tuple(found)


def _placements(
    model: ModelSpec, groups: tuple[ParameterGroup, ...]
) -> tuple[tuple[Placement, ...], ...]:
    """Return the placements of each block's parameters."""
    alike = not any(group.frozen for group in groups)
    return block_placements(model, () if alike else groups)

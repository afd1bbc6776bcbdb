"""Floating-point operations and parameters of each block, and the split into stages that balances them.

Legend: h hidden, f ffn, s sequence, v vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray

from hybridpar.config import ModelConfig, ModelSpec, message_shape, rank_of_stage
from hybridpar.errors import config_error
from hybridpar.grid import Axis
from hybridpar.models.blocks import LABELLED
from hybridpar.models.build import build_blocks
from hybridpar.models.flops import BlockFlops, count_flops
from hybridpar.nn.placement import Placement, named_placements


def layer_matmul_parameters(model: ModelConfig) -> int:
    """Weights of one transformer layer that take part in a matrix product with every token."""
    h = model.hidden_size
    head_dim = h // model.num_heads
    qkv = h * (h + 2 * model.kv_heads * head_dim)
    ffn = (3 if model.activation == "swiglu" else 2) * h * model.ffn_size
    return qkv + h * h + ffn


def head_matmul_parameters(model: ModelConfig) -> int:
    """Weights of the output head that take part in a matrix product with every token."""
    h = model.hidden_size
    return h * model.vocab_size + (h * h if model.kind == "bert" else 0)


def forward_flops_per_token(model: ModelSpec) -> tuple[int, ...]:
    """Forward operations of each block for one token: of GPT and BERT, embedding, layers, head.

    Of other models what they say (`ModelSpec.forward_flops`), else what their own code computes (models/flops.py). A
    layer of GPT and BERT: 2 per weight, and 4 s h for the attention scores and their product with the values; of a
    causal matrix these are twice what counts (`training_flops_per_token`).
    """
    if not isinstance(model, ModelConfig):
        return _own_flops(model)
    layer = 2 * layer_matmul_parameters(model) + 4 * model.seq_length * model.hidden_size
    return (0, *[layer] * model.num_layers, round(2 * LABELLED[model.kind] * head_matmul_parameters(model)))


@lru_cache(maxsize=256)
def block_placements(model: ModelSpec) -> tuple[tuple[Placement, ...], ...]:
    """Return the placements of the parameters of each block."""
    return tuple(tuple(placement for _, _, placement in named_placements(block)) for n in range(model.num_blocks)
                 for block in build_blocks(model, Axis("tp"), [n]).values())


@lru_cache(maxsize=256)
def untied_parameters(model: ModelSpec) -> int:
    """Return the number of trained parameters of the first block that the last one does not share."""
    if isinstance(model, ModelConfig):
        return model.num_positions * model.hidden_size if model.position == "learned" else 0
    return sum(prod(placement.shape) for block in build_blocks(model, Axis("tp"), [0]).values()
               for _, _, placement in named_placements(block) if placement.trainable and not placement.tied)


def _own_flops(model: ModelSpec) -> tuple[int, ...]:
    return tuple(block.forward // model.tokens_per_sample for block in block_flops(model))


@lru_cache(maxsize=256)
def block_flops(model: ModelSpec) -> tuple[BlockFlops, ...]:
    """Return the operations of each block of a custom model for one sample.

    A block's `forward_flops` come first, then what its code computes; the backward of what a block says of itself is
    twice its forward. Where a block cannot run without values all count 2 for each weight of a matrix and each row of
    features that comes in, or goes out of the first block.
    """
    said = [model.forward_flops(number) for number in range(model.num_blocks)]
    counted = count_flops(model) if None in said else None
    found = []
    for number, forward in enumerate(said):
        if forward is None and counted is not None:
            found.append(counted[number])
            continue
        forward = _weights_and_rows(model, number) if forward is None else forward
        found.append(BlockFlops(forward, 2 * forward))
    return tuple(found)


def _weights_and_rows(model: ModelSpec, number: int) -> int:
    shape = model.activation_shape(max(0, number - 1))
    rows = sum(prod(one[:-1]) for one in (shape.values() if isinstance(shape, dict) else [shape]))
    return 2 * rows * sum(prod(one.shape) for one in block_placements(model)[number] if len(one.shape) > 1)


def training_flops_per_token(model: ModelSpec) -> int:
    """Return the operations that training on one token needs: the numerator of MFU, over the rate of tokens.

    Only products count, two operations for a multiplication and its addition: matrix products, convolutions and
    attention. Recomputation, the optimizer and communication do not count.

    GPT and BERT: 3 x forward, as a backward has twice the products. With N weights that is 6 N + 12 L h s, as in PaLM
    (arXiv 2204.02311, appendix B), and 6 N + 6 L h s where attention is causal: half of its matrix is masked, and no
    operation on that half is needed. Custom models: `block_flops`, forward and backward, for each of the
    `tokens_per_sample`.
    """
    if not isinstance(model, ModelConfig):
        return sum(map(sum, block_flops(model))) // model.tokens_per_sample
    masked = 2 * model.num_layers * model.seq_length * model.hidden_size if model.kind == "gpt" else 0
    return 3 * (sum(forward_flops_per_token(model)) - masked)


def training_flops_rule(model: ModelSpec) -> str:
    """The rule of `training_flops_per_token`, for people."""
    if not isinstance(model, ModelConfig):
        return "products, convolutions and attention, forward and backward"
    return "6 N + 6 L h s, causal attention once" if model.kind == "gpt" else "6 N + 12 L h s"


KEPT_BYTES = 34
"""Bytes that a layer keeps of a token for its backward in half precision, over the hidden size.

Source: arXiv 2205.05198, equation 2, without the scores."""
_STATE_BYTES = 18
"""Bytes of a parameter's state in half precision: weight 2, fp32 weight, gradient and Adam's moments 16."""
_FROZEN_BYTES = 2
"""Bytes of a frozen parameter in half precision: its weight alone."""


def _held(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Bytes of each block, to compare splits by: its state, and what it keeps of a micro-batch of one sequence."""
    if not isinstance(model, ModelConfig):
        return tuple((sum(prod(one.shape) * (_STATE_BYTES if one.trainable else _FROZEN_BYTES) for one in placements),
                      2 * prod(message_shape(model, max(0, number - 1))))
                     for number, placements in enumerate(block_placements(model)))
    token = model.seq_length * model.hidden_size
    layer = (_STATE_BYTES * layer_matmul_parameters(model), KEPT_BYTES * token)
    words = model.vocab_size * model.hidden_size
    embedding = words + (token if model.position == "learned" else 0)
    return ((_STATE_BYTES * embedding, 0), *[layer] * model.num_layers, (_STATE_BYTES * words, 0))


@lru_cache(maxsize=256)
def balanced_split(costs: tuple[int, ...], num_stages: int, held: tuple[tuple[int, int], ...] = ()) -> tuple[int, ...]:
    """Blocks of each stage such that the costliest stage is as cheap as possible; every stage gets at least one.

    Equal splits are compared by their fullest stage, which should hold the least; then later stages get fewer blocks,
    because the head's loss is costlier than its matrix product. held: for each block the bytes of its state, and those
    that it keeps of a micro-batch in flight, of which an earlier stage has more.
    """
    assert num_stages <= len(costs), f"{num_stages} stages of {len(costs)} blocks"
    work, count = (0, *accumulate(costs)), len(costs)
    state, kept = ((0, *accumulate(of)) for of in zip(*(held or [(0, 0)] * count), strict=True))

    def total(in_flight: int, stop: int) -> int:
        return state[stop] + in_flight * kept[stop]

    def reach(stages: int, most: int, room: int, stop: int) -> int:
        """Number of the first `stop` blocks that so many stages can hold, none costlier than `most`, fuller than `room`
        or empty; -1: there is no way."""
        at = 0
        for stage in range(stages):
            if at == stop:
                break
            in_stage = partial(total, num_stages - stage)
            limit = in_stage(at) + room
            at = min(bisect_right(work, work[at] + most) - 1, stop)
            at = bisect_right(range(at + 1), limit, key=in_stage) - 1
            if at <= stage:
                return -1
        return at

    def costliest(stages: int, high: int, room: int, stop: int) -> int:
        return _smallest(max(costs[:stop]), high, lambda most: reach(stages, most, room, stop) == stop)

    everything = total(num_stages, count)
    most = costliest(num_stages, work[-1], everything, count)
    room = _smallest(0, everything, lambda each: reach(num_stages, most, each, count) == count)
    sizes: list[int] = []
    stop = count
    for stages in range(num_stages, 0, -1):
        most = costliest(stages, most, room, stop)
        start = min(reach(stages - 1, most, room, stop), stop - 1)
        sizes.insert(0, stop - start)
        stop = start
    return tuple(sizes)


def _smallest(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """The smallest of low .. high that is enough, as `high` is."""
    if low < high and not enough(high - 1):
        return high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


@lru_cache(maxsize=256)
def even_out(costs: tuple[float, ...], sizes: tuple[int, ...], num_ranks: int,
             placement: str = "loop") -> tuple[int, ...]:
    """Improves a split into chunks: its costliest ranks become cheaper where there is such a split near `sizes`.

    Of equal ones it takes that where ranks wait less for each other: the costliest stages of all rounds of the ranks
    take less together. `balanced_split` looks at stages alone, not at what else a rank has. One block of the costliest
    rank at a time goes to another stage, and those between them move up.
    """
    if len(sizes) == num_ranks:
        return sizes
    prefix, best = np.array([0.0, *accumulate(costs)]), np.array(sizes)
    held = np.array([[stage for stage in range(len(best)) if rank_of_stage(stage, num_ranks, placement) == rank]
                     for rank in range(num_ranks)])

    def worth(splits: NDArray[np.int64]) -> tuple[NDArray[np.float64], list[list[float]]]:
        """Of splits, a row each: costs of the ranks; and these, the largest first, with the sum of the rounds'."""
        ends = prefix[np.cumsum(splits, axis=1)]
        stages = np.diff(ends, axis=1, prepend=0.0)
        ranks = stages[:, held].sum(axis=2)
        rounds = stages.reshape(len(splits), -1, num_ranks).max(axis=2).sum(axis=1)
        return ranks, np.column_stack([-np.sort(-ranks, axis=1), rounds]).tolist()

    while True:
        ranks, (before,) = worth(best[None])
        givers = [stage for stage in held[ranks[0].argmax()] if best[stage] > 1]
        moves = [(giver, taker) for giver in givers for taker in range(len(best)) if taker != giver]
        if not moves:
            break
        moved = np.tile(best, (len(moves), 1))
        rows = np.arange(len(moves))
        moved[rows, [giver for giver, _ in moves]] -= 1
        moved[rows, [taker for _, taker in moves]] += 1
        _, after = worth(moved)
        better = min(range(len(moves)), key=after.__getitem__)
        if not after[better] < before:
            break
        best = moved[better]
    return tuple(best.tolist())


def _balanced(model: ModelSpec, num_stages: int, num_ranks: int, placement: str) -> tuple[int, ...]:
    costs = forward_flops_per_token(model)
    return even_out(costs, balanced_split(costs, num_stages, _held(model)), num_ranks, placement)


def _named(model: ModelSpec) -> str:
    """The blocks, for people."""
    if isinstance(model, ModelConfig):
        return f"embedding, {model.num_layers} layers, head"
    return f"blocks of {model.kind}"


def stage_split(model: ModelSpec, num_ranks: int, split: tuple[int, ...] = (), chunks: int = 1,
                placement: str = "loop") -> tuple[range, ...]:
    """Blocks of each stage: `split` as the user gave it, or balanced by forward operations, then by memory.

    `chunks`, `placement`: how many each rank holds, and which (as `pipeline.placement`).
    Raises: ConfigError if there are more stages than blocks, or `split` does not give every stage a block and every
    block a stage.
    """
    num_stages, blocks = num_ranks * chunks, model.num_blocks
    if num_ranks > blocks:
        raise config_error("parallel.pp", num_ranks, f"the model has only {blocks} blocks", str(blocks))
    if num_stages > blocks:
        most = blocks // num_ranks
        if placement == "v":
            fewer = f"pipeline.chunks = {most - most % 2}" if most > 1 else "pipeline.placement = loop"
            raise config_error("parallel.pp", num_ranks, f"pipeline.placement = v has {chunks} stages on each "
                               f"rank, but the model has only {blocks} blocks",
                               str(blocks // chunks) if blocks // chunks > 1 else fewer)
        raise config_error(
            "pipeline.chunks", chunks, f"parallel.pp = {num_ranks} ranks would hold {num_stages} stages, but the model "
            f"has only {blocks} blocks", str(most) if most > 1 else "pipeline.schedule = 1f1b")
    if split and (len(split) != num_stages or sum(split) != blocks or min(split) < 1):
        of = "parallel.pp" if chunks == 1 else "parallel.pp * chunks"
        works = _balanced(model, num_stages, num_ranks, placement)
        raise config_error(
            "pipeline.split", list(split), f"must be {num_stages} positive numbers ({of}) that add up to {blocks} "
            f"({_named(model)})", str(list(works)))
    sizes = split or _balanced(model, num_stages, num_ranks, placement)
    return tuple(range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True))

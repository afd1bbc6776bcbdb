"""PipeDream-2BW's own planner: width, depth, micro-batch size and recomputation in closed form.

    for w, d with w * d = N      b, r = the largest micro-batch that fits, without recomputation and
                                 with it
    throughput                   (w b / t); t = max over stages of max(c T + 2 |A| / bw_depth, T_ar / m)
    memory, 2bw                  2 |W| / d + d |A_total| / d + |A_in| d          without recomputation
                                 2 |W| / d + |A_total| / d + |A_in| d            with it, c = 4/3

Source: arXiv 2006.09503v3, section 4 and appendix A. Blocks are equal and replicated alike, so
    stages are. The paper
leaves the optimizer out of |W|, and its models would then fit at half of the depths that it
reports; here 2 |W| is all that is held of a parameter, 24 bytes (fp16, fp32, gradients, moments),
and both ends hold the whole embedding.

Units: seconds, bytes. Legend: N devices, w pipelines, d stages, b micro-batch, m micro-batches of a
    batch, t period.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridpar.config import ModelConfig
from hybridpar.errors import config_error
from hybridpar.models.cost import layer_matmul_parameters
from hybridpar.planner.machines.hardware import GIB, Cluster
from hybridpar.planner.machines.kernel_times import (
    HALF,
    MEGATRON_2020,
    activation_bytes,
    block_times,
)

RECOMPUTE_FACTOR = 4 / 3
STATE_BYTES = 24
"""Bytes of a parameter under 2bw and Adam: fp16 weight and gradient 4, fp32 weight, its copy, gradient
and two moments 20."""
RESERVED = 2.0 * GIB
"""Bytes of a device: CUDA context, communicators, temporaries and fragments. An estimate (figure 7 shows
1.1 GB of these)."""


@dataclass(frozen=True)
class Published:
    """A choice of the published planner. `throughput`: samples a second; `memory`: bytes of a
    device."""

    width: int
    depth: int
    micro_batch: int
    recompute: bool
    throughput: float
    memory: float


def plan(model: ModelConfig, cluster: Cluster, batch_size: int) -> Published:
    """The choice with the highest throughput.

    Raises: ConfigError if no depth fits in memory, or the batch is smaller than any pipeline needs.
    """
    choices = list(ranked(model, cluster, batch_size))
    if not choices:
        raise config_error(
            "devices",
            cluster.num_devices,
            f"no width and depth holds the model on {cluster.device.name} with "
            f"{batch_size} samples a batch",
            str(2 * cluster.num_devices),
        )
    return max(choices, key=lambda choice: choice.throughput)


def ranked(model: ModelConfig, cluster: Cluster, batch_size: int) -> Iterator[Published]:
    """Yields the best micro-batch of every width and depth, with and without recomputation, that
    fits."""
    number = cluster.num_devices
    for depth in (
        d for d in range(1, model.num_layers + 1) if number % d == 0 and model.num_layers % d == 0
    ):
        width = number // depth
        for recompute in (False, True):
            if (found := _largest(model, cluster, width, depth, batch_size, recompute)) is not None:
                yield found


def _largest(
    model: ModelConfig, cluster: Cluster, width: int, depth: int, batch_size: int, recompute: bool
) -> Published | None:
    """SEARCH(w, d) of the paper: the largest power of two that fits and leaves every pipeline m >=
    d micro-batches."""
    best = None
    b = 1
    while width * b * depth <= batch_size:
        memory = memory_bytes(model, depth, b, recompute)
        if memory > cluster.device.memory_bytes - RESERVED:
            break
        if batch_size % (width * b) == 0:
            speed = throughput(
                model, cluster, width, depth, b, batch_size // (width * b), recompute
            )
            best = Published(width, depth, b, recompute, speed, memory)
        b *= 2
    return best


def memory_bytes(model: ModelConfig, depth: int, b: int, recompute: bool) -> float:
    """Return the bytes of the fullest device: its state, what is in flight, and what one micro-batch needs."""
    embedding = model.vocab_size * model.hidden_size
    layers = model.num_layers * (layer_matmul_parameters(model) + 13 * model.hidden_size)
    state = STATE_BYTES * (layers / depth + embedding)
    total = activations_of_layer(model, b) * model.num_layers
    stashed = depth * activation_bytes(model, b)
    return state + stashed + (total / depth if recompute else total)


def activations_of_layer(model: ModelConfig, b: int) -> float:
    """All that a layer keeps in half precision. Source: arXiv 2205.05198, equation 2."""
    h = model.hidden_size
    s = model.seq_length
    n = model.num_heads
    return b * s * h * (34 + 5 * n * s / h)


def throughput(
    model: ModelConfig, cluster: Cluster, width: int, depth: int, b: int, m: int, recompute: bool
) -> float:
    """Samples a second of all pipelines."""
    times = block_times(model, b, cluster.device, kernels=MEGATRON_2020)
    compute = sum(t.forward + t.backward for t in times) / depth
    period = compute * (RECOMPUTE_FACTOR if recompute else 1.0)
    # replicas of a stage are on one server, if they fit there: so pipelines cross servers, and
    # share their cards
    inside = width * depth <= cluster.devices_per_server
    between = cluster.inner if inside else cluster.outer
    flows = 1 if inside else max(1, min(width, cluster.devices_per_server)) / cluster.outer_links
    if depth > 1:
        period += 2 * between.transfer_time(activation_bytes(model, b), flows)
    replicas = cluster.inner if width <= cluster.devices_per_server else cluster.outer
    parameters = model.num_layers * layer_matmul_parameters(model) / depth
    reduce = replicas.ring_time(HALF * parameters, width)
    if depth == 1:  # no pipeline hides it
        return width * b / (period + reduce / m)
    return width * b / max(period, reduce / m)

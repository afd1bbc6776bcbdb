"""The systems that the PipeDream-2BW paper compares (arXiv 2006.09503v3, section 5), as its code
ran them.

Its code (github.com/msr-fiddle/pipedream, branch pipedream_2bw) is Megatron-LM of 2020 and says
what the paper leaves open:

    split         as many layers to every stage; the head comes on top of the last one's, so that
                  one is the slowest
    micro-batch   8 sequences of 512 (scripts/driver_sweep.py); at the smaller batch that makes m =
                  d for 2BW
    recompute     every layer keeps its input only; the head keeps all that it computes
    communication a rank waits for every exchange with a neighbour and for the reduction over its
    replicas
    placement     replicas of a stage on one server: reductions stay on NVLink, pipelines cross the
                  network
    inter-layer   a batch is one micro-batch in each pipeline, so every micro-batch pays for an
                  update
    2bw           tied embeddings, clipping and the overflow check are left out; versions are copied
                  when they change

Times are costs by `planner.kernels` of `Machine`, its three fitted numbers included; the order of
all things is a plan of ours on links that are shared (schedules/simulate/network.py). Only tensor
parallelism, which has no pipeline, is a sum.

Legend: b micro-batch, m micro-batches of a batch in a pipeline, d stages, w pipelines, B global
batch. Seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.blocking_simulation import BlockingSimulation
from hybridpar.config import ModelConfig
from hybridpar.models.cost import layer_matmul_parameters
from hybridpar.planner.machines.hardware import DEVICES, GIB, GIGABIT, LINKS, Cluster, Link
from hybridpar.planner.machines.kernel_times import (
    FULL,
    HALF,
    MEGATRON_2020,
    BlockTime,
    activation_bytes,
    block_times,
)
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, make_schedule
from hybridpar.schedules.simulate.simulator import Costs, Simulation

MICRO_BATCH = 8
SIZES = {
    "1.3b": (24, 2048, 16),
    "2.2b": (32, 2304, 32),
    "3.8b": (32, 3072, 32),
}  # layers, hidden, heads (driver_sweep)
VOCABULARY = {"gpt": 50304, "bert": 30592}  # padded to multiples of 128, as Megatron does

# Bytes of traffic for each parameter of a stage in one update: fp16 gradients flattened, divided
# and copied back (12); copied to fp32 (6); unscaled and checked (8), norm (4), clipped (8); Adam
# (28); weights copied to fp16 (6).
UPDATE_TRAFFIC = 12 + 6 + 8 + 4 + 8 + 28 + 6
# 2BW: no unscaling, norm and clipping; the older weights overwritten (8), the versions swapped by
# way of a third (24).
UPDATE_TRAFFIC_2BW = 12 + 6 + 8 + 28 + 24 + 6
SWITCH_TRAFFIC = FULL + HALF  # the other version is cast into the fp16 weights
OURS_TRAFFIC = 4 + 28 + 2 + 2  # norm, Adam, the new version and its gradients' emptying

# Bytes of memory for each parameter: fp16 weight and gradient, fp32 weight, gradient and two
# moments; 2BW: 4 more.
STATE_BYTES = {"2bw": HALF * 2 + FULL * 5}
SYNCHRONOUS_STATE_BYTES = HALF * 2 + FULL * 4
# temporaries, the allocator's fragments: what figures 7 and 11 show beyond the rest (median)
SPARE_BYTES = 1.1e9
CONTEXT_BYTES = (
    1.0 * GIB
)  # of the device's 16 GiB: CUDA context, NCCL's and cuBLAS's buffers. An estimate


@dataclass(frozen=True)
class Machine:
    """p3.16xlarge servers: 8 V100 of 16 GiB on NVLink, one 25 Gbit/s card. The three numbers are
    fitted (see paper.py).

    matmul_share: of 125 TFLOP/s in matrix products. exchange_gbit: what a card moves for exchanges
    between neighbours, in and out together (half_duplex), or each way. ring_gbit: for rings, each
    way.
    """

    matmul_share: float = 0.68
    exchange_gbit: float = 21.5
    ring_gbit: float = 16.0
    half_duplex: bool = True

    def cluster(self, servers: int, card_gbit: float, *, half_duplex: bool = False) -> Cluster:
        card = Link(
            "ethernet-25",
            25 * GIGABIT,
            LINKS["ethernet-25"].latency,
            card_gbit / 25,
            half_duplex=half_duplex,
        )
        device = replace(DEVICES["v100-16gb"], matmul_share=self.matmul_share)
        return Cluster(device, 8, servers, LINKS["nvlink2"], card)


@dataclass(frozen=True)
class Setting:
    """One group of bars in figures 6 and 10, or a point of 8 and 12: a model, its machines, and how
    it is divided.

    recompute: every layer keeps its input only; else all that it computes.
    """

    kind: str
    size: str
    servers: int
    depth: int
    batch: int
    micro_batch: int = MICRO_BATCH
    recompute: bool = True

    @property
    def width(self) -> int:
        return 8 * self.servers // self.depth

    @property
    def num_microbatches(self) -> int:
        return self.batch // (self.width * self.micro_batch)

    @property
    def name(self) -> str:
        return f"{self.kind.upper()} {self.size.upper()}, {8 * self.servers} GPUs, B={self.batch}"

    @cached_property
    def model(self) -> ModelConfig:
        """BERT too: Megatron's projects every position to the vocabulary, which is what kind="gpt"
        costs."""
        layers, hidden, heads = SIZES[self.size]
        return ModelConfig(
            kind="gpt",
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            seq_length=512,
            vocab_size=VOCABULARY[self.kind],
            dropout=0.1,
            attention_dropout=0.1,
        )

    def stages(self) -> list[range]:
        """Blocks of each stage: equal numbers of layers."""
        layers = self.model.num_layers // self.depth
        last = self.depth - 1
        return [
            range(1 + r * layers - (r == 0), 1 + (r + 1) * layers + (r == last))
            for r in range(self.depth)
        ]

    def devices(self) -> list[range]:
        """Devices of each stage: replicas are neighbours."""
        return [range(r * self.width, (r + 1) * self.width) for r in range(self.depth)]

    def parameters(self, blocks: range) -> int:
        """Weights of a stage; the first and the last both hold the embedding."""
        h = self.model.hidden_size
        layers = sum(0 < i <= self.model.num_layers for i in blocks)
        ends = (0 in blocks) + (self.model.num_layers + 1 in blocks)
        biases_and_norms = 13 * h
        return (
            layers * (layer_matmul_parameters(self.model) + biases_and_norms)
            + ends * self.model.vocab_size * h
        )


# -- memory


def memory_bytes(setting: Setting, system: str, num_microbatches: int) -> float:
    """Most memory that any device needs at once: state, what waits for its backward pass, and what
    one pass needs.

    A waiting micro-batch: the input of every layer; on the last stage also that of the head's norm
    and product, and the softmax in fp32. Under way: all activations of one layer (arXiv 2205.05198,
    equation 2), or of the head the logits in half precision and the gradient of its weights.
    """
    model = setting.model
    b = setting.micro_batch
    act = activation_bytes(model, b)
    tp = setting.depth if system == "tensor" else 1
    stages = [range(model.num_blocks)] if system == "tensor" else setting.stages()
    logits = b * model.seq_length * model.vocab_size / tp
    scores = 5 * model.num_heads * model.seq_length / model.hidden_size
    layer = act / HALF * (10 + (24 + scores) / tp)
    most = 0.0
    for r, blocks in enumerate(stages):
        waiting = {"gpipe": num_microbatches, "inter-layer": 1, "tensor": 1}.get(
            system, min(setting.depth - r, num_microbatches)
        )
        layers = sum(0 < i <= model.num_layers for i in blocks)
        last = model.num_layers + 1 in blocks
        kept = layers * (act if setting.recompute else layer) + last * (2 * act + FULL * logits)
        head = HALF * (logits + model.vocab_size * model.hidden_size / tp) if last else 0.0
        tied = (0 in blocks) and last  # one device holds both ends, so one copy
        parameters = (setting.parameters(blocks) - tied * model.vocab_size * model.hidden_size) / tp
        most = max(
            most,
            STATE_BYTES.get(system, SYNCHRONOUS_STATE_BYTES) * parameters
            + waiting * kept
            + max(layer, head),
        )
    return most + SPARE_BYTES


def fits(setting: Setting, system: str, num_microbatches: int) -> bool:
    return (
        memory_bytes(setting, system, num_microbatches)
        <= DEVICES["v100-16gb"].memory_bytes - CONTEXT_BYTES
    )


def flush_interval(setting: Setting) -> int:
    """Micro-batches between two of GPipe's flushes: all of a batch, or the largest power of two
    that fits in memory.

    GPipe keeps every micro-batch until the flush. A larger batch accumulates gradients over several
    flushes.
    """
    interval = setting.num_microbatches
    while interval > 1 and not fits(setting, "gpipe", interval):
        interval //= 2
    return interval


# -- time


def stage_time(
    times: Sequence[BlockTime], blocks: Iterable[int], recomputed: Iterable[int] = ()
) -> BlockTime:
    """A stage of those blocks, of which `recomputed` run forward once more in the backward pass."""
    blocks = tuple(blocks)
    again = set(recomputed)
    return BlockTime(
        sum(times[i].forward for i in blocks),
        sum(times[i].backward + times[i].forward * (i in again) for i in blocks),
    )


def _stage_times(
    setting: Setting, times: Sequence[BlockTime], stages: Sequence[range]
) -> list[BlockTime]:
    again = range(1, setting.model.num_layers + 1) if setting.recompute else ()
    return [stage_time(times, blocks, again) for blocks in stages]


def pipeline_costs(setting: Setting, machine: Machine, system: str) -> Costs:
    """Return the costs of each stage. The last stages' reduction of tied weights crosses the network in every
    replica at once."""
    cluster = machine.cluster(setting.servers, machine.ring_gbit)
    device = cluster.device
    devices = setting.devices()
    model = setting.model
    stages = setting.stages()
    compute = _stage_times(
        setting, block_times(model, setting.micro_batch, device, kernels=MEGATRON_2020), stages
    )
    parameters = [setting.parameters(blocks) for blocks in stages]
    reduce = [
        cluster.all_reduce(HALF * n, group) for n, group in zip(parameters, devices, strict=True)
    ]
    if system == "2bw":
        switches = [2 * (setting.depth - 1 - r) for r in range(setting.depth)]
        traffic = [UPDATE_TRAFFIC_2BW + SWITCH_TRAFFIC * n for n in switches]
        # the code updates as soon as its gradients are reduced, which a plan of ours puts off: so
        # both are in REDUCE
        reduce = [
            t + device.memory_time(n * k)
            for t, n, k in zip(reduce, traffic, parameters, strict=True)
        ]
        return Costs([t.forward for t in compute], [t.backward for t in compute], reduce=reduce)
    ends = [devices[0][0], devices[-1][0]]
    tied = cluster.all_reduce(HALF * model.vocab_size * model.hidden_size, ends, setting.width)
    if system == "ours":
        update = [device.memory_time(OURS_TRAFFIC * n) for n in parameters]
    else:
        update = [device.memory_time(UPDATE_TRAFFIC * n) for n in parameters]
    reduce = [t + tied * (r in (0, setting.depth - 1)) for r, t in enumerate(reduce)]
    return Costs(
        [t.forward for t in compute],
        [t.backward for t in compute],
        update=update,
        reduce=reduce,
        tied=True,
    )


def _simulated(
    setting: Setting,
    machine: Machine,
    system: str,
    schedule: str,
    num_microbatches: int,
    *,
    update: bool = True,
) -> float:
    """Seconds of one batch of `num_microbatches`, in the steady state where the schedule has one;
    without `update`, of forward and backward alone.
    """
    ours = system == "ours"
    network = machine.cluster(
        setting.servers, machine.exchange_gbit, half_duplex=machine.half_duplex
    ).network(setting.devices(), activation_bytes(setting.model, setting.micro_batch))
    num_batches = 4 if schedule == "2bw" else 1
    theirs = make_schedule(ScheduleOptions(schedule, clip=system != "2bw"))
    plan = make_plan(
        replace(theirs, receive_ahead=1 if ours else 0),
        PipelineShape(setting.depth, num_microbatches),
        0,
        num_batches,
    )
    costs = pipeline_costs(setting, machine, system)
    if not update:
        costs = Costs(costs.forward, costs.backward)
    simulation = Simulation if ours else BlockingSimulation
    timeline = simulation(plan, replace(costs, network=network)).timeline()
    return timeline.step_time(num_microbatches) if num_batches > 1 else timeline.makespan


def _tensor_step(setting: Setting, machine: Machine) -> float:
    """Megatron's tensor parallelism over `depth` devices, the rest data parallel: a sum, as nothing
    overlaps but the launches of a layer's kernels with the layer's collectives, as in
    `StageCosts.block_time`."""
    model = setting.model
    tp = setting.depth
    cluster = machine.cluster(setting.servers, machine.ring_gbit)
    times = block_times(model, setting.micro_batch, cluster.device, tp, MEGATRON_2020)
    message = cluster.all_reduce(activation_bytes(model, setting.micro_batch), range(tp))
    layer = times[1]
    head = times[-1]
    # two collectives in each pass of a layer, forward once more; one of embedding and head
    forward = layer.forward - layer.forward_idle + max(layer.forward_idle, 2 * message)
    backward = layer.backward - layer.backward_idle + max(layer.backward_idle, 2 * message)
    passes = 1 + setting.recompute
    compute = model.num_layers * (passes * forward + backward) + sum(head[:2]) + 2 * message
    embedding = model.vocab_size * model.hidden_size
    parameters = (setting.parameters(range(model.num_blocks)) - embedding) / tp
    reduce = cluster.all_reduce(HALF * parameters, range(0, cluster.num_devices, tp), rings=8)
    update = cluster.device.memory_time(UPDATE_TRAFFIC * parameters)
    return setting.num_microbatches * compute + reduce + update


def step_time(setting: Setting, system: str, machine: Machine) -> float:
    """Seconds that `system` takes for one batch of `setting`."""
    m = setting.num_microbatches
    if system == "tensor":
        return _tensor_step(setting, machine)
    if system == "inter-layer":
        return m * _simulated(setting, machine, system, "naive", 1)
    if system == "gpipe":
        interval = flush_interval(setting)
        last = _simulated(setting, machine, system, "gpipe", interval)
        others = _simulated(setting, machine, system, "gpipe", interval, update=False)
        return (m // interval - 1) * others + last
    return _simulated(setting, machine, system, {"flush": "1f1b"}.get(system, "2bw"), m)


def throughput(setting: Setting, system: str, machine: Machine) -> float:
    """Sequences a second."""
    return setting.batch / step_time(setting, system, machine)

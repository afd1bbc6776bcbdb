"""The configuration: frozen dataclasses, filled from a TOML file and flags. The only reader of os.environ.

Resolution order: defaults, then the TOML file, then flags (`--section.key value`). Errors are reported all at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal

from hybridpar.errors import ConfigError, Problem
from hybridpar.reading import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


MAX_TOML = 1 << 20
"""Bytes of a TOML file."""


@dataclass(frozen=True)
class ModelConfig:
    kind: Literal["gpt", "bert"] = "gpt"
    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 0
    """Heads of keys and values (grouped-query attention); 0: as many as num_heads."""
    ffn_hidden_size: int = 0
    """0: 4 * hidden_size."""
    seq_length: int = 128
    vocab_size: int = 8192
    tie_embeddings: bool = True
    position: Literal["learned", "rotary"] = "learned"
    rotary_base: float = 10000.0
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: float = 0.0
    """Added to the variance before its root; 0: 1e-5 for layer_norm, 1e-6 for rms_norm."""
    norm_position: Literal["auto", "pre", "post"] = "auto"
    """What is normalised: a sublayer's input, or the sum it leaves; auto: as in the papers, gpt pre, bert post."""
    activation: Literal["gelu", "gelu_exact", "swiglu"] = "gelu"
    """gelu: the tanh form; gelu_exact: by the error function, as published BERT weights have it."""
    bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    label_smoothing: float = 0.0
    logits_chunk: int = 0
    """Tokens whose logits exist at a time: computed twice, which takes time and saves memory; 0: all, computed once."""
    sentence_head: Literal["nsp", "sop", "none"] = "sop"
    """BERT only: next-sentence prediction, sentence-order prediction, or neither."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def post_norm(self) -> bool:
        return self.norm_position == "post" or (self.norm_position == "auto" and self.kind == "bert")

    @property
    def norm_epsilon(self) -> float:
        return self.norm_eps or {"layer_norm": 1e-5, "rms_norm": 1e-6}[self.norm]

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def num_blocks(self) -> int:
        """Units that a split into stages can separate: the embedding, each layer, the head."""
        return self.num_layers + 2


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = 1
    pp: int = 1
    dp: int = 0
    """0: whatever fills the job, number of processes / (tp * pp)."""
    zero: Literal[0, 1] = 0
    """1: optimizer state (and the fp32 master weights of bf16 and fp16) is split over the replicas, as in ZeRO-1."""


@dataclass(frozen=True)
class PipelineConfig:
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "2bw", "pipedream"] = "1f1b"
    num_microbatches: int = 4
    """Micro-batches a batch for each data-parallel replica (gradient accumulation when pp = 1)."""
    split: tuple[int, ...] = ()
    """Blocks of each stage, embedding and head included; empty: balanced by cost."""
    chunks: int = 0
    """interleaved: stages on each rank, chunk c of rank r being stage c * pp + r; 0: 2. All others have one."""
    recompute: str = "none"
    """Layers whose activations are recomputed in the backward pass: 'none', 'all', or a list such as '0,2-5'; or
    'stage' (every stage keeps nothing but its input), 'stage:0,2-3' (those stages)."""
    warmup: Literal["depth", "latency", "bandwidth"] = "depth"
    """Forwards that stage r runs ahead: p-1-r; 2(p-1-r), which hides transfers that take half a forward and backward;
    2bw alone: 3(p-1-r), which hides those that take a whole one."""
    early_switch: int | Literal["off", "auto"] = "off"
    """2bw: L, where only the first pp-1+L micro-batches of a batch use the older weights; 'off': all of them do, as in
    the paper; 'auto': the smallest L that costs no time, measured before the first step."""
    gradient_buffers: Literal[0, 1, 2] = 0
    """2bw: 2 lets a batch accumulate while the one before is reduced and applied; 1 saves the memory and waits.
    0: what the schedule can use."""
    sync_steps: int = 0
    """2bw, pipedream: the first steps run as 1f1b, without stale gradients."""

    @property
    def num_chunks(self) -> int:
        """Stages of the model on each rank."""
        return self.chunks or 2 if self.schedule == "interleaved" else 1


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "sgd", "lamb", "muon"] = "adamw"
    lr: float = 3e-4
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: int = 0
    """Steps until min_lr is reached; 0: train.num_steps."""
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    """sgd and muon."""
    nesterov: bool = False
    """sgd and muon."""
    staleness: Literal["none", "extrapolation", "prediction", "nesterov", "lr_rescale"] = "none"
    """What makes up for gradients that are a step old (schedules 2bw and pipedream)."""
    staleness_steps: int = 0
    """lr_rescale: steps over which the learning rate returns to its full value; 0: a tenth of train.num_steps."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    loss_scale: float = 65536.0
    """fp16 only: initial dynamic loss scale."""


@dataclass(frozen=True)
class TrainConfig:
    num_steps: int = 100
    micro_batch_size: int = 4
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    seed: int = 1234
    threads: int = 0
    """CPU threads of each process; 0: cores / processes on this machine, at least 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    eval_interval: int = 0
    """Steps between evaluations (also one at the start and the end); 0: none."""
    eval_batches: int = 4
    save_interval: int = 0
    """Steps between checkpoints (also one at the end); 0: only at the end."""
    log_interval: int = 1
    measure_memory: bool = False
    """Say at the end how the allocator's peak compares with the predicted one; slows the first batches down on CPUs."""
    keep_memory: bool = True
    """On CPUs with glibc: freed memory is kept for what comes next, not given back to the system and taken anew."""
    timeout_s: float = 60.0
    """Longest wait for another rank before the job is given up."""
    start_from: str = ""
    """A run folder or a checkpoint, of any grid: its weights are what a new run starts from; empty: random ones."""


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written, and which stay; when they are made is train.save_interval's."""

    keep: int = 2
    """The newest ones."""
    keep_best: int = 0
    """And those with the lowest validation loss, of steps that were evaluated and saved."""
    asynchronous: bool = True
    """Training goes on while a copy of its state is written: host memory for that copy is kept. The last save of a run
    has no copy."""
    read_back: bool = False
    """Every file is read again, from the disk where the system can be told so, and compared with its checksums before
    the checkpoint is published."""


@dataclass(frozen=True)
class FaultsConfig:
    """What becomes of a job whose ranks `train --ranks N` has started, where one of them fails."""

    restarts: int = 3
    """How often it starts again from the last good checkpoint before a newer one is there; 0: never."""
    timeout_s: float = 60.0
    """A rank hangs that for so long neither goes on nor waits for another; a link is lost where for so long all wait.
    In steps and evaluations: at least a few times the longest action."""
    start_timeout_s: float = 600.0
    """The same where more is done at a time: during set-up, loading and the first step, which may compile, between two
    stretches of steps, and at the end."""
    save_timeout_s: float = 1800.0
    """The same while a checkpoint is saved, also beside training: a rank hangs that for so long has written nothing."""
    min_ranks: int = 0
    """Fewest ranks to go on with where one does not come back: there are fewer replicas then, and more micro-batches
    for each of them; 0: as many as before."""


@dataclass(frozen=True)
class AnomaliesConfig:
    """What counts as an anomaly of a step, and what all ranks then do together.

    skip: the update is not made. roll_back: the newest checkpoint is loaded, and training goes on behind the offending
    batch as if the batches since that checkpoint had not been in the data; after diverging replicas, on the same ones.
    stop: the run ends with an error.
    """

    on_non_finite: Literal["auto", "skip", "roll_back", "stop"] = "auto"
    """A loss or gradient norm that is not finite. auto: skip; stop where updates do not wait for the norm (pipedream
    without clipping). An fp16 overflow that a smaller loss scale may cure is none: it is skipped, as ever."""
    loss_spike: float = 0.0
    """A loss so many standard deviations above the median of the last ones; 0: not looked for. The deviation is a
    robust one, 1.48 times the median distance from the median."""
    on_loss_spike: Literal["skip", "roll_back", "stop"] = "skip"
    norm_spike: float = 0.0
    """The same of the gradient norm, before clipping."""
    on_norm_spike: Literal["skip", "roll_back", "stop"] = "skip"
    window: int = 64
    """How many of the last steps' losses and norms those are; anomalies are not among them."""
    audit_interval: int = 0
    """Steps between audits that replicas hold the same weights, bit for bit, also before each checkpoint; 0: none. The
    pipeline drains for them."""
    on_divergence: Literal["roll_back", "stop"] = "stop"
    """Replicas that differ."""
    limit: int = 10
    """So many anomalies within `window` steps end the run, whatever is to be done about each; 0: any number may be."""

    @property
    def rolls_back(self) -> bool:
        """Whether anything here may go back to a checkpoint."""
        return "roll_back" in (
            self.on_non_finite, self.loss_spike and self.on_loss_spike, self.norm_spike and self.on_norm_spike,
            self.audit_interval and self.on_divergence)


@dataclass(frozen=True)
class DataConfig:
    corpus: tuple[str, ...] = ("stdlib",)
    """Text files, folders, .jsonl files, prefixes of .bin/.idx pairs, or 'stdlib' (the Python library's own source)."""
    weights: tuple[float, ...] = ()
    """Sampling weight of each corpus; empty: all in one."""
    tokenizer: str = ""
    """A tokenizer.json; empty: a byte-level BPE of model.vocab_size entries is trained on the corpus."""
    split: float = 0.02
    """Share of the documents held out for validation."""
    cache: str = ""
    """Where prepared corpora are kept; empty: data/ in run.dir."""


@dataclass(frozen=True)
class KernelsConfig:
    """Backend of each op: 'auto' takes the fastest that can run here, any other name must be able to."""

    layer_norm: str = "auto"
    rms_norm: str = "auto"
    add_norm: str = "auto"
    bias_dropout_add: str = "auto"
    gelu: str = "auto"
    swiglu: str = "auto"
    rotary: str = "auto"
    attention: str = "auto"
    cross_entropy: str = "auto"
    dropout: str = "auto"
    embedding: str = "auto"
    optimizer: str = "auto"


AUTO = KernelsConfig()


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    dir: str = "runs"

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name


@dataclass(frozen=True)
class PlanConfig:
    """What `hybridpar plan` predicts of this configuration; a run says at its end how that compares."""

    step_ms: float = 0.0
    """Time of a step; 0: nothing is predicted."""
    memory_mib: tuple[float, ...] = ()
    """Peak memory of a process of each stage."""


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    run: RunConfig = field(default_factory=RunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    anomalies: AnomaliesConfig = field(default_factory=AnomaliesConfig)

    @property
    def global_batch_size(self) -> int:
        """Samples an optimizer step; parallel.dp must be resolved."""
        assert self.parallel.dp > 0, "parallel.dp is not resolved"
        return self.train.micro_batch_size * self.pipeline.num_microbatches * self.parallel.dp

    @property
    def norms_first(self) -> bool:
        """Whether an update waits for the norm of the whole gradient.

        pipedream's stages update at different times; without clipping none needs to wait for the others.
        """
        return self.pipeline.schedule != "pipedream" or self.optim.clip_grad > 0 or self.train.dtype == "fp16"

    @property
    def saves_beside_training(self) -> bool:
        """Whether a copy of the training state will be written while training goes on."""
        return self.checkpoint.asynchronous and 0 < self.train.save_interval < self.train.num_steps

    @property
    def batch_tokens(self) -> int:
        return self.global_batch_size * self.model.seq_length


def triton_is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Launch:
    """What the launcher (torchrun) says of this process, and what the process was called with.

    launched: there is a launcher. loopback: it has started all processes on this machine, and nobody has named a
    network interface for them (GLOO_SOCKET_IFNAME).
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool = False
    loopback: bool = False
    args: tuple[str, ...] = ()
    own_store_port: int = 0
    """Where all processes are on this machine and the launcher leaves them to make their store: its port."""

    @staticmethod
    def from_environment(args: Sequence[str] = ()) -> Launch:
        def get(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        world = get("WORLD_SIZE", 1)
        local = get("LOCAL_WORLD_SIZE", world)
        here = world == get("LOCAL_WORLD_SIZE", 0) and "GLOO_SOCKET_IFNAME" not in os.environ
        theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        near = local == world and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
        return Launch(get("RANK", 0), get("LOCAL_RANK", 0), world, local, "RANK" in os.environ, here, tuple(args),
                      get("MASTER_PORT", 0) if near and not theirs else 0)


def load_toml(path: str | Path) -> Config:
    """Reads a TOML file over the defaults.

    Raises: ConfigError naming every unknown section or key (with the nearest known one) and every wrong type.
    """
    path = Path(path)
    try:
        document = tomllib.loads(read_text(path, MAX_TOML))
    except OSError as error:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
        problem = Problem("config", str(path), f"cannot be read ({error.strerror})", near[0] if near else "")
        raise ConfigError(problem) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem("config", str(path), f"is not valid TOML: {error}")) from None
    return from_mapping(document)


def from_mapping(document: Mapping[str, Any], base: Config | None = None) -> Config:
    """`base` (default: the defaults) with the sections and keys of `document` put over it. Raises: ConfigError."""
    base = base or Config()
    problems: list[Problem] = []
    sections = {f.name for f in dataclasses.fields(Config)}
    changed: dict[str, Any] = {}
    for name, table in document.items():
        if name not in sections:
            problems.append(Problem(name, "...", "is not a section of the configuration", _nearest(name, sections)))
        elif not isinstance(table, Mapping):
            problems.append(Problem(name, table, "is a section and needs keys", f"[{name}]"))
        else:
            changed[name] = _read_section(name, getattr(base, name), table, problems)
    if problems:
        raise ConfigError(*problems)
    return dataclasses.replace(base, **changed)


def to_toml(config: Config) -> str:
    """The configuration as TOML; `load_toml` reads back an equal one."""
    import tomli_w  # here, so that operators and benchmarks run without it

    return tomli_w.dumps(to_mapping(config))


def to_mapping(config: Config) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars."""
    plain = dataclasses.asdict(config)
    return {s: {k: list(v) if isinstance(v, tuple) else v for k, v in t.items()} for s, t in plain.items()}


def _nearest(name: str, known: Sequence[str] | set[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return near[0] if near else "one of " + ", ".join(sorted(known))


@functools.cache
def _hints_of(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _read_section(name: str, base: Any, table: Mapping[str, Any], problems: list[Problem]) -> Any:
    section: Any = type(base)
    hints = _hints_of(section)
    known = {f.name for f in dataclasses.fields(base)}
    values = {}
    for key, value in table.items():
        if key not in known:
            problems.append(Problem(f"{name}.{key}", value, "is not a key of the configuration", _nearest(key, known)))
            continue
        try:
            values[key] = _convert(value, hints[key])
        except ValueError as error:
            problems.append(Problem(f"{name}.{key}", value, str(error), repr(getattr(base, key))))
    return dataclasses.replace(base, **values)


def _convert(value: Any, kind: Any) -> Any:
    """`value` as the annotated type. Raises: ValueError with the rule it breaks."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        options = typing.get_args(kind)
        if value not in options or isinstance(value, bool):
            raise ValueError(f"must be one of {', '.join(map(str, options))}")
        return value
    if origin is tuple:
        inner = typing.get_args(kind)
        items = [value] if isinstance(value, str) and inner[0] is str else value
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise ValueError("must be a list")
        if inner[-1] is not Ellipsis and len(items) != len(inner):
            raise ValueError(f"must have {len(inner)} entries")
        return tuple(_convert(v, inner[0]) for v in items)
    if origin in (typing.Union, UnionType):
        return _convert_to_any(value, typing.get_args(kind))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max:
            raise ValueError("is too large")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"must be of type {kind.__name__}")
    return value


def _convert_to_any(value: Any, kinds: Sequence[Any]) -> Any:
    rules = []
    for kind in kinds:
        try:
            return _convert(value, kind)
        except ValueError as error:
            rules.append(str(error))
    raise ValueError(", or ".join(rules))

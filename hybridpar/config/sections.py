"""The sections of the configuration, with their defaults, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hybridpar.config.faults import AnomaliesConfig, FaultsConfig

STOP_SIGNALS = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "XCPU")
"""What train.stop_signals may name: other signals cannot be caught, or mean something else."""


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
    max_positions: int = 0
    """Rows of the learned position table, of which the first seq_length are used; of a rotary model only what export
    writes down. 0: seq_length."""
    vocab_size: int = 8192
    tie_embeddings: bool = True
    position: Literal["learned", "rotary"] = "learned"
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    """Share of a head's features, the first, that rotary positions turn."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: float = 0.0
    """Added to the variance before its root; 0: 1e-5 for layer_norm, 1e-6 for rms_norm."""
    norm_position: Literal["auto", "pre", "post"] = "auto"
    """What is normalised: a sublayer's input, or the sum it leaves; auto: as in the papers, gpt pre, bert post."""
    parallel_residual: bool = False
    """Attention and MLP of a layer both read its input, as in GPT-NeoX; otherwise the MLP reads what attention left."""
    activation: Literal["gelu", "gelu_exact", "swiglu"] = "gelu"
    """gelu: the tanh form; gelu_exact: by the error function, as published BERT weights have it."""
    bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    label_smoothing: float = 0.0
    """Of the training loss; evaluations have none."""
    logits_chunk: int = 0
    """Tokens whose logits exist at a time: computed twice, which takes time and saves memory; 0: all, computed once."""
    sentence_head: Literal["nsp", "sop", "none"] = "sop"
    """BERT only: next-sentence prediction, sentence-order prediction, or neither."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def num_positions(self) -> int:
        """Rows of the learned position table; of a rotary model what export writes down."""
        return max(self.max_positions, self.seq_length)

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
    split_backward: bool = False
    """A backward runs in two parts: the gradient of a stage's input leaves for the stage before while those of its
    weights are still computed. Losses and weights stay the same to the bit; each part keeps its inputs for longer."""
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
    decay: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """wsd: constant but for the last steps, so a run can be made longer (train.num_steps) from before these."""
    decay_steps: int = 0
    """Step at which min_lr is reached, 0: train.num_steps; wsd: how many steps the decay at the end takes, 0: a fifth
    of train.num_steps."""
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
    """auto: GPUs, where each process of a machine can have its own."""
    share_gpus: bool = False
    """Processes may share GPUs and talk over Gloo, through host memory: slow, for trying out grids on few GPUs."""
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
    cuda_graphs: bool = True
    """On a GPU: micro-batches are recorded and replayed, for GPTs on one stage, without tensor parallelism; others run
    kernel by kernel."""
    timeout_s: float = 60.0
    """Longest wait for another rank before the job is given up."""
    stop_signals: tuple[str, ...] = ("INT", "TERM", "HUP")
    """Signals at which the run saves and leaves; INT is Ctrl-C, HUP a terminal that is closed (nohup: ignored). Batch
    systems may send others: USR1."""
    start_from: str = ""
    """A run folder or a checkpoint, of any grid: its weights are what a new run starts from; empty: random ones."""
    continue_with: tuple[str, ...] = ()
    """Settings that may differ from those that this run's checkpoints were made with, such as "data.corpus",
    "train.micro_batch_size" or "model.dropout": weights, optimizer and step stay, and the data go on where they were,
    or begin anew where they are others."""


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
    max_failed_saves: int = 3
    """So many saves in a row that fail end the run; after fewer it trains on, and the next one tries again."""
    read_back: bool = False
    """Every file is read again, from the disk where the system can be told so, and compared with its checksums before
    the checkpoint is published."""


@dataclass(frozen=True)
class DataConfig:
    corpus: tuple[str, ...] = ("stdlib",)
    """Files of text, JSON lines, JSON, CSV, parquet or Arrow, folders of them, Hugging Face datasets, prefixes of
    .bin/.idx pairs, or 'stdlib' (the Python library's own source)."""
    weights: tuple[float, ...] = ()
    """Sampling weight of each corpus; empty: all in one."""
    tokenizer: str = ""
    """A tokenizer.json; empty: a byte-level BPE of model.vocab_size entries is trained on the corpus."""
    text_key: str = "text"
    """The field or column that holds a document's text, in files that have those."""
    split: float = 0.02
    """Share of the documents held out for validation, where there is no valid_corpus."""
    valid_corpus: tuple[str, ...] = ()
    """What validation is on, together; the tokenizer is that of `corpus`. Empty: what `split` holds out."""
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
    cores_taken: float = 0.0
    """Share of the cores that other programs took while the times it rests on were measured."""


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
    def cache_folder(self) -> Path:
        """Where prepared corpora are kept, and what was measured of machines."""
        return Path(self.data.cache or Path(self.run.dir) / "data")

    @property
    def batch_tokens(self) -> int:
        return self.global_batch_size * self.model.seq_length

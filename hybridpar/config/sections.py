"""All sections of the configuration together, and those that have no file of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from hybridpar.config.compression import CompressionConfig
from hybridpar.config.data import DataConfig
from hybridpar.config.faults import AnomaliesConfig, FaultsConfig
from hybridpar.config.memory import MemoryConfig
from hybridpar.config.model import ModelConfig
from hybridpar.config.outer import OuterConfig
from hybridpar.config.parallel import ParallelConfig
from hybridpar.config.pipeline import PipelineConfig
from hybridpar.config.spec import ModelSpec
from hybridpar.config.train import TrainConfig
from hybridpar.config.typed import AtLeastOne, Count, NotNegative, Positive, Within


@dataclass(frozen=True)
class ParameterGroup:
    """An entry of optim.groups: settings for the parameters whose global names match its
    pattern."""

    pattern: str
    """Pattern of global names, such as "blocks.0.*" or "*.bias": * matches any characters (dots
    too), ? one character, [ab] one of these."""
    lr: NotNegative = 1.0
    """Factor of the learning rate."""
    weight_decay: NotNegative = 1.0
    """Factor of the weight decay, which never applies to biases and norms."""
    frozen: bool = False
    """Whether the parameters keep their values."""


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "sgd", "lamb", "muon", "own"] = "adamw"
    """Optimizer. own: the custom rule that `spec` names."""
    spec: str = ""
    """own: the class of the rule, as "module:class", a subclass of hybridpar.UpdateRule."""
    lr: NotNegative = 3e-4
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Count = 0
    """Updates over which the learning rate rises to lr. Schedules count updates: a step whose
    update is skipped (fp16 overflow, anomaly) does not advance the warm-up or the decay."""
    decay: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning-rate decay. wsd (warmup-stable-decay): constant until the last
    steps, so a run can be extended (train.num_steps) from before these."""
    decay_steps: Count = 0
    """Update at which min_lr is reached; 0: train.num_steps. With wsd: number of updates of the
    final decay; 0: a fifth of train.num_steps."""
    lr_points: Annotated[tuple[tuple[int, float], ...], Within(0)] = ()
    """Learning rate by update, instead of the five settings above: [[0, 0.0], [100, 1e-3],
    [1000, 1e-4]]. Linear between two points, constant before the first and after the last. The
    first update is number 0."""
    groups: tuple[ParameterGroup, ...] = ()
    """[[optim.groups]]: parameters with a different learning rate or weight decay, or frozen.
    Each entry has a `pattern` of global names, the factors `lr` and `weight_decay` (1.0), and
    `frozen` (false). The first pattern that matches a parameter counts."""
    weight_decay: NotNegative = 0.01
    """Weight decay, except for biases and norms. Decoupled; with sgd it is added to the
    gradient."""
    betas: Annotated[tuple[float, float], Within(0, below=1)] = (0.9, 0.999)
    """Decay rates of the averages of gradients and squared gradients: adamw, lamb, and the
    parameters that muon updates by adamw."""
    eps: Positive = 1e-8
    """Added to the denominator: adamw, lamb, and the parameters that muon updates by adamw."""
    momentum: NotNegative = 0.9
    """Momentum of sgd and muon."""
    nesterov: bool = False
    """Use Nesterov momentum, with sgd and muon."""
    staleness: Literal["none", "extrapolation", "prediction", "nesterov", "lr_rescale"] = "none"
    """Correction for gradients that are a step old (schedules 2bw and pipedream)."""
    staleness_steps: Count = 0
    """lr_rescale: steps over which the learning rate returns to its full value. 0: a tenth of
    train.num_steps."""
    clip_grad: NotNegative = 1.0
    """Largest global gradient norm. 0: no clipping."""
    loss_scale: Positive = 65536.0
    """fp16 only: initial dynamic loss scale."""

    @property
    def highest_lr(self) -> float:
        """The highest rate of the schedule."""
        return max((rate for _, rate in self.lr_points), default=self.lr)


@dataclass(frozen=True)
class CheckpointConfig:
    """Writing and keeping of checkpoints; train.save_interval says when they are made."""

    keep: AtLeastOne = 2
    """Number of newest checkpoints to keep."""
    keep_best: Count = 0
    """Number of checkpoints to keep besides these: the ones with the lowest validation losses."""
    best_by: str = ""
    """Name of the validation set whose loss keep_best compares, if sets have names. Empty: the
    first one."""
    asynchronous: bool = True
    """Write a copy of the state, in host memory, while training continues. The last save of a
    run makes no copy."""
    max_failed_saves: AtLeastOne = 3
    """Number of failed saves in a row that ends the run. After fewer, training continues and the
    next save tries again."""
    read_back: bool = False
    """Read every file again, from the disk if the system allows it, and compare it with its
    checksums before the checkpoint is published."""


@dataclass(frozen=True)
class KernelsConfig:
    """Backend of each operation. 'auto' uses the fastest that can run here; any other name must
    be able to run."""

    layer_norm: str = "auto"
    """LayerNorm."""
    rms_norm: str = "auto"
    """RMSNorm."""
    add_norm: str = "auto"
    """Addition of bias, residual and input, and the norm of the result."""
    bias_dropout_add: str = "auto"
    """Bias, dropout and residual in one pass."""
    gelu: str = "auto"
    """GELU, with the bias before it."""
    swiglu: str = "auto"
    """SwiGLU, with the bias before it."""
    rotary: str = "auto"
    """Rotary position embeddings."""
    split_qkv: str = "auto"
    """Split of queries, keys and values into heads."""
    attention: str = "auto"
    """Attention."""
    cross_entropy: str = "auto"
    """Cross-entropy, also vocabulary-parallel."""
    dropout: str = "auto"
    """Dropout."""
    embedding: str = "auto"
    """Embedding lookup and its gradient."""
    quantize: str = "auto"
    """Quantization of messages (int8 and int4)."""
    largest: str = "auto"
    """Selection of a tensor's largest elements, for compressed messages and gradients."""
    optimizer: str = "auto"
    """Optimizer updates."""
    sparse: str = "auto"
    """Packing of the elements above a threshold into messages."""


AUTO = KernelsConfig()


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    """Name of the run: its folder in run.dir."""
    dir: str = "runs"
    """Folder of all runs."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Services that receive the numbers of metrics.jsonl; each is set up by its own environment
    variables."""
    project: str = "hybridpar"
    """The run's project (wandb) or experiment (mlflow)."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name


@dataclass(frozen=True)
class PlanConfig:
    """Predictions of `hybridpar plan` for this configuration, which a run compares with its
    measurements at its end."""

    step_ms: NotNegative = 0.0
    """Predicted time of a step in milliseconds. 0: no prediction."""
    memory_mib: tuple[float, ...] = ()
    """Predicted peak memory of a process, for each stage."""
    cores_taken: NotNegative = 0.0
    """Share of the cores that other programs used while the machine was measured."""


@dataclass(frozen=True)
class Config:
    """All settings of a run: one field per section of a TOML file."""

    model: ModelSpec = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    run: RunConfig = field(default_factory=RunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    anomalies: AnomaliesConfig = field(default_factory=AnomaliesConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)

    @property
    def global_batch_size(self) -> int:
        """Samples an optimizer step, of all sites; parallel.dp must be resolved."""
        assert self.parallel.dp > 0, "parallel.dp is not resolved"
        return self.train.micro_batch_size * self.pipeline.num_microbatches * self.parallel.replicas

    @property
    def norms_first(self) -> bool:
        """Whether an update waits for the norm of the whole gradient.

        pipedream's stages update at different times; without clipping none needs to wait for the
        others.
        """
        return (
            self.pipeline.schedule != "pipedream"
            or self.optim.clip_grad > 0
            or self.train.dtype == "fp16"
        )

    @property
    def feeds_back(self) -> bool:
        """Whether the sum of a batch's gradients depends on what sums before it have left."""
        return self.compression.gradients != "none"

    @property
    def state_moves(self) -> bool:
        """Whether some of what replicas share is whole of a part of the blocks at a time: with
        ZeRO-3 weights, and from ZeRO-2 on gradients, if these are not compressed."""
        return self.parallel.zero > 1 + self.feeds_back and self.parallel.dp > 1

    @property
    def replicas_differ(self) -> bool:
        """Whether every replica has state of its own to save."""
        return self.parallel.zero > 0 or (self.compression.replicas_differ and self.parallel.dp > 1)

    @property
    def longest_wait_s(self) -> float:
        """Time-out of what ranks do together: an outage of a link is waited for."""
        return max(self.train.timeout_s, self.faults.patience_s)

    @property
    def saves_beside_training(self) -> bool:
        """Whether a copy of the training state will be written while training goes on."""
        return (
            self.checkpoint.asynchronous
            and not self.memory.budget
            and (0 < self.train.save_interval < self.train.num_steps)
        )

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers are alike and trained alike, so that one shows what each takes."""
        has_frozen = any(group.frozen for group in self.optim.groups)
        return bool(self.model.layers_field) and not has_frozen

    @property
    def cache_folder(self) -> Path:
        """Folder of prepared corpora and of profiles of machines."""
        return Path(self.data.cache or Path(self.run.dir) / "data")

    @property
    def batch_tokens(self) -> int:
        return self.global_batch_size * self.model.tokens_per_sample

    @property
    def transformer(self) -> ModelConfig:
        """The model, if it is a GPT or a BERT.

        Raises: ConfigError if it is not.
        """
        return self.model.as_transformer()

"""All sections of the configuration together, and those that have no file of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hybridpar.config.sections.compression import CompressionConfig
from hybridpar.config.sections.data import DataConfig
from hybridpar.config.sections.faults import AnomaliesConfig, FaultsConfig
from hybridpar.config.sections.memory import MemoryConfig
from hybridpar.config.sections.model import ModelConfig
from hybridpar.config.sections.optim import OptimConfig
from hybridpar.config.sections.outer import OuterConfig
from hybridpar.config.sections.parallel import ParallelConfig
from hybridpar.config.sections.pipeline import PipelineConfig
from hybridpar.config.sections.train import TrainConfig
from hybridpar.config.spec import ModelSpec
from hybridpar.config.typed import AtLeastOne, Count, NotNegative


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
    family: str = ""
    """Family of transformers that an export writes, such as "phi3", if it has the model's
    mathematics; an import sets it. Empty, or if the model was changed: the first family that has."""


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
    geglu: str = "auto"
    """GeGLU, with the bias before it."""
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
        return self.parallel.zero > 1 + self.feeds_back and self.parallel.dp_cp > 1

    @property
    def replicas_differ(self) -> bool:
        """Whether every replica has state of its own to save."""
        return self.parallel.zero > 0 or (
            self.compression.replicas_differ and self.parallel.dp_cp > 1
        )

    @property
    def longest_wait_s(self) -> float:
        """Time-out of what ranks do together: an outage of a link is waited for."""
        return max(self.train.timeout_s, self.faults.patience_s)

    @property
    def saves_beside_training(self) -> bool:
        """Whether a copy of the training state will be written while training continues."""
        return (
            self.checkpoint.asynchronous
            and not self.memory.is_limited
            and (0 < self.train.save_interval < self.train.num_steps)
        )

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers are alike and trained alike, so that one shows what each takes."""
        has_frozen = any(group.frozen for group in self.optim.groups)
        alike = self.model.layers_field and self.model.layers_are_alike
        return bool(alike) and not has_frozen

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

"""The configuration: frozen dataclasses, filled from a TOML file and flags.

Resolution order: defaults, then the TOML file, then flags (`--section.key value`). Errors are
reported all at once.
"""

from hybridpar.config.all_sections import (
    AUTO,
    CheckpointConfig,
    Config,
    KernelsConfig,
    PlanConfig,
    RunConfig,
)
from hybridpar.config.capabilities import RoutedExperts
from hybridpar.config.environment import (
    AGENT,
    JOB,
    Launch,
    become_rank,
    pass_on_signals,
    passing_on_signals,
    require_gpu_queues,
    triton_is_interpreted,
    use_all_gpu_queues,
)
from hybridpar.config.keywords import from_keywords
from hybridpar.config.sections.compression import UNCOMPRESSED, CompressionConfig
from hybridpar.config.sections.data import DataConfig
from hybridpar.config.sections.faults import AnomaliesConfig, FaultsConfig
from hybridpar.config.sections.memory import MemoryConfig
from hybridpar.config.sections.model import ModelConfig
from hybridpar.config.sections.optim import OptimConfig, ParameterGroup
from hybridpar.config.sections.outer import OuterConfig
from hybridpar.config.sections.parallel import ParallelConfig
from hybridpar.config.sections.pipeline import FOUND, PipelineConfig, rank_of_stage
from hybridpar.config.sections.train import STOP_SIGNALS, TrainConfig
from hybridpar.config.spec import (
    ModelSpec,
    UnloadedModel,
    import_spec,
    known_spec,
    message_shape,
    spec_error,
    spec_folder,
    spec_name,
)
from hybridpar.config.toml import (
    MAX_TOML,
    MODEL_FOLDER,
    as_typed,
    from_mapping,
    import_beside_user,
    load_toml,
    read_run_config,
    to_mapping,
    to_short_toml,
    to_toml,
    unloaded_code,
)
from hybridpar.config.typed import FINITE, Size, Whole, Within, broken_rules, from_plain, span
from hybridpar.config.unused import without_unused
from hybridpar.config.update_rule import UpdateRule, import_rule

__all__ = [
    "AGENT",
    "AUTO",
    "FINITE",
    "FOUND",
    "JOB",
    "MAX_TOML",
    "MODEL_FOLDER",
    "STOP_SIGNALS",
    "UNCOMPRESSED",
    "AnomaliesConfig",
    "CheckpointConfig",
    "CompressionConfig",
    "Config",
    "DataConfig",
    "FaultsConfig",
    "KernelsConfig",
    "Launch",
    "MemoryConfig",
    "ModelConfig",
    "ModelSpec",
    "OptimConfig",
    "OuterConfig",
    "ParallelConfig",
    "ParameterGroup",
    "PipelineConfig",
    "PlanConfig",
    "RoutedExperts",
    "RunConfig",
    "Size",
    "TrainConfig",
    "UnloadedModel",
    "UpdateRule",
    "Whole",
    "Within",
    "as_typed",
    "become_rank",
    "broken_rules",
    "from_keywords",
    "from_mapping",
    "from_plain",
    "import_beside_user",
    "import_rule",
    "import_spec",
    "known_spec",
    "load_toml",
    "message_shape",
    "pass_on_signals",
    "passing_on_signals",
    "rank_of_stage",
    "read_run_config",
    "require_gpu_queues",
    "span",
    "spec_error",
    "spec_folder",
    "spec_name",
    "to_mapping",
    "to_short_toml",
    "to_toml",
    "triton_is_interpreted",
    "unloaded_code",
    "use_all_gpu_queues",
    "without_unused",
]

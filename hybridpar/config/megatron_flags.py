"""Flags of Megatron-LM, and what stands for each here, for whoever writes them out of habit.

docs/coming_from.md says the same in more words.
"""

from __future__ import annotations

ALWAYS = "always"
"""Answer to a flag whose behaviour is always on."""
ABSENT = "absent"
"""There is no such thing; the page says what to do instead."""
TORCHRUN = "torchrun"
"""A flag of torchrun, which may start the ranks here, too."""
PAGE = "docs/coming_from.md"

MEGATRON: dict[str, str] = {
    # model
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_heads",
    "group_query_attention": "model.num_kv_heads",
    "num_query_groups": "model.num_kv_heads",
    "seq_length": "model.seq_length",
    "max_position_embeddings": "model.max_positions",
    "position_embedding_type": "model.position",
    "no_position_embedding": 'model.position = "rotary"',
    "rope_type": 'model.position = "rotary"',
    "rotary_base": "model.rotary_base",
    "rotary_percent": "model.rotary_fraction",
    "normalization": "model.norm",
    "swiglu": 'model.activation = "swiglu"',
    "disable_bias_linear": "model.bias = false",
    "untie_embeddings_and_output_weights": "model.tie_embeddings = false",
    "hidden_dropout": "model.dropout",
    "attention_dropout": "model.attention_dropout",
    "init_method_std": "model.init_std",
    "vocab_size": "model.vocab_size",
    "spec": "model.spec",
    "attention_backend": "kernels.attention",
    "use_flash_attn": "kernels.attention",
    "attention_softmax_in_fp32": ALWAYS,
    "use_mcore_models": ALWAYS,
    "transformer_impl": ALWAYS,
    "no_create_attention_mask_in_dataloader": ALWAYS,
    "cross_entropy_loss_fusion": ALWAYS,
    "calculate_per_token_loss": ALWAYS,
    "kv_channels": "model.head_dim",
    "apply_layernorm_1p": "model.norm_zero_centered",
    "qk_layernorm": 'model.qk_norm = "head"',
    "add_qkv_bias": 'model.qkv_bias = "on"',
    "use_rope_scaling": 'model.rotary_scaling = "llama3"',
    "rope_scaling_factor": "model.rotary_factor",
    "rotary_seq_len_interpolation_factor": "model.rotary_factor",
    "no_rope_freq": "model.rotary_pattern",
    "no_masked_softmax_fusion": 'kernels.attention = "torch"',
    "no_rope_fusion": 'kernels.rotary = "torch"',
    "no_bias_gelu_fusion": 'kernels.gelu = "torch"',
    "no_bias_dropout_fusion": 'kernels.bias_dropout_add = "torch"',
    "encoder_num_layers": ABSENT,
    "decoder_num_layers": ABSENT,
    "encoder_seq_length": ABSENT,
    "decoder_seq_length": ABSENT,
    "quick_geglu": ABSENT,
    "glu_linear_offset": ABSENT,
    "activation_func_clamp_value": ABSENT,
    "softmax_type": ABSENT,
    "window_size": "model.window",
    "window_attn_skip_freq": "model.window_pattern",
    "hybrid_layer_pattern": ABSENT,
    "enable_gpt_oss": ABSENT,
    "export_force_local_attention": ABSENT,
    "num_experts": "model.num_experts",
    "expert_model_parallel_size": "parallel.ep",
    "moe_router_topk": "model.router_topk",
    "moe_router_load_balancing_type": ABSENT,
    "moe_router_dtype": ALWAYS,
    "moe_aux_loss_coeff": "model.router_balance_loss",
    "moe_z_loss_coeff": "model.router_z_loss",
    "moe_grouped_gemm": ABSENT,
    "moe_permute_fusion": ALWAYS,
    "moe_token_dispatcher_type": ABSENT,
    "moe_ffn_hidden_size": "model.expert_ffn_hidden_size",
    "moe_per_layer_logging": ALWAYS,
    # grid and memory
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "num_layers_per_virtual_pipeline_stage": "pipeline.virtual_stages",
    "pipeline_model_parallel_layout": "pipeline.split",
    "sequence_parallel": "parallel.sequence = true",
    "use_distributed_optimizer": "parallel.zero = 1",
    "context_parallel_size": "parallel.cp",
    "cp_comm_type": "parallel.cp_comm",
    "recompute_activations": 'pipeline.recompute = "selective"',
    "recompute_granularity": "pipeline.recompute",
    "optimizer_cpu_offload": "memory.host_optimizer = true",
    "overlap_grad_reduce": ALWAYS,
    "overlap_param_gather": ALWAYS,
    "distributed_backend": ALWAYS,
    "distributed_timeout_minutes": "train.timeout_s",
    "nnodes": TORCHRUN,
    "node_rank": TORCHRUN,
    "master_addr": TORCHRUN,
    "master_port": TORCHRUN,
    "empty_unused_memory_level": ABSENT,
    "manual_gc": ABSENT,
    # training
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "pipeline.num_microbatches",
    "step_batch_size_schedule": ABSENT,
    "rampup_batch_size": ABSENT,
    "train_iters": "train.num_steps",
    "train_samples": "train.num_steps",
    "optimizer": "optim.name",
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "lr_warmup_iters": "optim.warmup_steps",
    "lr_warmup_samples": "optim.warmup_steps",
    "lr_warmup_fraction": "optim.warmup_steps",
    "lr_decay_style": "optim.decay",
    "lr_decay_iters": "optim.decay_steps",
    "lr_decay_samples": "optim.decay_steps",
    "decoupled_lr": "optim.groups",
    "decoupled_min_lr": "optim.groups",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_eps": "optim.eps",
    "clip_grad": "optim.clip_grad",
    "initial_loss_scale": "optim.loss_scale",
    "seed": "train.seed",
    "bf16": 'train.dtype = "bf16"',
    "fp16": 'train.dtype = "fp16"',
    "fp8_format": "train.fp8 = true",
    "fp8_amax_history_len": ABSENT,
    "fp8_amax_compute_algo": ABSENT,
    "fp8_param_gather": ABSENT,
    "grad_reduce_in_bf16": 'compression.gradients = "bf16"',
    "accumulate_allreduce_grads_in_fp32": ALWAYS,
    "disable_bf16_reduced_precision_matmul": ABSENT,
    # data
    "data_path": "data.corpus",
    "split": "data.split",
    "mock_data": 'data.corpus = ["stdlib"]',
    "data_cache_path": "data.cache",
    "tokenizer_type": "data.tokenizer",
    "tokenizer_model": "data.tokenizer",
    "vocab_file": "data.tokenizer",
    "merge_file": "data.tokenizer",
    "tiktoken_pattern": ABSENT,
    "vocab_extra_ids": ABSENT,
    "reset_position_ids": 'data.packing = "stream"',
    "reset_attention_mask": 'data.packing = "stream"',
    "eod_mask_loss": 'data.packing = "stream"',
    "num_workers": ABSENT,
    "no_mmap_bin_files": ABSENT,
    # runs
    "save": "run.name",
    "load": "train.start_from",
    "finetune": "train.start_from",
    "no_load_optim": "train.start_from",
    "no_load_rng": "train.start_from",
    "ckpt_format": ALWAYS,
    "save_interval": "train.save_interval",
    "async_save": "checkpoint.asynchronous",
    "eval_interval": "train.eval_interval",
    "eval_iters": "train.eval_batches",
    "log_interval": "train.log_interval",
    "log_throughput": ALWAYS,
    "tensorboard_dir": ALWAYS,
    "wandb_project": "run.project",
    "wandb_exp_name": "run.name",
    "exit_signal_handler": "train.stop_signals",
    "exit_duration_in_mins": ABSENT,
    "profile": ABSENT,
    "profile_step_start": ABSENT,
    "profile_step_end": ABSENT,
}
"""Settings that stand for a flag (its dashes as underscores): a setting, or one with its value as TOML has
it."""


def megatron_flag(name: str) -> str:
    """Return what to do about a flag of Megatron-LM, as the end of a sentence; empty if it is none.
    `name`: without dashes."""
    setting = MEGATRON.get(name, "")
    if setting == ALWAYS:
        return f"not needed: hybridpar always does this ({PAGE})"
    if setting == TORCHRUN:
        return "is a flag of torchrun: give it before -m hybridpar train CONFIG.toml"
    if setting == ABSENT:
        return f"not supported; {PAGE} says what to use instead"
    return f"is called {as_flag(setting)} here ({PAGE})" if setting else ""


def as_flag(setting: str) -> str:
    """`section.key = value` as words of a command line: '--section.key value'."""
    key, _, value = setting.partition(" = ")
    return f"--{key} {value.strip('[]').replace(chr(34), '')}".rstrip()

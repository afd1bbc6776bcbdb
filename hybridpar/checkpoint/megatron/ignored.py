"""Names of Megatron-LM's arguments that do not affect what a GPT computes.

They are about data, training, parallelism, precision, kernels, logging, files and inference, or
about features that are off unless another argument, which family.py knows, switches them on
(experts, latent attention, other kinds of models). An argument that is neither here nor in
family.py must be off: arguments.py says what that means.
Source: megatron/arguments.py, megatron/training/arguments.py, the configurations that later
versions make arguments of, and megatron/post_training/arguments.py, of all released versions from
1.0 to core 0.19 and of August 2026 (names only).
"""

from __future__ import annotations

import re

_SUBJECTS = """
    adlr app_tag async_ckpt bert biencoder checkpoint ckpt cpu_offloading cuda_graph data
    dataloader ddp dino dist_ckpt distributed dsa error_injection fim flight_recorder fp4 fp8
    fsdp gdp grpo gtp_remat ict indexer inference inprocess kitchen langrl lion load logits_load
    logits_save lr mamba manual_gc megatron_fsdp mhc mock moe mtp muon mup nccl non_persistent
    one_logger optimizer otel profile pytorch_profiler recompute rerun retriever retro rl s3
    save sft straggler swin tensorboard tiktoken timing tokenizer tp_comm vision wandb yarn
"""
"""Subjects: a name is one, or begins with one and an underscore."""

_OTHERS = """
    DDP_impl _is_global_batch_size_explicitly_specified account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split accumulate_allreduce_grads_in_fp32
    activation_func_fp8_input_store activation_offload_fraction activations_checkpoint_method
    activations_checkpoint_num_layers adam_beta1 adam_beta2 adam_eps align_grad_reduce
    align_param_gather allow_ambiguous_pad_tokens allow_transformer_engine
    ammo_convert_te_to_local_spec ammo_load_classic_megatron_to_mcore
    apply_query_key_layer_scaling apply_rope_fusion apply_wd_to_qk_layernorm async_save
    async_strategy async_tensor_model_parallel_allreduce attention_backend
    attention_softmax_in_fp32 auto_detect_ckpt_format barrier_with_L1_time
    batch_invariant_backend batch_invariant_mode batch_p2p_comm batch_p2p_sync batch_size bf16
    bias_dropout_fusion bias_swiglu_fusion block_data_path cache_mla_latents calc_ft_timeouts
    calculate_per_token_loss chat_template check_for_large_grads check_for_nan_in_loss
    check_for_nan_in_loss_and_grad check_for_spiky_loss
    check_weight_hash_across_dp_replicas_interval classes_fraction clip_grad
    clone_scatter_output_in_embedding config_logger_dir consumed_train_bins
    consumed_train_samples consumed_valid_samples context_parallel_size cp_comm_type
    create_all_gather_group create_attention_mask_in_dataloader cross_entropy_fusion_impl
    cross_entropy_loss_fusion curr_iteration deallocate_pipeline_outputs decode_only_cuda_graphs
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers decoder_seq_length
    decoupled_lr decoupled_min_lr decrease_batch_size_if_needed defer_embedding_wgrad_compute
    delay_grad_reduce delay_offload_until_cuda_graph delay_param_gather delay_wgrad_compute
    delta_offload_bytes_across_pp_ranks deprecated_use_mcore_models deterministic_mode
    disable_bf16_reduced_precision_matmul disable_chunked_prefill disable_jit_fuser
    disable_mamba_mem_eff_path disable_msc_deprecated disable_parameter_transpose_cache
    disable_straggler_on_startup disable_symmetric_registration
    distrib_optim_fully_reshardable_mem_efficient distribute_checkpointed_activations
    distribute_saved_activations do_test do_train do_valid dump_param_to_param_group_map
    dynamic_loss_scale embedding_init_method_std embedding_path embedding_weights_in_fp32
    empty_unused_memory_level enable_autocast enable_chunked_prefill enable_cuda_graph
    enable_experimental enable_ft_package enable_full_sharding_in_hsdp
    enable_gloo_process_groups enable_msc enable_one_logger encoder_num_layers
    encoder_pipeline_model_parallel_size encoder_seq_length encoder_tensor_model_parallel_size
    end_weight_decay eod_mask_loss ep_overlap_early_attn_memory_release eval_global_batch_size
    eval_interval eval_iters eval_micro_batch_size evidence_data_path exit_duration_in_mins
    exit_interval exit_on_missing_checkpoint exit_signal exit_signal_handler
    exit_signal_handler_for_dataloader exit_signal_handler_for_training exp_avg_dtype
    exp_avg_sq_dtype expert_gtp_weight_remat_size expert_model_parallel_size
    expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size export_default_te_spec
    export_draft_vocab_size export_eagle_algorithm export_force_local_attention
    export_freeze_mtp export_kd_cfg export_kd_finalize export_kd_teacher_ckpt_format
    export_kd_teacher_load export_kd_teacher_model_config export_kv_cache_quant
    export_legacy_megatron export_model_type export_te_mcore_model external_cuda_graph
    faiss_use_gpu fake_process_group filter_warnings fine_grained_activation_offloading
    fine_grained_offloading_max_inflight_offloads finetune finetune_data_files
    finetune_data_split finetune_hf_dataset first_last_layers_bf16 flash_attention_version
    flash_decode fp16 fp16_lm_cross_entropy fp32_allreduce fp32_residual_connection
    freeze_all_layers freeze_base_for_mtp ft_num_warmup_iters full_validation
    fully_parallel_load fully_parallel_save fused_residual_rmsnorm fused_single_qkv_rope
    global_batch_size gpu_sniff_test_interval grad_reduce_in_bf16 gradient_accumulation_fusion
    gradient_reduce_div_fusion gtp_expert_remat_nccl_ub gtp_weight_remat_size head_lr_mult
    hetereogenous_dist_checkpoint hierarchical_context_parallel_sizes
    high_priority_a2a_comm_stream high_priority_stream_groups hybrid_context_parallel hysteresis
    img_dim img_h img_w init_method_xavier_uniform init_model_with_meta_device
    initial_loss_scale initialize_socket_comms iter_per_epoch iteration iterations_to_skip
    keep_fp8_transpose_cache keep_fp8_transpose_cache_when_using_custom_fsdp kv_lora_rank
    lazy_mpu_init legacy_tokenizer linear_conv_kernel_dim linear_key_head_dim
    linear_num_key_heads linear_num_value_heads linear_value_head_dim local_rank
    log_batch_size_to_tensorboard log_device_memory_used log_energy log_interval
    log_l2_norm_grad_to_tensorboard log_learning_rate_to_tensorboard
    log_loss_scale_to_tensorboard log_max_attention_logit log_memory_interval
    log_memory_to_tensorboard log_num_zeros_in_grad log_params_norm log_progress
    log_runtime_to_tensorboard log_straggler log_throughput log_throughput_to_tensorboard
    log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_world_size_to_tensorboard
    logging_level logit_dtype loss_scale loss_scale_window main_grads_dtype main_params_dtype
    make_vocab_size_divisible_by mask_factor mask_prob mask_type masked_softmax_fusion
    max_seqlen_per_dp_cp_rank max_tokens_to_oom memory_efficient_layer_norm memory_keys
    memory_snapshot_path merge_file metadata_path micro_batch_size
    microbatch_group_size_per_vp_stage mid_level_dataset_surplus min_loss_scale min_lr
    min_offloaded_tensor_size min_scale mla_down_proj_fusion mlp_chunks_for_prefill
    mlp_chunks_for_training mmap_bin_files mmap_warmup model_parallel_size model_type
    modules_to_filter most_recent_k mrope_section mscale mscale_all_dim multiple_validation_sets
    no_load_optim no_load_rng no_persist_layer_norm no_save_optim no_save_rng
    no_weight_decay_cond_type null_tokenizer_eod_id null_tokenizer_pad_id num_channels
    num_classes num_dataset_builder_threads num_distributed_optimizer_instances
    num_floating_point_operations_so_far num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    num_layers_per_virtual_pipeline_stage num_microbatches_with_partial_activation_checkpoints
    num_speculative_tokens num_virtual_stages_per_pipeline_rank num_workers nvtx_ranges
    object_storage_cache_path offload_modules offload_optimizer_states
    offset_sampling_seed_by_dp_rank outer_dp_sharding_strategy output_bert_embeddings
    overlap_cpu_optimizer_d2h_h2d overlap_dispatch_backward_with_experts_wgrad
    overlap_grad_reduce overlap_moe_expert_parallel_comm overlap_p2p_comm
    overlap_p2p_comm_warmup_flush overlap_param_gather overlap_param_gather_with_optimizer_step
    override_ckpt_iteration override_lr_scheduler override_opt_param_scheduler pad_vocab_size
    padded_vocab_size params_dtype patch_dim per_dataset_sequences_path per_split_data_args_path
    perform_initialization perform_rl_step persist_layer_norm phase_transition_iterations
    pin_cpu_grads pin_cpu_params pipeline_dtype pipeline_model_parallel_comm_backend
    pipeline_model_parallel_layout pipeline_model_parallel_size
    pipeline_model_parallel_split_rank pretrained_checkpoint q_lora_rank qad_train_target
    qk_clip qk_clip_alpha qk_clip_threshold qk_head_dim qk_pos_emb_head_dim quant_recipe
    query_in_block_prob rampup_batch_size rank record_memory_history record_shapes refit_method
    relative_attention_max_distance relative_attention_num_buckets renormalize_blend_weights
    replication replication_factor replication_jump report_topk_accuracies reset_attention_mask
    reset_position_ids result_rejected_tracker_filename reuse_grad_buf_for_mxfp8_param_ag
    rope_scaling_factor rotary_scaling_factor run_workload_inspector_server runtime_time_unit
    sample_rate scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion
    scatter_gather_tensors_in_pipeline seed seq_length sequence_packing_scheduler
    sequence_parallel set_level_for_all_loggers sgd_momentum sharp_enabled_group short_seq_prob
    skip_train skipped_train_samples special_tokens split standalone_embedding_stage
    start_eval_at_iter start_weight_decay step_batch_size_schedule stream_ckpt_dequant
    strict_fsdp_dtensor_load suggested_communication_unit_size symmetric_ar_type
    te_precision_config_file te_rng_tracker teacher_model_config tensor_model_parallel_size
    tensor_parallel_num_weight_shards test_data_path test_mode throughput_window_size
    titles_data_path to_test torch_fsdp2_reshard_after_forward tp_only_amax_red train_data_path
    train_iters train_samples train_sync_interval transformer_pipeline_model_parallel_size
    trust_remote_code use_checkpoint_args use_checkpoint_lr_scheduler
    use_checkpoint_opt_param_scheduler use_contiguous_buffers_in_ddp
    use_contiguous_buffers_in_local_ddp use_cpu_initialization use_custom_fsdp use_dist_ckpt
    use_dist_ckpt_deprecated use_distributed_optimizer use_flash_attn
    use_fused_weighted_squared_relu use_gigatoken use_gloo_process_groups
    use_grouped_gemm_for_shared_expert use_inference_optimized_layers use_kitchen
    use_kitchen_attention use_layer_wise_distributed_optimizer use_layer_wise_param_layout
    use_legacy_models use_legacy_static_engine use_mamba_mem_eff_path use_mcore_models
    use_megatron_fsdp use_mp_args_from_checkpoint_args use_nsys_profiler use_one_sent_docs
    use_persistent_ckpt_worker use_precision_aware_optimizer use_pytorch_profiler
    use_ring_exchange_p2p use_sharp use_te_rng_tracker use_tokenizer_model_from_checkpoint_args
    use_torch_fsdp2 use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping v_head_dim
    valid_data_path validation_set_names variable_seq_lengths verify_integrity
    virtual_pipeline_model_parallel_size vocab_extra_ids vocab_file warmup wd_incr_steps
    weight_decay weight_decay_incr_style wgrad_deferral_limit window_attn_skip_freq world_size
    wsd_decay_steps
"""
"""Further names."""

_SUBJECT = re.compile(rf"({'|'.join(_SUBJECTS.split())})(_|$)")
_NAMES = frozenset(_OTHERS.split())


def is_ignored(name: str) -> bool:
    """Return whether an argument of this name does not affect what a GPT computes."""
    return name in _NAMES or bool(_SUBJECT.match(name))

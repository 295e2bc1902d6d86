"""The range of each number, and what must divide: the smallest rules of limits.py."""

from __future__ import annotations

import math
from argparse import Namespace

from megatron.train.arguments.tables import flags_by_dest

_ABOVE_ZERO = 5e-324  # the smallest number above 0

# destination: (lowest, highest or None, whether the highest itself is allowed)
RANGES: dict[str, tuple[float, float | None, bool]] = {
    "attention_dropout": (0, 1, False),
    "hidden_dropout": (0, 1, False),
    "adam_beta1": (0, 1, False),
    "adam_beta2": (0, 1, False),
    "adam_eps": (0, None, True),
    "sgd_momentum": (0, 1, False),
    "clip_grad": (0, None, True),
    "weight_decay": (0, None, True),
    "layernorm_epsilon": (0, None, True),
    "init_method_std": (0, None, True),
    "rotary_percent": (0, 1, True),
    "lr_warmup_fraction": (0, 1, False),
    "lr_warmup_iters": (0, None, True),
    "lr_warmup_samples": (0, None, True),
    "lr_warmup_init": (0, None, True),
    "min_lr": (0, None, True),
    "lr": (0, None, True),
    "seed": (0, None, True),
    "num_workers": (0, None, True),
    "eval_iters": (0, None, True),
    "ffn_hidden_size": (1, None, True),
    "kv_channels": (1, None, True),
    "num_query_groups": (1, None, True),
    "vocab_size": (1, None, True),
    "train_iters": (0, None, True),
    "train_samples": (1, None, True),
    "lr_decay_iters": (1, None, True),
    "lr_decay_samples": (1, None, True),
    "eval_interval": (1, None, True),
    "save_interval": (1, None, True),
    "save_retain_interval": (1, None, True),
    "non_persistent_save_interval": (1, None, True),
    "exit_interval": (1, None, True),
    "log_interval": (1, None, True),
    "tensorboard_log_interval": (1, None, True),
    "distributed_timeout_minutes": (1, None, True),
    "num_distributed_optimizer_instances": (1, None, True),
    "expert_model_parallel_size": (1, None, True),
    "expert_tensor_parallel_size": (1, None, True),
    "recompute_num_layers": (1, None, True),
    "fsdp_order_check_interval": (0, None, True),
    "loss_scale_window": (1, None, True),
    "hysteresis": (1, None, True),
    "num_dataset_builder_threads": (1, None, True),
    "num_virtual_stages_per_pipeline_rank": (1, None, True),
    "num_layers_per_virtual_pipeline_stage": (1, None, True),
    "microbatch_group_size_per_vp_stage": (1, None, True),
    "moe_shared_expert_intermediate_size": (1, None, True),
    "embedding_init_method_std": (0, None, True),
    "mup_base_hidden_size": (1, None, True),
    "mup_base_head_dim": (_ABOVE_ZERO, None, True),
    "mup_width_mult": (_ABOVE_ZERO, None, True),
    "mtp_num_layers": (0, None, True),
    "mtp_loss_scaling_factor": (0, None, True),
    "eval_micro_batch_size": (1, None, True),
    "eval_global_batch_size": (1, None, True),
    "start_eval_at_iter": (0, None, True),
    "exit_duration_in_mins": (0, None, True),
    "manual_gc_interval": (0, None, True),
    "check_weight_hash_across_dp_replicas_interval": (1, None, True),
    "min_offloaded_tensor_size": (0, None, True),
    "lion_beta1": (0, 1, False),
    "lion_beta2": (0, 1, False),
    "muon_momentum": (0, 1, False),
    "muon_num_ns_steps": (1, None, True),
    "muon_extra_scale_factor": (_ABOVE_ZERO, None, True),
    "lr_wsd_decay_iters": (0, None, True),
    "lr_wsd_decay_samples": (0, None, True),
    "loss_scale": (0, None, True),
    "initial_loss_scale": (_ABOVE_ZERO, None, True),
    "min_loss_scale": (_ABOVE_ZERO, None, True),
    "fp8_amax_history_len": (1, None, True),
    "num_layers_at_start_in_bf16": (0, None, True),
    "num_layers_at_end_in_bf16": (0, None, True),
    "mid_level_dataset_surplus": (0, None, True),
    "fim_rate": (0, 1, True),
    "fim_spm_rate": (0, 1, True),
    "fim_fragment_rate": (0, 1, True),
    "tiktoken_num_special_tokens": (0, None, True),
    "ckpt_step": (0, None, True),
    "tensorboard_queue_size": (1, None, True),
    "logging_level": (0, None, True),
    "straggler_minmax_count": (1, None, True),
    "error_injection_rate": (0, None, True),
    "flight_recorder_trace_buffer_size": (1, None, True),
    "distributed_timeout_seconds_after_init": (0, None, True),
    "peak_tflops": (_ABOVE_ZERO, None, True),
    "q_lora_rank": (1, None, True),
    "kv_lora_rank": (1, None, True),
    "qk_head_dim": (1, None, True),
    "qk_pos_emb_head_dim": (1, None, True),
    "v_head_dim": (1, None, True),
    "rope_scaling_factor": (_ABOVE_ZERO, None, True),
    "rotary_scaling_factor": (_ABOVE_ZERO, None, True),
    "yarn_original_max_position_embeddings": (1, None, True),
    "profile_step_start": (0, None, True),
    "activation_func_clamp_value": (_ABOVE_ZERO, None, True),
    "mup_embedding_mult": (_ABOVE_ZERO, None, True),
    "mup_output_mult": (_ABOVE_ZERO, None, True),
    "mscale": (0, None, True),
    "mscale_all_dim": (0, None, True),
    "yarn_beta_fast": (_ABOVE_ZERO, None, True),
    "yarn_beta_slow": (_ABOVE_ZERO, None, True),
}


def check_ranges(v: Namespace) -> None:
    """Raises ValueError naming the flag, its value and the range. v: arguments as given, or resolved."""
    _check_finite(v)
    for dest, (low, high, closed) in RANGES.items():
        value = getattr(v, dest)
        if value is None:
            continue
        flag = flags_by_dest()[dest][0].name
        if not value >= low:
            least = "a number above 0" if low == _ABOVE_ZERO else f"{low} or more"
            raise ValueError(f"{flag} {value}: give {least}")
        if high is not None and not (value <= high if closed else value < high):
            raise ValueError(f"{flag} {value}: give a number {'up to' if closed else 'below'} {high}")


def _check_finite(v: Namespace) -> None:
    for dest, (flag, *_) in flags_by_dest().items():
        value = getattr(v, dest)
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{flag.name} {number}: give a finite number")


def check_multiple(what: str, value: int, of: str, by: int) -> None:
    """Raises ValueError where `what` with its value is not a multiple of `by`, which `of` describes."""
    if by and value % by:
        raise ValueError(
            f"{what} {value} is not a multiple of {of}: take {value // by * by + by}, or lower the other side"
        )

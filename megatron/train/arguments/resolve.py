"""Values that follow from others: what the user left out, older spellings, and everything derived.

Each function takes the namespace that is being resolved and changes it; `resolve` runs them in order. The
rules are Megatron-LM's (megatron/training/arguments.py) unless a line says otherwise.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.parallel.pipeline.stages import parse_layout
from megatron.train.arguments.batch import batch_schedule
from megatron.train.arguments.fp8 import check_fp8
from megatron.train.arguments.idle import idle_flags


@dataclass
class Context:
    """What a run is resolved for, and the lines that come up on the way."""

    world_size: int
    device: str  # "cpu" or "cuda"
    warnings: list[str] = field(default_factory=list)


def resolve(v: Namespace, context: Context) -> None:
    """Fills in everything that follows. Raises ValueError naming flags, values and the fix."""
    for step in _STEPS:
        step(v, context)


def default_device() -> str:
    """ "cuda" where torch sees a CUDA device, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _older_spellings(v: Namespace, context: Context) -> None:
    """Flags that only say in another way what another flag says."""
    for older, name, flag in (
        ("encoder_num_layers", "num_layers", "--num-layers"),
        ("encoder_seq_length", "seq_length", "--seq-length"),
    ):
        old, new = getattr(v, older), getattr(v, name)
        if old is not None and new is not None and old != new:
            raise ValueError(
                f"{flag} {new} and --{older.replace('_', '-')} {old} contradict each other: give one of them"
            )
        value = new if new is not None else old
        setattr(v, name, value)
        setattr(v, older, value)
    if v.recompute_activations:
        if v.recompute_granularity == "full":
            raise ValueError(
                "--recompute-activations means --recompute-granularity selective, not full: drop one of them"
            )
        v.recompute_granularity = "selective"
    if v.moe_enable_deepep:
        if v.moe_token_dispatcher_type != "flex":
            raise ValueError(
                f"--moe-enable-deepep is for --moe-token-dispatcher-type flex, not {v.moe_token_dispatcher_type}: use "
                "that, or drop it"
            )
        v.moe_flex_dispatcher_backend = "deepep"
    if v.position_embedding_type == "yarn":
        v.position_embedding_type, v.rope_type = "rope", "yarn"
    if v.use_rotary_position_embeddings:
        v.position_embedding_type = "rope"
    if not v.add_position_embedding and v.position_embedding_type == "learned_absolute":
        raise ValueError(
            "--no-position-embedding without a kind of positions: add --position-embedding-type rope or none"
        )
    v.exit_signal_handler = v.exit_signal_handler or v.exit_signal_handler_for_training
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(v, name)
        if isinstance(value, list) and len(value) == 1:
            setattr(v, name, value[0])
    if v.num_experts == 0:
        v.num_experts = None


def _required(v: Namespace, context: Context) -> None:
    for name, what in (
        ("num_layers", "the number of transformer layers"),
        ("hidden_size", "the width of the model"),
        ("num_attention_heads", "the number of attention heads"),
        ("seq_length", "the number of tokens in a sequence"),
        ("micro_batch_size", "the sequences in one forward pass of a rank"),
    ):
        value = getattr(v, name)
        flag = "--" + name.replace("_", "-")
        if value is None:
            raise ValueError(f"{flag} is missing: give {what}")
        if value <= 0:
            raise ValueError(f"{flag} {value}: {what} must be positive")
    if v.max_position_embeddings is None:
        # Megatron demands the flag; nothing else than the sequence length could be meant.
        v.max_position_embeddings = v.seq_length


def _device(v: Namespace, context: Context) -> None:
    v.device = context.device
    cuda = context.device == "cuda"
    if v.distributed_backend == "nccl" and not cuda:
        context.warnings.append("--distributed-backend nccl: there is no CUDA device here, gloo is used")
        v.distributed_backend = "gloo"
    if v.distributed_backend == "auto":
        v.distributed_backend = "nccl" if cuda else "gloo"
    if v.transformer_impl == "transformer_engine" and not cuda:
        context.warnings.append(
            "--transformer-impl transformer_engine: there is no CUDA device here, local is used"
        )
        v.transformer_impl = "local"
    installed = importlib.util.find_spec("transformer_engine") is not None
    if v.transformer_impl == "transformer_engine" and not installed:
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; install it, or use local"
        )
    if v.transformer_impl == "auto":
        v.transformer_impl = "transformer_engine" if cuda and installed else "local"
    context.warnings.extend(check_fp8(v))


def _parallel(v: Namespace, context: Context) -> None:
    world, tensor = context.world_size, v.tensor_model_parallel_size
    for name in ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"):
        if getattr(v, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(v, name)}: give 1 or more")
    model = tensor * v.pipeline_model_parallel_size * v.context_parallel_size
    if world % model:
        raise ValueError(
            f"{world} ranks cannot hold --tensor-model-parallel-size {tensor} x "
            "--pipeline-model-parallel-size "
            f"{v.pipeline_model_parallel_size} x --context-parallel-size {v.context_parallel_size}: "
            f"start a multiple of {model} ranks or lower one of them"
        )
    v.world_size = world
    v.data_parallel_size = world // model
    v.transformer_pipeline_model_parallel_size = v.pipeline_model_parallel_size
    if v.sequence_parallel and tensor == 1:
        context.warnings.append(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1: it is off"
        )
        v.sequence_parallel = False
    if v.expert_tensor_parallel_size is None:
        v.expert_tensor_parallel_size = tensor
    v.virtual_pipeline_model_parallel_size = _virtual_stages(v)


def _virtual_stages(v: Namespace) -> int | None:
    """Chunks of layers on each pipeline rank, None for one."""
    stages = v.num_virtual_stages_per_pipeline_rank
    if v.num_layers_per_virtual_pipeline_stage is not None:
        layers = (
            v.num_layers + v.account_for_embedding_in_pipeline_split + v.account_for_loss_in_pipeline_split
        )
        chunk = v.pipeline_model_parallel_size * v.num_layers_per_virtual_pipeline_stage
        if chunk <= 0 or layers % chunk:
            raise ValueError(
                f"--num-layers {v.num_layers} (with embedding and loss counted: {layers}) is not a "
                "multiple of "
                f"--pipeline-model-parallel-size {v.pipeline_model_parallel_size} x "
                f"--num-layers-per-virtual-pipeline-stage {v.num_layers_per_virtual_pipeline_stage}"
            )
        stages = layers // chunk
    if v.pipeline_model_parallel_layout is not None:
        ranks = v.pipeline_model_parallel_size
        count = len(parse_layout(v.pipeline_model_parallel_layout, v.num_layers))
        if count % ranks:
            raise ValueError(
                f"--pipeline-model-parallel-layout {v.pipeline_model_parallel_layout} has {count} stages: give a "
                f"multiple of --pipeline-model-parallel-size {ranks}"
            )
        stages = count // ranks
    return None if stages == 1 else stages


def _sharding(v: Namespace, context: Context) -> None:
    """One FSDP wrapper always; the flags choose its strategy."""
    if v.use_torch_fsdp2:
        v.sharding_strategy = "optim_grads_params"
    elif v.use_megatron_fsdp:
        v.sharding_strategy = v.data_parallel_sharding_strategy
    else:
        v.sharding_strategy = "optim" if v.use_distributed_optimizer else "no_shard"
        if "data_parallel_sharding_strategy" in v.explicit:
            context.warnings.append(
                f"--data-parallel-sharding-strategy {v.data_parallel_sharding_strategy} counts with "
                f"--use-megatron-fsdp only: the strategy is {v.sharding_strategy}"
            )
    v.outer_sharding_strategy = v.outer_dp_sharding_strategy
    v.data_parallel_outer_size = v.num_distributed_optimizer_instances
    v.reshard_after_forward = v.torch_fsdp2_reshard_after_forward


def _precision(v: Namespace, context: Context) -> None:
    """Dtypes by name: fp64, fp32, bf16, fp16."""
    v.params_dtype = "fp64" if v.fp64 else "bf16" if v.bf16 else "fp16" if v.fp16 else "fp32"
    main = v.megatron_fsdp_main_params_dtype
    if "main_params_dtype" not in v.explicit or not v.use_precision_aware_optimizer:
        v.main_params_dtype = v.params_dtype if main == "auto" else main
    if v.megatron_fsdp_main_grads_dtype != "auto":
        v.main_grads_dtype = v.megatron_fsdp_main_grads_dtype
    if v.fp64:
        v.main_params_dtype = v.main_grads_dtype = "fp64"
    travel = v.megatron_fsdp_grad_comm_dtype
    v.grad_comm_dtype = (
        "bf16" if v.grad_reduce_in_bf16 else v.main_grads_dtype if travel == "auto" else travel
    )
    if v.fp16 and not v.loss_scale and v.check_for_nan_in_loss_and_grad:
        # An overflow is how the dynamic loss scale learns; it is counted and skipped, not an error.
        v.check_for_nan_in_loss_and_grad = False


def _model(v: Namespace, context: Context) -> None:
    v.gated_linear_unit = v.swiglu or v.quick_geglu
    if v.ffn_hidden_size is None:
        wide = 4 * v.hidden_size
        v.ffn_hidden_size = int(wide * 2 / 3 / 64) * 64 if v.swiglu else wide
    if v.kv_channels is None:
        if v.hidden_size % v.num_attention_heads:
            raise ValueError(
                f"--hidden-size {v.hidden_size} is not a multiple of --num-attention-heads "
                f"{v.num_attention_heads}: change one of them or give --kv-channels"
            )
        v.kv_channels = v.hidden_size // v.num_attention_heads
    if not v.group_query_attention:
        if v.num_query_groups != 1:
            raise ValueError(
                f"--num-query-groups {v.num_query_groups} needs --group-query-attention: add it, or "
                "leave both out"
            )
        v.num_query_groups = v.num_attention_heads
    if v.add_bias_linear:
        v.add_qkv_bias = True
    if v.num_experts is not None and v.moe_ffn_hidden_size is None:
        v.moe_ffn_hidden_size = v.ffn_hidden_size
    if v.recompute_granularity == "selective" and not v.recompute_modules:
        v.recompute_modules = ["core_attn"]
    if v.vocab_size is not None and v.padded_vocab_size is None:
        v.padded_vocab_size = padded_vocabulary(v.vocab_size, v)


def padded_vocabulary(size: int, config: Any) -> int:
    """`size` rounded up to a multiple of --make-vocab-size-divisible-by times the tensor-parallel size.

    config: a TrainConfig or namespace. An explicit --padded-vocab-size is taken as it is; with
    --no-pad-vocab-size there is no padding. Raises ValueError where the result is too small or does not
    divide.
    """
    tensor = config.tensor_model_parallel_size
    if config.padded_vocab_size is not None:
        if config.padded_vocab_size < size or config.padded_vocab_size % tensor:
            raise ValueError(
                f"--padded-vocab-size {config.padded_vocab_size} must be at least the vocabulary's "
                f"{size} and a "
                f"multiple of --tensor-model-parallel-size {tensor}; leave it out for the rule"
            )
        return int(config.padded_vocab_size)
    if not config.pad_vocab_size:
        if size % tensor:
            raise ValueError(
                f"--no-pad-vocab-size: the vocabulary's {size} is not a multiple of "
                f"--tensor-model-parallel-size {tensor}; leave the flag out"
            )
        return size
    multiple = config.make_vocab_size_divisible_by * tensor
    if multiple < 1:
        raise ValueError(
            f"--make-vocab-size-divisible-by {config.make_vocab_size_divisible_by}: give 1 or more"
        )
    return -(-size // multiple) * multiple


def _batch(v: Namespace, context: Context) -> None:
    if v.step_batch_size_schedule is not None:
        if (
            v.global_batch_size is not None
            or v.rampup_batch_size is not None
            or v.decrease_batch_size_if_needed
        ):
            raise ValueError(
                "--step-batch-size-schedule sets the global batch: leave out --global-batch-size, "
                "--rampup-batch-size and --decrease-batch-size-if-needed"
            )
        v.global_batch_size = max(batch for _, batch in batch_schedule(v).steps)
    if v.global_batch_size is None:
        v.global_batch_size = v.micro_batch_size * v.data_parallel_size
    unit = v.micro_batch_size * v.data_parallel_size
    schedule = batch_schedule(v)
    for _, batch in schedule.steps:
        if batch <= 0 or (batch % unit and not schedule.round_down) or batch < unit:
            raise ValueError(
                f"{_batch_flag(v)} {batch} is not a multiple of --micro-batch-size {v.micro_batch_size} x "
                f"data-parallel size {v.data_parallel_size}: take a multiple of {unit}, such as "
                f"{max(1, round(batch / unit)) * unit}"
            )
    v.num_microbatches = schedule.microbatches_at(schedule.steps[-1][0])
    v.eval_micro_batch_size = v.eval_micro_batch_size or v.micro_batch_size
    v.eval_global_batch_size = v.eval_global_batch_size or schedule.at(schedule.steps[-1][0])
    unit = v.eval_micro_batch_size * v.data_parallel_size
    if v.eval_global_batch_size % unit:
        raise ValueError(
            f"--eval-global-batch-size {v.eval_global_batch_size} is not a multiple of "
            "--eval-micro-batch-size "
            f"{v.eval_micro_batch_size} x data-parallel size {v.data_parallel_size}: take a multiple "
            f"of {unit}"
        )


def _batch_flag(v: Namespace) -> str:
    if v.step_batch_size_schedule is not None:
        return "--step-batch-size-schedule: batch"
    return "--global-batch-size" if v.rampup_batch_size is None else "--rampup-batch-size: batch"


def _length(v: Namespace, context: Context) -> None:
    """train_iters is always there where the run trains; train_samples stays what the user gave."""
    if v.train_samples and v.train_iters is None:
        v.train_iters = batch_schedule(v).iterations_for(v.train_samples)
        if v.train_iters == 0:
            raise ValueError(
                f"--train-samples {v.train_samples} are not enough for one step of "
                f"--global-batch-size {v.global_batch_size}"
            )
    if v.lr is not None and v.lr_warmup_init > v.lr:
        raise ValueError(f"--lr-warmup-init {v.lr_warmup_init} is above --lr {v.lr}: start lower")
    if v.weight_decay_incr_style == "constant":
        v.start_weight_decay = v.end_weight_decay = v.weight_decay


def _data(v: Namespace, context: Context) -> None:
    if v.tokenizer_type is None and v.vocab_file and v.merge_file:
        v.tokenizer_type = "GPT2BPETokenizer"  # the default of Megatron-LM's pretrain_gpt.py
    if v.dataloader_type is None:
        v.dataloader_type = "single"
    if (v.data_path or v.data_args_path) and v.split is None:
        v.split = "969, 30, 1"
        context.warnings.append("--split is missing: 969, 30, 1 is used for training, validation and test")


_STEPS: tuple[Callable[[Namespace, Context], None], ...] = (
    _older_spellings,
    _required,
    _device,
    _parallel,
    _sharding,
    _precision,
    _model,
    _batch,
    _length,
    _data,
    lambda v, context: context.warnings.extend(idle_flags(v)),
)

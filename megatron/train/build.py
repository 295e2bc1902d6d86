"""THE composition root: how a validated configuration becomes a model that trains in parallel.

One order, top to bottom of `build_run`: mesh -> tokenizer and data files checked -> model on the meta
device (tensor, sequence, pipeline, context and expert parallelism happen here, by the mesh that its layers
get; activation recompute too) -> compile -> FSDP, which materialises and initialises shard by shard ->
optimizer and schedule -> data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.fsdp import (
    Chunk,
    DataParallelPlacement,
    FSDPConfig,
    FullyShardedDataParallel,
    Location,
    OuterStrategy,
    ShardingStrategy,
)
from megatron.models.backends.base import Backend, LayerOptions
from megatron.models.block import Block
from megatron.models.config import ModelConfig
from megatron.models.gpt import Embedding, GPTModel, StageParts
from megatron.models.init import Initializer
from megatron.models.moe.experts import global_names
from megatron.parallel.annotate import annotation_of, global_shape, local_chunks
from megatron.parallel.communicators import CommunicatorOptions, communicator_options
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.pipeline.stages import prediction_stage
from megatron.parallel.random import RngStreams
from megatron.train.arguments.fp8 import fp8_settings_from
from megatron.train.arguments.model import model_config_from
from megatron.train.config import TrainConfig
from megatron.train.data import DataIterators, build_data_iterators, data_config_from_args, validate_data
from megatron.train.initialize import Launch, set_variables
from megatron.train.loss_scale import loss_scaler_from_config
from megatron.train.lr_schedule import OptimizerParamScheduler, schedule_from_config
from megatron.train.optimizer import MUON_KINDS, build_optimizer, optimizer_config, write_group_map
from megatron.train.pipeline import PipelineModel, pipeline_plan
from megatron.train.rerun import RerunOptions
from megatron.train.step import StepOptions, TrainState
from megatron.train.tokenizers import Tokenizer, build_tokenizer

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Run:
    """Everything that a training loop works on."""

    config: TrainConfig
    launch: Launch
    device: torch.device
    mesh: ParallelMesh
    model_config: ModelConfig
    tokenizer: Tokenizer
    state: TrainState
    data: DataIterators
    streams: RngStreams | None


def build_run(config: TrainConfig, launch: Launch, device: torch.device) -> Run:
    """Build everything that `config` describes on this rank; collective where groups are made.

    Raises ValueError, naming flag and fix, before a model is built where data, tokenizer or sizes do not fit.
    """
    mesh = build_mesh(config, device)
    tokenizer = build_tokenizer(config)
    data_config = data_config_from_args(config, tokenizer)
    validate_data(data_config)
    model_config = build_model_config(config, tokenizer)
    streams = RngStreams.for_mesh(config.seed, mesh)
    backend = build_backend(config, mesh, streams)
    wrapped = build_model(model_config, backend, config, mesh, device)
    optimizer = build_optimizer(
        wrapped.named_parameters(), optimizer_config(config), backend.fused_adam, mesh
    )
    if config.dump_param_to_param_group_map is not None and launch.rank == 0:
        write_group_map(
            config.dump_param_to_param_group_map, wrapped.named_parameters(), optimizer_config(config)
        )
    state = TrainState(
        model=wrapped,
        optimizer=optimizer,
        schedule=OptimizerParamScheduler(optimizer, schedule_from_config(config)),
        scaler=loss_scaler_from_config(config),
    )
    data = build_data_iterators(data_config, dp_rank=mesh.rank("dp"), dp_size=mesh.size("dp"))
    return Run(config, launch, device, mesh, model_config, tokenizer, state, data, streams)


def build_mesh(config: TrainConfig, device: torch.device) -> ParallelMesh:
    """The mesh of all parallel axes."""
    sizes = ParallelSizes(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        context=config.context_parallel_size,
        data=config.data_parallel_size,
        data_outer=config.num_distributed_optimizer_instances,
        expert=config.expert_model_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size if config.num_experts else 1,
    )
    return ParallelMesh(sizes, device.type, communicators=communicators_from(config))


def communicators_from(config: TrainConfig) -> dict[str, CommunicatorOptions]:
    """--nccl-communicator-config-path and --high-priority-stream-groups, by axis.

    Raises ValueError naming the flag for a file that cannot be read, or what communicators do not know.
    """
    path = config.nccl_communicator_config_path
    groups: dict[str, Any] = {}
    if path:
        import yaml

        try:
            groups = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"--nccl-communicator-config-path {path}: {reason}; give a YAML file") from error
    if not isinstance(groups, dict) or not all(isinstance(value, dict) for value in groups.values()):
        raise ValueError(f"--nccl-communicator-config-path {path}: no mapping of groups to options")
    try:
        return communicator_options(groups, config.high_priority_stream_groups)
    except ValueError as error:
        raise ValueError(
            f"--nccl-communicator-config-path, --high-priority-stream-groups: {error}"
        ) from error


def build_model_config(config: TrainConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model, with room for every id of the tokenizer (--vocab-size may ask for more)."""
    changes: dict[str, object] = {"vocab_size": max(tokenizer.vocab_size, config.vocab_size or 0)}
    if "padded_vocab_size" not in config.explicit:
        changes["padded_vocab_size"] = None
    return model_config_from(config.replace(**changes))


def build_backend(config: TrainConfig, mesh: ParallelMesh, streams: RngStreams | None) -> Backend:
    """Who builds the layers; parameters on the meta device."""
    options = LayerOptions.from_mesh(
        mesh,
        sequence_parallel=config.sequence_parallel,
        params_dtype=DTYPES[config.params_dtype],
        device="meta",
        fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
        delay_wgrad_compute=config.delay_wgrad_compute,
        rng=streams,
        seed=config.seed,
    )
    if config.transformer_impl == "transformer_engine":
        from megatron.models.backends.transformer_engine import (
            EngineSettings,
            TransformerEngineBackend,
            attention_environment,
        )

        set_variables(
            attention_environment(config.attention_backend)
        )  # before Transformer Engine is imported
        settings = EngineSettings(config.attention_backend, fp8_settings_from(config))
        backend = TransformerEngineBackend(options, settings, amax_group=mesh.group("tp_dp_cp"))
        if mesh.global_rank == 0:
            print(backend.describe(), flush=True)
        return backend
    from megatron.models.backends.torch import TorchBackend

    return TorchBackend(options)


def build_model(
    model_config: ModelConfig, backend: Backend, config: TrainConfig, mesh: ParallelMesh, device: torch.device
) -> FullyShardedDataParallel | PipelineModel:
    """The whole model under FSDP, or this rank's pipeline stages, each under an FSDP of its own."""
    if mesh.size("pp") == 1:
        return wrap_model(GPTModel(model_config, backend, mesh), config, mesh, device)
    plan = pipeline_plan(config)
    chunks = {}
    for stage in plan.shape(mesh.size("pp"), 1).stages_of(mesh.rank("pp")):
        held = plan.stages[stage]
        predicts = stage == prediction_stage(plan.stages)
        parts = StageParts(held.embedding, held.loss, held.layers, predicts)
        model = GPTModel(model_config, backend, mesh, parts)
        chunks[stage] = wrap_model(model, config, mesh, device)
    return PipelineModel(chunks, model_config, backend, mesh, plan)


def wrap_model(
    model: nn.Module, config: TrainConfig, mesh: ParallelMesh, device: torch.device
) -> FullyShardedDataParallel:
    """Put `model` (on meta) under FSDP and give its shards their initial values on `device`."""
    fsdp_config = FSDPConfig(
        strategy=ShardingStrategy.parse(config.sharding_strategy),
        outer_strategy=OuterStrategy.parse(config.outer_sharding_strategy),
        main_params_dtype=DTYPES[config.main_params_dtype],
        main_grads_dtype=DTYPES[config.main_grads_dtype],
        grad_comm_dtype=DTYPES[config.grad_comm_dtype],
        reshard_after_forward=config.reshard_after_forward,
        buffer_pool=2 if config.fsdp_double_buffer else 0,
        tensor_atomic=config.optimizer in MUON_KINDS,
        order_check_interval=config.fsdp_order_check_interval,
        # Of the microbatches under way in a pipeline only the first would find what is kept after forward alone.
        reshard_after_backward=config.reshard_after_forward or mesh.size("pp") == 1,
    )
    return FullyShardedDataParallel(
        model,
        fsdp_config,
        placement_for=placement_callback(mesh, per_token=config.calculate_per_token_loss),
        unit_modules=unit_modules(model, mesh),
        initialize=Initializer(config.seed, mesh, global_names(mesh, config.num_experts)),
        locate=locate_callback(mesh, global_names(mesh, config.num_experts)),
    )


def unit_modules(model: nn.Module, mesh: ParallelMesh) -> Callable[[str, nn.Module], bool]:
    """What is gathered on its own: a layer, the embedding, the head; the final norm stays with the root.

    In a pipeline the word embedding is a unit without positions, so that the copies of a tied one are cut alike.
    """
    parts: tuple[type[nn.Module], ...] = (Block, Embedding)
    embedding = getattr(model, "embedding", None)
    if mesh.size("pp") > 1 and embedding is not None:
        parts = (*parts, type(embedding.word_embeddings))
    return lambda name, module: isinstance(module, parts) or name == "output_layer"


def placement_callback(
    mesh: ParallelMesh, *, per_token: bool
) -> Callable[[str, torch.Tensor], DataParallelPlacement]:
    """Where FSDP shards each parameter: experts over expert-data ranks, all others over data x context ranks.

    The divisor is the same for both (fsdp.md, "One scale"): gradients are means over data-parallel ranks,
    or, per token, sums.
    """
    divisor = 1 if per_token else mesh.size("dp")
    hybrid = mesh.size("dp_outer") > 1
    cache: dict[bool, DataParallelPlacement] = {}

    def placement_for(name: str, parameter: torch.Tensor) -> DataParallelPlacement:
        expert = annotation_of(parameter).expert
        if expert not in cache:
            inner, outer = ("edp_shard", "edp_outer") if expert else ("fsdp", "dp_outer")
            # Slices of one mesh: an optimizer state that both axes cut is a DTensor over both.
            both = mesh.device_mesh(outer, inner) if hybrid else None
            cache[expert] = DataParallelPlacement(
                shard_mesh=mesh.device_mesh(inner) if both is None else both[inner],
                outer_mesh=None if both is None else both[outer],
                gradient_divisor=divisor,
            )
        return cache[expert]

    return placement_for


def locate_callback(
    mesh: ParallelMesh, name_of: Callable[[str, torch.Tensor], str] = lambda name, parameter: name
) -> Callable[[str, torch.Tensor], Location]:
    """Where a parameter of this rank lies in the whole model, for checkpoints that any layout loads.

    name_of: its name in the whole model, where experts have other numbers.
    """

    def locate(name: str, parameter: torch.Tensor) -> Location:
        annotation = annotation_of(parameter)
        axis = annotation.tensor_axis
        shape = tuple(parameter.shape)
        chunks = local_chunks(annotation, shape, mesh.rank(axis), mesh.size(axis))
        return Location(
            name_of(name, parameter),
            tuple(global_shape(annotation, shape, mesh.size(axis))),
            tuple(Chunk(chunk.global_offsets, chunk.local_offsets, chunk.sizes) for chunk in chunks),
        )

    return locate


def step_options(config: TrainConfig) -> StepOptions:
    """What a step does, from the configuration."""
    return StepOptions(
        per_token=config.calculate_per_token_loss,
        clip_grad=config.clip_grad,
        stop_at_nan=config.check_for_nan_in_loss_and_grad,
        count_zeros=config.log_num_zeros_in_grad,
        overlap_experts=config.overlap_moe_expert_parallel_comm,
        rerun=RerunOptions(
            mode=config.rerun_mode,
            spiky_loss=config.check_for_spiky_loss,
            large_grads=config.check_for_large_grads,
            injection_rate=config.error_injection_rate,
            persistent=config.error_injection_type == "persistent_error",
            tracker=config.result_rejected_tracker_filename,
        ),
    )


def describe(run: Run) -> list[str]:
    """The run in a few lines, for the log's beginning."""
    from megatron.models.flops import count_parameters

    config, launch = run.config, run.launch
    parameters: Any = count_parameters(run.model_config)
    model = run.state.model
    return [
        *([model.plan.describe()] if isinstance(model, PipelineModel) else []),
        f"{launch.world_size} ranks ({launch.launcher}) on {run.device.type}, {config.distributed_backend}; "
        f"sharding {config.sharding_strategy} over {run.mesh.size('fsdp')} ranks",
        f"{parameters.total / 1e6:.2f} M parameters, {config.params_dtype} compute, "
        f"{config.main_params_dtype} main; vocabulary {run.model_config.vocab_size} padded to "
        f"{run.model_config.padded_vocab_size}",
        f"global batch {config.global_batch_size} x {config.seq_length} tokens, "
        f"{config.num_microbatches} microbatch(es) of {config.micro_batch_size} on each of "
        f"{config.data_parallel_size} data-parallel ranks",
    ]

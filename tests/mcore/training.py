"""Train a small GPTModel of megatron-core for some steps, under its own DDP or under our FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VOCABULARY, SEQUENCE, HIDDEN, MICRO_BATCH, MICROBATCHES = 64, 16, 32, 2, 2


@dataclass(frozen=True)
class Job:
    """One layout of one model. `wrap`: "ddp" (megatron-core's) or one of our strategies."""

    wrap: str
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    expert: int = 1
    experts: int = 0
    tied: bool = False
    sequence_parallel: bool = False
    per_token: bool = False
    instances: int = 1
    align: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 3
    microbatches: int = MICROBATCHES


@dataclass(frozen=True)
class Result:
    """Of one rank: mean loss of each step over all ranks; norms of the first step's whole gradients by name."""

    losses: list[float]
    gradient_norms: dict[str, float]
    attributes: dict[str, set[str]]


def run_jobs(rank: int, world_size: int, jobs: list[Job]) -> list[Result]:
    """Run `jobs` one after the other on the ranks of this process group."""
    from megatron.core import parallel_state

    results = []
    for job in jobs:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=job.tensor,
            pipeline_model_parallel_size=job.pipeline,
            virtual_pipeline_model_parallel_size=job.virtual,
            expert_model_parallel_size=job.expert,
            expert_tensor_parallel_size=1,  # gloo gathers even sizes only
            num_distributed_optimizer_instances=job.instances,
            create_gloo_process_groups=False,
        )
        try:
            results.append(_train(job))
        finally:
            parallel_state.destroy_model_parallel()
    return results


def _transformer_config(job: Job) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts: dict[str, Any] = {}
    if job.experts:
        experts = {
            "num_moe_experts": job.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": HIDDEN,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
        }
    return TransformerConfig(
        num_layers=4 if job.virtual else 2, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN, num_attention_heads=4,
        num_query_groups=2, tensor_model_parallel_size=job.tensor, pipeline_model_parallel_size=job.pipeline,
        virtual_pipeline_model_parallel_size=job.virtual, expert_model_parallel_size=job.expert,
        expert_tensor_parallel_size=1, sequence_parallel=job.sequence_parallel, pipeline_dtype=job.dtype,
        params_dtype=job.dtype, bf16=job.dtype == torch.bfloat16, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, batch_p2p_comm=False, overlap_p2p_comm=False,
        deallocate_pipeline_outputs=False, calculate_per_token_loss=job.per_token, init_method_std=0.1, **experts,
    )  # fmt: skip


def _build(job: Job, config: Any) -> list[Any]:
    """The chunks of this rank, wrapped; the same weights for every `wrap`."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    from megatron.fsdp.mcore import MegatronCoreFSDP, connect

    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(7)
    spec = get_gpt_layer_local_spec(num_experts=job.experts or None, normalization="RMSNorm")
    stages = range(job.virtual) if job.virtual else [None]
    chunks: list[Any] = []
    for stage in stages:
        model = GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=job.tied, position_embedding_type="rope", vp_stage=stage,
        )  # fmt: skip
        chunks.append(Float16Module(config, model) if job.dtype == torch.bfloat16 else model)
    ours = job.wrap != "ddp"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=ours and job.wrap != "no_shard",
        data_parallel_sharding_strategy=job.wrap if ours else "no_shard",
        num_distributed_optimizer_instances=job.instances,
        overlap_param_gather=job.align and ours,
        overlap_grad_reduce=job.align and ours,
        align_param_gather=job.align and ours,
    )
    if ours:
        chunks = [MegatronCoreFSDP(config, ddp_config, chunk) for chunk in chunks]
        connect(config, chunks)
        return chunks
    from megatron.core.distributed import finalize_model_grads

    config.finalize_model_grads_func = finalize_model_grads
    return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


def _train(job: Job) -> Result:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = _transformer_config(job)
    chunks = _build(job, config)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    schedule = get_forward_backward_func()
    losses: list[float] = []
    norms: dict[str, float] = {}
    for step in range(job.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        iterators = [_batches(job, step) for _ in chunks]
        reported = schedule(
            forward_step_func=_forward_step(job), data_iterator=iterators if job.virtual else iterators[0],
            model=chunks, num_microbatches=job.microbatches, seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )  # fmt: skip
        _expose_gradients(job, parameters)
        if step == 0:
            norms = _gradient_norms(chunks)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.zeros(2)
        for entry in reported:
            total += torch.tensor([float(entry["loss"]), 1.0])
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
    return Result(losses, norms, _attributes(chunks))


def _expose_gradients(job: Job, parameters: list[Any]) -> None:
    """What megatron-core's optimizers do first with the gradients of its DDP."""
    if job.wrap == "ddp":
        for parameter in parameters:
            parameter.grad = parameter.main_grad.to(parameter.dtype)


def _gradient_norms(chunks: list[Any]) -> dict[str, float]:
    norms = {}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            key = f"{index}.{name.replace('module.', '')}"
            norms[key] = float(whole.double().norm())
    return norms


def _attributes(chunks: list[Any]) -> dict[str, set[str]]:
    """megatron-core's marks on each parameter, with their values."""
    marks = ("tensor_model_parallel", "partition_dim", "sequence_parallel", "allreduce", "shared")
    return {
        f"{index}.{name.replace('module.', '')}": {
            f"{mark}={getattr(parameter, mark)}" for mark in marks if hasattr(parameter, mark)
        }
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def _batches(job: Job, step: int) -> Iterator[Tensor]:
    """This rank's microbatches [micro batch, sequence + 1], by its data-parallel rank."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(step)
    shape = (job.microbatches, size, MICRO_BATCH, SEQUENCE + 1)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    yield from tokens[:, rank]


def _forward_step(job: Job) -> Any:
    positions = torch.arange(SEQUENCE)[None].expand(MICRO_BATCH, -1)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]

    def loss_function(output: Tensor) -> tuple:
        total = output.float().sum()
        report = {"loss": total.detach().clone() / output.numel()}
        if job.per_token:
            return total, torch.tensor(output.numel(), dtype=torch.int), report
        return total / output.numel(), report

    def forward_step(iterator: Iterator[Tensor], model: Any) -> tuple:
        tokens = next(iterator)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return model(inputs, positions, mask, labels=labels), loss_function

    return forward_step

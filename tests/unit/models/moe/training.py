"""Training a model with experts on one rank by plain torch, and in a layout by TrainStep under FSDP."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.fsdp import collectives as fsdp_collectives
from megatron.models.backends.base import Backend, LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.config import ModelConfig, RecomputeConfig
from megatron.models.gpt import GPTModel
from megatron.models.init import Initializer, materialise
from megatron.models.moe.router import TopKRouter
from megatron.parallel import collectives as parallel_collectives
from megatron.parallel.context.balance import split_batch
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.train.arguments import parse_args, validate
from megatron.train.build import build_model
from megatron.train.lr_schedule import OptimizerParamScheduler, ScheduleConfig
from megatron.train.optimizer import OptimizerConfig, build_optimizer
from megatron.train.step import BatchSize, StepOptions, TrainState, TrainStep
from tests.te import engine
from tests.unit.models.moe.shapes import VOCABULARY, pieces

STEPS, MICRO_BATCH, LENGTH, SEED, LEARNING_RATE = 2, 2, 16, 7, 0.05
TOTAL_MICROBATCHES = 4
CLIP = 0.5
"""Less than the norms, so that every step clips."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; data x microbatches is the same for all, so that all see the same samples."""

    sizes: dict[str, int]
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        return ParallelSizes(**self.sizes).world

    @property
    def microbatches(self) -> int:
        return TOTAL_MICROBATCHES // self.sizes.get("data", 1)


@dataclass(frozen=True)
class Options:
    """How a layout trains. `double`: in float64, where a long chain of sums leaves fp32's 1e-6. `forced`: a
    bias that sends every token to the first experts. `backend`: "torch" or "te" (in a process that has it).
    `overlap`: microbatches take turns. `delay`: weight gradients wait.
    """

    strategy: str = "optim_grads_params"
    fused: bool = True
    per_token: bool = False
    recompute: str | None = None
    double: bool = False
    forced: bool = False
    backend: str = "torch"
    overlap: bool = False
    delay: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def apply(self, config: ModelConfig) -> ModelConfig:
        if self.recompute == "full":
            return config.replace(recompute=RecomputeConfig("full", "uniform", 1))
        if self.recompute == "moe":
            return config.replace(recompute=RecomputeConfig("selective", modules=("moe", "core_attn")))
        return config


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def batch(step: int, index: int) -> dict[str, Tensor]:
    """Microbatch `index` (m * dp + d) of a step; some of its tokens are not valid."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH + 1), generator=generator)
    mask = (torch.rand(MICRO_BATCH, LENGTH, generator=generator) < 0.4 + 0.15 * index).float()
    mask[0, 1] = 1.0
    positions = torch.arange(LENGTH).expand(MICRO_BATCH, LENGTH)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}


def force_first_experts(model: Any) -> None:
    """A bias that leaves no choice."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.expert_bias.copy_(torch.arange(module.config.num_experts, 0, -1) * 10.0)


def reference(config: ModelConfig, per_token: bool, dtype: torch.dtype, forced: bool = False) -> Trace:
    """One process, plain autograd and SGD."""
    mesh = ParallelMesh.single()
    options = LayerOptions.from_mesh(mesh, params_dtype=dtype, device="meta")
    model = materialise(GPTModel(config, TorchBackend(options), mesh), Initializer(SEED, mesh))
    if forced:
        force_first_experts(model)
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trace = Trace()
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [batch(step, index) for index in range(TOTAL_MICROBATCHES)]
        total = sum(float(one["loss_mask"].sum()) for one in batches)
        loss_sum = 0.0
        for one in batches:
            valid = float(one["loss_mask"].sum())
            share = valid / total if per_token else 1.0 / TOTAL_MICROBATCHES
            model.auxiliary.scale = share
            losses = model(
                one["tokens"], one["position_ids"], labels=one["labels"], loss_mask=one["loss_mask"]
            )
            loss = (losses * one["loss_mask"]).sum() / valid * share
            loss.backward()
            loss_sum += loss.item()
        report = model.auxiliary.report(model.auxiliary.vector(), TOTAL_MICROBATCHES)
        model.auxiliary.end_step(report)
        trace.losses.append(loss_sum)
        trace.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()
        }
        trace.gradients.append(gradients)
        trace.auxiliary.append({**report.means(), **report.by_layer()})
        optimizer.step()
    trace.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    trace.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return trace


def backend_class(name: str) -> type[Backend]:
    if name == "torch":
        return TorchBackend
    from megatron.models.backends.transformer_engine import TransformerEngineBackend

    return TransformerEngineBackend


def train_config(config: ModelConfig, layout: Layout, options: Options) -> Any:
    sizes = layout.sizes
    words = [
        *"--num-layers 2 --hidden-size 16 --num-attention-heads 4 --train-iters 5 --lr 0.05 --mock-data".split(),
        *"--attention-dropout 0 --hidden-dropout 0".split(),
        *("--micro-batch-size", str(MICRO_BATCH), "--seq-length", str(LENGTH), "--seed", str(SEED)),
        *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", options.strategy),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)),
        *("--num-distributed-optimizer-instances", str(sizes.get("data_outer", 1))),
        *("--tensor-model-parallel-size", str(sizes.get("tensor", 1))),
        *("--context-parallel-size", str(sizes.get("context", 1))),
        *("--pipeline-model-parallel-size", str(sizes.get("pipeline", 1))),
        *("--expert-model-parallel-size", str(sizes.get("expert", 1))),
        *("--expert-tensor-parallel-size", str(sizes.get("expert_tensor", 1))),
        *("--num-experts", str(config.moe.num_experts)),
        *(["--calculate-per-token-loss"] if options.per_token else []),
        *(["--fp64"] if options.double else []),
    ]
    return validate(parse_args(words), layout.world, "cpu")


def train(
    rank: int, world: int, config: ModelConfig, layout: Layout, options: Options
) -> tuple[Trace, list[Any]]:
    """This rank's trace, its tensors local, and where they lie in the whole model."""
    where = engine.device() if options.backend == "te" else "cpu"
    mesh = ParallelMesh(ParallelSizes(**layout.sizes), where)
    layers = LayerOptions.from_mesh(
        mesh,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=options.dtype,
        device="meta",
        fuse_wgrad_accumulation=options.fused,
        delay_wgrad_compute=options.delay,
    )
    settings = train_config(config, layout, options)
    backend = backend_class(options.backend)(layers)
    wrapped = build_model(options.apply(config), backend, settings, mesh, torch.device(where))
    if options.forced:
        force_first_experts(wrapped)
    places = [(name, shape, chunks) for name, _, shape, chunks in pieces(wrapped, config, mesh)]
    sgd = OptimizerConfig(kind="sgd", lr=LEARNING_RATE, weight_decay=0.0, momentum=0.0)
    optimizer = build_optimizer(wrapped.named_parameters(), sgd)
    schedule = ScheduleConfig(max_lr=LEARNING_RATE, decay_style="constant")
    state = TrainState(wrapped, optimizer, OptimizerParamScheduler(optimizer, schedule))
    step_options = StepOptions(per_token=options.per_token, clip_grad=CLIP, overlap_experts=options.overlap)
    step = TrainStep(state, mesh, step_options, device=where)
    named = list(wrapped.named_parameters())
    trace = Trace()

    def record(*_: object) -> None:
        tensors = [whole(parameter.grad) for _, parameter in named]
        trace.gradients.append(dict(zip([place[0] for place in places], tensors, strict=True)))

    optimizer.register_step_pre_hook(record)
    dp, size = mesh.size("dp"), BatchSize(layout.microbatches, TOTAL_MICROBATCHES * MICRO_BATCH)
    for index in range(STEPS):
        own = (
            {
                name: value.to(where)
                for name, value in part(batch(index, m * dp + mesh.rank("dp")), mesh).items()
            }
            for m in range(layout.microbatches)
        )
        result = step(own, size)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.auxiliary.append(dict(result.auxiliary))
    trace.weights = {place[0]: whole(parameter) for place, (_, parameter) in zip(places, named, strict=True)}
    trace.buffers = {
        name: buffer.clone() for name, buffer in wrapped.state_dict().items() if "expert_bias" in name
    }
    return trace, places


def recorded(
    rank: int, world: int, config: ModelConfig, layout: Layout, options: Options
) -> dict[tuple[int, ...], list[tuple[str, int]]]:
    """The collectives that this rank launched on each group, in order: (kind, group)."""
    seen: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    numbers: dict[Any, int] = {}
    originals = [(module, name, getattr(module, name)) for module, name in COLLECTIVES]

    def recorder(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.group.WORLD
            numbers.setdefault(group, len(numbers))
            ranks = tuple(dist.get_process_group_ranks(group))
            seen.setdefault((*ranks, -numbers[group] - 1), []).append((name, len(ranks)))
            return original(*args, **kwargs)

        return call

    for module, name, original in originals:
        setattr(module, name, recorder(name, original))
    try:
        train(rank, world, config, layout, options)
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
    return seen


def assert_one_order(logs: list[Any]) -> None:
    """What `recorded` gave on each rank: the same calls in the same order on all ranks of each group."""
    groups: dict[tuple[int, ...], list[tuple[int, list[list[tuple[str, int]]]]]] = {}
    for rank, log in enumerate(logs):
        by_ranks: dict[tuple[int, ...], list[list[tuple[str, int]]]] = {}
        for key, calls in log.items():  # several groups may have the same members: in the order of first use
            by_ranks.setdefault(key[:-1], []).append(calls)
        for ranks, found in by_ranks.items():
            groups.setdefault(ranks, []).append((rank, found))
    assert any(len(ranks) == 2 for ranks in groups)
    for ranks, members in groups.items():
        assert [rank for rank, _ in members] == list(ranks)
        assert all(found == members[0][1] for _, found in members), ranks


COLLECTIVES = (
    (dist, "all_to_all_single"),
    (dist, "all_reduce"),
    (parallel_collectives, "_all_gather_single"),
    (parallel_collectives, "_reduce_scatter_single"),
    (fsdp_collectives, "all_gather_single"),
    (fsdp_collectives, "reduce_scatter_single"),
)


def part(one: dict[str, Tensor], mesh: ParallelMesh) -> dict[str, Tensor]:
    """This context-parallel rank's part."""
    return one if mesh.size("cp") == 1 else dict(split_batch(one, mesh.size("cp"), mesh.rank("cp")))


def whole(tensor: Any) -> Tensor:
    """A shard's tensor on its tensor and expert rank. Collective."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone().cpu()


def assembled(results: list[tuple[Trace, list[Any]]]) -> Trace:
    """One trace of the whole model; replicas must agree bit for bit."""
    first = results[0][0]
    out = dataclasses.replace(first, gradients=[{} for _ in first.gradients], weights={}, buffers={})
    for trace, places in results:
        for name, shape, chunks in places:
            for target, source in zip(
                [*out.gradients, out.weights], [*trace.gradients, trace.weights], strict=True
            ):
                into = target.setdefault(name, torch.full(shape, torch.nan, dtype=source[name].dtype))
                for chunk in chunks:
                    there = tuple(
                        slice(o, o + n) for o, n in zip(chunk.global_offsets, chunk.sizes, strict=True)
                    )
                    here = tuple(
                        slice(o, o + n) for o, n in zip(chunk.local_offsets, chunk.sizes, strict=True)
                    )
                    piece = source[name][here]
                    assert bool(into[there].isnan().all()) or torch.equal(into[there], piece), (
                        f"{name}: replicas differ"
                    )
                    into[there] = piece
        for name, value in trace.buffers.items():
            assert torch.equal(out.buffers.setdefault(name, value), value), f"{name}: replicas differ"
    return out

"""One truth: training under FSDP, in any layout, against a plain single-process torch run. The functions of
the test.

The reference shares nothing with train/ or fsdp/: a plain module, autograd, torch's clip and torch's
optimizers. Both see the same samples: sample (m * dp + d) * mbs belongs to microbatch m of rank d.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.config import ModelConfig
from megatron.models.gpt import GPTModel
from megatron.models.init import Initializer, materialise
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.train.arguments import parse_args, validate
from megatron.train.build import wrap_model
from megatron.train.lr_schedule import OptimizerParamScheduler, ScheduleConfig
from megatron.train.optimizer import OptimizerConfig, build_optimizer
from megatron.train.step import BatchSize, StepOptions, TrainState, TrainStep, model_inputs

STEPS = 5
RECORDED = (0, STEPS - 1)
"""Steps whose gradients are compared: gathering them all costs more than the steps do. Norms are compared at each."""
MICRO_BATCH, LENGTH, VOCABULARY, SEED = 2, 12, 29, 7
LEARNING_RATE = {"adam": 0.05, "sgd": 0.01}
CLIP = 0.5

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=VOCABULARY,
    padded_vocab_size=32,
    max_position_embeddings=LENGTH,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.1,
)


@dataclass(frozen=True)
class Case:
    """A cell of the grid. `tied` has the embedding used by two units, `untied` gates the MLP as well. `delay`: weight
    gradients after each backward.
    """

    strategy: str = "optim_grads_params"
    fused: bool = True
    microbatches: int = 1
    optimizer: str = "adam"
    per_token: bool = False
    tied: bool = True
    outer: int = 1
    defer: bool = False
    delay: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Weights after AdamW are only comparable in float64 (parallelism.md, "One truth")."""
        return torch.float64 if self.optimizer == "adam" else torch.float32

    @property
    def lr(self) -> float:
        return LEARNING_RATE[self.optimizer]

    @property
    def model(self) -> ModelConfig:
        if self.tied:
            return MODEL
        return MODEL.replace(
            untie_embeddings_and_output_weights=True,
            gated_linear_unit=True,
            activation="silu",
            normalization="RMSNorm",
            position_embedding_type="rope",
            # Eight numbers that nearly cancel: in fp32 their gradient is 1e-6 off by summation order alone.
            qk_layernorm=self.optimizer == "adam",
        )

    def batch(self, step: int, index: int) -> dict[str, Tensor]:
        """Microbatch `index` (m * dp + d) of a step, whole."""
        return batch(step, index)

    def count(self, step: int) -> int:
        """Microbatches of a data-parallel rank in a step."""
        return self.microbatches


@dataclass
class Trace:
    """What a run leaves: per step the loss and the norm before clipping; gradients after it in RECORDED steps; weights
    at the end.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def batch(step: int, index: int) -> dict[str, Tensor]:
    """Microbatch `index` (m * dp + d) of a step; between 1 and all of its tokens are valid."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH + 1), generator=generator)
    mask = (torch.rand(MICRO_BATCH, LENGTH, generator=generator) < 0.3 + 0.2 * (index % 4)).float()
    mask[0, 0] = 1.0
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def optimizer_options(case: Case) -> OptimizerConfig:
    return OptimizerConfig(kind=case.optimizer, lr=case.lr, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


def reference(case: Case, world: int, dtype: torch.dtype) -> Trace:
    """The plain run: one process, world x microbatches microbatches a step."""
    mesh = ParallelMesh.single()
    options = LayerOptions.from_mesh(mesh, params_dtype=dtype, device="meta")
    model = materialise(GPTModel(case.model, TorchBackend(options), mesh), Initializer(SEED, mesh))
    named = dict(model.named_parameters())
    decayed = [parameter for parameter in named.values() if parameter.dim() > 1]
    rest = [parameter for parameter in named.values() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if case.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=case.lr, betas=(0.9, 0.95), eps=1e-8)
    else:
        optimizer = torch.optim.SGD(groups, lr=case.lr, momentum=0.9)
    trace = Trace()
    for step in range(STEPS):
        count = world * case.count(step)
        optimizer.zero_grad()
        batches = [case.batch(step, index) for index in range(count)]
        total = sum(float(one["loss_mask"].sum()) for one in batches)
        loss_sum = 0.0
        for one in batches:
            losses = model(**model_inputs(one))
            masked = (losses * one["loss_mask"].to(losses.dtype)).sum()
            loss = masked / total if case.per_token else masked / one["loss_mask"].sum() / count
            loss.backward()
            loss_sum += loss.item()
        trace.losses.append(loss_sum)
        trace.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        if step in RECORDED:
            trace.gradients.append({name: parameter.grad.clone() for name, parameter in named.items()})
        optimizer.step()
    trace.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return trace


def train_config(case: Case, world: int) -> Any:
    """A validated configuration, so that the model is wrapped exactly as a real run wraps it."""
    precision = ["--fp64"] if case.optimizer == "adam" else []
    words = [
        *("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --train-iters 5 --lr 0.05".split()),
        *("--micro-batch-size", str(MICRO_BATCH), "--seq-length", str(LENGTH), "--seed", str(SEED)),
        *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", case.strategy, "--mock-data"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)),
        *("--num-distributed-optimizer-instances", str(case.outer)),
        *(["--calculate-per-token-loss"] if case.per_token else []),
        *precision,
    ]
    return validate(parse_args(words), world, "cpu")


def train(rank: int, world: int, case: Case) -> Trace:
    """The same run by TrainStep under FSDP on `world` ranks; whole tensors on every rank."""
    mesh = ParallelMesh(ParallelSizes(data=world, data_outer=case.outer))
    options = LayerOptions.from_mesh(
        mesh,
        params_dtype=case.dtype,
        device="meta",
        fuse_wgrad_accumulation=case.fused,
        delay_wgrad_compute=case.delay,
    )
    model = GPTModel(case.model, TorchBackend(options), mesh)
    wrapped = wrap_model(model, train_config(case, world), mesh, torch.device("cpu"))
    optimizer = build_optimizer(wrapped.named_parameters(), optimizer_options(case))
    schedule = ScheduleConfig(
        max_lr=case.lr, decay_style="constant", start_weight_decay=0.1, end_weight_decay=0.1
    )
    state = TrainState(wrapped, optimizer, OptimizerParamScheduler(optimizer, schedule))
    step = TrainStep(state, mesh, StepOptions(per_token=case.per_token, clip_grad=CLIP))
    named = list(wrapped.named_parameters())
    trace = Trace()

    def record(*_: object) -> None:
        if len(trace.losses) in RECORDED:
            trace.gradients.append({name: whole(parameter.grad) for name, parameter in named})

    optimizer.register_step_pre_hook(record)
    size = BatchSize(case.microbatches, world * case.microbatches * MICRO_BATCH)
    for index in range(STEPS):
        own = (batch(index, m * world + rank) for m in range(case.microbatches))
        result = step(own, size)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    trace.weights = {name: whole(parameter) for name, parameter in named}
    return trace


def whole(tensor: Any) -> Tensor:
    """The global tensor of a shard. Collective."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def error(ours: Tensor, reference: Tensor) -> float:
    """||a - b|| / ||b|| in float64."""
    difference, size = (ours.double() - reference.double()).norm(), reference.double().norm()
    return (difference / size.clamp(min=1e-300)).item()

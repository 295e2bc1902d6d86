"""The model of benchmarks/fsdp.py under each of the wrappers that it compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, ShardingStrategy, data_parallel_placement
from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.block import Block
from megatron.models.config import ModelConfig
from megatron.models.gpt import Embedding, GPTModel
from megatron.models.init import Initializer, materialise
from megatron.parallel.mesh import ParallelMesh

SEQUENCE, BATCH, VOCABULARY = 256, 2, 8192
OURS = {
    "ours no_shard": "no_shard",
    "ours optim": "optim",
    "ours optim_grads": "optim_grads",
    "ours ZeRO-3": "optim_grads_params",
}
OTHERS = ("no communication", "torch DDP", "torch ZeRO-1", "torch FSDP2")
VARIANTS = (*OTHERS, *OURS)


@dataclass(frozen=True)
class Variant:
    """One line of the table: who wraps, and in which dtypes."""

    name: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype


class Trainee:
    """A wrapped model and its optimizer. `step()` trains one step of one microbatch."""

    def __init__(self, variant: Variant, device: torch.device) -> None:
        self.variant = variant
        self.device = device
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(device)
        self.positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1)
        self.finish: Callable[[], None] = lambda: None
        self.clear: Callable[[], None]
        self.model, parameters = self._build()
        if variant.name == "torch ZeRO-1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
                parameters, torch.optim.AdamW, lr=1e-4, fused=True
            )
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(self, seconds: dict[str, float] | None = None) -> None:
        """Forward, backward, gradients synchronised, optimizer; adds the seconds of each phase to `seconds`."""
        phases: dict[str, Callable[[], None]] = {
            "forward": self._forward,
            "backward": self._backward,
            "finish": self.finish,
            "optimizer": self.optimizer.step,  # type: ignore[dict-item]
            "zero_grad": self.optimizer.zero_grad,
        }
        for name, run in phases.items():
            start = time.perf_counter()
            run()
            if seconds is not None:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    def _forward(self) -> None:
        self._loss = self.forward()

    def _backward(self) -> None:
        self._loss.backward()
        del self._loss

    def forward(self) -> Tensor:
        """Mean loss of the batch."""
        tokens, labels = self.tokens[:, :-1], self.tokens[:, 1:]
        return self.model(tokens, self.positions, labels=labels).mean()

    def _build(self) -> tuple[nn.Module, list[nn.Parameter]]:
        name, dtype = self.variant.name, self.variant.dtype
        if name in OURS:
            return self._build_ours(dtype)
        if name == "torch FSDP2":
            return self._build_fsdp2(dtype)
        model = _gpt(dtype, fused=False)
        materialise(model, Initializer(0, ParallelMesh.single(self.device.type)), self.device)
        if name in ("torch DDP", "torch ZeRO-1"):
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)  # type: ignore[assignment]
        return model, list(model.parameters())

    def _build_ours(self, dtype: torch.dtype) -> tuple[nn.Module, list[nn.Parameter]]:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        config = FSDPConfig(
            strategy=ShardingStrategy(OURS[self.variant.name]), grad_comm_dtype=self.variant.reduce_dtype
        )
        model = FullyShardedDataParallel(
            _gpt(dtype, fused=True), config, data_parallel_placement(mesh), is_unit,
            initialize=Initializer(0, ParallelMesh.single(self.device.type)),
        )  # fmt: skip
        self.finish = model.finish_grad_sync
        return model, list(model.parameters())

    def _build_fsdp2(self, dtype: torch.dtype) -> tuple[nn.Module, list[nn.Parameter]]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = _gpt(torch.float32, fused=False)
        materialise(model, Initializer(0, ParallelMesh.single(self.device.type)), self.device)
        policy = MixedPrecisionPolicy()
        if dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self.variant.reduce_dtype)
        for module_name, module in model.named_modules():
            if is_unit(module_name, module):
                fully_shard(module, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model, list(model.parameters())


def is_unit(name: str, module: nn.Module) -> bool:
    """Blocks, the embedding and the head are gathered on their own."""
    return isinstance(module, (Block, Embedding)) or name == "output_layer"


def _gpt(dtype: torch.dtype, fused: bool) -> GPTModel:
    """8 layers, hidden 512, 8 heads, 4 groups, gated ffn 1536, vocabulary 8192, untied: 33.6 M parameters."""
    config = ModelConfig(
        num_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=1536,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=True,
    )
    options = LayerOptions(params_dtype=dtype, device="meta", fuse_wgrad_accumulation=fused)
    return GPTModel(config, TorchBackend(options), ParallelMesh.single())

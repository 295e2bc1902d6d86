"""megatron-core models under our FSDP: an adapter with the interface of megatron-core's own DDP (0.16).

    model = MegatronCoreFSDP(config, ddp_config, GPTModel(config, ...))
    connect(config, [model])                # no_sync_func and finalize_model_grads_func of the schedules
    optimizer = torch.optim.AdamW(model.parameters())

The only module of fsdp/ that imports megatron.core, inside functions, so that importing it costs nothing.

Note [main_grad]
megatron-core's finalize_model_grads sums gradients of some parameters over the tensor-parallel ranks and reads
`main_grad` for it, in place. After `finish_grad_sync` that is this rank's rows of the reduced gradient, the memory of
`.grad`: ranks that differ in the tensor coordinate only hold the same rows, so that rows may be summed.

Note [Tied embeddings]
On one stage the output layer takes the embedding's weight in the model's own forward, so that neither is a unit of its
own; both belong to the root, which stays gathered. Across pipeline stages the first and last stage cut their copies
at different rows. The adapter then sums the whole gradients in `finish_grad_sync` and leaves `main_grad` None, which
megatron-core takes for a frozen weight and passes over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.grouping import DataParallelPlacement, PlacementFor
from megatron.fsdp.strategy import OuterStrategy, ShardingStrategy
from megatron.fsdp.wrapper import FSDPConfig, FullyShardedDataParallel


@dataclass(frozen=True)
class _Groups:
    """Process groups of megatron-core that FSDP needs; `outer` only with several optimizer instances."""

    dense: dist.ProcessGroup
    dense_inner: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_inner: dist.ProcessGroup
    outer: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup
    embedding: dist.ProcessGroup | None


class MegatronCoreFSDP(nn.Module):
    """A megatron-core model (or one pipeline chunk of it) whose parameters, gradients and optimizer state are sharded.

    Takes the place of megatron.core.distributed.DistributedDataParallel. Units are the transformer layers, the
    embedding and the output layer; dense parameters are sharded over dp x cp, experts (`allreduce` False) over the
    expert data-parallel ranks. `parameters()` are DTensors with megatron-core's attributes; step any torch optimizer
    over them.

    Args:
        config: TransformerConfig of the model.
        ddp_config: megatron-core's DistributedDataParallelConfig; `data_parallel_sharding_strategy`,
            `outer_dp_sharding_strategy`, `grad_reduce_in_fp32` and `num_distributed_optimizer_instances` are read.
        module: a GPTModel or another LanguageModule of megatron-core, also inside a Float16Module.
        options: of our FSDP; None: what `ddp_config` says.
        pg_collection: megatron-core's ProcessGroupCollection; None: the groups of parallel_state.

    Raises:
        ValueError: an option of `config` or `ddp_config` that cannot be, naming it.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        options: FSDPConfig | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        _check(config, ddp_config)
        self.config = config
        self.ddp_config = replace(ddp_config, use_megatron_fsdp=False)  # Note [main_grad]
        groups = _find_groups(config, ddp_config, pg_collection)
        self._shared_across_stages = _is_shared_across_stages(module, groups)
        self._embedding_group = groups.embedding
        unfuse(module)
        self.module = FullyShardedDataParallel(
            module,
            options or fsdp_config(ddp_config),
            _placement_for(config, module, groups),
            unit_modules=_unit_predicate(module),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.module(*args, **kwargs)

    @property
    def model(self) -> nn.Module:
        """The module that was wrapped."""
        return self.module.module

    # --- what megatron-core's schedules and training loops call -------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward belongs to a microbatch that is not the step's last (of this chunk)."""
        with self.module.no_sync():
            yield

    def start_grad_sync(self, *_unused: object) -> None:
        """Start the reductions that are due."""
        self.module.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Return when `.grad` and `main_grad` of every parameter are the reduced gradient (Note [main_grad]).

        `force_all_reduce` means something to megatron-core's DDP only.
        """
        self.module.finish_grad_sync()
        for parameter in self.module.parameters():
            gradient = parameter.grad
            parameter.main_grad = None if gradient is None else gradient._local_tensor
        if self._shared_across_stages:
            self._sum_shared_embedding()

    def start_param_sync(self, *_unused: object, **_options: object) -> None:
        """Start the gathers that are due after an optimizer step."""
        self.module.start_param_sync()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply every reduced gradient."""
        self.module.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        for parameter in self.module.parameters():
            parameter.__dict__.pop("main_grad", None)
        self.module.zero_grad_buffer()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, as `zero_grad_buffer`."""
        self.zero_grad_buffer()

    def broadcast_params(self) -> None:
        """Make replicas of main parameters equal to those of their first rank."""
        self.module.broadcast_params()

    def set_is_first_microbatch(self) -> None:
        """Pass on what the schedules tell layers that cache quantised weights."""
        function = getattr(_language_model(self.model), "set_is_first_microbatch", None)
        if function is not None:
            function()

    def _sum_shared_embedding(self) -> None:
        """Sum the tied weight's gradient over the first and last stage (Note [Tied embeddings])."""
        weight = _language_model(self.model).shared_embedding_or_output_weight()
        if weight.grad is None:
            return
        whole = weight.grad.full_tensor()
        dist.all_reduce(whole, group=self._embedding_group)
        info = weight.shard_info
        rows = whole[info.rows.start : info.rows.stop] if info.groups else whole
        weight.grad._local_tensor.copy_(rows)
        weight.main_grad = None

    # --- names and state are the model's own ------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, sharded parameter); names as before wrapping."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state: sharded parameters (DTensors that know their offsets) and buffers."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of sharded parameters or of this rank's whole tensors."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def sharded_state_dict(self, *_args: object, **_options: object) -> Any:
        """megatron-core's distributed checkpoints take even shards, which ours are not."""
        raise NotImplementedError(
            "megatron-core's dist_checkpointing cannot describe the shards of this FSDP; save state_dict() with "
            "torch.distributed.checkpoint"
        )


def fsdp_config(ddp_config: Any) -> FSDPConfig:
    """Return our options for a DistributedDataParallelConfig of megatron-core."""
    return FSDPConfig(
        strategy=ShardingStrategy.parse(ddp_config.data_parallel_sharding_strategy),
        outer_strategy=OuterStrategy.parse(ddp_config.outer_dp_sharding_strategy),
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=torch.float32 if ddp_config.grad_reduce_in_fp32 else torch.bfloat16,
    )


def connect(config: Any, chunks: Sequence[MegatronCoreFSDP]) -> None:
    """Give megatron-core's schedules the functions of the wrapped model: sets fields of the TransformerConfig.

    `no_sync_func` and `finalize_model_grads_func` always; `grad_sync_func` and `param_sync_func` where
    `ddp_config.align_param_gather` asks for aligned pipeline stages.

    Args:
        config: TransformerConfig that the model was built with.
        chunks: of this rank, in virtual-pipeline order.
    """
    from megatron.core.distributed import finalize_model_grads

    def of_chunks(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions if len(functions) > 1 else functions[0]

    config.no_sync_func = of_chunks("no_sync")
    config.finalize_model_grads_func = finalize_model_grads
    if chunks[0].ddp_config.align_param_gather:
        config.grad_sync_func = of_chunks("start_grad_sync")
        config.param_sync_func = of_chunks("start_param_sync")


def unfuse(module: nn.Module) -> None:
    """Let autograd make the weight gradients of megatron-core's own linear layers.

    Their fused path (0.16) overwrites the buffer of an FSDP parameter whatever `overwrite_main_grad` says, and fails
    where dtypes differ. Layers of Transformer Engine keep the contract and stay fused.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for child in module.modules():
        if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
            child.gradient_accumulation_fusion = False


def _check(config: Any, ddp_config: Any) -> None:
    if getattr(config, "mtp_num_layers", None):
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers}: multi-token prediction of megatron-core uses the embedding on "
            f"two stages in ways that the FSDP adapter does not follow; use mtp_num_layers=None"
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError(
            "defer_embedding_wgrad_compute=True writes to gradient buffers behind FSDP; use False"
        )
    if getattr(ddp_config, "fp8_param_gather", False):
        raise ValueError("fp8_param_gather=True: FSDP does not shard quantised parameters; use False")


def _find_groups(config: Any, ddp_config: Any, pg_collection: Any) -> _Groups:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    found = ProcessGroupCollection.setup_process_groups_for_ddp(pg_collection, config, ddp_config)
    if pg_collection is None:
        embedding = parallel_state.get_embedding_group(check_initialized=False)
    else:
        embedding = getattr(pg_collection, "embd", None)
    several = ddp_config.num_distributed_optimizer_instances > 1
    return _Groups(
        dense=found["dp_cp_group"],
        dense_inner=found["intra_dp_cp_group"] if several else found["dp_cp_group"],
        expert=found["expt_dp_group"],
        expert_inner=found["intra_expt_dp_group"] if several else found["expt_dp_group"],
        outer=found["inter_dist_opt_group"] if several else None,
        pipeline=found["pp_group"],
        embedding=embedding,
    )


def _placement_for(config: Any, module: nn.Module, groups: _Groups) -> PlacementFor:
    """Dense parameters over dp x cp, experts over their own data-parallel ranks, one divisor for both.

    As in megatron-core an expert's gradient, the sum over all tokens that were sent to it, is divided by the number
    of *dense* data-parallel ranks; with a per-token loss nothing is.
    """
    device_type = next(module.parameters()).device.type
    per_token = getattr(config, "calculate_per_token_loss", False)
    divisor = 1.0 if per_token else float(groups.dense.size())

    def placement(whole: dist.ProcessGroup, inner: dist.ProcessGroup) -> DataParallelPlacement:
        shard, outer = _meshes(whole, inner, groups.outer, device_type)
        return DataParallelPlacement(shard, outer, divisor)

    dense = placement(groups.dense, groups.dense_inner)
    has_experts = any(not getattr(parameter, "allreduce", True) for parameter in module.parameters())
    expert = placement(groups.expert, groups.expert_inner) if has_experts else dense
    return lambda _name, parameter: dense if getattr(parameter, "allreduce", True) else expert


def _meshes(
    whole: dist.ProcessGroup, inner: dist.ProcessGroup, outer: dist.ProcessGroup | None, device_type: str
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the (shard, outer) meshes over megatron-core's groups; instances are runs of neighbouring ranks."""
    if outer is None or outer.size() == 1:
        return DeviceMesh.from_group(inner, device_type, mesh_dim_names=("fsdp",)), None
    rows = torch.tensor(dist.get_process_group_ranks(whole)).view(outer.size(), inner.size())
    assert dist.get_process_group_ranks(inner) in rows.tolist(), "an optimizer instance is not a run of ranks"
    mesh = DeviceMesh.from_group([outer, inner], device_type, mesh=rows, mesh_dim_names=("dp_outer", "fsdp"))
    return mesh["fsdp"], mesh["dp_outer"]


def _language_model(module: nn.Module) -> Any:
    """The LanguageModule in `module`, which a Float16Module may wrap."""
    while not hasattr(module, "share_embeddings_and_output_weights") and hasattr(module, "module"):
        module = module.module  # type: ignore[assignment]
    return module


def _unit_predicate(module: nn.Module) -> Any:
    """Transformer layers, and embedding and output layer unless they share a weight (Note [Tied embeddings])."""
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    model = _language_model(module)
    ends: list[nn.Module] = []
    if not getattr(model, "share_embeddings_and_output_weights", False):
        ends = [getattr(model, name) for name in ("embedding", "output_layer") if hasattr(model, name)]

    def is_unit(_name: str, child: nn.Module) -> bool:
        return isinstance(child, BaseTransformerLayer) or any(child is end for end in ends)

    return is_unit


def _is_shared_across_stages(module: nn.Module, groups: _Groups) -> bool:
    """Whether this chunk holds one of two copies of a tied weight."""
    model = _language_model(module)
    if not getattr(model, "share_embeddings_and_output_weights", False) or groups.pipeline.size() == 1:
        return False
    return bool(model.pre_process or model.post_process)

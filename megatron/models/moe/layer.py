"""The mixture-of-experts layer: router, dispatcher, grouped experts, shared expert.

Note "Distinct tokens". Each rank routes tokens that no other rank has. Under sequence parallelism it has them; without,
the tensor-parallel ranks of a group hold the same ones, and each takes its piece of the sequence and hands the result
back. So expert parallelism may use the tensor ranks too, and counts, losses and gradients need no case of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.models.moe.config import MoEConfig
from megatron.models.moe.experts import GroupedExperts, SharedExpert
from megatron.models.moe.router import TopKRouter
from megatron.parallel.collectives import gather
from megatron.parallel.expert import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, ExpertGrid, Routing
from megatron.parallel.expert.dispatch import nothing
from megatron.parallel.expert.flex import FlexDispatcher, flex_buffer
from megatron.parallel.sequence import scatter_sequence

if TYPE_CHECKING:
    from megatron.models.block import LayerContext


class MoELayer(nn.Module):
    """[s, b, hidden] -> [s, b, hidden], after a norm that stands alone and without the residual."""

    recompute_name = "moe"

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config = context.config.moe
        assert config is not None, "a layer with experts needs ModelConfig.moe"
        grid = ExpertGrid.of_mesh(config.num_experts, context.mesh)
        _check(context, config, grid)
        self.config = config
        self.router = TopKRouter(context, config)
        self.experts = GroupedExperts(context, grid.num_local, config.ffn_hidden_size)
        self.shared_experts: SharedExpert | None = None
        if config.shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpert(
                context, config.shared_expert_intermediate_size, config.shared_expert_gate
            )
        recompute = context.config.recompute
        self._checkpoint = context.backend.checkpoint if recompute.selects("shared_experts") else None
        self.dispatcher = build_dispatcher(config, grid)
        self._scatter_group = None if context.backend.options.sequence_parallel else context.mesh.group("tp")

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [s, b, hidden] (s / tp under sequence parallelism) -> the same shape and dtype."""
        own = scatter_sequence(hidden, self._scatter_group)
        if self.shared_experts is None:
            return gather(self._routed(own, nothing), self._scatter_group)
        if not self.config.shared_expert_overlap:
            out = gather(self._routed(own, nothing), self._scatter_group)
            return out + self._shared(hidden)
        shared: list[Tensor] = []
        out = gather(self._routed(own, lambda: shared.append(self._shared(hidden))), self._scatter_group)
        return out + shared[0]

    def _shared(self, hidden: Tensor) -> Tensor:
        assert self.shared_experts is not None
        if self._checkpoint is None or not torch.is_grad_enabled():
            return self.shared_experts(hidden)
        return self._checkpoint(self.shared_experts, hidden)

    def _routed(self, hidden: Tensor, meanwhile: Callable[[], None]) -> Tensor:
        routing: Routing = self.router(hidden)
        tokens = hidden.flatten(0, 1)
        if self.config.apply_probs_on_input:
            tokens = (tokens * routing.weights).to(tokens.dtype)
            # The weight is in the input; what is kept of it here is that a dropped token gives nothing.
            kept = (routing.experts < routing.num_experts).to(routing.weights.dtype)
            routing = Routing(routing.experts, kept, routing.num_experts, routing.capacity)
        there = self.dispatcher.dispatch(tokens, routing, meanwhile)
        return there.combine(self.experts(there.rows, there.splits)).view_as(hidden)


def build_dispatcher(config: MoEConfig, grid: ExpertGrid) -> Dispatcher:
    """The dispatcher that the configuration names."""
    if config.dispatcher == "allgather":
        return AllGatherDispatcher(grid)
    if config.dispatcher == "alltoall":
        return AllToAllDispatcher(grid)
    return FlexDispatcher(grid, flex_buffer(config.flex_backend, grid))


def _check(context: LayerContext, config: MoEConfig, grid: ExpertGrid) -> None:
    tensor = context.mesh.size("tp")
    if config.ffn_hidden_size % grid.etp_size:
        raise ValueError(
            f"--moe-ffn-hidden-size {config.ffn_hidden_size} does not divide by "
            f"--expert-tensor-parallel-size {grid.etp_size}"
        )
    shared = config.shared_expert_intermediate_size
    if shared is not None and shared % tensor:
        raise ValueError(
            f"--moe-shared-expert-intermediate-size {shared} does not divide by "
            f"--tensor-model-parallel-size {tensor}"
        )

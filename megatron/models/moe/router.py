"""TopKRouter: which experts each token goes to, the losses that balance them, and the bias that does so too.

Note "Replicas". Every tensor-parallel rank holds the whole router and routes tokens of its own, so its gradient is
partial and is summed over the tensor axis once a step, with and without sequence parallelism.

Note "fp32 bias". `expert_bias` is moved by steps of 1e-3, which bf16 cannot add to 0.5: it stays fp32 whatever the
model is cast to.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.moe import balance
from megatron.models.moe.config import LOG_NAMES, MoEConfig
from megatron.models.moe.scores import balancing_scores, choose_by_sinkhorn, choose_experts
from megatron.parallel.annotate import ParameterAnnotation, annotate
from megatron.parallel.expert.permute import Routing, apply_capacity, expert_capacity, tokens_per_expert

if TYPE_CHECKING:
    from megatron.models.auxiliary import AuxiliaryReport
    from megatron.models.block import LayerContext

_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(nn.Module):
    """weight [experts, hidden]; with --moe-router-enable-expert-bias the buffer expert_bias [experts] fp32."""

    expert_bias: Tensor | None

    def __init__(self, context: LayerContext, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.layer_name = context.layer_name
        options, mesh = context.backend.options, context.mesh
        shape = (config.num_experts, context.config.hidden_size)
        weight = nn.Parameter(torch.empty(shape, dtype=options.params_dtype, device=options.device))
        weight.init_spec = context.config.linear_init(shape[1], shape[0])  # type: ignore[attr-defined]
        partial = "sum" if mesh.size("tp") > 1 else "none"
        self.weight = annotate(weight, ParameterAnnotation(replicated_gradient=partial))  # type: ignore[arg-type]
        self.register_buffer("expert_bias", self._new_bias("cpu") if config.enable_expert_bias else None)
        self._rng = context.backend.rng_tracker()
        self._auxiliary = context.auxiliary
        self._micro_group, self._step_group = mesh.group("tp_cp"), mesh.group("tp_dp_cp")
        self._micro_size, self._step_size = mesh.size("tp_cp"), mesh.size("tp_dp_cp")
        self._so_far = _StepCounts()
        self._auxiliary.on_forget(self._so_far.clear)
        self._auxiliary.on_step_end(self._end_step)

    def forward(self, hidden: Tensor) -> Routing:
        """hidden: [s, b, hidden] of this rank alone -> the routing of its s * b tokens, sequences fastest."""
        config = self.config
        logits = self._forced(self._logits(self._with_jitter(hidden).flatten(0, 1)))
        if config.sinkhorn:
            experts, weights = choose_by_sinkhorn(logits, config, self.training)
        else:
            experts, weights = choose_experts(logits, config, self.expert_bias)
        if self.training and torch.is_grad_enabled():
            weights = self._with_losses(weights, logits, experts, hidden.shape[1])
        routing = Routing(experts, weights, config.num_experts)
        if config.expert_capacity_factor is None:
            return routing
        capacity = expert_capacity(
            experts.shape[0], config.topk, config.num_experts, config.expert_capacity_factor
        )
        return apply_capacity(
            routing, capacity, config.token_drop_policy, config.pad_expert_input_to_capacity
        )

    def _logits(self, tokens: Tensor) -> Tensor:
        dtype = _DTYPES[self.config.router_dtype] or tokens.dtype
        dtype = torch.promote_types(dtype, tokens.dtype)
        logits = F.linear(tokens.to(dtype), self.weight.to(dtype))
        return logits.to(torch.promote_types(dtype, torch.float32))

    def _forced(self, logits: Tensor) -> Tensor:
        """Logits as measurements of the experts' speed ask for them; the gradient stays that of `logits`."""
        config = self.config
        if config.force_load_balancing:
            with nullcontext() if self._rng is None else self._rng.fork():
                drawn = torch.randn_like(logits)
            return logits + (drawn - logits).detach()
        if config.force_biased is None:
            return logits
        generator = None
        if config.force_biased < 0:
            generator = torch.Generator(logits.device).manual_seed(zlib.crc32(self.layer_name.encode()))
        # Without a generator of its own from the stream that all ranks share, which recompute restores.
        bias = torch.randn(config.num_experts, generator=generator, dtype=logits.dtype, device=logits.device)
        return logits + abs(config.force_biased) * bias

    def _with_jitter(self, hidden: Tensor) -> Tensor:
        eps = self.config.input_jitter_eps
        if not self.training or not eps:
            return hidden
        if self._rng is None:
            return hidden * torch.empty_like(hidden).uniform_(1.0 - eps, 1.0 + eps)
        with self._rng.fork():
            return hidden * torch.empty_like(hidden).uniform_(1.0 - eps, 1.0 + eps)

    def _with_losses(self, weights: Tensor, logits: Tensor, experts: Tensor, batch: int) -> Tensor:
        """`weights` with this layer's losses and loads attached (megatron/models/auxiliary.py)."""
        config, losses = self.config, {}
        num_tokens = logits.shape[0] * self._micro_size
        if config.losses:
            probabilities, chosen = balancing_scores(logits, config)
            for kind, weight in config.losses.items():
                value = _LOSSES[kind](self, probabilities, chosen, num_tokens, batch)
                losses[LOG_NAMES[kind]] = (value, weight)
        if config.z_loss_coeff:
            losses["z_loss"] = (balance.z_loss(logits, num_tokens), config.z_loss_coeff)
        counts = tokens_per_expert(experts, config.num_experts)
        return self._auxiliary.attach(weights, self.layer_name, losses, counts)

    def _micro_batch_loss(self, probabilities: Tensor, chosen: Tensor, num_tokens: int, batch: int) -> Tensor:
        counts = balance.summed_counts(chosen, self.config.num_experts, self._micro_group)
        return balance.load_balancing_loss(probabilities, counts, num_tokens, num_tokens, self.config.topk)

    def _sequence_loss(self, probabilities: Tensor, chosen: Tensor, num_tokens: int, batch: int) -> Tensor:
        counts = balance.summed_counts_by_sequence(chosen, batch, self.config.num_experts, self._micro_group)
        by_sequence = probabilities.unflatten(0, (-1, batch))
        return balance.sequence_load_balancing_loss(
            by_sequence, counts, num_tokens // batch, self.config.topk
        )

    def _step_loss(self, probabilities: Tensor, chosen: Tensor, num_tokens: int, batch: int) -> Tensor:
        own = probabilities.shape[0] * self._step_size
        counts, counted = self._so_far.add(
            lambda: (balance.summed_counts(chosen, self.config.num_experts, self._step_group), own)
        )
        return balance.load_balancing_loss(probabilities, counts, counted, num_tokens, self.config.topk)

    def _end_step(self, report: AuxiliaryReport | None) -> None:
        if report is None or self.expert_bias is None:
            return
        counts = report.loads[self.layer_name].to(self.expert_bias.device)
        self.expert_bias.copy_(balance.moved_bias(self.expert_bias, counts, self.config.bias_update_rate))

    def _new_bias(self, device: torch.device | str) -> Tensor:
        return torch.zeros(self.config.num_experts, dtype=torch.float32, device=device)

    def reset_buffers(self, device: torch.device | str) -> None:
        """Make the bias afresh on `device`, where the module was built on meta."""
        if self.expert_bias is not None:
            self.expert_bias = self._new_bias(device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Casts and moves, but the bias stays fp32 bit for bit (note "fp32 bias")."""
        before = self.expert_bias
        result = super()._apply(fn, recurse)
        after = self.expert_bias
        if before is None or after is None or before.is_meta or after.is_meta:
            return result
        if after.dtype != torch.float32:
            self.expert_bias = before.to(after.device)
        return result

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{self.config.num_experts} experts, topk={self.config.topk}, {self.config.score_function}"


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "aux_loss": TopKRouter._micro_batch_loss,
    "seq_aux_loss": TopKRouter._sequence_loss,
    "global_aux_loss": TopKRouter._step_loss,
}


class _StepCounts:
    """Choices of each expert in the step so far; a forward that backward repeats counts once.

    Recompute asks again in the order of the forwards (it is first in, first out in every pipeline schedule) and gets
    what the first time gave.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._tokens = 0
        self._given: deque[tuple[Tensor, int]] = deque()

    def add(self, count: Callable[[], tuple[Tensor, int]]) -> tuple[Tensor, int]:
        """(counts, tokens) up to and with the microbatch that `count()` gives (collective, in forward only)."""
        if self._given and _in_backward():
            return self._given.popleft()
        counts, tokens = count()
        self._counts = counts if self._counts is None else self._counts + counts
        self._tokens += tokens
        self._given.append((self._counts, self._tokens))
        return self._given[-1]

    def clear(self) -> None:
        """Begin a new step."""
        self._counts, self._tokens = None, 0
        self._given.clear()


def _in_backward() -> bool:
    """Whether this forward is a recompute: it runs inside autograd's backward (torch.utils.checkpoint asks so too)."""
    return torch._C._current_graph_task_id() != -1

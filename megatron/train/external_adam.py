"""Fused Adams that know neither DTensors nor checkpoints, on this rank's shards.

Transformer Engine's and apex's FusedAdam have one constructor and keep one `step` a parameter group. Here their kernel
runs on the local tensors, while the state has the names, shards and per-parameter `step` of torch's AdamW, so that a
checkpoint of one implementation goes on with another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.train.grad_norm import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIONS = ("lr", "betas", "eps", "weight_decay")


class ExternalAdam(torch.optim.Optimizer):
    """AdamW by `adam`, a class like transformer_engine.pytorch.optimizers.FusedAdam.

    Args:
        adam: takes (params, lr, betas, eps, weight_decay, adam_w_mode); decouples weight decay with adam_w_mode.
        params: as every torch optimizer takes them.
        defaults: lr, betas, eps, weight_decay.
    """

    def __init__(
        self, adam: type[torch.optim.Optimizer], params: Iterable[Any], defaults: dict[str, Any]
    ) -> None:
        super().__init__(params, defaults)
        self._adam = adam

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; see torch.optim.AdamW."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                self._prepare(parameter)
            # A rank may hold no row of a parameter.
            held = [parameter for parameter in trained if local_tensor(parameter).numel()]
            if held:
                self._step_group(group, held)
        return loss

    def _prepare(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, requires_grad=False)
        state["step"] += 1

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """The kernel on local tensors; it counts steps by group, so that parameters go by their own count."""
        by_step: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            by_step.setdefault(int(self.state[parameter]["step"]), []).append(parameter)
        for step, members in by_step.items():
            inner = self._adam(
                [nn.Parameter(local_tensor(parameter)) for parameter in members],
                **{name: group[name] for name in OPTIONS},
                adam_w_mode=True,  # type: ignore[call-arg]
            )
            for local, parameter in zip(inner.param_groups[0]["params"], members, strict=True):
                assert parameter.grad is not None
                local.grad = local_tensor(parameter.grad)
                state = self.state[parameter]
                inner.state[local] = {name: local_tensor(state[name]) for name in MOMENTS}
            inner.param_groups[0]["step"] = step - 1
            inner.step()

"""AdamW whose two averages are kept in 16 bits (--use-precision-aware-optimizer), and Lion.

Note "Sixteen bits". bf16 holds the averages as they are (as for DeepSeek-V3, https://arxiv.org/abs/2412.19437,
section 3.3.3). fp16 has too few exponents for that, so it holds 64 times their signed square roots: 1e-12 to 1e6 at
three digits, less below, without a scale beside each tensor, so that a checkpoint loads in any layout. All arithmetic
is fp32. A second average in bf16 stands still once a step changes it by less than 0.4 %: take --adam-beta2 0.95 or so,
not 0.999.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.train.grad_norm import local_tensor

_FACTOR = 64.0


def encode(value: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values as `dtype` holds them (note "Sixteen bits")."""
    if dtype is torch.float16:
        largest = torch.finfo(dtype).max
        value = (value.sign() * value.abs().sqrt() * _FACTOR).clamp(-largest, largest)
    return value.to(dtype)


def decode(stored: Tensor) -> Tensor:
    """The fp32 (or wider) values of `encode`."""
    value = stored.to(torch.promote_types(stored.dtype, torch.float32))
    return value * value.abs() / _FACTOR**2 if stored.dtype is torch.float16 else value


@dataclass(frozen=True)
class StateDtypes:
    """Of Adam's first and second average."""

    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32


def own_parts(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """(this rank's part, that of the gradient), or None where there is nothing to do."""
    if parameter.grad is None or local_tensor(parameter).numel() == 0:
        return None
    return local_tensor(parameter), local_tensor(parameter.grad)


def count_step(state: dict[str, Any]) -> int:
    """Steps of a parameter, this one included; kept as torch's optimizers keep it."""
    state["step"] = state.get("step", torch.zeros(())) + 1
    return int(state["step"])


def adam_update(parameter: Tensor, state: dict[str, Any], group: dict[str, Any], dtypes: StateDtypes) -> None:
    """One step of AdamW (https://arxiv.org/abs/1711.05101) on this rank's part of a parameter, in place."""
    for key, dtype in (("exp_avg", dtypes.exp_avg), ("exp_avg_sq", dtypes.exp_avg_sq)):
        if key not in state:
            state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    step, parts = count_step(state), own_parts(parameter)
    if parts is None:
        return
    own, grad = parts
    (beta1, beta2), lr = group["betas"], group["lr"]
    first, second = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
    wide = torch.promote_types(torch.promote_types(own.dtype, first.dtype), torch.float32)
    grad = grad.to(wide)
    mean, square = decode(first).lerp(grad, 1 - beta1), decode(second).mul_(beta2)
    square.addcmul_(grad, grad, value=1 - beta2)
    first.copy_(encode(mean, first.dtype))
    second.copy_(encode(square, second.dtype))
    root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    value = own.to(wide) * (1 - lr * group["weight_decay"])
    own.copy_(value.addcdiv_(mean, root, value=-lr / (1 - beta1**step)))


def lion_update(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of Lion (https://arxiv.org/abs/2302.06675) on this rank's part of a parameter, in place."""
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
    count_step(state)
    parts = own_parts(parameter)
    if parts is None:
        return
    own, grad = parts
    (beta1, beta2), lr = group["lion_betas"], group["lr"]
    average, grad = local_tensor(state["exp_avg"]), grad.to(own.dtype)
    own.mul_(1 - lr * group["weight_decay"]).sub_(average.lerp(grad, 1 - beta1).sign_(), alpha=lr)
    average.lerp_(grad, 1 - beta2)


class OwnUpdates(torch.optim.AdamW):
    """torch's AdamW with an update of ours; the base gives it groups, state dicts and step counts by parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; see torch.optim.Optimizer."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)
        return loss

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change `parameter` and `state` in place."""
        raise NotImplementedError


class PrecisionAwareAdam(OwnUpdates):
    """AdamW with averages of given dtypes."""

    def __init__(self, groups: list[dict[str, Any]], dtypes: StateDtypes, **options: Any) -> None:
        super().__init__(groups, **options)
        self.dtypes = dtypes

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """See adam_update."""
        adam_update(parameter, state, group, self.dtypes)


class Lion(OwnUpdates):
    """Lion: the sign of an average."""

    def __init__(self, groups: list[dict[str, Any]], lion_betas: tuple[float, float], **options: Any) -> None:
        super().__init__([{"lion_betas": lion_betas, **group} for group in groups], **options)

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """See lion_update."""
        lion_update(parameter, state, group)

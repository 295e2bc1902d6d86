"""LayerNorm and RMSNorm, forward and backward, computed in fp32 as TE's kernels do."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.te.emulator.float8 import quantized
from tests.te.emulator.values import torch_dtype


def _store(value: Tensor, out: Any, dtype: Any, quantizer: Any) -> Any:
    converted = torch_dtype(dtype)
    assert converted is not None
    if quantizer is not None:
        return quantized(value.to(converted), quantizer, out)
    if out is None:
        return value.to(converted)
    out.copy_(value)
    return out


def _scale(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    return weight.detach().float() + (1.0 if zero_centered_gamma else 0.0)


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[output, mean, 1 / standard deviation]."""
    x = input.detach().float()
    mean = x.mean(-1)
    rsigma = (x - mean[..., None]).square().mean(-1).add(eps).rsqrt()
    y = (x - mean[..., None]) * rsigma[..., None] * _scale(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.detach().float()
    return [_store(y, ln_out, otype, quantizer), mean.reshape(-1), rsigma.reshape(-1)]


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[gradient of the input, of the weight, of the bias]."""
    hidden = x.shape[-1]
    dy, value = dz.float().reshape(-1, hidden), x.detach().float().reshape(-1, hidden)
    normalised = (value - mu[:, None]) * rsigma[:, None]
    scaled = dy * _scale(gamma, zero_centered_gamma)
    centred = scaled - scaled.mean(-1, True) - normalised * (scaled * normalised).mean(-1, True)
    dx = (centred * rsigma[:, None]).to(x.dtype).reshape(x.shape)
    return [dx, (dy * normalised).sum(0).to(gamma.dtype), dy.sum(0).to(gamma.dtype)]


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor | None]:
    """[output, None, 1 / root mean square]."""
    x = input.detach().float()
    rsigma = x.square().mean(-1).add(eps).rsqrt()
    y = x * rsigma[..., None] * _scale(weight, zero_centered_gamma)
    return [_store(y, ln_out, otype, quantizer), None, rsigma.reshape(-1)]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """[gradient of the input, of the weight]."""
    hidden = x.shape[-1]
    dy, value = dz.float().reshape(-1, hidden), x.detach().float().reshape(-1, hidden)
    normalised = value * rsigma[:, None]
    scaled = dy * _scale(gamma, zero_centered_gamma)
    dx = (scaled - normalised * (scaled * normalised).mean(-1, True)) * rsigma[:, None]
    return [dx.to(x.dtype).reshape(x.shape), (dy * normalised).sum(0).to(gamma.dtype)]


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """rmsnorm_bwd with the residual's gradient added to the input's."""
    dx, dgamma = rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma)
    return [(dx.float() + add.float()).to(x.dtype), dgamma]


FUNCTIONS = (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add)

"""Rotary positions (https://arxiv.org/abs/2104.09864), their interpolation, Llama 3.1's frequency scaling.

Nothing here is a buffer. A buffer made on meta comes back as garbage, one of a bf16 model is rounded, and
pipeline chunks would own copies that can differ; the few frequencies are computed from the config in fp32
(float64 for float64 models), on the device of the positions, once per forward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.models.deepseek import YarnConfig
from megatron.models.rotary import RotaryConfig

# Llama 3.1's constants (transformers' "llama3" rope type, Megatron's --use-rope-scaling)
_LOW_FREQUENCY_FACTOR = 1.0
_HIGH_FREQUENCY_FACTOR = 4.0


def inverse_frequencies(
    config: RotaryConfig, dim: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Radians per position of each of the dim / 2 pairs: [dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
    frequencies = 1.0 / (config.base**exponents)
    if config.yarn is not None:
        return _stretch_yarn(frequencies, config.yarn, config.base, dim)
    if config.scaling_factor is None:
        return frequencies
    return _scale_llama3(frequencies, config.scaling_factor, config.original_max_position)


def _scale_llama3(frequencies: Tensor, factor: float, original_length: int) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, interpolate between (Llama 3.1)."""
    turns = original_length * frequencies / (2 * math.pi)  # full turns within the original length
    smooth = (turns - _LOW_FREQUENCY_FACTOR) / (_HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR)
    kept = smooth.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / factor * (1.0 - kept)


def _stretch_yarn(frequencies: Tensor, yarn: YarnConfig, base: float, dim: int) -> Tensor:
    """Divide the frequencies that turn less than beta_slow times in the original length, keep those that turn more
    than beta_fast times, interpolate by channel between (YaRN, https://arxiv.org/abs/2309.00071, section 3.2).
    """

    def channel(turns: float) -> float:
        return dim * math.log(yarn.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    channels = torch.arange(dim // 2, dtype=frequencies.dtype, device=frequencies.device)
    divided = ((channels - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return frequencies / yarn.scaling_factor * divided + frequencies * (1.0 - divided)


def rotary_table(
    config: RotaryConfig, dim: int, position_ids: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `apply_rotary`: [s, b, 1, dim] each, in `dtype`, which is fp32 or float64.

    position_ids: [b, s] integers, any: context-parallel slices, positions that begin again at a document.
    """
    positions = position_ids.t().to(dtype)
    if config.seq_len_interpolation_factor is not None:
        positions = positions / config.seq_len_interpolation_factor
    angles = positions[..., None] * inverse_frequencies(config, dim, position_ids.device, dtype)
    if config.interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)
    if config.yarn is None:
        return cos, sin
    return cos * config.yarn.concentration, sin * config.yarn.concentration


def apply_rotary(x: Tensor, table: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Turn the first channels of each head; the channels after `dim` pass.

    x: [s, b, heads, channels]. table: from `rotary_table`, dim <= channels.
    """
    cos, sin = (item.to(x.dtype) for item in table)
    dim = cos.shape[-1]
    turned = x if dim == x.shape[-1] else x[..., :dim]
    turned = turned * cos + _rotate_half(turned, interleaved) * sin
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)


def _rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)

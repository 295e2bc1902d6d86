"""Activations in host memory: the same gradients, weights stay, and the layers that the flags name."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.models import block
from megatron.models.offload import OffloadConfig, host_hooks, offloading
from tests.unit.models.helpers import build_gpt, random_batch, tiny_config


@pytest.mark.parametrize("minimum", [1, 2000])
def test_what_is_saved_goes_to_the_host_and_comes_back(minimum: int) -> None:
    """Gradients are the same bits; no weight, nor a view of one, nor a small tensor is copied."""
    model = build_gpt(tiny_config())
    tokens, labels = random_batch(model.config)
    model(tokens, labels=labels).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    pack, unpack = host_hooks(kept, minimum)
    moved = []

    def counting(tensor: torch.Tensor) -> object:
        packed = pack(tensor)
        if packed is not tensor:
            moved.append(tensor)
        return packed

    with saved_tensors_hooks(counting, unpack):
        loss = model(tokens, labels=labels).sum()
    assert moved and all(tensor.untyped_storage().data_ptr() not in kept for tensor in moved)
    assert all(tensor.numel() * tensor.element_size() >= minimum for tensor in moved)
    for tensor in moved:
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))  # backward must read the copies alone
    loss.backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_flags_name_layers_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = SimpleNamespace(
        fine_grained_activation_offloading=True, offload_modules=["core_attn"], cpu_offloading_num_layers=1,
        min_offloaded_tensor_size=77,
    )  # fmt: skip
    made = OffloadConfig.from_arguments(flags)
    assert made == OffloadConfig(1, ("core_attn",), 77)
    flags.fine_grained_activation_offloading = False
    assert OffloadConfig.from_arguments(flags).modules == ()
    with pytest.raises(ValueError, match="--offload-modules router: choose from attn_norm"):
        OffloadConfig(modules=("router",))
    model = build_gpt(tiny_config(offload=made))
    names = {module: name for name, module in model.named_modules()}
    seen = []
    monkeypatch.setattr(
        block, "offloading", lambda module, size: seen.append((names[module], size)) or nullcontext()
    )
    model(*random_batch(model.config)[:1])
    assert seen == [
        ("decoder.layers.0.self_attention", 77),
        ("decoder.layers.0.mlp", 77),
        ("decoder.layers.1.self_attention", 77),
    ]


def test_host_memory_is_not_copied_to_itself() -> None:
    assert isinstance(offloading(torch.nn.Linear(2, 2), 1), nullcontext)

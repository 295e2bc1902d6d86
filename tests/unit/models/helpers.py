"""Small models for the model tests."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.config import ModelConfig
from megatron.models.gpt import GPTModel, StageParts
from megatron.models.init import Initializer, materialise
from megatron.parallel.mesh import ParallelMesh
from megatron.tools.convert.deferred import values_of
from megatron.tools.convert.import_hugging_face import read_model
from megatron.tools.convert.records import differences

TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 24,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def tiny_config(**changes) -> ModelConfig:
    return ModelConfig(**{**TINY, **changes})


def build_gpt(config: ModelConfig, *, dtype=torch.float32, device="meta", seed=11, **stage) -> GPTModel:
    """A model of one rank, built on `device` and materialised on CPU."""
    mesh = ParallelMesh.single()
    options = LayerOptions.from_mesh(mesh, params_dtype=dtype, device=device)
    return materialise(
        GPTModel(config, TorchBackend(options), mesh, StageParts(**stage)), Initializer(seed, mesh)
    )


def randomise(model: GPTModel, scale: float = 0.2, seed: int = 5) -> GPTModel:
    """Give every parameter, norms and biases too, values that matter; vocabulary padding stays zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
            is_gain = "norm" in name and name.endswith("weight")
            gain = is_gain and not model.config.layernorm_zero_centered_gamma
            parameter.copy_(noise + 1 if gain else noise)
            if parameter.shape[:1] == (model.config.padded_vocab_size,):
                parameter[model.config.vocab_size :] = 0
    return model


def random_batch(config: ModelConfig, batch: int = 2, length: int = 12, seed: int = 3):
    """tokens, labels: [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, config.vocab_size, (batch, length + 1), generator=generator)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b|| in float64."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


def converted(theirs, config: ModelConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a transformers model by our names, as the conversion tool reads them from its files."""
    theirs.save_pretrained(folder)
    source = read_model(folder)
    assert differences(config, source.model) == []
    tensors = source.deferred()
    return {key.partition(".")[2]: values_of(tensor) for key, tensor in tensors.items()}

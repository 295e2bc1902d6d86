"""Multi-token prediction stays within a packed document: packed samples give what separate ones give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.gpt import GPTModel
from megatron.models.init import Initializer, materialise
from megatron.parallel.context import split
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from tests.pool import run_ranks
from tests.unit.models.moe import shapes

LENGTH, COUNT = 8, 2  # of a document, of documents
Values = dict[str, torch.Tensor]


def build(mesh: ParallelMesh) -> GPTModel:
    config = shapes.deepseek(aux_loss_coeff=(0.0,), load_balancing=("seq_aux_loss",)).replace(moe=None)
    assert config.mtp is not None and config.mtp.num_layers == 2
    options = LayerOptions.from_mesh(mesh, params_dtype=torch.float64, device="meta")
    model = materialise(GPTModel(config, TorchBackend(options), mesh), Initializer(7, mesh))
    assert isinstance(model, GPTModel)
    return model


def batch(vocabulary: int) -> Values:
    """A packed sample: each document's last token, its end, has no loss (--eod-mask-loss)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (1, COUNT * LENGTH + 1), generator=generator)
    mask = torch.ones(COUNT, LENGTH)
    mask[:, -1] = 0
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(LENGTH).repeat(COUNT)[None],
        "loss_mask": mask.reshape(1, -1),
    }


def predictions(model: GPTModel, monkeypatch: pytest.MonkeyPatch, **inputs: Any) -> list[float]:
    """The depths' losses; their gradients go to the model's parameters."""
    seen: list[float] = []
    attach = model.auxiliary.attach

    def record(main: torch.Tensor, name: str, losses: Any, *args: Any, **more: Any) -> torch.Tensor:
        if "mtp_loss" in losses:
            seen.append(losses["mtp_loss"][0].item())
        return attach(main, name, losses, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(model.auxiliary, "attach", record)
        (0 * model(**inputs)).sum().backward()
    return seen


def packed_on_ranks(rank: int, world: int) -> list[float]:
    mesh = ParallelMesh(ParallelSizes(context=world))
    model = build(mesh)
    model.auxiliary.scale = 1.0
    whole = batch(model.config.vocab_size)
    local = {name: split(value, 1, world, rank) for name, value in whole.items()}
    with pytest.MonkeyPatch.context() as patch:
        return predictions(model, patch, document_ids=document_ids(), **local)


def document_ids() -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.int32).repeat_interleave(LENGTH)[None]


def test_packed_documents_predict_as_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """D11, E13: losses of both depths and their gradients; documents of one length weigh the same."""
    model = build(ParallelMesh.single())
    whole = batch(model.config.vocab_size)
    model.auxiliary.scale = 1.0
    packed = predictions(model, monkeypatch, document_ids=document_ids(), **whole)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.auxiliary.scale = 1.0 / COUNT
    parts = []
    for index in range(COUNT):
        document = {name: v[:, index * LENGTH : (index + 1) * LENGTH] for name, v in whole.items()}
        parts.append(predictions(model, monkeypatch, **document))
    means = torch.tensor(parts).mean(0).tolist()
    assert packed == pytest.approx(means, rel=1e-6) and len(packed) == 2
    assert any("mtp" in name for name in gradients)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
    by_rank = run_ranks(packed_on_ranks, 2)
    assert torch.tensor(by_rank).sum(0).tolist() == pytest.approx(packed, rel=1e-6)

"""A layer is what its spec says; the stack of layers is named by global index."""

from __future__ import annotations

import torch
from torch import nn

from megatron.models.attention import SelfAttention
from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.block import AttentionInputs, Block, BlockSpec, Decoder, HiddenDropout, LayerContext
from megatron.models.config import RecomputeConfig
from megatron.models.gpt import GPTModel
from megatron.models.init import Initializer, InitSpec, materialise
from megatron.models.mlp import MLP
from megatron.parallel.mesh import ParallelMesh
from tests.unit.models.helpers import build_gpt, random_batch, tiny_config


class Doubler(nn.Module):
    """A feed-forward part with a weight of its own and a word of --recompute-modules."""

    recompute_name = "mlp"

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.calls = 0
        self.factor = nn.Parameter(torch.empty(1, device=context.backend.options.device))
        self.factor.init_spec = InitSpec("ones")

    def forward(self, hidden):
        self.calls += 1
        return hidden * 2 * self.factor


def context(index: int = 0, **changes) -> LayerContext:
    return LayerContext(
        tiny_config(**changes), TorchBackend(LayerOptions()), ParallelMesh.single(), layer_number=index + 1
    )


def test_parts_with_norms_of_their_own():
    """The shape of MLA and MoE layers: a norm before a part that does not begin with one."""
    spec = BlockSpec(
        attention=SelfAttention,
        mlp=Doubler,
        input_layernorm=LayerContext.norm,
        pre_mlp_layernorm=LayerContext.norm,
    )
    block = Block(spec, context())
    names = {name for name, _ in block.named_parameters()}
    assert {"input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.factor"} <= names
    materialise(block, Initializer(3, ParallelMesh.single()))
    hidden = torch.randn(6, 2, 32)
    inputs = AttentionInputs()
    after = hidden + block.self_attention(block.input_layernorm(hidden), inputs)
    assert torch.equal(block(hidden, inputs), after + 2 * block.pre_mlp_layernorm(after))


def test_recompute_covers_a_part_by_its_word():
    for modules, runs in ((("mlp",), 2), (("core_attn",), 1)):
        recompute = RecomputeConfig("selective", modules=modules)
        block = Block(BlockSpec(SelfAttention, Doubler), context(recompute=recompute))
        materialise(block, Initializer(3, ParallelMesh.single()))
        block(torch.randn(6, 2, 32, requires_grad=True), AttentionInputs()).sum().backward()
        assert block.mlp.calls == runs


def test_models_choose_their_parts():
    class Mixed(GPTModel):
        def block_spec(self, layer_index):
            return BlockSpec(SelfAttention, Doubler if layer_index == 1 else MLP)

    config = tiny_config(num_layers=3)
    mesh = ParallelMesh.single()
    model = Mixed(config, TorchBackend(LayerOptions(device="meta")), mesh)
    materialise(model, Initializer(1, mesh))
    kinds = [type(block.mlp) for block in model.decoder.layers.values()]
    assert kinds == [MLP, Doubler, MLP]
    plain = dict(build_gpt(config, seed=1).named_parameters())
    for name, parameter in model.named_parameters():
        assert name.endswith("factor") or torch.equal(parameter, plain[name])
    tokens, labels = random_batch(config)
    assert model(tokens, labels=labels).isfinite().all()


def test_a_stage_may_have_no_layer():
    """P20: stages with only the embedding or only the loss."""
    config = tiny_config()
    backend = TorchBackend(LayerOptions())
    decoder = Decoder(config, backend, [], None)
    hidden = torch.randn(6, 2, 32)
    assert torch.equal(decoder(hidden, AttentionInputs()), hidden)
    loss_only = build_gpt(config, embedding=False, layers=[])
    _, labels = random_batch(config, length=6)
    assert loss_only(None, hidden=hidden, labels=labels).shape == labels.shape


def test_layers_name_their_context_communication():
    assert context(0, cp_comm_type=("p2p", "a2a")).cp_comm_type == "p2p"
    assert context(1, cp_comm_type=("p2p", "a2a")).cp_comm_type == "a2a"
    assert context(1, cp_comm_type=("all_gather",)).cp_comm_type == "all_gather"


def test_hidden_dropout_keeps_the_mean_and_stops_in_eval():
    dropout = HiddenDropout(0.25, TorchBackend(LayerOptions()))
    torch.manual_seed(1)
    x = torch.ones(100, 100)
    out = dropout(x)
    assert abs((out == 0).float().mean().item() - 0.25) < 0.02
    assert torch.allclose(out[out != 0], torch.tensor(1 / 0.75))
    assert dropout.eval()(x) is x

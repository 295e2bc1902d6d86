"""The model against a naive one: logits, losses, gradients; names, stages, ties, masks, construction."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.config import RotaryConfig
from megatron.models.gpt import GPTModel
from megatron.models.init import Initializer, materialise
from megatron.models.variants import MuPConfig, Variants
from megatron.parallel import loss
from megatron.parallel.annotate import annotation_of
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from tests.unit.models.helpers import build_gpt, random_batch, randomise, relative_error, tiny_config
from tests.unit.models.naive_gpt import naive_logits, naive_losses
from tests.unit.parallel.context.test_memory import LiveBytes

ROPE = {"position_embedding_type": "rope"}
SWIGLU = {"activation": "silu", "gated_linear_unit": True}
MODELS = {
    "gpt2": {},
    "llama": dict(
        **ROPE,
        **SWIGLU,
        normalization="RMSNorm",
        add_bias_linear=False,
        num_query_groups=2,
        untie_embeddings_and_output_weights=True,
    ),
    "qwen": dict(
        **ROPE,
        **SWIGLU,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=True,
        qk_layernorm=True,
        num_query_groups=1,
        kv_channels=12,
    ),
    "padded": {"padded_vocab_size": 64, "untie_embeddings_and_output_weights": True},
    "padded-tied": {"padded_vocab_size": 72},
    "one-centered": {"layernorm_zero_centered_gamma": True, "qk_layernorm": True},
    "interleaved": {"position_embedding_type": "rope", "rotary": RotaryConfig(interleaved=True, base=500.0)},
    "partial-rotary": {
        "position_embedding_type": "rope",
        "rotary": RotaryConfig(percent=0.5, seq_len_interpolation_factor=2.0),
    },
    "no-positions": {"position_embedding_type": "none", "softmax_scale": 0.4},
    "squared-relu": {"activation": "squared_relu", "ffn_hidden_size": 40},
    "relu": {"activation": "relu", "add_bias_linear": False},
    "geglu": {"gated_linear_unit": True, "ffn_hidden_size": 40},
    "clamped-quick-geglu": {
        "activation": "quick_gelu",
        "gated_linear_unit": True,
        "activation_func_clamp_value": 0.3,
        "glu_linear_offset": 1.0,
        "ffn_hidden_size": 40,
    },
    "openai-gelu": {"activation": "gelu_tanh"},
    "window-but-last": {"variants": Variants(window_size=(3, 0), windowed=(True, False))},
    "sink-and-window": {
        **ROPE,
        "num_query_groups": 2,
        "variants": Variants(window_size=(4, 0), softmax_type="learnable", without_rope=(False, True)),
    },
    "off-by-one": {"variants": Variants(softmax_type="off-by-one", qk_l2_norm=True)},
    "gated-attention": {"num_query_groups": 2, "variants": Variants(output_gate=True)},
    "post-norm-residual": {"variants": Variants(residual_post_layernorm=True)},
    "mup": {
        "variants": Variants(
            mup=MuPConfig(4.0, embedding_mult=3.0, output_mult=2.0, attn_scale_power=0.9, base_head_dim=4)
        )
    },
}


def weights_of(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_equals_the_naive_model(changes, dtype):
    """Logits, token losses and all gradients."""
    config = tiny_config(**changes)
    model = randomise(build_gpt(config, dtype=dtype))
    tokens, labels = random_batch(config)
    weights = weights_of(model)
    expected_logits = naive_logits(weights, config, tokens)
    expected = naive_losses(expected_logits, labels)
    losses = model(tokens, labels=labels)
    logits = model(tokens)
    assert losses.dtype is dtype
    limit = 1e-6 if dtype is torch.float32 else 1e-14
    assert relative_error(losses, expected) < limit
    assert relative_error(logits[..., : config.vocab_size], expected_logits) < limit
    assert torch.isneginf(logits[..., config.vocab_size :]).all()
    losses.sum().backward()
    expected.sum().backward()
    limit = 3e-6 if dtype is torch.float32 else 1e-13  # cancellation in the gradients of norms
    for name, parameter in model.named_parameters():
        if name.endswith("k_layernorm.bias"):  # softmax does not see it: its gradient is rounding
            assert parameter.grad.norm() < limit * parameter.norm()
        else:
            assert relative_error(parameter.grad, weights[name].grad) < limit, name
    if config.padded_vocab_size != config.vocab_size:
        head = model.output_layer.weight
        assert head.grad[config.vocab_size :].count_nonzero() == 0


def test_parameter_names_are_megatron_s():
    config = tiny_config(qk_layernorm=True, untie_embeddings_and_output_weights=True)
    names = {name for name, _ in build_gpt(config).named_parameters()}
    layer = [
        *(
            f"self_attention.linear_qkv.{item}"
            for item in ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
        ),
        *(f"self_attention.{item}" for item in ("linear_proj.weight", "linear_proj.bias")),
        *(
            f"self_attention.{norm}.{item}"
            for norm in ("q_layernorm", "k_layernorm")
            for item in ("weight", "bias")
        ),
        *(f"mlp.linear_fc1.{item}" for item in ("layer_norm_weight", "layer_norm_bias", "weight", "bias")),
        *(f"mlp.linear_fc2.{item}" for item in ("weight", "bias")),
    ]
    expected = {f"decoder.layers.{index}.{name}" for index in range(2) for name in layer}
    expected |= {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "output_layer.weight",
    }
    expected |= {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert names == expected
    config = tiny_config(position_embedding_type="rope", normalization="RMSNorm", add_bias_linear=False)
    names = {name for name, _ in build_gpt(config).named_parameters()}
    assert not [name for name in names if name.endswith("bias") or "position" in name or "output" in name]


def test_tied_head_is_one_parameter_and_one_checkpoint_entry():
    model = randomise(build_gpt(tiny_config()))
    assert model.output_layer.weight is model.embedding.word_embeddings.weight
    state = model.state_dict()
    assert "output_layer.weight" not in state
    other = build_gpt(tiny_config(), seed=12)
    other.load_state_dict(state)
    tokens, _ = random_batch(model.config)
    assert torch.equal(model(tokens), other(tokens))


@pytest.mark.parametrize("changes", [{}, MODELS["llama"]], ids=["tied", "untied"])
def test_pipeline_stages_are_the_model_cut_up(changes):
    """P19 (layer names are global and none is lost); same bits, same losses, same gradients."""
    config = tiny_config(**{**changes, "num_layers": 5})
    tokens, labels = random_batch(config)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    whole = build_gpt(config)
    stages = [
        build_gpt(config, embedding=True, head=False, layers=range(2)),
        build_gpt(config, embedding=False, head=False, layers=range(2, 3)),
        build_gpt(config, embedding=False, head=True, layers=range(3, 5)),
    ]
    named = dict(whole.named_parameters())
    seen = set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, named[name]), name
            seen.add(name)
    assert seen == set(named)
    hidden = stages[0](tokens, positions)
    hidden = stages[1](None, positions, hidden=hidden)
    losses = stages[2](None, positions, hidden=hidden, labels=labels)
    expected = whole(tokens, positions, labels=labels)
    assert torch.equal(losses, expected)
    losses.sum().backward()
    expected.sum().backward()
    grads: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            grads[name] = grads.get(name, 0) + parameter.grad
    for name, parameter in named.items():
        assert relative_error(grads[name], parameter.grad) < 1e-6, name


class CountAllocations(TorchDispatchMode):
    """Real bytes that any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            self.bytes += out.numel() * out.element_size()
        return out


@pytest.mark.parametrize("changes", [{}, MODELS["qwen"]], ids=["gpt2", "qwen"])
def test_meta_construction_allocates_nothing_and_gives_the_same_bits(changes):
    """I01, I02: a model built on meta and materialised equals one built on CPU; every value is finite."""
    config = tiny_config(**changes)
    mesh = ParallelMesh.single()
    backend = TorchBackend(LayerOptions.from_mesh(mesh, device="meta"))
    with CountAllocations() as count:
        model = GPTModel(config, backend, mesh)
    assert count.bytes == 0
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, Initializer(11, mesh))
    direct = dict(build_gpt(config, device="cpu", seed=11).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, direct[name]) and parameter.isfinite().all(), name
    assert not list(model.buffers())


def test_initial_distribution():
    config = tiny_config(hidden_size=128, num_layers=8, init_method_std=0.1, embedding_init_method_std=0.3)
    model = dict(build_gpt(config).named_parameters())
    layer = "decoder.layers.3."
    for name, std in {
        "embedding.word_embeddings.weight": 0.3,
        "embedding.position_embeddings.weight": 0.3,
        layer + "self_attention.linear_qkv.weight": 0.1,
        layer + "self_attention.linear_proj.weight": 0.1 / 4,
        layer + "mlp.linear_fc1.weight": 0.1,
        layer + "mlp.linear_fc2.weight": 0.1 / 4,
    }.items():
        assert abs(model[name].std().item() / std - 1) < 0.04, name
    for name, parameter in model.items():
        if "norm" in name or name.endswith("bias"):
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
    xavier = dict(build_gpt(config.replace(init_method_xavier_uniform=True)).named_parameters())
    bound = (6 / (128 + 512)) ** 0.5
    assert 0.99 * bound < xavier[layer + "mlp.linear_fc2.weight"].abs().max().item() <= bound


@pytest.mark.parametrize("changes", [MODELS["gpt2"], MODELS["llama"]], ids=["gpt2", "llama"])
def test_packed_documents_equal_documents_alone(changes):
    """D11: with document ids and reset positions a document's logits are those of a forward of it alone."""
    config = tiny_config(**changes)
    model = randomise(build_gpt(config))
    tokens, _ = random_batch(config, batch=2, length=12)
    lengths = [[5, 4, 3], [7, 5]]
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    logits = model(tokens, positions, document_ids=ids)
    for sample, row in enumerate(lengths):
        start = 0
        for length in row:
            alone = model(tokens[sample : sample + 1, start : start + length])
            assert relative_error(logits[sample, start : start + length], alone[0]) < 2e-6
            start += length
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    assert relative_error(model(tokens, attention_mask=mask), model(tokens)) < 2e-6


def test_position_ids_are_what_counts():
    """Shuffled tokens with their positions and mask give shuffled logits (as context-parallel slices do)."""
    config = tiny_config(**MODELS["llama"])
    model = randomise(build_gpt(config))
    tokens, _ = random_batch(config, batch=1, length=12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    mask = (order[None, :] > order[:, None])[None, None]
    shuffled = model(tokens[:, order], order[None], attention_mask=mask)
    assert relative_error(shuffled[0], model(tokens)[0, order]) < 2e-6


def test_fp32_residual_keeps_small_updates():
    config = tiny_config(num_layers=3, fp32_residual_connection=True)
    model = randomise(build_gpt(config, dtype=torch.bfloat16), scale=0.02)
    seen = []
    for block in model.decoder.layers.values():
        block.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    tokens, labels = random_batch(config)
    losses = model(tokens, labels=labels)
    assert seen == [(torch.float32, torch.float32)] * 3
    losses.sum().backward()
    assert all(parameter.grad.dtype is torch.bfloat16 for parameter in model.parameters())
    plain = build_gpt(config.replace(fp32_residual_connection=False), dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    assert relative_error(losses, plain(tokens, labels=labels)) < 2e-3


def test_bf16_model_gives_fp32_losses():
    config = tiny_config()
    model = build_gpt(config, dtype=torch.bfloat16)
    tokens, labels = random_batch(config)
    losses = model(tokens, labels=labels)
    assert losses.dtype is torch.float32 and losses.shape == tokens.shape
    assert model(tokens).dtype is torch.bfloat16
    model32 = build_gpt(config, dtype=torch.float32)
    assert relative_error(losses, model32(tokens, labels=labels)) < 1e-2


def test_logits_never_exist_as_a_whole(monkeypatch):
    """Peak live bytes of forward and backward stay far below what the logits of an fp32 model would take."""
    vocabulary, length = 1024, 512
    monkeypatch.setattr(loss, "LINEAR_CHUNK_ROWS", 16)
    monkeypatch.setattr(loss, "LINEAR_CHUNK_ELEMENTS", 16 * vocabulary)
    config = tiny_config(
        hidden_size=8,
        num_attention_heads=1,
        num_layers=1,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        ffn_hidden_size=8,
    )
    tokens, labels = random_batch(config, length=length)
    logits, peaks = tokens.numel() * vocabulary * 4, {}
    for chunked in (True, False):
        model = build_gpt(config)
        model.decoder.layers = torch.nn.ModuleDict()  # naive attention would hold more than all the rest
        with LiveBytes() as live:
            out = model(tokens, labels=labels) if chunked else model(tokens).logsumexp(-1)
            out.sum().backward()
        peaks[chunked] = live.peak
    assert peaks[False] > logits, "the count misses logits that are there"
    assert peaks[True] < 0.3 * logits, peaks


def test_padding_does_not_change_a_model():
    """Losses and initial weights are those of the true vocabulary under any padding."""
    tokens, labels = random_batch(tiny_config())
    plain, padded = build_gpt(tiny_config()), build_gpt(tiny_config(padded_vocab_size=128))
    weight = padded.embedding.word_embeddings.weight
    assert torch.equal(weight[:61], plain.embedding.word_embeddings.weight)
    assert weight[61:].count_nonzero() == 0
    assert torch.equal(padded(tokens, labels=labels), plain(tokens, labels=labels))


class NoGroup:
    """Stands for a group of two whose collectives nobody calls."""

    def rank(self):
        return 1

    def size(self):
        return 2


def test_annotations_say_how_weights_are_cut():
    config = tiny_config(**MODELS["qwen"], padded_vocab_size=64, untie_embeddings_and_output_weights=True)
    config = config.replace(num_query_groups=2, ffn_hidden_size=64)
    mesh = ParallelMesh(ParallelSizes(tensor=2), rank=1)
    options = LayerOptions(device="meta", tp_size=2, tp_group=NoGroup(), sequence_parallel=True)
    mesh.group = lambda axis: None
    model = GPTModel(config, TorchBackend(options), mesh)
    cut = {name: annotation_of(parameter) for name, parameter in model.named_parameters()}
    layer = "decoder.layers.1."
    assert cut["embedding.word_embeddings.weight"].num_global_rows == 61
    assert cut["output_layer.weight"].num_global_rows == 61
    assert cut["output_layer.weight"].tensor_parallel_dim == 0
    assert cut[layer + "self_attention.linear_qkv.weight"].tensor_parallel_dim == 0
    assert cut[layer + "self_attention.linear_proj.weight"].tensor_parallel_dim == 1
    assert cut[layer + "self_attention.q_layernorm.weight"].replicated_gradient == "sum"
    assert cut[layer + "mlp.linear_fc1.weight"].tensor_parallel_parts == 2
    assert cut[layer + "mlp.linear_fc2.weight"].tensor_parallel_dim == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 2},
            "--num-attention-heads 2 does not divide by --tensor-model-parallel-size 4",
        ),
        ({"ffn_hidden_size": 42}, "--ffn-hidden-size 42"),
        ({}, "padded vocabulary .* 61"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, message):
    """O06: before any layer is made, naming the flag."""
    mesh = ParallelMesh(ParallelSizes(tensor=4), rank=0)
    backend = TorchBackend(LayerOptions(device="meta"))
    config = tiny_config(**{"padded_vocab_size": 64 if changes else 61, **changes})
    with pytest.raises(ValueError, match=message):
        GPTModel(config, backend, mesh)


def test_sequences_longer_than_the_position_table_are_refused():
    model = build_gpt(tiny_config())
    with pytest.raises(ValueError, match="25 tokens is longer than --max-position-embeddings 24"):
        model(torch.zeros(1, 25, dtype=torch.long))


def test_contradictory_inputs_are_refused():
    model = build_gpt(tiny_config())
    tokens, _ = random_batch(model.config)
    mask = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
    with pytest.raises(ValueError, match="attention_mask or document_ids"):
        model(tokens, attention_mask=mask, document_ids=torch.zeros_like(tokens))
    last = build_gpt(tiny_config(position_embedding_type="rope"), embedding=False)
    with pytest.raises(ValueError, match="position_ids"):
        last(None, hidden=torch.zeros(12, 2, 32))

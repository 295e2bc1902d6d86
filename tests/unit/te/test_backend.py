"""The TE backend against the torch backend: the same layers, parameters, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.te.checks import assert_close
from tests.te.engine import device, in_te_process, load, run_te_ranks

HIDDEN, FFN, TOKENS, BATCH = 16, 32, 8, 2
SPLITS = [5, 0, 11]

Build = Callable[[Any], nn.Module]


def _norm_linear(**arguments: Any) -> Build:
    return lambda backend: backend.LayerNormLinear(HIDDEN, FFN, **arguments)


def _linear(**arguments: Any) -> Build:
    return lambda backend: backend.Linear(HIDDEN, FFN, **arguments)


LAYERS: dict[str, Build] = {
    "Linear": _linear(),
    "Linear-no-bias-returned": _linear(bias=False, return_bias=True),
    "Linear-column": _linear(parallel_mode="column", return_bias=True),
    "Linear-row": _linear(parallel_mode="row"),
    "Linear-row-bias-returned": _linear(parallel_mode="row", return_bias=True),
    "Linear-expert-column": _linear(parallel_mode="column", expert=True, bias=False),
    "LayerNormLinear": _norm_linear(parallel_mode="column"),
    "LayerNormLinear-RMSNorm": _norm_linear(normalization="RMSNorm", bias=False, parallel_mode="column"),
    "LayerNormLinear-zero-centred": _norm_linear(zero_centered_gamma=True, return_bias=True),
    "LayerNormLinear-all-outputs": _norm_linear(return_layernorm_output=True, bias=False, return_bias=True),
    "LayerNormLinear-gated": _norm_linear(tensor_parallel_parts=2, parallel_mode="column"),
    "LayerNormMLP": lambda backend: backend.LayerNormMLP(HIDDEN, FFN, return_bias=True),
    "LayerNormMLP-swiglu": lambda backend: backend.LayerNormMLP(
        HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", bias=False
    ),
    "LayerNorm": lambda backend: backend.LayerNorm(HIDDEN),
    "RMSNorm": lambda backend: backend.RMSNorm(HIDDEN, zero_centered_gamma=True),
    "RMSNorm-partial": lambda backend: backend.RMSNorm(HIDDEN, tensor_partial=True),
}


def backends(**options: Any) -> tuple[Any, Any]:
    """(TE's, torch's), with the same options."""
    from megatron.models.backends.base import LayerOptions
    from megatron.models.backends.torch import TorchBackend
    from megatron.models.backends.transformer_engine import TransformerEngineBackend

    load()
    layer_options = LayerOptions(**{"device": device()} | options)
    return TransformerEngineBackend(layer_options), TorchBackend(layer_options)


def assert_same_parameters(engine: nn.Module, plain: nn.Module) -> None:
    """Names, shapes, dtypes, init specs, annotations."""
    ours, theirs = dict(plain.named_parameters()), dict(engine.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, want in ours.items():
        got = theirs[name]
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device), name
        assert got.init_spec == want.init_spec, name
        assert got.parallel_annotation == want.parallel_annotation, name


def outputs(value: Any) -> list[Tensor | None]:
    """A layer's outputs as a list."""
    return list(value) if isinstance(value, tuple) else [value]


def assert_same_layer(engine: nn.Module, plain: nn.Module, x: Tensor, *extra: Any) -> None:
    """Outputs and all gradients agree when `engine` has the weights of `plain`; checkpoints load both ways."""
    with torch.no_grad():
        for parameter in plain.parameters():  # norms too are not to be trivial
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine.load_state_dict(plain.state_dict())
    plain.load_state_dict(engine.state_dict())
    leaves = [x.detach().clone().requires_grad_() for _ in range(2)]
    pairs = list(zip(outputs(engine(leaves[0], *extra)), outputs(plain(leaves[1], *extra)), strict=True))
    for index, (got, want) in enumerate(pairs):
        assert (got is None) == (want is None), f"output {index}"
        if got is not None and want is not None:
            assert_close(f"output {index}", got, want, 1e-6)
    gradients = [torch.randn_like(want) for _, want in pairs if want is not None]
    torch.autograd.backward([got for got, _ in pairs if got is not None], gradients)
    torch.autograd.backward([want for _, want in pairs if want is not None], gradients)
    assert_close("input gradient", leaves[0].grad, leaves[1].grad, 1e-6)
    for (name, got), want in zip(engine.named_parameters(), plain.parameters(), strict=False):
        want = dict(plain.named_parameters())[name]
        assert_close(f"gradient of {name}", got.grad, want.grad, 2e-6)


@pytest.mark.parametrize("name", LAYERS)
@in_te_process
def test_layer_equals_the_torch_backends(name: str) -> None:
    engine, plain = (LAYERS[name](backend) for backend in backends())
    assert_same_parameters(engine, plain)
    assert_same_layer(engine, plain, torch.randn(TOKENS, BATCH, HIDDEN, device=device()))


@pytest.mark.parametrize("bias", [False, True])
@in_te_process
def test_grouped_linear_equals_the_torch_backends(bias: bool) -> None:
    def build(backend: Any) -> nn.Module:
        return backend.GroupedLinear(
            3, HIDDEN, FFN, bias=bias, parallel_mode="column", tensor_parallel_parts=2
        )

    engine, plain = (build(backend) for backend in backends())
    assert_same_parameters(engine, plain)
    assert_same_layer(engine, plain, torch.randn(sum(SPLITS), HIDDEN, device=device()), SPLITS)


ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {},
    "no-mask": {"attn_mask_type": "no_mask"},
    "groups": {"num_gqa_groups": 2},
    "scale": {"softmax_scale": 0.3},
    "bshd": {"qkv_format": "bshd"},
    "padding": {"attn_mask_type": "padding"},
    "arbitrary": {"attn_mask_type": "arbitrary"},
    "value-size": {"kv_channels": (8, 4)},
}


def attention_mask(kind: str) -> Tensor | None:
    """True: masked out; no query is without keys."""
    if kind == "padding":
        mask = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool)
        mask[1, ..., 5:] = True
        return mask.to(device())
    if kind == "arbitrary":
        mask = torch.rand(BATCH, 1, TOKENS, TOKENS) < 0.3
        mask[..., 0] = False
        return mask.to(device())
    return None


@pytest.mark.parametrize("name", ATTENTION)
@in_te_process
def test_attention_equals_the_torch_backends(name: str) -> None:
    heads, arguments = 4, {"kv_channels": 8} | ATTENTION[name]
    groups, channels = arguments.get("num_gqa_groups", heads), arguments.pop("kv_channels")
    engine, plain = (b.DotProductAttention(heads, channels, **arguments) for b in backends())
    sizes = channels if isinstance(channels, tuple) else (channels, channels)
    leading = (BATCH, TOKENS) if name == "bshd" else (TOKENS, BATCH)
    shapes = ((heads, sizes[0]), (groups, sizes[0]), (groups, sizes[1]))
    inputs = [torch.randn(*leading, *shape, device=device()) for shape in shapes]
    mask = attention_mask(name)
    results = []
    for module in (engine, plain):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = module(*leaves, attention_mask=mask)
        # Queries that are padding themselves have no meaning, and TE may leave anything there.
        used = out[:5] if name == "padding" else out
        results.append([used, *torch.autograd.grad(used.square().sum(), leaves)])
    for index, (got, want) in enumerate(zip(*results, strict=True)):
        assert_close(f"tensor {index}", got, want, 1e-5)


@in_te_process
def test_attention_dropout_follows_the_tensor_stream() -> None:
    from megatron.parallel.random import TENSOR, RngStreams

    outs = []
    for seed in (1, 1, 2):
        streams = RngStreams(device())
        streams.add(TENSOR, seed)
        attention = backends(rng=streams)[0].DotProductAttention(4, 8, attention_dropout=0.5)
        torch.manual_seed(len(outs))
        q = torch.ones(TOKENS, BATCH, 4, 8, device=device())
        outs.append(attention(q, q, q))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@in_te_process
def test_checkpoint_replays_dropout_and_gives_the_same_gradients() -> None:
    from megatron.parallel.random import TENSOR, RngStreams

    streams = RngStreams(device())
    streams.add(TENSOR, 3)
    backend = backends(rng=streams)[0]
    layer = backend.LayerNormLinear(HIDDEN, HIDDEN)

    def run(x: Tensor) -> Tensor:
        with streams.fork():
            x = nn.functional.dropout(x, 0.5)
        return nn.functional.dropout(layer(x), 0.5)

    x, state, results = torch.randn(TOKENS, HIDDEN, device=device()), streams.state(), []
    for recompute in (False, True):
        streams.load_state(state)
        torch.manual_seed(7)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = backend.checkpoint(run, leaf) if recompute else run(leaf)
        out.square().sum().backward()
        results.append(
            [out, leaf.grad, *(p.grad.clone() for p in layer.parameters()), streams.state()[TENSOR]]
        )
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@in_te_process
def test_layers_build_on_meta_and_take_parameters_later() -> None:
    engine, plain = backends(device="meta")
    for name, build in LAYERS.items():
        layer = build(engine)
        assert_same_parameters(layer, build(plain))
        assert all(parameter.is_meta for parameter in layer.parameters()), name
    layer = engine.LayerNormLinear(HIDDEN, FFN)
    for name, parameter in list(layer.named_parameters()):
        layer._parameters[name] = nn.Parameter(torch.ones(parameter.shape, device=device()))
    assert layer(torch.randn(TOKENS, HIDDEN, device=device())).shape == (TOKENS, FFN)


@in_te_process
def test_delayed_weight_gradients() -> None:
    for backend in backends(delay_wgrad_compute=True):
        layer = backend.Linear(HIDDEN, FFN, bias=False)
        assert backend.needs_backward_dw(layer)
        assert not backend.needs_backward_dw(backend.RMSNorm(HIDDEN))
        x = torch.randn(TOKENS, HIDDEN, device=device())
        layer(x).sum().backward()
        assert layer.weight.grad is None
        layer.backward_dw()
        assert_close("weight", layer.weight.grad, x.sum(0).expand(FFN, HIDDEN))


@in_te_process
def test_what_cannot_be_is_refused_by_name() -> None:
    from megatron.models.backends.transformer_engine import (
        EngineSettings,
        Fp8Settings,
        TransformerEngineBackend,
    )

    engine, plain = backends()
    options = engine.options
    with pytest.raises(ValueError, match="float64.*--transformer-impl local"):
        backends(params_dtype=torch.float64)
    with pytest.raises(ValueError, match="--attention-backend 'flush'"):
        EngineSettings(attention_backend="flush")
    with pytest.raises(ValueError, match="--fp8-format 'e3m4'"):
        Fp8Settings(format="e3m4")
    with pytest.raises(ValueError, match="row"):
        engine.LayerNormLinear(HIDDEN, FFN, parallel_mode="row")
    local = TransformerEngineBackend(options, EngineSettings(attention_backend="local"))
    assert type(local.DotProductAttention(4, 8)) is type(plain.DotProductAttention(4, 8))
    if device() == "cpu":
        with pytest.raises(ValueError, match="--fp8-format hybrid: FP8 needs a CUDA device"):
            TransformerEngineBackend(options, EngineSettings(fp8=Fp8Settings(recipe="mxfp8")))
        with pytest.raises(ValueError, match="--context-parallel-size"):
            engine.DotProductAttention(4, 8, cp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="--fp8-recipe mxfp8: this backend was built without it"):
        engine.autocast("mxfp8")
    with engine.autocast(None), engine.model_autocast():
        pass
    assert engine.fused_adam() is None or device() == "cuda"


def test_the_choice_of_attention_is_told() -> None:
    from megatron.models.backends.transformer_engine.settings import attention_environment, describe_attention

    assert attention_environment("fused") == {
        "NVTE_FLASH_ATTN": "0",
        "NVTE_FUSED_ATTN": "1",
        "NVTE_UNFUSED_ATTN": "0",
    }
    assert "NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0" in describe_attention("flash")
    assert "flash, fused, unfused" in describe_attention("auto")
    assert "not Transformer Engine" in describe_attention("local")


def test_without_te_the_error_says_what_to_do() -> None:
    """In this process, where TE has no extension."""
    from megatron.models.backends.base import LayerOptions
    from megatron.models.backends.transformer_engine import TransformerEngineBackend

    if device() == "cuda":
        pytest.skip("a compiled Transformer Engine is here")
    with pytest.raises(ValueError, match="--transformer-impl local"):
        TransformerEngineBackend(LayerOptions())


def compare_tensor_parallel(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """Every layer of both backends with the same weights on each rank."""
    options = {"tp_group": dist.group.WORLD, "tp_size": world_size, "sequence_parallel": sequence_parallel}
    for name, build in LAYERS.items():
        torch.manual_seed(1 + rank)
        engine, plain = (build(backend) for backend in backends(expert_tp_size=world_size, **options))
        width = HIDDEN // world_size if "row" in name else HIDDEN
        x = torch.randn(TOKENS, BATCH, width, device=device())
        try:
            assert_same_parameters(engine, plain)
            assert_same_layer(engine, plain, x)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_tensor_parallel_layers_equal_the_torch_backends(sequence_parallel: bool) -> None:
    run_te_ranks(compare_tensor_parallel, 2, sequence_parallel)


@in_te_process
def test_the_probe_knows_this_version() -> None:
    from megatron.models.backends.transformer_engine import probe

    found = probe(device())
    assert found.version >= (2, 20)
    assert found.get_main_grad and found.overwrite_modules and found.overwrite_grouped and found.overwrite_ops
    assert found.ops_return_real_wgrad and found.dummy_wgrad and found.delayed_wgrad
    assert "overwrite_modules" in str(found)


def test_an_older_te_is_refused_by_what_it_lacks() -> None:
    import dataclasses

    from megatron.models.backends.base import LayerOptions
    from megatron.models.backends.transformer_engine.capabilities import Capabilities, check_contract

    found = Capabilities((2, 20), *[True] * 7)
    options = LayerOptions(fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    check_contract(found, options)
    with pytest.raises(ValueError, match="--no-gradient-accumulation-fusion"):
        check_contract(dataclasses.replace(found, overwrite_modules=False), options)
    with pytest.raises(ValueError, match="--delay-wgrad-compute"):
        check_contract(dataclasses.replace(found, delayed_wgrad=False), options)

"""A small GPT of TE layers against the same GPT of the torch backend: losses, gradients, training under FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.te.engine import device, in_te_process, load, run_te_ranks

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "padded_vocab_size": 64,
    "max_position_embeddings": 24,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.2,  # large enough that attention and gates are far from uniform
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**SHAPE, "qk_layernorm": True},
    "llama": {
        **SHAPE,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "silu",
        "gated_linear_unit": True,
        "ffn_hidden_size": 48,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": True,
    },
}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LENGTH, BATCH, MICROBATCHES, STEPS, LEARNING_RATE = 12, 2, 2, 3, 0.1
TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 5e-6
"""After steps: weights of standard deviation 0.2 magnify the rounding of the steps before."""
RECOMPUTES = {
    "layers": {"granularity": "full", "method": "uniform", "num_layers": 1},
    "core-attention": {"granularity": "selective", "modules": ("core_attn",)},
    "mlp": {"granularity": "selective", "modules": ("mlp",)},
}


def build(
    kind: str, model: str, mesh: Any, recompute: str = "", sequence_parallel: bool = False, **options: Any
):
    """(model on meta, Initializer) of the backend `kind`: "te" or "torch"."""
    from megatron.models.backends.base import LayerOptions
    from megatron.models.backends.torch import TorchBackend
    from megatron.models.backends.transformer_engine import TransformerEngineBackend
    from megatron.models.config import ModelConfig, RecomputeConfig
    from megatron.models.gpt import GPTModel
    from megatron.models.init import Initializer

    load()
    config = ModelConfig(**MODELS[model], recompute=RecomputeConfig(**RECOMPUTES.get(recompute, {})))
    layer_options = LayerOptions.from_mesh(
        mesh, sequence_parallel=sequence_parallel, device="meta", **options
    )
    backend = (TransformerEngineBackend if kind == "te" else TorchBackend)(layer_options)
    return GPTModel(config, backend, mesh), Initializer(21, mesh)


def build_single(kind: str, model: str, recompute: str = "") -> nn.Module:
    """A materialised model of one rank."""
    from megatron.models.init import materialise
    from megatron.parallel.mesh import ParallelMesh

    return materialise(*build(kind, model, ParallelMesh.single(), recompute), device=device())


def batch(step: int, microbatch: int, rank: int) -> tuple[Tensor, Tensor]:
    """tokens, labels: [BATCH, LENGTH]."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    data = torch.randint(0, SHAPE["vocab_size"], (BATCH, LENGTH + 1), generator=generator).to(device())
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor], **inputs: Any) -> Tensor:
    """Mean loss of a microbatch."""
    tokens, labels = data
    positions = torch.arange(LENGTH, device=device()).expand_as(tokens)
    return model(tokens, positions, labels=labels, **inputs).mean()


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return ((got - want).norm() / want.norm().clamp(min=1e-12)).item()


def is_noise(name: str, want: Tensor, largest: float) -> bool:
    """Whether a gradient is zero by mathematics (the K bias), so that only rounding is left of it."""
    return want.norm().item() < 1e-5 * largest


def assert_same(
    what: str, got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    """Tensor by tensor; those that are rounding noise are held to the size of the others."""
    assert got.keys() == want.keys()
    largest = max(tensor.norm().item() for tensor in want.values())
    for name, tensor in want.items():
        if is_noise(name, tensor, largest):
            assert (got[name].cpu() - tensor.cpu()).norm().item() < tolerance * largest, f"{what} {name}"
            continue
        error = relative_error(got[name], tensor)
        assert error < tolerance, f"{what} of {name}: relative error {error:.3g}"


@pytest.mark.parametrize("recompute", ["none", *RECOMPUTES])
@pytest.mark.parametrize("model", MODELS)
@in_te_process
def test_losses_and_gradients_equal_the_torch_backends(model: str, recompute: str) -> None:
    results = []
    for kind in ("te", "torch"):
        gpt = build_single(kind, model, recompute)
        loss = loss_of(gpt, batch(0, 0, 0))
        loss.backward()
        results.append((loss, {name: p.grad for name, p in gpt.named_parameters()}))
    (loss, gradients), (loss_want, gradients_want) = results
    assert relative_error(loss, loss_want) < TOLERANCE
    assert_same("gradient", gradients, gradients_want, 2 * TOLERANCE)


@in_te_process
def test_documents_are_kept_apart() -> None:
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12], device=device())
    losses = [
        loss_of(build_single(kind, "llama"), batch(0, 0, 0), document_ids=ids) for kind in ("te", "torch")
    ]
    assert relative_error(*losses) < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
@in_te_process
def test_a_checkpoint_of_one_backend_loads_in_the_other(model: str) -> None:
    te, plain = build_single("te", model), build_single("torch", model)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    te.load_state_dict(plain.state_dict())
    assert relative_error(loss_of(te, batch(0, 0, 0)), loss_of(plain, batch(0, 0, 0))) < TOLERANCE
    plain.load_state_dict(te.state_dict())
    assert te.state_dict().keys() == plain.state_dict().keys()


Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]
"""Losses by step, gradients of the last step, final weights."""


def train_plainly(kind: str, model: str, ranks: int) -> Result:
    """One process, no FSDP: all ranks' microbatches."""
    gpt = build_single(kind, model)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(ranks):
            for microbatch in range(MICROBATCHES):
                loss = loss_of(gpt, batch(step, microbatch, rank)) / (ranks * MICROBATCHES)
                loss.backward()
                total += loss.item()
        losses.append(total)
        optimizer.step()
    gradients = {name: p.grad.clone() for name, p in gpt.named_parameters()}
    return losses, gradients, {name: p.detach().clone() for name, p in gpt.named_parameters()}


def train_sharded(
    rank: int, world_size: int, model: str, options: dict[str, Any], sizes: dict[str, int], kind: str = "te"
) -> Any:
    """The same under FSDP, built on meta. Returns (losses, {name: (gradient, weight, chunks, global shape)})."""
    from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, ShardingStrategy
    from megatron.models.block import Block
    from megatron.models.gpt import Embedding
    from megatron.parallel.annotate import annotation_of, global_shape, local_chunks
    from megatron.parallel.mesh import ParallelMesh, ParallelSizes
    from megatron.parallel.replicated import sum_replicated_gradients
    from megatron.train.build import placement_callback

    mesh = ParallelMesh(ParallelSizes(**sizes), device())
    strategy, options = options["strategy"], {k: v for k, v in options.items() if k != "strategy"}
    gpt, initializer = build(kind, model, mesh, **options)
    placement = placement_callback(mesh, per_token=False)
    config = FSDPConfig(strategy=ShardingStrategy(strategy))
    wrapped = FullyShardedDataParallel(gpt, config, placement, (Block, Embedding), initialize=initializer)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    losses, data_rank, gradients = [], mesh.rank("dp"), {}
    delayed = options.get("delay_wgrad_compute", False)
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        total = torch.zeros(())
        for microbatch in range(MICROBATCHES):
            last = microbatch == MICROBATCHES - 1
            with torch.autograd.set_grad_enabled(True) if last else wrapped.no_sync():
                loss = loss_of(wrapped, batch(step, microbatch, data_rank)) / MICROBATCHES
                loss.backward()
                for module in wrapped.modules() if delayed else ():
                    if hasattr(module, "wgrad_store"):
                        module.backward_dw()
            total += loss.detach().cpu() / mesh.size("dp")
        wrapped.finish_grad_sync()
        parameters = list(wrapped.parameters())
        sum_replicated_gradients([(annotation_of(p), p.grad.to_local()) for p in parameters], mesh)
        gradients = {name: p.grad.full_tensor().clone() for name, p in wrapped.named_parameters()}
        optimizer.step()
        if mesh.size("dp") > 1:
            torch.distributed.all_reduce(total, group=mesh.group("dp"))
        losses.append(total.item())
    tensors = {}
    for name, parameter in wrapped.named_parameters():
        annotation, shape = annotation_of(parameter), tuple(parameter.shape)
        tp_rank, tp_size = mesh.rank("tp"), mesh.size("tp")
        where = local_chunks(annotation, shape, tp_rank, tp_size), global_shape(annotation, shape, tp_size)
        with torch.no_grad():
            tensors[name] = (gradients[name], parameter.full_tensor(), *where)
    return losses, tensors


def assembled(results: list[Any], index: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of tensor-parallel ranks; `like` may hold padding rows, which stay zero."""
    whole = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for _, tensors in results:
        for name, values in tensors.items():
            for chunk in values[2]:
                local = tuple(slice(o, o + n) for o, n in zip(chunk.local_offsets, chunk.sizes, strict=True))
                place = tuple(slice(o, o + n) for o, n in zip(chunk.global_offsets, chunk.sizes, strict=True))
                whole[name][place] = values[index][local]
    return whole


def plain_result(rank: int, world_size: int, kind: str, model: str, ranks: int) -> Result:
    """train_plainly for a worker."""
    return train_plainly(kind, model, ranks)


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], Result]:
    """Plain single-process runs of the torch backend, made once."""
    return {}


def reference(references: dict[tuple[str, str], Result], kind: str, model: str) -> Result:
    """See `references`."""
    if (kind, model) not in references:
        references[kind, model] = run_te_ranks(plain_result, 1, kind, model, 2)[0]
    return references[kind, model]


def assert_same_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Biases start at zero, so that they are sums of gradients and no better than these."""
    biases = {name for name in want if name.endswith("bias")}
    for names, tolerance in ((want.keys() - biases, TOLERANCE), (biases, GRADIENT_TOLERANCE)):
        if names:
            assert_same("weight", {n: got[n] for n in names}, {n: want[n] for n in names}, tolerance)


def compare(results: list[Any], want: Result) -> None:
    """Losses, gradients, weights."""
    losses, gradients, weights = want
    for losses_of_rank, _ in results:
        assert losses_of_rank == pytest.approx(losses, rel=TOLERANCE)
    assert_same("gradient", assembled(results, 0, gradients), gradients, GRADIENT_TOLERANCE)
    assert_same_weights(assembled(results, 1, weights), weights)


def test_a_plain_run_of_te_layers_equals_the_torch_backends(references: Any) -> None:
    losses, gradients, weights = reference(references, "te", "llama")
    losses_want, gradients_want, weights_want = reference(references, "torch", "llama")
    assert losses == pytest.approx(losses_want, rel=TOLERANCE)
    assert_same("gradient", gradients, gradients_want, GRADIENT_TOLERANCE)
    assert_same_weights(weights, weights_want)


@pytest.mark.parametrize(
    "fused", [True, pytest.param(False, marks=pytest.mark.full)], ids=["fused", "unfused"]
)
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *(("llama", strategy) for strategy in STRATEGIES),
        ("gpt2", "optim_grads_params"),
        *(pytest.param("gpt2", strategy, marks=pytest.mark.full) for strategy in STRATEGIES[:3]),
    ],
)
def test_training_under_each_strategy_equals_the_plain_run(
    references: Any, model: str, strategy: str, fused: bool
) -> None:
    """Two ranks, two microbatches, three steps."""
    options = {"strategy": strategy, "fuse_wgrad_accumulation": fused}
    results = run_te_ranks(train_sharded, 2, model, options, {"data": 2})
    compare(results, reference(references, "torch", model))


@pytest.mark.parametrize(
    "strategy", [pytest.param("no_shard", marks=pytest.mark.full), "optim", "optim_grads_params"]
)
def test_training_with_delayed_weight_gradients(references: Any, strategy: str) -> None:
    options = {"strategy": strategy, "fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}
    results = run_te_ranks(train_sharded, 2, "llama", options, {"data": 2})
    compare(results, reference(references, "torch", "llama"))


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_training_with_recompute(references: Any, recompute: str) -> None:
    options = {"strategy": "optim_grads_params", "fuse_wgrad_accumulation": True, "recompute": recompute}
    results = run_te_ranks(train_sharded, 2, "gpt2", options, {"data": 2})
    compare(results, reference(references, "torch", "gpt2"))


TENSOR_CELLS = [
    pytest.param(model, strategy, sp, marks=() if model == "llama" and default else pytest.mark.full)
    for model in MODELS
    for strategy in STRATEGIES
    for sp, default in ((True, True), (False, strategy == "optim_grads_params"))
]


@pytest.mark.parametrize(("model", "strategy", "sequence_parallel"), TENSOR_CELLS)
def test_tensor_parallel_training_under_each_strategy(
    references: Any, model: str, strategy: str, sequence_parallel: bool
) -> None:
    """Four ranks: tensor parallel over two, data parallel over two. Fault replays: P13, F12."""
    options = {
        "strategy": strategy,
        "fuse_wgrad_accumulation": True,
        "sequence_parallel": sequence_parallel,
    }
    results = run_te_ranks(train_sharded, 4, model, options, {"tensor": 2, "data": 2})
    compare(results, reference(references, "torch", model))

"""FP8: the flags, which layers compute in which recipe, and who is refused. Training: test_fp8_training.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron.models.backends.transformer_engine.settings import Fp8Settings
from megatron.parallel.expert.permute import padded_places
from megatron.train.arguments import parse_args, validate
from megatron.train.arguments.fp8 import check_fp8_sizes, fp8_settings_from
from tests.te.engine import compiled, device, in_te_process, load
from tests.unit.models.moe import shapes

RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --bf16 "
    "--train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 "
)
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def refused(words: str, where: str) -> str:
    with pytest.raises(ValueError) as caught:
        validate(parse_args((RUN + words).split()), 1, where)
    return str(caught.value)


def test_flags_are_refused_by_name_where_fp8_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused("--fp8-format hybrid", "cpu")
    assert "--fp8-format hybrid: FP8 needs a CUDA device" in message
    assert "--transformer-impl local" in refused("--fp8-format hybrid --transformer-impl local", "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--fp8-format e4m3: FP8 is Transformer Engine's" in refused("--fp8-format e4m3", "cuda")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--hidden-size 72 --num-attention-heads 8", "--hidden-size 72 is 72"),
        ("--ffn-hidden-size 72", "--ffn-hidden-size 72 / tensor-parallel 1 is 72"),
        ("--seq-length 33 --micro-batch-size 1", "--seq-length 33 / 1 ranks x --micro-batch-size 1 is 33"),
        (
            "--fp8-recipe mxfp8 --seq-length 48 --micro-batch-size 1",
            "--fp8-recipe mxfp8 needs a multiple of 32",
        ),
        ("--num-experts 4 --moe-ffn-hidden-size 24", "--moe-ffn-hidden-size 24"),
        ("--fp8-recipe custom", "--fp8-recipe custom is not built"),
    ],
)
def test_sizes_and_parts_that_fp8_cannot_have(words: str, expected: str) -> None:
    assert expected in refused(f"--fp8-format hybrid {words}", "cuda")


def test_weights_travel_in_the_compute_dtype() -> None:
    """--fp8-param-gather of a launch script changes no number here; it is said once, and needs FP8 as in Megatron."""
    config = validate(parse_args(f"{RUN} --fp8-format hybrid --fp8-param-gather".split()), 1, "cuda")
    (note,) = [line for line in config.notes if "--fp8-param-gather" in line]
    assert "has no effect" in note and "gathered in the compute dtype" in note
    assert "--fp8-param-gather: it needs --fp8-format" in refused("--fp8-param-gather", "cuda")


def test_flags_become_settings() -> None:
    words = (
        "--fp8-format e4m3 --fp8-recipe delayed --fp8-margin 2 --fp8-amax-history-len 16 --fp8-amax-compute-algo max "
        "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 0"
    )
    config = validate(parse_args((RUN + words).split()), 1, "cuda")
    assert config.transformer_impl == "transformer_engine"
    settings = fp8_settings_from(config)
    assert settings == Fp8Settings("e4m3", "delayed", 2, 16, "max", True, 2, 0)
    assert settings is not None and "delayed" in settings.describe() and "first 2" in settings.describe()
    without = validate(parse_args(f"{RUN} --fp8-recipe mxfp8".split()), 1, "cpu")
    assert fp8_settings_from(without) is None
    assert any("--fp8-recipe: without --fp8-format" in line for line in without.warnings)
    check_fp8_sizes(config)


def test_first_and_last_layers_in_bf16() -> None:
    """Layers of multi-token prediction, from index 5 on, are not the last ones."""
    settings = Fp8Settings(
        recipe="tensorwise",
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=2,
        num_layers_at_end_in_bf16=1,
    )
    recipes = [settings.recipe_of_layer(layer, 5) for layer in range(6)]
    assert recipes == [None, None, "tensorwise", "tensorwise", None, "tensorwise"]
    assert Fp8Settings().recipe_of_layer(0, 5) == "delayed"


def test_rows_of_experts_are_padded_to_the_recipe() -> None:
    splits, places = padded_places([3, 0, 16, 17], 16)
    assert splits == [16, 0, 16, 32]
    assert places.tolist() == [0, 1, 2, *range(16, 32), *range(32, 49)]


@pytest.mark.parametrize("recipe", RECIPES)
@in_te_process
def test_recipes_are_tes(recipe: str) -> None:
    """What can be checked without the hardware: names and options fit the installed TE."""
    from megatron.models.backends.transformer_engine import fp8

    settings = Fp8Settings(
        format="e4m3", recipe=recipe, margin=1, amax_history_len=16, amax_compute_algo="max"
    )
    if not compiled():
        with pytest.raises(ValueError, match="--fp8-format e4m3: FP8 needs a CUDA device"):
            fp8.make_recipe(load(), settings)
        if recipe in ("blockwise", "mxfp8"):  # not emulated
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fp8, "_on_cuda", lambda: True)
                with pytest.raises(ValueError, match=f"--fp8-recipe {recipe}: this device cannot do it"):
                    fp8.make_recipe(load(), settings)
    with any_device():
        made = fp8.make_recipe(load(), settings)
    assert type(made).__name__ == fp8.RECIPE_CLASSES[recipe]
    assert made.fp8_format.name == "E4M3"
    if recipe == "delayed":
        assert (made.margin, made.amax_history_len, made.amax_compute_algo) == (1, 16, "max")


@contextmanager
def any_device() -> Iterator[None]:
    """Recipes can be made, whatever the device can compute."""
    from megatron.models.backends.transformer_engine import fp8

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "_check_device", lambda te, recipe: None)
        patch.setattr(fp8, "_on_cuda", lambda: True)
        yield


class Recorder:
    """Stands in for te.autocast: which recipe each of TE's modules ran under, and how often FP8 was entered."""

    def __init__(self) -> None:
        self.stack: list[str | None] = []
        self.outermost: list[str] = []
        self.groups: set[Any] = set()
        self.seen: dict[str, set[str | None]] = {}

    @contextmanager
    def autocast(self, enabled: bool, recipe: Any, amax_reduction_group: Any) -> Iterator[None]:
        name = type(recipe).__name__ if enabled else None
        if not self.stack and name is not None:
            self.outermost.append(name)
            self.groups.add(amax_reduction_group)
        self.stack.append(name)
        yield
        self.stack.pop()

    def watch(self, model: torch.nn.Module, kinds: tuple[type, ...]) -> None:
        """Note the recipe at each forward, and recompute, of modules of these kinds."""
        for name, module in model.named_modules():
            if isinstance(module, kinds):
                module.register_forward_pre_hook(lambda module, args, name=name: self.note(name))

    def note(self, name: str) -> None:
        self.seen.setdefault(name, set()).add(self.stack[-1] if self.stack else None)

    def of(self, part: str) -> set[str | None]:
        """Recipes of the modules whose names hold `part`."""
        return set().union(*(recipes for name, recipes in self.seen.items() if part in name))


@contextmanager
def recorded(settings: Fp8Settings, recompute: Any = None) -> Iterator[tuple[Recorder, Any]]:
    """A DeepSeek-like model of TE's layers in FP8, but for te.autocast, which only records."""
    from megatron.models.backends.base import LayerOptions
    from megatron.models.backends.transformer_engine import EngineSettings, TransformerEngineBackend
    from megatron.models.config import RecomputeConfig
    from megatron.models.gpt import GPTModel
    from megatron.models.init import Initializer, materialise
    from megatron.parallel.mesh import ParallelMesh

    te, recorder, mesh = load(), Recorder(), ParallelMesh.single()
    config = shapes.deepseek().replace(recompute=RecomputeConfig(**recompute or {}))
    options = LayerOptions.from_mesh(mesh, device="meta")
    with any_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(te, "autocast", recorder.autocast)
        backend = TransformerEngineBackend(options, EngineSettings(fp8=settings), amax_group="maxima")
        model = materialise(GPTModel(config, backend, mesh), Initializer(3, mesh), device=device())
        kinds = (te.Linear, te.LayerNormLinear, te.GroupedLinear, type(model.output_layer))
        recorder.watch(model, kinds)
        yield recorder, model


def train_one(model: Any) -> torch.Tensor:
    """Loss of one microbatch after its backward."""
    data = torch.randint(0, shapes.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1)).to(
        device()
    )
    loss = model(data[:, :-1].contiguous(), labels=data[:, 1:].contiguous()).mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("bf16", ["none", "first"])
@in_te_process
def test_which_layers_run_under_which_recipe(recipe: str, bf16: str) -> None:
    """A dense layer, one with experts, two of multi-token prediction; never the head. Delayed: one context."""
    from megatron.models.backends.transformer_engine import fp8

    name, first = fp8.RECIPE_CLASSES[recipe], bf16 == "first"
    settings = Fp8Settings(recipe=recipe, first_last_layers_bf16=first, num_layers_at_end_in_bf16=0)
    with recorded(settings) as (recorder, model):
        train_one(model)
    assert recorder.of("decoder.layers.0.") == {None if first else name}
    assert recorder.of("decoder.layers.1.mlp.experts") == recorder.of("shared_experts") == {name}
    assert recorder.of("decoder.layers.1.") == recorder.of("mtp.") == {name}
    assert recorder.of("eh_proj") == {name}
    assert recorder.of("output_layer") == {None}
    assert recorder.groups == {"maxima"}
    if recipe == "delayed":
        assert recorder.outermost == [name], "the history of maxima must roll once a forward"
    assert not recorder.stack


@pytest.mark.parametrize("recompute", [{"granularity": "full", "method": "uniform", "num_layers": 1}])
@in_te_process
def test_a_recompute_runs_under_the_same_recipe(recompute: dict[str, Any]) -> None:
    settings = Fp8Settings(recipe="tensorwise", first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
    with recorded(settings, recompute) as (recorder, model):
        counted: list[str] = []
        model.decoder.layers["1"].register_forward_pre_hook(lambda module, args: counted.append("forward"))
        train_one(model)
    assert len(counted) == 2, "once in forward, once in backward"
    assert recorder.of("decoder.layers.0.") == {None}
    assert recorder.of("decoder.layers.1.") == {"Float8CurrentScaling"}


@in_te_process
def test_padded_experts_change_nothing() -> None:
    """Rows of zeros that FP8 needs give nothing and get nothing."""
    results = []
    for settings in (Fp8Settings(recipe="mxfp8"), None):
        with recorded(settings) if settings else plain() as (_, model):
            loss = train_one(model)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append((loss, gradients))
    (loss, gradients), (loss_want, gradients_want) = results
    assert torch.allclose(loss, loss_want, rtol=1e-6)
    for name, want in gradients_want.items():
        error = (gradients[name] - want).norm() / want.norm().clamp(min=1e-6)
        assert error < 1e-5, f"{name}: {error}"


@contextmanager
def plain() -> Iterator[tuple[None, Any]]:
    """The same model without FP8, on the torch backend."""
    from megatron.models.backends.base import LayerOptions
    from megatron.models.backends.torch import TorchBackend
    from megatron.models.gpt import GPTModel
    from megatron.models.init import Initializer, materialise
    from megatron.parallel.mesh import ParallelMesh

    mesh = ParallelMesh.single()
    backend = TorchBackend(LayerOptions.from_mesh(mesh, device="meta"))
    yield None, materialise(GPTModel(shapes.deepseek(), backend, mesh), Initializer(3, mesh), device=device())

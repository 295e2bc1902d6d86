"""Faults to plant: context managers that break one thing by patching, as hooks of a run (hooks.py).

Each is something that has gone wrong in training frameworks. `CAUGHT_BY` names the case whose comparison fails;
test_faults.py plants them. A user's run never imports this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def gradient_scale() -> Iterator[None]:
    """Gradients are summed over data-parallel ranks and never divided."""
    from megatron.train import build

    original = build.placement_callback
    undivided = lambda mesh, per_token: original(mesh, per_token=True)
    with mock.patch.object(build, "placement_callback", undivided):
        yield


@contextlib.contextmanager
def overwrite_flag() -> Iterator[None]:
    """A buffer that lasts for the step is announced as one to be overwritten: only the last microbatch counts."""
    from megatron.fsdp.main_grad import MainGrad

    original = MainGrad.announce

    def announce(self: MainGrad) -> None:
        original(self)
        self.parameter.overwrite_main_grad = True  # type: ignore[attr-defined]

    with mock.patch.object(MainGrad, "announce", announce):
        yield


@contextlib.contextmanager
def expert_scale() -> Iterator[None]:
    """Gradients of experts are divided by their copies instead of by the data-parallel ranks."""
    from megatron.fsdp import DataParallelPlacement
    from megatron.parallel.annotate import annotation_of
    from megatron.train import build

    original = build.placement_callback

    def placement_callback(mesh: Any, per_token: bool) -> Callable[..., DataParallelPlacement]:
        whole = original(mesh, per_token=per_token)

        def placement_for(name: str, parameter: torch.Tensor) -> DataParallelPlacement:
            placement = whole(name, parameter)
            if not annotation_of(parameter).expert:
                return placement
            divisor = 2 * mesh.size("edp")
            return DataParallelPlacement(placement.shard_mesh, placement.outer_mesh, divisor)

        return placement_for

    with mock.patch.object(build, "placement_callback", placement_callback):
        yield


@contextlib.contextmanager
def loss_normalisation() -> Iterator[None]:
    """--calculate-per-token-loss divides by all tokens, valid or not."""
    from megatron.train.step import TrainStep

    original = TrainStep._gradient_factor
    with mock.patch.object(TrainStep, "_gradient_factor", lambda self, tokens: original(self, 8 * 16)):
        yield


@contextlib.contextmanager
def dropped_layer() -> Iterator[None]:
    """The second layer is silently left out."""
    from megatron.models import block

    original = block._run_blocks

    def run_blocks(blocks: list[Any], *arguments: Any) -> Any:
        return original([one for one in blocks if one.layer_number != 2], *arguments)

    with mock.patch.object(block, "_run_blocks", run_blocks):
        yield


@contextlib.contextmanager
def rng() -> Iterator[None]:
    """A resume does not restore random states."""
    from megatron.train import rng as states

    with mock.patch.object(states, "restore", lambda *arguments: None):
        yield


@contextlib.contextmanager
def data_order() -> Iterator[None]:
    """Every data-parallel rank reads the first one's samples."""
    from megatron.train.data import order

    original = order.microbatch_positions
    first = lambda consumed, microbatch, rank, size, micro: original(consumed, microbatch, 0, size, micro)
    with mock.patch.object(order, "microbatch_positions", first):
        yield


@contextlib.contextmanager
def mtp_shift() -> Iterator[None]:
    """Multi-token prediction does not shift tokens, labels and mask."""
    from megatron.models import mtp

    with mock.patch.object(mtp, "roll_left", lambda tensor, shift, group: tensor):
        yield


@contextlib.contextmanager
def sequence_parallel_norms() -> Iterator[None]:
    """Partial gradients of norms under sequence parallelism are not summed over tensor-parallel ranks."""
    from megatron.train import step

    with mock.patch.object(step, "sum_replicated_gradients", lambda gradients, mesh: list(gradients)):
        yield


FAULTS = (
    "gradient_scale",
    "overwrite_flag",
    "expert_scale",
    "loss_normalisation",
    "dropped_layer",
    "rng",
    "data_order",
    "mtp_shift",
    "sequence_parallel_norms",
)
# What a case must have for a fault to be felt in it; of the fp32 ones the one with the least ranks is taken.
NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "gradient_scale": {"loss": ("mean",), "zero": ("zero1", "zero2", "zero3")},
    "overwrite_flag": {"zero": ("zero0", "zero1"), "wgrad": ("fused",), "pipeline": ("pp1",)},
    "expert_scale": {"experts": ("ep2", "ep2-etp2")},
    "loss_normalisation": {"loss": ("per-token",)},
    "dropped_layer": {"pipeline": ("gpipe", "1f1b", "interleaved", "zero-bubble")},
    "data_order": {"context": ("cp1",), "pipeline": ("pp1",)},
    "mtp_shift": {"model": ("deepseek",)},
    "sequence_parallel_norms": {"tensor": ("tp2-sp",)},
}
NAMED = {"rng": "gpt/dropout-ckpt-resume"}

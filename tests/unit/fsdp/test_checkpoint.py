"""Sharded state through torch.distributed.checkpoint: any strategy and size to any other."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from megatron.fsdp import ShardingStrategy, fully_shard
from megatron.fsdp.checkpoint import allocate_optimizer_state, mark_loaded, model_state, optimizer_state
from tests.pool import run_ranks
from tests.unit.fsdp.models import loss_of, tokens_for
from tests.unit.fsdp.test_wrapper import build, wrap

ADAM = functools.partial(torch.optim.AdamW, lr=0.01)


def step(model, optim, index, rank):
    model.zero_grad_buffer()
    loss_of(model, tokens_for(index, 0, rank)).backward()
    model.finish_grad_sync()
    optim.step()


def full(model, optim):
    weights = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    states = {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, values in optimizer_state(optim).items()
        for key, value in values.items()
    }
    return weights, states


def save(rank, world_size, strategy, folder, steps):
    model = wrap(build("plain", True), world_size, strategy=ShardingStrategy(strategy))
    optim = ADAM(model.parameters())
    for index in range(steps):
        step(model, optim, index, 0)
    dcp.save({"model": model_state(model), "optimizer": optimizer_state(optim)}, checkpoint_id=folder)
    return full(model, optim)


def load(rank, world_size, strategy, folder):
    torch.manual_seed(99)
    model = wrap(build("plain", True), world_size, strategy=ShardingStrategy(strategy))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(7.0)
    optim = ADAM(model.parameters())
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {
        key: (value.size, value.properties.dtype) for key, value in metadata.items() if hasattr(value, "size")
    }
    allocate_optimizer_state(optim, shapes, "optimizer.")
    dcp.load({"model": model_state(model), "optimizer": optimizer_state(optim)}, checkpoint_id=folder)
    mark_loaded(model)
    before = full(model, optim)
    step(model, optim, 5, 0)
    return before, full(model, optim)


TARGETS = (("optim_grads_params", 4), ("optim_grads", 2), ("no_shard", 1))


@pytest.mark.parametrize(
    "saved_as, targets",
    [
        (("optim", 3), TARGETS),
        (("optim_grads_params", 2), TARGETS[1:]),
        pytest.param(("no_shard", 2), TARGETS, marks=pytest.mark.full),
    ],
)
def test_any_to_any(tmp_path: Path, saved_as, targets):
    """Weights and optimizer state come back bit for bit, and the next step counts on (K17, I04, G20)."""
    folder = str(tmp_path / "checkpoint")
    weights, states = run_ranks(save, saved_as[1], saved_as[0], folder, 2)[0]
    assert any(key.endswith("exp_avg") for key in states)
    after_step = []
    for strategy, world_size in targets:
        for (loaded_weights, loaded_states), after in run_ranks(load, world_size, strategy, folder):
            assert loaded_weights.keys() == weights.keys()
            assert loaded_states.keys() == states.keys()
            for name, value in weights.items():
                assert torch.equal(loaded_weights[name], value), name
            for name, value in states.items():
                assert torch.equal(loaded_states[name], value), name
            after_step.append(after)
    for weights_after, states_after in after_step:
        assert all(value.item() == 3 for key, value in states_after.items() if key.endswith(".step"))
        for name, value in after_step[0][0].items():
            torch.testing.assert_close(weights_after[name], value, rtol=1e-12, atol=1e-14)


def test_empty_optimizer_state(tmp_path: Path):
    """A checkpoint from before the first step gives an optimizer without state (G20)."""
    folder = str(tmp_path / "checkpoint")
    run_ranks(save, 2, "optim", folder, 0)
    for (_, states), (_, states_after) in run_ranks(load, 2, "optim_grads_params", folder):
        assert states == {}
        assert all(value.item() == 1 for key, value in states_after.items() if key.endswith(".step"))


def state_offsets(rank, world_size, front_end):
    """Rows that `state_dict()` says are here, and whether its tensors can be made whole."""
    model = build("plain", False)
    wrapped = wrap(model, world_size) if front_end == "wrapper" else fully_shard(model)
    state = wrapped.state_dict()
    whole = {name: torch.equal(value.full_tensor(), dict(wrapped.named_parameters())[name].full_tensor())
             for name, value in state.items()}  # fmt: skip
    chunk = state["head.weight"].__create_chunk_list__()
    return whole, [(tuple(c.offsets), tuple(c.sizes)) for c in chunk]


@pytest.mark.parametrize("front_end", ["wrapper", "fully_shard"])
def test_state_dict_knows_its_rows(front_end):
    """13 uneven rows of the head over two ranks: each row once, and `full_tensor()` works on what state_dict() made."""
    results = run_ranks(state_offsets, 2, front_end)
    assert all(all(whole.values()) and len(whole) > 10 for whole, _ in results)
    chunks = [chunk for _, found in results for chunk in found]
    assert sum(sizes[0] for _, sizes in chunks) == 13
    assert {row for offsets, sizes in chunks for row in range(offsets[0], offsets[0] + sizes[0])} == set(
        range(13)
    )

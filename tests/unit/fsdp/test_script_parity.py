"""What FSDP2 scripts do beside forward, backward and step: the same with a changed import, or a named error."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import megatron.fsdp as ours
from tests.pool import run_ranks
from tests.unit.fsdp.models import Net, loss_of, tokens_for

LIBRARIES = {"torch": torch_fsdp, "ours": ours}
VOCAB = 16  # FSDP2's full_tensor() of uneven shards is not at issue here


def build(which: str, hidden: int = 10, **options) -> nn.Module:
    torch.manual_seed(0)
    model = Net(vocab=VOCAB, hidden=hidden, ffn=18).double()
    for block in model.blocks:
        LIBRARIES[which].fully_shard(block, **options)
    return LIBRARIES[which].fully_shard(model, **options)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def optimizer_in_backward(rank, world_size, which):
    """Weights after two backwards whose hooks step an optimizer for each parameter, and the number of hook calls."""
    model, calls = build(which, hidden=8), []
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        calls.append(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for index in range(2):
        loss_of(model, tokens_for(index, 0, rank, VOCAB)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    return whole(model), len(calls)


def test_optimizer_in_backward():
    """Post-accumulate-grad hooks of the sharded parameters run once a backward, on the reduced gradient."""
    (truth, calls), (found, our_calls) = (
        run_ranks(optimizer_in_backward, 2, which)[0] for which in LIBRARIES
    )
    assert calls == our_calls == 2 * len(truth)
    for name, weight in truth.items():
        torch.testing.assert_close(found[name], weight, msg=name)

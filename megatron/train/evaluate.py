"""Loss on held-out data: sum over valid tokens / number of valid tokens, whatever the batch's cut.

Training's loss in mean mode is a mean of means; evaluation's never is, so that it depends neither on the
number of microbatches nor on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron.parallel.flight import Recorded
from megatron.parallel.mesh import ParallelMesh
from megatron.train.pipeline import PipelineModel
from megatron.train.step import Batch, LossFunction, masked_loss, model_inputs

_MAX_EXPONENT = 20.0


@dataclass(frozen=True)
class EvaluationResult:
    """Mean loss in nats per valid token, over `num_tokens` of them."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss), capped as Megatron's is."""
        return math.exp(min(_MAX_EXPONENT, self.loss))


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    mesh: ParallelMesh,
    *,
    loss_function: LossFunction = masked_loss,
    device: torch.device | str = "cpu",
) -> EvaluationResult:
    """Mean loss of `model` over `batches`, which are as many on every rank. Collective.

    The model's training mode and every generator's state are as before afterwards. Dropout is off.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    try:
        with torch.no_grad():
            if isinstance(model, PipelineModel):
                sums += model.evaluate_microbatches(batches, loss_function)
                batches = ()
            for batch in batches:
                total, valid = loss_function(model(**model_inputs(batch)), batch["loss_mask"])
                sums += torch.stack([total.double(), valid.double()])
    finally:
        model.train(was_training)
    if mesh.rank("tp") != 0 or mesh.rank("pp") != mesh.size("pp") - 1:
        sums.zero_()
    group = mesh.group("world")
    if group is not None:
        with Recorded("all_reduce", group, (sums,), "the evaluation's loss"):
            dist.all_reduce(sums, group=group)
    loss, tokens = sums.tolist()
    return EvaluationResult(loss / max(tokens, 1.0), int(tokens))

"""The language-model head: a column-parallel Linear that can give losses without ever holding the logits."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from megatron.models.backends.torch.linear import Linear, split_options
from megatron.parallel.loss import linear_cross_entropy


class VocabParallelHead(Linear):
    """Head over a vocabulary that is cut over tp. Arguments as Backend.VocabParallelHead, and LayerOptions or fields.

    Its weight gradient is fused like a Linear's but never delayed: what would wait is as large as the logits.
    """

    def __init__(self, in_features: int, out_features: int, **arguments: Any) -> None:
        options, arguments = split_options(arguments.pop("options", None), arguments)
        super().__init__(
            in_features,
            out_features,
            bias=False,
            parallel_mode="column",
            options=dataclasses.replace(options, delay_wgrad_compute=False),
            **arguments,
        )

    def forward(self, x: Tensor, labels: Tensor | None = None, num_real: int | None = None) -> Tensor:
        """[s, b, hidden] -> logits [s, b, out / tp]; with labels [s, b] the loss of each token, [s, b].

        num_real: this rank's words that are no padding (losses only); None: all.
        """
        if labels is None:
            return self._multiply(x)
        return linear_cross_entropy(x, self.weight, labels, self.plan, num_real)

"""Weight gradients that wait for backward_dw(), with Transformer Engine's method names."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatron.parallel.wgrad import WeightGradientStore


class DelayedWeightGradients(nn.Module):
    """Base of the layers with GEMM weights (note "The contract" in megatron/parallel/wgrad.py)."""

    uses_per_backward = 1

    def __init__(self, delay_wgrad_compute: bool) -> None:
        super().__init__()
        self.wgrad_store = WeightGradientStore(delay_wgrad_compute)
        self._wgrad_hooks: list[Callable[[], None]] = []

    def gemm_weights(self) -> list[Tensor]:
        """The weights whose gradients backward_dw() computes."""
        raise NotImplementedError

    def mark_delayed(self) -> None:
        """Tell data-parallel wrappers that the end of backward does not finish these weights, as TE does."""
        if self.wgrad_store.delay_wgrad_compute():
            for weight in self.gemm_weights():
                weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call `hook()` at the end of each backward_dw()."""
        self._wgrad_hooks.append(hook)

    def need_backward_dw(self) -> bool:
        """Whether backward_dw() must be called, once after each backward of this layer."""
        return self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward that waits, if they are delayed."""
        if not self.need_backward_dw():
            return
        for _ in range(min(self.uses_per_backward, len(self.wgrad_store))):  # frozen weights left nothing
            self.wgrad_store.pop()
        for hook in self._wgrad_hooks:
            hook()

"""FP8 flags: what they need, and what the backend is given of them."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.models.backends.transformer_engine import Fp8Settings


def check_fp8(v: Namespace) -> list[str]:
    """Check a namespace whose device and implementation are resolved; returns warnings.

    Raises ValueError naming the flag where FP8 cannot be computed here.
    """
    if v.fp8 is None:
        given = [name for name in ("fp8_recipe", "fp8_margin", "fp8_amax_history_len") if name in v.explicit]
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        return [f"{flags}: without --fp8-format nothing is computed in FP8"] if given else []
    if v.device != "cuda":
        raise ValueError(
            f"--fp8-format {v.fp8}: FP8 needs a CUDA device and there is none; leave it out, or use --bf16"
        )
    if v.transformer_impl != "transformer_engine":
        raise ValueError(
            f"--fp8-format {v.fp8}: FP8 is Transformer Engine's, which is not used here (--transformer-impl "
            f"{v.transformer_impl}); install it, or leave the flag out"
        )
    return []


def check_fp8_sizes(v: Namespace) -> None:
    """Raise ValueError where Transformer Engine's FP8 products cannot have the sizes of a resolved namespace."""
    if v.fp8 is None:
        return
    tensor, expert_tensor = v.tensor_model_parallel_size, v.expert_tensor_parallel_size
    multiple = 32 if v.fp8_recipe == "mxfp8" else 16
    by = f"--fp8-recipe {v.fp8_recipe}"
    _multiple(f"--hidden-size {v.hidden_size}", v.hidden_size, multiple, by)
    _multiple(
        f"--ffn-hidden-size {v.ffn_hidden_size} / tensor-parallel {tensor}",
        v.ffn_hidden_size // tensor,
        multiple,
        by,
    )
    if v.num_experts:
        width = v.moe_ffn_hidden_size
        _multiple(
            f"--moe-ffn-hidden-size {width} / expert-tensor-parallel {expert_tensor}",
            width // expert_tensor,
            multiple,
            by,
        )
    pieces = v.context_parallel_size * (tensor if v.sequence_parallel else 1)
    tokens = v.seq_length // pieces * v.micro_batch_size
    _multiple(
        f"--seq-length {v.seq_length} / {pieces} ranks x --micro-batch-size {v.micro_batch_size}",
        tokens,
        multiple if v.fp8_recipe == "mxfp8" else 8,
        by,
    )


def _multiple(what: str, value: int, multiple: int, by: str) -> None:
    if value % multiple:
        raise ValueError(f"{what} is {value}, but {by} needs a multiple of {multiple}: change one of them")


def fp8_settings_from(config: Any) -> Fp8Settings | None:
    """What the flags ask of FP8; None without --fp8-format. config: a TrainConfig."""
    from megatron.models.backends.transformer_engine import Fp8Settings

    if config.fp8 is None:
        return None
    return Fp8Settings(
        format=config.fp8,
        recipe=config.fp8_recipe,
        margin=config.fp8_margin,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
        first_last_layers_bf16=config.first_last_layers_bf16,
        num_layers_at_start_in_bf16=config.num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=config.num_layers_at_end_in_bf16,
    )

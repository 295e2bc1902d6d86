"""Which activations a model computes again in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")


@dataclass(frozen=True)
class RecomputeConfig:
    """Which activations are thrown away in forward and computed again in backward.

    Attributes:
        granularity: None keeps everything, "full" checkpoints whole layers, "selective" some `modules`.
        method: of full: "uniform" checkpoints runs of `num_layers` layers, and each depth of multi-token prediction;
            "block" checkpoints the first `num_layers` layers of a pipeline stage one by one and keeps the rest.
        num_layers: of full.
        modules: of selective. "core_attn", "mlp", "moe" and "shared_experts" run again as a whole; of "layernorm"
            (norms that stand alone: a norm that is fused with the linear after it belongs to that linear and is
            kept), "moe_act" (between the experts' two linears) and "mla_up_proj" (latents to heads, and rotation) only
            the outputs are thrown away (megatron/parallel/recompute.py). "moe" covers "moe_act" and "shared_experts".
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)

    def __post_init__(self) -> None:
        _one_of("--recompute-granularity", self.granularity, (None, "full", "selective"))
        if self.granularity == "full":
            _one_of(
                "--recompute-method (with --recompute-granularity full)", self.method, ("uniform", "block")
            )
            if self.num_layers is None or self.num_layers < 1:
                raise ValueError(
                    f"--recompute-num-layers {self.num_layers}: granularity full needs a number >= 1"
                )
            return
        if self.method is not None or self.num_layers is not None:
            raise ValueError(
                f"--recompute-method {self.method} and --recompute-num-layers {self.num_layers} belong to "
                f"--recompute-granularity full, not to {self.granularity}: drop them or ask for full"
            )
        if self.granularity == "selective":
            for module in self.modules:
                _one_of("--recompute-modules", module, RECOMPUTE_MODULES)

    def selects(self, module: str) -> bool:
        """Whether selective recompute covers `module` by itself."""
        if module in ("moe_act", "shared_experts") and "moe" in self.modules:
            return False
        return self.granularity == "selective" and module in self.modules

    def check(self, *, latent: bool, experts: bool, shared: bool, residual_from_norm: bool = False) -> None:
        """Raise ValueError for a module that a model lacks: latent attention, experts, a shared expert."""
        alone = (latent or experts, "no norm stands alone: each is fused with the linear after it")
        if residual_from_norm:
            alone = (False, "the outputs of norms stay (--apply-residual-connection-post-layernorm)")
        present = {
            "layernorm": alone,
            "mla_up_proj": (latent, "there is no latent attention (--multi-latent-attention)"),
            "moe": (experts, "there are no experts (--num-experts)"),
            "moe_act": (experts, "there are no experts (--num-experts)"),
            "shared_experts": (shared, "there is no shared expert (--moe-shared-expert-intermediate-size)"),
        }
        for module in self.modules if self.granularity == "selective" else ():
            there, reason = present.get(module, (True, ""))
            if not there:
                raise ValueError(f"--recompute-modules {module}: in this model {reason}; drop {module}")


def recompute_from_arguments(arguments: Any) -> RecomputeConfig:
    """What a namespace with Megatron's argument names asks for."""
    granularity = getattr(arguments, "recompute_granularity", None)
    if getattr(arguments, "recompute_activations", False):
        if granularity == "full":
            raise ValueError(
                "--recompute-activations means --recompute-granularity selective: drop one of the two"
            )
        granularity = "selective"
    return RecomputeConfig(
        granularity=granularity,
        method=getattr(arguments, "recompute_method", None),
        num_layers=getattr(arguments, "recompute_num_layers", None),
        modules=tuple(getattr(arguments, "recompute_modules", None) or ("core_attn",)),
    )


def _one_of(flag: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join("unset" if item is None else str(item) for item in allowed)
        raise ValueError(f"{flag} {value}: choose one of {names}")

"""Flags: mixture of experts: model and router."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, not_yet
from megatron.train.arguments.values import layer_pattern

NO_EXPERTS = "mixture-of-experts layers are planned; leave them out for a dense model"

TITLE = "Mixture of experts: model and router"

FLAGS: tuple[Flag, ...] = (
    not_yet("--num-experts", int, None, NO_EXPERTS),
    not_yet("--moe-layer-freq", layer_pattern, 1, NO_EXPERTS),
    not_yet("--moe-ffn-hidden-size", int, None, NO_EXPERTS),
    not_yet("--moe-shared-expert-intermediate-size", int, None, NO_EXPERTS),
    not_yet("--moe-shared-expert-gate", Switch.ON, False, NO_EXPERTS),
    not_yet("--moe-latent-size", int, None, NO_EXPERTS),
    not_yet(
        "--moe-router-load-balancing-type",
        str,
        "aux_loss",
        NO_EXPERTS,
        nargs="+",
        choices=(
            "aux_loss",
            "seq_aux_loss",
            "global_aux_loss",
            "sinkhorn",
            "quantile_balancing",
            "none",
        ),
    ),
    not_yet("--moe-router-topk", int, 2, NO_EXPERTS),
    not_yet("--moe-router-pre-softmax", Switch.ON, False, NO_EXPERTS),
    not_yet(
        "--moe-router-score-function",
        str,
        "softmax",
        NO_EXPERTS,
        choices=(
            "softmax",
            "sigmoid",
            "sqrtsoftplus",
        ),
    ),
    not_yet("--moe-router-num-groups", int, None, NO_EXPERTS),
    not_yet("--moe-router-group-topk", int, None, NO_EXPERTS),
    not_yet("--moe-router-topk-scaling-factor", float, None, NO_EXPERTS),
    not_yet(
        "--moe-router-dtype",
        str,
        None,
        NO_EXPERTS,
        choices=(
            "fp32",
            "fp64",
        ),
    ),
    not_yet("--moe-router-enable-expert-bias", Switch.ON, False, NO_EXPERTS),
    not_yet("--moe-router-bias-update-rate", float, 0.001, NO_EXPERTS),
    not_yet("--moe-router-force-load-balancing", Switch.ON, False, NO_EXPERTS),
    not_yet("--moe-router-force-biased", float, None, NO_EXPERTS),
    not_yet("--moe-router-quantile-balancing-ema", float, 0.0, NO_EXPERTS),
    not_yet("--moe-aux-loss-coeff", float, 0.0, NO_EXPERTS, nargs="+"),
    not_yet("--moe-z-loss-coeff", float, None, NO_EXPERTS),
    not_yet("--moe-input-jitter-eps", float, None, NO_EXPERTS),
    not_yet("--moe-expert-capacity-factor", float, None, NO_EXPERTS),
    not_yet("--moe-expert-rank-capacity-factor", float, None, NO_EXPERTS),
    not_yet("--moe-pad-expert-input-to-capacity", Switch.ON, False, NO_EXPERTS),
    not_yet(
        "--moe-token-drop-policy",
        str,
        "probs",
        NO_EXPERTS,
        choices=(
            "probs",
            "position",
        ),
    ),
    not_yet("--moe-use-upcycling", Switch.ON, False, NO_EXPERTS),
    not_yet("--moe-upcycling-granularity", int, 1, NO_EXPERTS),
    not_yet("--moe-per-layer-logging", Switch.ON, False, NO_EXPERTS),
    not_yet("--moe-apply-probs-on-input", Switch.ON, False, NO_EXPERTS),
)

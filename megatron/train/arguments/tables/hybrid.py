"""Flags: state-space, linear and experimental attention."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused
from megatron.train.arguments.values import layer_pattern

HYBRID = (
    "state-space, linear and experimental attention layers are not part of this project; "
    "use softmax attention"
)

TITLE = "State-space, linear and experimental attention"

FLAGS: tuple[Flag, ...] = (
    refused("--disable-mamba-mem-eff-path", Switch.OFF, True, HYBRID, dest="use_mamba_mem_eff_path"),
    refused("--dsa-indexer-head-dim", int, None, HYBRID),
    refused("--dsa-indexer-k-norm-epsilon", float, None, HYBRID),
    refused("--dsa-indexer-k-norm-fp32", Switch.ON, False, HYBRID),
    refused("--dsa-indexer-loss-coeff", float, None, HYBRID),
    refused("--dsa-indexer-n-heads", int, None, HYBRID),
    refused("--dsa-indexer-rope-interleaved", Switch.ON, False, HYBRID),
    refused("--dsa-indexer-skip-topk-offset", int, 0, HYBRID),
    refused("--dsa-indexer-topk", int, None, HYBRID),
    refused("--dsa-indexer-topk-freq", int, 1, HYBRID),
    refused("--dsa-indexer-use-sparse-loss", Switch.ON, False, HYBRID),
    refused(
        "--dsa-kernel-backend",
        str,
        "none",
        HYBRID,
        choices=(
            "none",
            "tilelang",
            "cudnn",
        ),
    ),
    refused(
        "--experimental-attention-variant",
        str,
        None,
        HYBRID,
        choices=(
            "gdn",
            "gdn2",
            "dsa",
            "gated_delta_net",
        ),
    ),
    refused("--gdp-cutedsl-kernel", Switch.ON, False, HYBRID),
    refused("--gdp-num-chunk-states-to-recompute", int, 2, HYBRID),
    refused("--gdp-num-householder", int, 3, HYBRID),
    refused("--hybrid-layer-pattern", str, None, HYBRID),
    refused("--hybrid-override-pattern", str, None, HYBRID),
    refused("--is-hybrid-model", Switch.ON, False, HYBRID),
    refused("--linear-attention-freq", layer_pattern, None, HYBRID),
    refused("--linear-conv-kernel-dim", int, 4, HYBRID),
    refused("--linear-key-head-dim", int, 128, HYBRID),
    refused("--linear-num-key-heads", int, 16, HYBRID),
    refused("--linear-num-value-heads", int, 32, HYBRID),
    refused("--linear-value-head-dim", int, 128, HYBRID),
    refused("--mamba-head-dim", int, 64, HYBRID),
    refused(
        "--mamba-inference-conv-states-dtype",
        str,
        "bf16",
        HYBRID,
        choices=(
            "bf16",
            "fp16",
            "fp32",
        ),
    ),
    refused(
        "--mamba-inference-ssm-states-dtype",
        str,
        "bf16",
        HYBRID,
        choices=(
            "bf16",
            "fp16",
            "fp32",
        ),
    ),
    refused("--mamba-num-groups", int, 8, HYBRID),
    refused("--mamba-num-heads", int, None, HYBRID),
    refused("--mamba-state-dim", int, 128, HYBRID),
    refused(
        "--mamba-training-ssm-states-dtype",
        str,
        None,
        HYBRID,
        choices=(
            "fp32",
            "bf16",
        ),
    ),
    refused("--mtp-hybrid-override-pattern", str, None, HYBRID),
    refused(
        "--no-dsa-indexer-rotate-activation",
        Switch.OFF,
        True,
        HYBRID,
        aliases=("--disable-dsa-indexer-rotate-activation",),
        dest="dsa_indexer_rotate_activation",
    ),
    refused(
        "--no-dsa-indexer-scoring-relu",
        Switch.OFF,
        True,
        HYBRID,
        aliases=("--disable-dsa-indexer-scoring-relu",),
        dest="dsa_indexer_scoring_relu",
    ),
)

"""Flags: variants of attention and of the residual stream."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused, works
from megatron.train.arguments.values import int_tuple, layer_pattern

SEE_MHC = "see --enable-mhc-connections"

TITLE = "Variants of attention and of the residual stream"

FLAGS: tuple[Flag, ...] = (
    works(
        "--apply-residual-connection-post-layernorm",
        Switch.ON,
        False,
        "The residual stream goes on from the norms' outputs; norms stand alone.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--qk-l2-norm",
        Switch.ON,
        False,
        "Queries and keys of each head are divided by their root mean square; no weights.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--softmax-type",
        str,
        "vanilla",
        "A further term in attention's sum of exponentials: 1, or one learned by each head.",
        "models/variants.py",
        choices=(
            "vanilla",
            "off-by-one",
            "learnable",
        ),
        test="models/test_gpt.py",
    ),
    works(
        "--window-size",
        int_tuple,
        None,
        "LEFT,RIGHT tokens that a query sees beside its own. Not under context parallelism.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--window-attn-skip-freq",
        layer_pattern,
        None,
        "Every n-th layer sees everything, or a list of the layers with the window.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--attention-output-gate",
        Switch.ON,
        False,
        "Attention's output times the sigmoid of a projection.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--use-mup",
        Switch.ON,
        False,
        "Maximal update parametrisation: what was tuned on a narrow model holds for a wide one.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--mup-attn-scale-power",
        float,
        1.0,
        "The softmax scale falls with the head's width to this power.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--mup-base-head-dim",
        float,
        None,
        "Width of the narrow model's heads.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--mup-base-hidden-size",
        int,
        None,
        "Width of the narrow model.",
        "models/variants.py",
        test="models/test_config.py",
    ),
    works(
        "--mup-embedding-mult",
        float,
        1.0,
        "Multiplies embeddings.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    works(
        "--mup-output-mult", float, 1.0, "Multiplies logits.", "models/variants.py", test="models/test_gpt.py"
    ),
    works(
        "--mup-width-mult",
        float,
        1.0,
        "Width over that of the narrow model, where --mup-base-hidden-size is not given.",
        "models/variants.py",
        test="models/test_config.py",
    ),
    refused(
        "--enable-mhc-connections",
        Switch.ON,
        False,
        "manifold-constrained hyper-connections are not part of GPT, Mixtral or DeepSeek-V3",
    ),
    refused("--mhc-init-gating-factor", float, 0.01, SEE_MHC),
    refused("--mhc-num-residual-streams", int, 4, SEE_MHC),
    refused("--mhc-recompute-layer-num", int, None, SEE_MHC),
    refused("--mhc-sinkhorn-iterations", int, 20, SEE_MHC),
)

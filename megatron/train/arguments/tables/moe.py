"""Flags: mixture of experts: model and router."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused, works
from megatron.train.arguments.values import layer_pattern

NOT_THERE = "it is not part of the experts here yet; leave it out"
CONFIG = "models/moe/config.py"
ROUTER_TEST = "models/moe/test_router.py"
LAYER_TEST = "models/moe/test_parallel.py"

TITLE = "Mixture of experts: model and router"

FLAGS: tuple[Flag, ...] = (
    works(
        "--num-experts",
        int,
        None,
        "Experts of a layer; without it all layers are dense.",
        CONFIG,
        test=LAYER_TEST,
    ),
    works(
        "--moe-layer-freq",
        layer_pattern,
        1,
        "Which layers have experts: every n-th from the first, or a list of 0 and 1.",
        CONFIG,
        test="models/moe/test_config.py",
    ),
    works(
        "--moe-ffn-hidden-size",
        int,
        None,
        "Inner channels of an expert; default --ffn-hidden-size.",
        CONFIG,
        test="models/moe/test_config.py",
    ),
    works(
        "--moe-shared-expert-intermediate-size",
        int,
        None,
        "Inner channels of an expert that every token meets.",
        CONFIG,
        test=LAYER_TEST,
    ),
    works(
        "--moe-shared-expert-gate",
        Switch.ON,
        False,
        "A learned gate on the shared expert.",
        CONFIG,
        test=LAYER_TEST,
    ),
    refused(
        "--moe-latent-size",
        int,
        None,
        "experts work on whole hidden states; use --moe-ffn-hidden-size for smaller ones",
    ),
    works(
        "--moe-router-load-balancing-type",
        str,
        "aux_loss",
        "Balancing losses, of one microbatch, one sequence or the step so far; or sinkhorn; or none.",
        CONFIG,
        nargs="+",
        choices=(
            "aux_loss",
            "seq_aux_loss",
            "global_aux_loss",
            "sinkhorn",
            "quantile_balancing",
            "none",
        ),
        refused_values=(
            (
                "quantile_balancing",
                "experimental in Megatron-LM; use --moe-router-enable-expert-bias or aux_loss",
            ),
        ),
        test=ROUTER_TEST,
    ),
    works("--moe-router-topk", int, 2, "Experts of a token.", CONFIG, test=ROUTER_TEST),
    works(
        "--moe-router-pre-softmax",
        Switch.ON,
        False,
        "Softmax over all experts before the choice, else over the chosen ones.",
        CONFIG,
        test=ROUTER_TEST,
    ),
    works(
        "--moe-router-score-function",
        str,
        "softmax",
        "What turns logits into scores.",
        CONFIG,
        choices=(
            "softmax",
            "sigmoid",
            "sqrtsoftplus",
        ),
        test=ROUTER_TEST,
    ),
    works("--moe-router-num-groups", int, None, "Groups of experts.", CONFIG, test=ROUTER_TEST),
    works(
        "--moe-router-group-topk",
        int,
        None,
        "Groups that a token's experts lie in.",
        CONFIG,
        test=ROUTER_TEST,
    ),
    works(
        "--moe-router-topk-scaling-factor", float, None, "Multiplies the weights.", CONFIG, test=ROUTER_TEST
    ),
    works(
        "--moe-router-dtype",
        str,
        None,
        "Dtype of the router's matrix product; scores are never narrower than fp32.",
        CONFIG,
        test=ROUTER_TEST,
        choices=(
            "fp32",
            "fp64",
        ),
    ),
    works(
        "--moe-router-enable-expert-bias",
        Switch.ON,
        False,
        "Balance by a bias on each expert's score that moves after every step.",
        CONFIG,
        test=ROUTER_TEST,
    ),
    works("--moe-router-bias-update-rate", float, 0.001, "How far the bias moves.", CONFIG, test=ROUTER_TEST),
    works(
        "--moe-router-force-load-balancing",
        Switch.ON,
        False,
        "For measurements: random logits, so that all experts get as much.",
        CONFIG,
        test=ROUTER_TEST,
    ),
    works(
        "--moe-router-force-biased",
        float,
        None,
        "For measurements: a random bias of this deviation on each expert's logits; drawn once if negative.",
        CONFIG,
        test=ROUTER_TEST,
    ),
    refused(
        "--moe-router-quantile-balancing-ema",
        float,
        0.0,
        "experimental in Megatron-LM; use --moe-router-enable-expert-bias or aux_loss",
    ),
    works(
        "--moe-aux-loss-coeff",
        float,
        0.0,
        "Weight of each of --moe-router-load-balancing-type.",
        CONFIG,
        test=ROUTER_TEST,
        nargs="+",
    ),
    works("--moe-z-loss-coeff", float, None, "Weight of the router's z-loss.", CONFIG, test=ROUTER_TEST),
    works(
        "--moe-input-jitter-eps",
        float,
        None,
        "In training the router's input is multiplied by uniform numbers in 1 -+ this.",
        CONFIG,
        test=ROUTER_TEST,
    ),
    works(
        "--moe-expert-capacity-factor",
        float,
        None,
        "An expert takes at most this many times its even share of a rank's tokens.",
        CONFIG,
        test=ROUTER_TEST,
    ),
    refused(
        "--moe-expert-rank-capacity-factor",
        float,
        None,
        "experimental in Megatron-LM; use --moe-expert-capacity-factor",
    ),
    works(
        "--moe-pad-expert-input-to-capacity",
        Switch.ON,
        False,
        "Every expert gets exactly its capacity, so that no rank asks how many rows come.",
        CONFIG,
        test=ROUTER_TEST,
    ),
    works(
        "--moe-token-drop-policy",
        str,
        "probs",
        "Over capacity, keep the largest weights or the first tokens.",
        CONFIG,
        test="parallel/expert/test_permute.py",
        choices=(
            "probs",
            "position",
        ),
    ),
    refused(
        "--moe-use-upcycling",
        Switch.ON,
        False,
        "weights of a dense model are not turned into experts; train the experts from the start",
    ),
    refused("--moe-upcycling-granularity", int, 1, "see --moe-use-upcycling"),
    works(
        "--moe-per-layer-logging",
        Switch.ON,
        False,
        "Write each layer's balancing losses and each expert's share too.",
        "train/report.py",
        test="models/moe/test_jobs.py",
    ),
    works(
        "--moe-apply-probs-on-input",
        Switch.ON,
        False,
        "Weigh an expert's input instead of its output; with --moe-router-topk 1.",
        CONFIG,
        test=ROUTER_TEST,
    ),
)

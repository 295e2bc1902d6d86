"""Flags: multi-latent attention."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works

CONFIG, TEST = "models/deepseek.py", "models/test_deepseek.py"

TITLE = "Multi-latent attention"

FLAGS: tuple[Flag, ...] = (
    works(
        "--multi-latent-attention",
        Switch.ON,
        False,
        "Attention whose queries, keys and values come from narrow latents.",
        CONFIG,
        test=TEST,
    ),
    works(
        "--q-lora-rank",
        int,
        None,
        "Width of the queries' latent; without it queries are projected at once.",
        CONFIG,
        test=TEST,
    ),
    works("--kv-lora-rank", int, 32, "Width of the latent of keys and values.", CONFIG, test=TEST),
    works("--qk-head-dim", int, 128, "Channels of a query or key head without positions.", CONFIG, test=TEST),
    works(
        "--qk-pos-emb-head-dim", int, 64, "Channels of a head that turn with the position.", CONFIG, test=TEST
    ),
    works("--v-head-dim", int, 128, "Channels of a value head.", CONFIG, test=TEST),
    no_op("--mla-down-proj-fusion", Switch.ON, False, "two products instead of one, with the same result"),
    refused(
        "--cache-mla-latents", Switch.ON, False, "keeps latents for inference; nothing is cached in training"
    ),
    refused(
        "--qk-clip",
        Switch.ON,
        False,
        "attention kernels do not give their largest logit; use --qk-layernorm, which bounds it",
    ),
    refused(
        "--qk-clip-alpha",
        float,
        0.5,
        "attention kernels do not give their largest logit; use --qk-layernorm, which bounds it",
    ),
    refused(
        "--qk-clip-threshold",
        float,
        100,
        "attention kernels do not give their largest logit; use --qk-layernorm, which bounds it",
    ),
    refused(
        "--log-max-attention-logit",
        Switch.ON,
        False,
        "attention kernels do not give their largest logit; use --qk-layernorm, which bounds it",
    ),
    works(
        "--mtp-num-layers",
        int,
        None,
        "Further tokens that are predicted, each by a layer of its own.",
        CONFIG,
        test=TEST,
    ),
    works("--mtp-loss-scaling-factor", float, 0.1, "Weight of the mean of their losses.", CONFIG, test=TEST),
    works(
        "--mtp-detach-heads",
        Switch.ON,
        False,
        "The losses of further tokens do not reach the model's layers.",
        CONFIG,
        test=TEST,
    ),
    refused("--mtp-hsm", Switch.ON, False, "experimental in Megatron-LM; leave it out"),
    refused(
        "--mtp-standalone",
        Switch.ON,
        False,
        "the layout says so: put m on a stage of its own in --pipeline-model-parallel-layout",
    ),
    works(
        "--mtp-use-repeated-layer",
        Switch.ON,
        False,
        "One layer predicts all further tokens.",
        CONFIG,
        test=TEST,
    ),
)

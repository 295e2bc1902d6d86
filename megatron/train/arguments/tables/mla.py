"""Flags: multi-latent attention."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, not_yet, refused, works

NO_MTP = "it is not part of multi-token prediction here; leave it out"
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
    not_yet("--qk-clip", Switch.ON, False, "clipping of attention logits is not there"),
    not_yet("--qk-clip-alpha", float, 0.5, "clipping of attention logits is not there"),
    not_yet("--qk-clip-threshold", float, 100, "clipping of attention logits is not there"),
    not_yet(
        "--log-max-attention-logit",
        Switch.ON,
        False,
        "attention logits are not kept by the attention kernels here",
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
    not_yet("--mtp-detach-heads", Switch.ON, False, NO_MTP),
    not_yet("--mtp-hsm", Switch.ON, False, NO_MTP),
    not_yet("--mtp-standalone", Switch.ON, False, NO_MTP),
    not_yet("--mtp-use-repeated-layer", Switch.ON, False, NO_MTP),
)

"""Flags: multi-latent attention."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, not_yet, refused

NO_MLA = "multi-latent attention is planned; use --group-query-attention"
NO_MTP = "multi-token prediction is planned; leave it out"

TITLE = "Multi-latent attention"

FLAGS: tuple[Flag, ...] = (
    not_yet("--multi-latent-attention", Switch.ON, False, NO_MLA),
    not_yet("--q-lora-rank", int, None, NO_MLA),
    not_yet("--kv-lora-rank", int, 32, NO_MLA),
    not_yet("--qk-head-dim", int, 128, NO_MLA),
    not_yet("--qk-pos-emb-head-dim", int, 64, NO_MLA),
    not_yet("--v-head-dim", int, 128, NO_MLA),
    not_yet("--mla-down-proj-fusion", Switch.ON, False, NO_MLA),
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
    not_yet("--mtp-num-layers", int, None, NO_MTP),
    not_yet("--mtp-loss-scaling-factor", float, 0.1, NO_MTP),
    not_yet("--mtp-detach-heads", Switch.ON, False, NO_MTP),
    not_yet("--mtp-hsm", Switch.ON, False, NO_MTP),
    not_yet("--mtp-standalone", Switch.ON, False, NO_MTP),
    not_yet("--mtp-use-repeated-layer", Switch.ON, False, NO_MTP),
)

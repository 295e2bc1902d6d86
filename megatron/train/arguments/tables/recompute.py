"""Flags: activation memory."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, not_yet, works

NO_OFFLOAD = "activations stay on the device; use --recompute-granularity"

TITLE = "Activation memory"

FLAGS: tuple[Flag, ...] = (
    works(
        "--recompute-activations",
        Switch.ON,
        False,
        "The same as --recompute-granularity selective.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
    ),
    works(
        "--recompute-granularity",
        str,
        None,
        "full: whole layers are run again in backward; selective: the modules of --recompute-modules.",
        "models/recompute.py",
        test="models/test_config.py",
        choices=(
            "full",
            "selective",
        ),
    ),
    works(
        "--recompute-method",
        str,
        None,
        "With full: uniform (every group of layers) or block (the first layers).",
        "models/recompute.py",
        test="models/test_config.py",
        choices=(
            "uniform",
            "block",
        ),
    ),
    works(
        "--recompute-num-layers",
        int,
        None,
        "With full: layers in a group (uniform), or layers recomputed (block).",
        "models/recompute.py",
        test="models/test_config.py",
    ),
    works(
        "--recompute-modules",
        str,
        None,
        "With selective: core_attn (the default), layernorm (norms that stand alone), mlp, moe, moe_act, "
        "shared_experts, mla_up_proj.",
        "models/recompute.py",
        test="models/test_recompute.py",
        nargs="+",
    ),
    no_op(
        "--distribute-saved-activations",
        Switch.ON,
        False,
        "tunes memory: saved activations stay on their rank; --sequence-parallel cuts them",
    ),
    not_yet("--cpu-offloading-num-layers", int, 0, NO_OFFLOAD),
    not_yet("--cpu-offloading-retain-pinned-cpu-buffers", Switch.ON, False, NO_OFFLOAD),
    not_yet("--fine-grained-activation-offloading", Switch.ON, False, NO_OFFLOAD),
    not_yet("--fine-grained-offloading-max-inflight-offloads", int, None, NO_OFFLOAD),
    not_yet("--offload-modules", str, [], NO_OFFLOAD, nargs="+"),
    not_yet("--activation-offload-fraction", float, 1.0, NO_OFFLOAD),
    not_yet("--delay-offload-until-cuda-graph", Switch.ON, False, NO_OFFLOAD),
    not_yet("--delta-offload-bytes-across-pp-ranks", int, 0, NO_OFFLOAD),
    not_yet("--min-offloaded-tensor-size", int, 1048576, NO_OFFLOAD),
)

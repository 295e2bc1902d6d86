"""Flags: activation memory."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, works

NO_OFFLOAD = "tunes copies to host memory: each tensor is copied as it is saved, and back in backward"

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
    works(
        "--cpu-offloading-num-layers",
        int,
        0,
        "What the first layers keep for backward waits in host memory.",
        "models/offload.py",
        test="models/test_offload.py",
    ),
    no_op("--cpu-offloading-retain-pinned-cpu-buffers", Switch.ON, False, NO_OFFLOAD),
    works(
        "--fine-grained-activation-offloading",
        Switch.ON,
        False,
        "The same for the halves of all layers that --offload-modules name.",
        "models/offload.py",
        test="models/test_offload.py",
    ),
    no_op("--fine-grained-offloading-max-inflight-offloads", int, None, NO_OFFLOAD),
    works(
        "--offload-modules",
        str,
        [],
        "attn_norm, qkv_linear, core_attn, attn_proj: attention; mlp_norm, expert_fc1, moe_act: the MLP.",
        "models/offload.py",
        nargs="+",
        test="models/test_offload.py",
    ),
    no_op("--activation-offload-fraction", float, 1.0, NO_OFFLOAD),
    no_op("--delay-offload-until-cuda-graph", Switch.ON, False, NO_OFFLOAD),
    no_op("--delta-offload-bytes-across-pp-ranks", int, 0, NO_OFFLOAD),
    works(
        "--min-offloaded-tensor-size",
        int,
        1048576,
        "Bytes under which a tensor stays on the device.",
        "models/offload.py",
        test="models/test_offload.py",
    ),
)

"""Flags: optimizer."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, not_yet, refused, works

STATES_FP32 = "optimizer states are fp32"
SEE_OFFLOAD = "see --optimizer-cpu-offload"
NO_MUON = "Muon is not there"

TITLE = "Optimizer"

FLAGS: tuple[Flag, ...] = (
    works(
        "--optimizer",
        str,
        "adam",
        "adam (AdamW) or sgd.",
        "train/optimizer.py",
        choices=(
            "adam",
            "sgd",
            "muon",
            "dist_muon",
            "lion",
            "soap",
            "adaptive_muon",
        ),
        refused_values=(
            ("muon", "Muon is not there; use adam"),
            ("dist_muon", "Muon is not there; use adam"),
            ("adaptive_muon", "Muon is not there; use adam"),
            ("lion", "Lion is not there; use adam"),
            ("soap", "SOAP is not there; use adam"),
        ),
    ),
    works("--adam-beta1", float, 0.9, "Decay of Adam's first moment.", "train/optimizer.py"),
    works("--adam-beta2", float, 0.999, "Decay of Adam's second moment.", "train/optimizer.py"),
    works("--adam-eps", float, 1e-08, "Added to the root of Adam's second moment.", "train/optimizer.py"),
    works("--sgd-momentum", float, 0.9, "Momentum of SGD.", "train/optimizer.py"),
    works(
        "--clip-grad",
        float,
        1.0,
        "Global norm to which gradients are clipped; 0 does not clip.",
        "train/step.py",
    ),
    works(
        "--weight-decay",
        float,
        0.01,
        "Decoupled weight decay of matrices (not of biases and norms).",
        "train/optimizer.py",
    ),
    works(
        "--start-weight-decay",
        float,
        None,
        "Weight decay at the start, when it changes.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--end-weight-decay",
        float,
        None,
        "Weight decay at the end, when it changes.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--weight-decay-incr-style",
        str,
        "constant",
        "How weight decay changes: constant, linear or cosine.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
        choices=(
            "constant",
            "linear",
            "cosine",
        ),
    ),
    works(
        "--apply-wd-to-qk-layernorm",
        Switch.ON,
        False,
        "Weight decay of the query and key norms too.",
        "train/optimizer.py",
    ),
    not_yet(
        "--no-weight-decay-cond-type",
        str,
        None,
        "use --apply-wd-to-qk-layernorm",
        choices=("apply_wd_to_qk_layernorm",),
    ),
    refused("--head-lr-mult", float, 1.0, "a factor for a classification head, which is not there"),
    not_yet("--use-precision-aware-optimizer", Switch.ON, False, STATES_FP32),
    works(
        "--main-grads-dtype",
        str,
        "fp32",
        "Dtype in which gradients accumulate (fp64 is our addition, for tests).",
        "train/arguments/resolve.py",
        choices=(
            "fp32",
            "bf16",
            "fp64",
        ),
    ),
    works(
        "--main-params-dtype",
        str,
        "fp32",
        "Dtype of the sharded main parameters.",
        "train/arguments/resolve.py",
        choices=(
            "fp32",
            "fp16",
        ),
    ),
    not_yet(
        "--exp-avg-dtype",
        str,
        "fp32",
        STATES_FP32,
        choices=(
            "fp32",
            "fp16",
            "bf16",
            "fp8",
        ),
    ),
    not_yet(
        "--exp-avg-sq-dtype",
        str,
        "fp32",
        STATES_FP32,
        choices=(
            "fp32",
            "fp16",
            "bf16",
            "fp8",
        ),
    ),
    not_yet(
        "--optimizer-cpu-offload",
        Switch.ON,
        False,
        "optimizer states stay on the device; shard them with --use-distributed-optimizer",
    ),
    not_yet("--optimizer-offload-fraction", float, 1.0, SEE_OFFLOAD),
    not_yet("--overlap-cpu-optimizer-d2h-h2d", Switch.ON, False, SEE_OFFLOAD),
    not_yet("--use-torch-optimizer-for-cpu-offload", Switch.ON, False, SEE_OFFLOAD),
    not_yet("--no-pin-cpu-grads", Switch.OFF, True, SEE_OFFLOAD, dest="pin_cpu_grads"),
    not_yet("--no-pin-cpu-params", Switch.OFF, True, SEE_OFFLOAD, dest="pin_cpu_params"),
    not_yet("--optimizer-cuda-graph", Switch.ON, False, "graph capture is not there"),
    not_yet("--lion-beta1", float, 0.95, "Lion is not there"),
    not_yet("--lion-beta2", float, 0.98, "Lion is not there"),
    not_yet("--muon-coefficient-type", str, "quintic", NO_MUON),
    not_yet("--muon-extra-scale-factor", float, 1.0, NO_MUON),
    not_yet(
        "--muon-fp32-matmul-prec",
        str,
        "medium",
        NO_MUON,
        choices=(
            "low",
            "medium",
            "high",
        ),
    ),
    not_yet("--muon-momentum", float, 0.9, NO_MUON),
    not_yet("--muon-nesterov", Switch.ON, False, NO_MUON),
    not_yet("--muon-no-split-qkv", Switch.OFF, True, NO_MUON, dest="muon_split_qkv"),
    not_yet("--muon-num-ns-steps", int, 5, NO_MUON),
    not_yet(
        "--muon-scalar-optimizer",
        str,
        "adam",
        NO_MUON,
        choices=(
            "adam",
            "lion",
        ),
    ),
    not_yet(
        "--muon-scale-mode",
        str,
        "spectral",
        NO_MUON,
        choices=(
            "spectral",
            "unit_rms_norm",
            "shape_scaling",
        ),
    ),
    not_yet(
        "--muon-tp-mode",
        str,
        "duplicated",
        NO_MUON,
        choices=(
            "blockwise",
            "duplicated",
            "distributed",
        ),
    ),
    not_yet("--muon-use-syrk", Switch.ON, False, NO_MUON),
    not_yet("--dump-param-to-param-group-map", str, None, "the map of parameters to groups is not written"),
)

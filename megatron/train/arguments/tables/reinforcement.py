"""Flags: reinforcement learning."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused

REINFORCEMENT = "reinforcement learning is left to frameworks built for it (NeMo-RL, verl)"

TITLE = "Reinforcement learning"

FLAGS: tuple[Flag, ...] = (
    refused("--grpo-clamp-eps-lower", float, 0.01, REINFORCEMENT),
    refused("--grpo-clamp-eps-upper", float, 0.01, REINFORCEMENT),
    refused("--grpo-entropy-term-weight", float, 0.0, REINFORCEMENT),
    refused("--grpo-filter-groups-with-same-reward", Switch.ON, False, REINFORCEMENT),
    refused("--grpo-group-size", int, 2, REINFORCEMENT),
    refused("--grpo-iterations", int, 2, REINFORCEMENT),
    refused("--grpo-kl-beta", float, 0.001, REINFORCEMENT),
    refused("--grpo-prompts-per-step", int, 32, REINFORCEMENT),
    refused("--langrl-env-config", str, None, REINFORCEMENT),
    refused("--perform-rl-step", Switch.ON, False, REINFORCEMENT),
    refused(
        "--refit-method",
        str,
        "gloo",
        REINFORCEMENT,
        choices=(
            "nccl",
            "gloo",
            "nvshmem",
        ),
    ),
    refused(
        "--rl-consumption-granularity",
        str,
        "B",
        REINFORCEMENT,
        choices=(
            "R",
            "G",
            "B",
        ),
    ),
    refused("--rl-default-temperature", float, 1.0, REINFORCEMENT),
    refused("--rl-default-top-k", int, -1, REINFORCEMENT),
    refused("--rl-default-top-p", float, 0, REINFORCEMENT),
    refused("--rl-durable-rollout-bank", Switch.ON, False, REINFORCEMENT),
    refused("--rl-generation-lag", float, None, REINFORCEMENT),
    refused("--rl-importance-sampling-truncation-coef", float, None, REINFORCEMENT),
    refused("--rl-inference-expert-model-parallel-size", int, None, REINFORCEMENT),
    refused("--rl-inference-expert-tensor-model-parallel-size", int, None, REINFORCEMENT),
    refused("--rl-inference-logprobs-is-correction", Switch.TOGGLE, False, REINFORCEMENT),
    refused(
        "--rl-inference-model-unified-memory-level",
        int,
        0,
        REINFORCEMENT,
        choices=(
            0,
            1,
        ),
    ),
    refused("--rl-inference-parsers", str, [], REINFORCEMENT, nargs="*"),
    refused("--rl-inference-pipeline-model-parallel-size", int, None, REINFORCEMENT),
    refused("--rl-inference-tensor-model-parallel-size", int, None, REINFORCEMENT),
    refused(
        "--rl-kv-cache-management-mode",
        str,
        "persist",
        REINFORCEMENT,
        choices=(
            "persist",
            "offload",
            "recompute",
        ),
    ),
    refused("--rl-max-inflight-requests", int, None, REINFORCEMENT),
    refused("--rl-offload-inference-model-weights-when-idle", Switch.TOGGLE, False, REINFORCEMENT),
    refused("--rl-offload-optimizer-during-inference", Switch.ON, False, REINFORCEMENT),
    refused("--rl-partial-rollouts", Switch.TOGGLE, False, REINFORCEMENT),
    refused("--rl-persist-cuda-graphs", Switch.TOGGLE, False, REINFORCEMENT),
    refused("--rl-profile", Switch.ON, False, REINFORCEMENT),
    refused("--rl-profile-dir", str, None, REINFORCEMENT),
    refused("--rl-prompts-per-eval", int, 32, REINFORCEMENT),
    refused("--rl-rollout-bank-dir", str, None, REINFORCEMENT),
    refused("--rl-rollout-bank-max-bytes", int, 0, REINFORCEMENT),
    refused(
        "--rl-sequence-packing-algo",
        str,
        "fifo",
        REINFORCEMENT,
        choices=(
            "fifo",
            "round-robin",
        ),
    ),
    refused("--rl-sequence-packing-max-sequences-per-bin", int, 50, REINFORCEMENT),
    refused("--rl-skip-bos-token", Switch.TOGGLE, False, REINFORCEMENT),
    refused(
        "--rl-submission-granularity",
        str,
        "B",
        REINFORCEMENT,
        choices=(
            "R",
            "G",
            "B",
        ),
    ),
    refused("--rl-training-cuda-graphs", Switch.TOGGLE, False, REINFORCEMENT),
    refused("--rl-use-sequence-packing", Switch.TOGGLE, False, REINFORCEMENT),
    refused("--rl-verify-model-weights-swap", Switch.TOGGLE, False, REINFORCEMENT),
)

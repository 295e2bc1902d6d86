"""Flags: inference."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused

INFERENCE = "serving and text generation at scale are left to megatron-core"

TITLE = "Inference"

FLAGS: tuple[Flag, ...] = (
    refused("--decode-only-cuda-graphs", Switch.ON, False, INFERENCE),
    refused("--enable-chunked-prefill", Switch.ON, False, INFERENCE),
    refused("--flash-decode", Switch.ON, False, INFERENCE),
    refused("--inference-batch-times-seqlen-threshold", int, -1, INFERENCE),
    refused("--inference-coordinator-port", int, None, INFERENCE),
    refused("--inference-cuda-graph-all-prefills", Switch.ON, False, INFERENCE),
    refused("--inference-cuda-graph-max-tokens", int, 512, INFERENCE),
    refused(
        "--inference-cuda-graph-scope",
        str,
        None,
        INFERENCE,
        choices=(
            "none",
            "layer",
            "block",
        ),
    ),
    refused("--inference-disable-ep-consensus", Switch.TOGGLE, False, INFERENCE),
    refused("--inference-disable-triton-nvls-kernels", Switch.ON, False, INFERENCE),
    refused("--inference-dynamic-batching", Switch.ON, False, INFERENCE),
    refused(
        "--inference-dynamic-batching-async-sched-mode",
        str,
        "legacy",
        INFERENCE,
        choices=(
            "legacy",
            "async",
        ),
    ),
    refused("--inference-dynamic-batching-block-size", int, 256, INFERENCE),
    refused("--inference-dynamic-batching-buffer-size-gb", float, 40.0, INFERENCE),
    refused("--inference-dynamic-batching-cuda-graph-mixed-prefill-count", int, 16, INFERENCE),
    refused(
        "--inference-dynamic-batching-cuda-graph-sizing-distribution",
        str,
        "exponential",
        INFERENCE,
        choices=(
            "exponential",
            "linear",
        ),
    ),
    refused(
        "--inference-dynamic-batching-logprobs-mode",
        str,
        "raw_logprobs",
        INFERENCE,
        choices=(
            "raw_logprobs",
            "processed_logprobs",
        ),
    ),
    refused("--inference-dynamic-batching-mamba-memory-ratio", float, None, INFERENCE),
    refused("--inference-dynamic-batching-max-requests", int, None, INFERENCE),
    refused("--inference-dynamic-batching-max-tokens", int, None, INFERENCE),
    refused("--inference-dynamic-batching-num-cuda-graphs", int, 16, INFERENCE),
    refused("--inference-dynamic-batching-paused-buffer-size-gb", float, None, INFERENCE),
    refused(
        "--inference-dynamic-batching-prefix-caching",
        Switch.TOGGLE,
        False,
        INFERENCE,
        dest="inference_dynamic_batching_enable_prefix_caching",
    ),
    refused(
        "--inference-dynamic-batching-prefix-caching-coordinator-policy",
        str,
        "load_balanced",
        INFERENCE,
        choices=(
            "longest_prefix",
            "first_prefix_block",
            "load_balanced",
        ),
    ),
    refused(
        "--inference-dynamic-batching-prefix-caching-eviction-policy",
        str,
        "ref_zero",
        INFERENCE,
        choices=(
            "ref_zero",
            "lru",
        ),
    ),
    refused("--inference-dynamic-batching-prefix-caching-mamba-gb", float, None, INFERENCE),
    refused("--inference-dynamic-batching-prefix-caching-routing-alpha", float, 0.5, INFERENCE),
    refused(
        "--inference-dynamic-batching-sampling-backend",
        str,
        "torch",
        INFERENCE,
        choices=(
            "torch",
            "flashinfer",
        ),
    ),
    refused("--inference-dynamic-batching-track-generated-token-events", Switch.ON, False, INFERENCE),
    refused("--inference-dynamic-batching-track-paused-request-events", Switch.ON, False, INFERENCE),
    refused(
        "--inference-dynamic-batching-unified-memory-level",
        int,
        0,
        INFERENCE,
        choices=(
            0,
            1,
        ),
    ),
    refused("--inference-fuse-tp-communication", Switch.ON, False, INFERENCE),
    refused(
        "--inference-grouped-gemm-backend",
        str,
        "vllm",
        INFERENCE,
        choices=(
            "flashinfer",
            "torch",
            "vllm",
        ),
    ),
    refused("--inference-logging-step-interval", int, 0, INFERENCE),
    refused("--inference-max-requests", int, 8, INFERENCE),
    refused("--inference-max-seq-length", int, 2560, INFERENCE),
    refused("--inference-moe-disable-fused-quant-kernels", Switch.ON, False, INFERENCE),
    refused(
        "--inference-moe-token-dispatcher-type",
        str,
        "nvls",
        INFERENCE,
        choices=(
            "nccl",
            "nvls",
        ),
    ),
    refused("--inference-shards", str, None, INFERENCE),
    refused("--inference-text-gen-server-logging", Switch.TOGGLE, False, INFERENCE),
    refused("--inference-use-synchronous-zmq-collectives", Switch.TOGGLE, False, INFERENCE),
    refused("--inference-wandb-logging", Switch.TOGGLE, False, INFERENCE),
    refused("--max-tokens-to-oom", int, 12000, INFERENCE),
    refused("--mlp-chunks-for-prefill", int, 1, INFERENCE),
    refused("--num-speculative-tokens", int, 0, INFERENCE),
    refused("--use-legacy-static-engine", Switch.ON, False, INFERENCE),
    refused(
        "--use-same-sampling-seed-across-dp-ranks",
        Switch.OFF,
        True,
        INFERENCE,
        dest="offset_sampling_seed_by_dp_rank",
    ),
)

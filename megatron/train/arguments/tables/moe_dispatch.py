"""Flags: mixture of experts: dispatch and kernels."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works

SEE_DELAY = "--delay-wgrad-compute computes weight gradients while tokens travel back"
HYBRID_EP = "tunes a kernel of HybridEP"
SAME_RESULT = "a fused kernel with the same result"
PADDED = "with FP8, each expert's rows are always padded to what the recipe needs"
SEE_STASH = "see --moe-paged-stash"
NO_TRACES = "routes are not recorded to files"

TITLE = "Mixture of experts: dispatch and kernels"

FLAGS: tuple[Flag, ...] = (
    no_op("--moe-grouped-gemm", Switch.ON, False, "experts are always grouped here"),
    no_op("--moe-use-grouped-tensor", Switch.ON, False, "experts are grouped by the backend's own layout"),
    no_op("--moe-single-grouped-bias", Switch.ON, False, "experts are grouped by the backend's own layout"),
    no_op("--moe-single-grouped-weight", Switch.ON, False, "experts are grouped by the backend's own layout"),
    works(
        "--moe-token-dispatcher-type",
        str,
        "allgather",
        "How tokens reach their experts: gather all, send copies, or a library that does both.",
        "models/moe/config.py",
        test="parallel/expert/test_dispatch.py",
        choices=(
            "allgather",
            "alltoall",
            "flex",
        ),
    ),
    works(
        "--moe-flex-dispatcher-backend",
        str,
        "deepep",
        "The library behind --moe-token-dispatcher-type flex; it must be installed.",
        "models/moe/config.py",
        choices=(
            "deepep",
            "hybridep",
            "ncclep",
        ),
        refused_values=(("ncclep", "use deepep or hybridep, or --moe-token-dispatcher-type alltoall"),),
        test="parallel/expert/test_dispatch.py",
    ),
    works(
        "--moe-enable-deepep",
        Switch.ON,
        False,
        "The older spelling of --moe-flex-dispatcher-backend deepep, under --moe-token-dispatcher-type flex.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
    ),
    no_op("--moe-deepep-num-sms", int, None, "tunes a kernel of DeepEP"),
    no_op("--moe-flex-dispatcher-num-sms", int, None, "tunes a kernel of the flex dispatcher"),
    no_op("--moe-hybridep-num-blocks-permute", int, None, HYBRID_EP),
    no_op("--moe-hybridep-num-blocks-unpermute", int, None, HYBRID_EP),
    no_op("--moe-hybridep-num-sms", int, None, HYBRID_EP),
    no_op("--moe-hybridep-num-sms-preprocessing", int, 108, HYBRID_EP),
    no_op("--moe-hybridep-pad-uneven-dispatch-inputs", Switch.ON, False, HYBRID_EP),
    no_op("--moe-permute-fusion", Switch.ON, False, SAME_RESULT),
    no_op("--moe-permute-fusion-into-hybridep", Switch.ON, False, SAME_RESULT),
    no_op("--moe-router-fusion", Switch.ON, False, SAME_RESULT),
    no_op("--moe-router-padding-for-fp8", Switch.ON, False, PADDED),
    no_op("--moe-router-padding-for-quantization", Switch.ON, False, PADDED),
    works(
        "--moe-shared-expert-overlap",
        Switch.ON,
        False,
        "The shared expert computes while tokens travel (with --moe-token-dispatcher-type alltoall).",
        "models/moe/config.py",
        test="models/moe/test_overlap.py",
    ),
    refused(
        "--moe-combine-bwd-dtype",
        str,
        "bf16",
        "tokens travel between experts in the compute dtype",
        choices=(
            "bf16",
            "mxfp8",
        ),
    ),
    refused(
        "--moe-dispatch-fwd-dtype",
        str,
        "bf16",
        "tokens travel between experts in the compute dtype",
        choices=(
            "bf16",
            "mxfp8",
        ),
    ),
    refused(
        "--moe-layer-recompute",
        Switch.ON,
        False,
        "use --recompute-granularity selective --recompute-modules moe",
    ),
    refused("--moe-mlp-glu-interleave-size", int, None, "gate and up rows are never interleaved here"),
    refused(
        "--moe-shared-expert-glu-interleave-size", int, None, "gate and up rows are never interleaved here"
    ),
    no_op("--moe-ncclep-zero-copy", Switch.ON, False, "tunes a kernel of NCCL-EP"),
    refused(
        "--moe-pad-experts-for-cuda-graph-inference", Switch.ON, False, "inference is left to megatron-core"
    ),
    refused(
        "--moe-paged-stash",
        Switch.ON,
        False,
        "memory of dropless experts is not paged here; use --moe-expert-capacity-factor or recompute",
    ),
    refused("--moe-paged-stash-buffer-size-factor-cpu", float, 0.0, SEE_STASH),
    refused("--moe-paged-stash-buffer-size-factor-cuda", float, 1.1, SEE_STASH),
    refused("--moe-paged-stash-page-size", int, 64, SEE_STASH),
    refused(
        "--moe-enable-routing-replay",
        Switch.ON,
        False,
        "replaying recorded routes belongs to reinforcement learning",
    ),
    refused("--moe-routing-trace-capture-hidden-states", Switch.ON, False, NO_TRACES),
    refused("--moe-routing-trace-capture-logits", Switch.ON, False, NO_TRACES),
    refused("--moe-routing-trace-dump-weights", Switch.ON, False, NO_TRACES),
    refused("--moe-routing-trace-max-training-iters", int, None, NO_TRACES),
    refused("--moe-routing-trace-path", str, None, NO_TRACES),
    no_op("--use-grouped-gemm-for-shared-expert", Switch.ON, False, "a kernel choice with the same result"),
    no_op("--use-grouped-gemm-for-dense-mlp", Switch.ON, False, "a kernel choice with the same result"),
    works(
        "--overlap-moe-expert-parallel-comm",
        Switch.ON,
        False,
        "Tokens travel between experts while the microbatch before or after computes; alltoall, without a pipeline.",
        "train/build.py",
        test="models/moe/test_overlap.py",
    ),
    refused("--overlap-dispatch-backward-with-experts-wgrad", Switch.ON, False, SEE_DELAY),
    no_op(
        "--ep-overlap-early-attn-memory-release",
        Switch.ON,
        False,
        "tunes the memory of an overlap that is not there",
    ),
    no_op("--high-priority-a2a-comm-stream", Switch.ON, False, "tunes a cluster's streams"),
)

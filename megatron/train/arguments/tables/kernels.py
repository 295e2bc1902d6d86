"""Flags: kernels."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works

SAME_RESULT = "a fused kernel with the same result"
INFERENCE = "inference is left to megatron-core"
NO_GRAPHS = "tunes the launch of kernels: steps are not captured in graphs, with the same result"

TITLE = "Kernels"

FLAGS: tuple[Flag, ...] = (
    works(
        "--transformer-impl",
        str,
        "auto",
        "local (torch), transformer_engine or auto (our addition and our default): "
        "Transformer Engine on CUDA where it is installed, else local; an explicit "
        "transformer_engine on a machine without CUDA runs as local with one warning.",
        "train/arguments/resolve.py",
        test="models/backends/torch/test_layers.py",
        choices=(
            "local",
            "transformer_engine",
            "inference_optimized",
            "auto",
        ),
        refused_values=(
            ("inference_optimized", "inference is left to megatron-core; use local or transformer_engine"),
        ),
    ),
    works(
        "--attention-backend",
        str,
        "auto",
        "Attention kernels that Transformer Engine may choose from (flash-attention, cuDNN's fused, unfused; "
        "auto: all), by its NVTE_ variables; local takes torch's. Without effect on --transformer-impl local, "
        "whose attention is torch's.",
        "train/build.py",
        test="te/test_backend.py",
        choices=(
            "flash",
            "fused",
            "unfused",
            "local",
            "auto",
        ),
    ),
    no_op("--use-flash-attn", Switch.ON, False, "the backend chooses the attention kernel"),
    no_op(
        "--flash-attention-version",
        int,
        None,
        "the backend chooses the attention kernel",
        choices=(
            2,
            3,
            4,
        ),
    ),
    no_op("--no-bias-gelu-fusion", Switch.OFF, True, SAME_RESULT, dest="bias_gelu_fusion"),
    no_op("--no-bias-swiglu-fusion", Switch.OFF, True, SAME_RESULT, dest="bias_swiglu_fusion"),
    no_op("--no-bias-dropout-fusion", Switch.OFF, True, SAME_RESULT, dest="bias_dropout_fusion"),
    no_op("--no-masked-softmax-fusion", Switch.OFF, True, SAME_RESULT, dest="masked_softmax_fusion"),
    no_op("--no-persist-layer-norm", Switch.ON, False, "a kernel choice with the same result"),
    no_op("--fused-residual-rmsnorm", Switch.ON, False, SAME_RESULT),
    no_op("--use-fused-weighted-squared-relu", Switch.ON, False, SAME_RESULT),
    no_op("--use-te-activation-func", Switch.ON, False, "a kernel choice with the same result"),
    no_op("--use-transformer-engine-op-fuser", Switch.ON, False, "a kernel choice with the same result"),
    no_op("--disable-jit-fuser", Switch.ON, False, "nothing is fused by TorchScript"),
    no_op("--te-rng-tracker", Switch.ON, False, "each backend brings its own random streams"),
    refused("--inference-rng-tracker", Switch.ON, False, INFERENCE),
    refused("--use-kitchen-attention", Switch.ON, False, "Kitchen is experimental"),
    refused(
        "--kitchen-attention-backend",
        str,
        "sdpa",
        "Kitchen is experimental",
        choices=(
            "sdpa",
            "fa",
        ),
    ),
    no_op("--enable-experimental", Switch.ON, False, "nothing here is behind this switch"),
    no_op(
        "--cuda-graph-impl",
        str,
        "none",
        NO_GRAPHS,
        choices=(
            "none",
            "local",
            "transformer_engine",
            "full_iteration",
        ),
    ),
    no_op("--cuda-graph-modules", str, [], NO_GRAPHS, nargs="+"),
    no_op("--cuda-graph-scope", str, None, NO_GRAPHS, nargs="+", dest="cuda_graph_scope_deprecated"),
    no_op("--cuda-graph-warmup-steps", int, 3, NO_GRAPHS),
    no_op("--enable-cuda-graph", Switch.ON, False, NO_GRAPHS),
    no_op("--external-cuda-graph", Switch.ON, False, NO_GRAPHS),
    refused(
        "--symmetric-ar-type",
        str,
        None,
        INFERENCE,
        choices=(
            "two_shot",
            "one_shot",
            "multimem_all_reduce",
        ),
    ),
)

"""Keys of Megatron-LM's YAML files that are fields of megatron-core's configurations and no flags.

Its example lists them all, most with the value that asks for nothing. A value in the table stands for the words beside
it; another one is refused, with what to use instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Words = tuple[str, ...]
NOTHING: Words = ()


@dataclass(frozen=True)
class ConfigKey:
    """values: what each value (by its YAML spelling: "null", "true", "swiglu") means; instead: of other values."""

    instead: str
    values: dict[str, Words] = field(default_factory=lambda: {"null": NOTHING})

    def words(self, key: str, value: object) -> list[str]:
        """The words of a value; ValueError for one that cannot be had."""
        spelled = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        if spelled not in self.values:
            raise ValueError(
                f"{key}: {spelled} cannot be had: {self.instead}; allowed: {', '.join(self.values)}"
            )
        return list(self.values[spelled])


def _only(*values: str) -> dict[str, Words]:
    return dict.fromkeys(values, NOTHING)


_FUNCTION = ConfigKey("a file cannot hold a function; leave it null")
_FROM_PRECISION = ConfigKey("dtypes follow from --bf16, --fp16 and the --megatron-fsdp-...-dtype flags")
_OFFLOADING = ConfigKey("use cpu_offloading_num_layers", _only("null", "false"))
_POINT_TO_POINT = ConfigKey("stages exchange tensors in batches", _only("null", "true", "false"))

CONFIG_KEYS: dict[str, ConfigKey] = {
    **dict.fromkeys(
        (
            "init_method",
            "output_layer_init_method",
            "timers",
            "finalize_model_grads_func",
            "grad_scale_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "_cpu_offloading_context",
        ),
        _FUNCTION,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), _FROM_PRECISION),
    "enable_autocast": ConfigKey("dtypes follow from --bf16 and --fp16", _only("null", "false")),
    "activation_func": ConfigKey(
        "use swiglu, squared_relu or quick_geglu",
        {
            "null": NOTHING,
            "gelu": NOTHING,
            "swiglu": ("--swiglu",),
            "squared_relu": ("--squared-relu",),
            "quick_geglu": ("--quick-geglu",),
        },
    ),
    "gated_linear_unit": ConfigKey("use swiglu: true or quick_geglu: true", _only("null", "false")),
    "bias_activation_fusion": ConfigKey(
        "give true or false", {**_only("null", "true"), "false": ("--no-bias-gelu-fusion",)}
    ),
    "persist_layer_norm": ConfigKey(
        "give true or false", {**_only("null", "true"), "false": ("--no-persist-layer-norm",)}
    ),
    "memory_efficient_layer_norm": ConfigKey("norms keep what their backend keeps", _only("null", "false")),
    "moe_token_dropping": ConfigKey("use moe_expert_capacity_factor", _only("null", "false")),
    "virtual_pipeline_model_parallel_size": ConfigKey("use num_virtual_stages_per_pipeline_rank"),
    "async_tensor_model_parallel_allreduce": ConfigKey(
        "input gradients always travel while weight gradients are computed", _only("null", "true")
    ),
    "tp_comm_atomic_ag": ConfigKey("it tunes tp_comm_overlap", _only("null", "true", "false")),
    "tp_comm_atomic_rs": ConfigKey("it tunes tp_comm_overlap", _only("null", "true", "false")),
    "variable_seq_lengths": ConfigKey("sequences have --seq-length tokens", _only("null", "false")),
    "num_microbatches_with_partial_activation_checkpoints": ConfigKey("use recompute_granularity for all"),
    "batch_p2p_comm": _POINT_TO_POINT,
    "batch_p2p_sync": _POINT_TO_POINT,
    "deallocate_pipeline_outputs": ConfigKey(
        "what was sent is always let go", _only("null", "true", "false")
    ),
    "pipeline_model_parallel_split_rank": ConfigKey("there are no encoder-decoder models"),
    "cpu_offloading": _OFFLOADING,
    "cpu_offloading_weights": _OFFLOADING,
    "cpu_offloading_activations": ConfigKey("use cpu_offloading_num_layers: 0", _only("null", "true")),
    "use_legacy_models": ConfigKey("there is one model implementation", _only("null", "false")),
    "delay_grad_reduce": ConfigKey(
        "give true or false", {**_only("null", "true"), "false": ("--no-align-grad-reduce",)}
    ),
    "delay_param_gather": ConfigKey("give true or false", {**_only("null", "true", "false")}),
    "scatter_gather_tensors_in_pipeline": ConfigKey(
        "stages exchange what they hold", _only("null", "true", "false")
    ),
    "standalone_embedding_stage": ConfigKey(
        "use pipeline_model_parallel_layout: E|...", _only("null", "false")
    ),
    "retriever_seq_length": ConfigKey("there are no retrieval models", _only("null", "256")),
}
"""By key."""

"""What CUDA, NCCL, cuBLAS and Transformer Engine read from the environment: one table of what a run needs. PURE.

Each rule names a variable, when it matters, the value that is set where the user gave none, and values that are
harmful. What the user set and is not harmful stays.

Sources: CUDA C++ Programming Guide, "CUDA environment variables" (CUDA_DEVICE_MAX_CONNECTIONS: hardware queues; with
one, kernels start in the order of their launch over all streams); PyTorch, "CUDA memory management" and
"ProcessGroupNCCL environment variables"; NCCL, "environment variables"; cuBLAS, "results reproducibility";
Transformer Engine's README (NVTE_ALLOW_NONDETERMINISTIC_ALGO).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EnvironmentRule:
    """One variable.

    applies: whether a configuration is concerned. default: value to set where none is given; None sets nothing.
    harmful: whether a given value must not stand. why: of the harm, and what to do instead.
    """

    name: str
    applies: Callable[[Any], bool]
    default: str | None
    harmful: Callable[[str], bool]
    why: str


def _gathers(config: Any) -> bool:
    """Parameters are gathered during forward: on a stream beside compute."""
    return config.sharding_strategy == "optim_grads_params" and config.data_parallel_size > 1


def _orders_by_launch(config: Any) -> bool:
    """Tensor or context parallel communication must start before the product that hides it."""
    return config.tensor_model_parallel_size > 1 or config.context_parallel_size > 1


def _deterministic(config: Any) -> bool:
    return bool(config.deterministic_mode)


def _always(_config: Any) -> bool:
    return True


def _is_true(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "y", "on")


def _is_false(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "no", "n", "off")


def _nondeterministic_nccl(value: str) -> bool:
    """In-network reduction adds in an order of its own; Megatron's list of the orders that are fixed."""
    fixed = {"tree", "ring", "collnetdirect", "collnetchain", "^nvls"}
    return not all(part.strip().lower() in fixed for part in value.split(","))


RULES: tuple[EnvironmentRule, ...] = (
    EnvironmentRule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _gathers,
        "32",
        lambda value: value.strip() == "1",
        "one queue makes gathers and reductions of FSDP wait for compute; unset it or give 32",
    ),
    EnvironmentRule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda config: _orders_by_launch(config) and not _gathers(config),
        "1",
        lambda value: False,
        "",
    ),
    EnvironmentRule(
        "PYTORCH_CUDA_ALLOC_CONF",
        _gathers,
        "expandable_segments:True",
        lambda value: "backend:cudamallocasync" in value.replace(" ", "").lower(),
        "FSDP's buffers change streams and sizes, which that allocator frees late; give expandable_segments:True",
    ),
    EnvironmentRule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _always,
        None,
        lambda value: value.strip() not in ("", "0"),
        "each gather would allocate from the driver, which waits for the device; unset it",
    ),
    EnvironmentRule(
        "TORCH_NCCL_BLOCKING_WAIT",
        _always,
        None,
        _is_true,
        "the host would wait in each collective, so nothing overlaps; unset it",
    ),
    EnvironmentRule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _always,
        None,
        _is_false,
        "a failed collective would hang the run for ever; unset it",
    ),
    EnvironmentRule(
        "CUBLAS_WORKSPACE_CONFIG",
        _deterministic,
        ":4096:8",
        lambda value: value.strip() not in (":4096:8", ":16:8"),
        "--deterministic-mode needs :4096:8 or :16:8; give one of them or unset it",
    ),
    EnvironmentRule(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        _deterministic,
        "0",
        lambda value: not _is_false(value),
        "--deterministic-mode needs 0; unset it",
    ),
    EnvironmentRule(
        "NCCL_ALGO",
        _deterministic,
        "Ring",
        _nondeterministic_nccl,
        "--deterministic-mode needs Ring, Tree, CollnetDirect, CollnetChain or ^NVLS; give one or unset it",
    ),
)


OTHER_SPELLINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "TORCH_NCCL_BLOCKING_WAIT": "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
}
"""Newer or older names of the same, judged alike."""


def environment_for(config: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set for a run on GPUs, before CUDA and NCCL start.

    config: a TrainConfig. environ: what the user set.

    Raises ValueError naming variable, value and fix where the user set a harmful one.
    """
    wanted: dict[str, str] = {}
    for rule in RULES:
        if not rule.applies(config):
            continue
        given = [name for name in (rule.name, OTHER_SPELLINGS.get(rule.name, "")) if name in environ]
        for name in given:
            if rule.harmful(environ[name]):
                raise ValueError(f"the environment sets {name}={environ[name]}: {rule.why}")
        if not given and rule.default is not None:
            wanted.setdefault(rule.name, rule.default)
    return wanted

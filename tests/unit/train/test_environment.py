"""Which environment a run on GPUs gets, what is refused in it, and what communicators are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.parallel.communicators import AXES_OF, CommunicatorOptions, communicator_options
from megatron.parallel.layout import AXES
from megatron.train.build import communicators_from
from megatron.train.environment import environment_for
from megatron.train.initialize import prepare_environment, verify_determinism

DEFAULTS = {
    "sharding_strategy": "optim_grads_params",
    "data_parallel_size": 4,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "deterministic_mode": False,
    "device": "cuda",
    "flight_recorder_dump_path": None,
    "flight_recorder_trace_buffer_size": 2000,
    "nccl_communicator_config_path": None,
    "high_priority_stream_groups": (),
}
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def config(**changes: Any) -> Any:
    return SimpleNamespace(**{**DEFAULTS, **changes})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "32"),
        ({"tensor_model_parallel_size": 2}, "32"),  # FSDP's gathers come first
        ({"sharding_strategy": "optim", "tensor_model_parallel_size": 2}, "1"),
        (
            {"sharding_strategy": "optim_grads_params", "data_parallel_size": 1, "context_parallel_size": 2},
            "1",
        ),
        ({"sharding_strategy": "optim"}, None),
    ],
)
def test_hardware_queues_follow_the_strategy(changes: dict[str, Any], wanted: str | None) -> None:
    assert environment_for(config(**changes), {}).get(QUEUES) == wanted


def test_what_the_user_set_stays() -> None:
    assert QUEUES not in environment_for(config(), {QUEUES: "8"})
    assert QUEUES not in environment_for(
        config(sharding_strategy="optim", tensor_model_parallel_size=2), {QUEUES: "1"}
    )
    segments = "PYTORCH_CUDA_ALLOC_CONF"
    assert environment_for(config(), {})[segments] == "expandable_segments:True"
    assert segments not in environment_for(config(), {segments: "max_split_size_mb:64"})
    assert segments not in environment_for(config(), {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    assert segments not in environment_for(config(sharding_strategy="optim"), {})


HARMFUL = [
    ({}, QUEUES, "1"),
    ({}, "PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
    ({}, "PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync"),
    ({}, "NCCL_BLOCKING_WAIT", "1"),
    ({}, "PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
    ({}, "TORCH_NCCL_BLOCKING_WAIT", "1"),
    ({}, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
    ({"deterministic_mode": True}, "CUBLAS_WORKSPACE_CONFIG", ":0:0"),
    ({"deterministic_mode": True}, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
    ({"deterministic_mode": True}, "NCCL_ALGO", "NVLS"),
]


@pytest.mark.parametrize(("changes", "name", "value"), HARMFUL)
def test_harmful_values_are_named(changes: dict[str, Any], name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"the environment sets {name}={value}: "):
        environment_for(config(**changes), {name: value})
    if changes:  # harmful for determinism only
        environment_for(config(), {name: value})


def test_determinism_sets_what_libraries_need() -> None:
    """O09, on the environment's side."""
    before = torch.are_deterministic_algorithms_enabled()
    environment: dict[str, str] = {}
    try:
        prepare_environment(config(deterministic_mode=True), environment)
        assert torch.are_deterministic_algorithms_enabled()
        assert environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        assert environment["NCCL_ALGO"] == "Ring"
        assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        torch.use_deterministic_algorithms(False)
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            verify_determinism(environment)
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_cpu_run_leaves_the_environment_alone() -> None:
    environment = {QUEUES: "1"}
    prepare_environment(config(device="cpu"), environment)
    assert environment == {QUEUES: "1"}
    prepare_environment(config(device="cpu", flight_recorder_dump_path="x"), environment)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "2000"


class FakeOptions:
    """torch.distributed.ProcessGroupNCCL.Options, which CPU builds of torch do not have."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace()


def test_communicators_by_group(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text("dp: {max_ctas: 8, min_ctas: 2}\nintra_dp_cp: {max_ctas: 16}\ntp: {net_name: IB}\n")
    found = communicators_from(
        config(nccl_communicator_config_path=str(path), high_priority_stream_groups=("tp", "ep"))
    )
    assert found["dp"].fields == {"max_ctas": 8, "min_ctas": 2}
    assert found["fsdp"].fields == {"max_ctas": 16, "min_ctas": 2}  # the particular name wins
    assert found["tp"] == CommunicatorOptions(True, {"net_name": "IB"})
    assert found["ep"].high_priority and not found["dp"].high_priority
    options = found["tp"].apply(FakeOptions())
    assert options.is_high_priority_stream and options.config.net_name == "IB"
    assert communicators_from(config()) == {}


def test_groups_stand_for_axes_that_exist() -> None:
    assert {axis for axes in AXES_OF.values() for axis in axes} <= set(AXES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dq: {max_ctas: 8}", "no communicator group 'dq'"),
        ("dp: {max_cta: 8}", "no option 'max_cta'"),
        ("dp: {max_ctas: many}", "max_ctas of group dp is 'many'; give a int"),
        ("- dp", "no mapping of groups"),
        ("dp: [", "give a YAML file"),
    ],
)
def test_bad_communicator_files_are_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="--nccl-communicator-config-path") as error:
        communicators_from(config(nccl_communicator_config_path=str(path)))
    assert words in str(error.value)


def test_a_group_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no communicator group 'xx'"):
        communicator_options({}, ["xx"])

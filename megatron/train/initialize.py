"""Where this process stands in the world: launch variables, device, process group, seeds. The only reader of
os.environ.

Three ways to start a run: by torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), by srun
without torchrun (SLURM's variables of a job step), or alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import time
import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megatron.train.environment import environment_for


@dataclass(frozen=True)
class Launch:
    """This process among those of the run. `launcher` is "torchrun", "slurm" or "alone"."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    launcher: str = "alone"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not within a world of {self.world_size}; check the launch variables of "
                f"{self.launcher}"
            )


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """How this process was launched.

    A shell inside a SLURM allocation is no job step: a program started there without srun runs alone.

    Raises ValueError naming a launch variable that is missing or no number.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return Launch(
            rank=_integer(env, "RANK"),
            world_size=_integer(env, "WORLD_SIZE"),
            local_rank=_integer(env, "LOCAL_RANK", "0"),
            local_world_size=_integer(env, "LOCAL_WORLD_SIZE", "1"),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_integer(env, "MASTER_PORT", "29500"),
            launcher="torchrun",
        )
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return _slurm_launch(env)
    return Launch()


def declared_world_size(launch: Launch, environ: Mapping[str, str] | None = None) -> int:
    """Ranks that --validate-only checks for: WORLD_SIZE, also where this process has no rank, else the launch's."""
    env = os.environ if environ is None else environ
    return _integer(env, "WORLD_SIZE") if "WORLD_SIZE" in env else launch.world_size


def _slurm_launch(env: Mapping[str, str]) -> Launch:
    world_size = _integer(env, "SLURM_STEP_NUM_TASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    # One job step at a time uses a port; job ids of neighbours on a node differ.
    port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000 + int(env.get("SLURM_STEP_ID", "0")) % 1000
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"
    return Launch(
        rank=_integer(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(env, "SLURM_LOCALID", "0"),
        local_world_size=tasks_on_node(tasks, int(env.get("SLURM_NODEID", "0"))),
        master_addr=env.get("MASTER_ADDR") or first_host(nodes),
        master_port=_integer(env, "MASTER_PORT", str(port)),
        launcher="slurm",
    )


def _integer(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        problem = "is not set" if text is None else f"is {text!r}, which is no integer"
        raise ValueError(f"the launch variable {name} {problem}; start with torchrun or srun") from None


def first_host(nodes: str) -> str:
    """First host of a SLURM node list: "node[007-009,12],other" -> "node007"."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST {nodes!r} holds no host; set MASTER_ADDR")
    prefix, ranges, suffix = match.groups()
    return prefix + (re.split(r"[-,]", ranges)[0] if ranges else "") + suffix


def tasks_on_node(tasks: str, node: int) -> int:
    """Tasks on the node-th node from SLURM's compact list: "4(x2),3" -> 4, 4, 3."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(repeat or 1)
    return counts[min(node, len(counts) - 1)] if counts else 1


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables that a library reads at its import."""
    os.environ.update(variables)


def cuda_is_there() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()


@dataclass(frozen=True)
class ProcessGroupOptions:
    """What init_process_group needs to know: backend "gloo" or "nccl", device "cpu" or "cuda"."""

    backend: str = "gloo"
    device: str = "cpu"
    timeout_minutes: float = 10.0


def initialize_distributed(launch: Launch, options: ProcessGroupOptions) -> torch.device:
    """Select this rank's device and make the default process group (also in a world of one).

    Raises ValueError where the machine has fewer GPUs than local ranks.
    """
    device = _select_device(launch, options)
    timeout = timedelta(minutes=options.timeout_minutes)
    _set_network(launch)
    if launch.world_size == 1:
        dist.init_process_group(
            options.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return device
    # torchrun's own store, where there is one, outlives rank 0; init_method env:// finds it.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = launch.master_addr, str(launch.master_port)
    try:
        dist.init_process_group(
            options.backend,
            init_method="env://",
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise ValueError(
            f"rank {launch.rank} could not meet the other {launch.world_size - 1} ranks at "
            f"{launch.master_addr}:{launch.master_port} within {options.timeout_minutes:g} minutes; "
            f"check MASTER_ADDR, MASTER_PORT and that every rank was started ({str(error).splitlines()[0]})"
        ) from error
    return device


def _select_device(launch: Launch, options: ProcessGroupOptions) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # A launcher may show each process its own GPU only.
    index = 0 if count == 1 else launch.local_rank
    if index >= count or (
        count == 1 and launch.local_world_size > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ
    ):
        raise ValueError(
            f"{launch.local_world_size} ranks on a machine with {count} GPU(s); start one process per GPU "
            "(torchrun --nproc-per-node), or pass --distributed-backend gloo to run on CPU"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _set_network(launch: Launch) -> None:
    """Ranks of one machine talk over loopback: a container's host name need not resolve to an address."""
    if launch.local_world_size == launch.world_size and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def prepare_environment(config: Any, environ: MutableMapping[str, str] | None = None) -> None:
    """Set what CUDA, NCCL and Transformer Engine need of the environment (environment.py), before they start.

    config: a TrainConfig. Also --deterministic-mode, before any model is built.

    Raises ValueError where the user's environment does harm.
    """
    env = os.environ if environ is None else environ
    if config.device == "cuda" or config.deterministic_mode:
        env.update(environment_for(config, env))
    if config.flight_recorder_dump_path:
        env["TORCH_FR_BUFFER_SIZE"] = str(config.flight_recorder_trace_buffer_size)
    if config.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        verify_determinism(env)


def verify_determinism(environ: Mapping[str, str]) -> None:
    """Whether --deterministic-mode holds in this process. Raises RuntimeError where something undid it."""
    wrong = [
        name
        for name, good in (
            ("torch.use_deterministic_algorithms", torch.are_deterministic_algorithms_enabled()),
            ("torch.backends.cudnn.benchmark", not torch.backends.cudnn.benchmark),
            ("CUBLAS_WORKSPACE_CONFIG", environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")),
            ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"),
        )
        if not good
    ]
    if wrong:
        raise RuntimeError(f"--deterministic-mode: {', '.join(wrong)} is not as it must be")


def sum_bf16_products_in_fp32() -> None:
    """--disable-bf16-reduced-precision-matmul: cuBLAS may not add partial sums of bf16 products in bf16."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def seed_everything(seed: int) -> None:
    """Seed every default generator of this process."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed {seed} is not within 0..{2**32 - 1}")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def quiet_libraries() -> None:
    """Hide warnings that a user of this program cannot act on."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for module in ("torch", "megatron.core", "transformer_engine", "google", "tensorboard"):
        warnings.filterwarnings("ignore", module=rf"{re.escape(module)}(\.|$)")


def record_for_launcher(text: str) -> None:
    """Leave the reason of this rank's end where torchrun looks for it: the summary that it prints last says it then."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def hostname() -> str:
    """This machine's name, for messages."""
    return socket.gethostname()

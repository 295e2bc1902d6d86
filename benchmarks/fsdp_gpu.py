"""What wrapping a model in FSDP costs on one device: the same step unwrapped, without sharding, and under ZeRO-3.

    python -m benchmarks.fsdp_gpu                       the first GPU, bf16
    python -m benchmarks.fsdp_gpu --device cpu          the same code where there is no GPU: host times only

World 1, so nothing is sent: what is left are hooks, copies and bookkeeping. Host time is what a step keeps Python busy
before it waits for the device; device time is what lies between events around it. Where host time is the larger one,
the device waits for Python. Retries are the allocator's: each frees its cache and stops the device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.fsdp import DTYPES
from benchmarks.fsdp_model import BATCH, SEQUENCE, Trainee, Variant

UNWRAPPED = "no communication"
VARIANTS = (UNWRAPPED, "torch FSDP2", "ours no_shard", "ours optim_grads", "ours ZeRO-3")


@dataclass(frozen=True)
class Cost:
    """Milliseconds a step, medians; the allocator's peaks in MB and its retries (0 without a GPU)."""

    host_ms: float
    step_ms: float
    allocated_mb: float
    reserved_mb: float
    retries: int


def measure(variant: Variant, device: torch.device, rounds: int, steps: int) -> Cost:
    """Train `rounds` times `steps` steps after a warm-up of as many."""
    trainee = Trainee(variant, device)
    _steps(trainee, device, steps)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    retries = _retries(device)
    times = [_steps(trainee, device, steps) for _ in range(rounds)]
    allocated = reserved = 0.0
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device) / 1e6
        reserved = torch.cuda.max_memory_reserved(device) / 1e6
    host, whole = (statistics.median(column) for column in zip(*times, strict=True))
    return Cost(host, whole, allocated, reserved, _retries(device) - retries)


def _steps(trainee: Trainee, device: torch.device, steps: int) -> tuple[float, float]:
    """Milliseconds a step of Python alone, and until the device is done."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            trainee.step()
        elapsed = (time.perf_counter() - start) * 1000 / steps
        return elapsed, elapsed
    torch.cuda.synchronize(device)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    start = time.perf_counter()
    for _ in range(steps):
        trainee.step()
    host = (time.perf_counter() - start) * 1000 / steps
    after.record()
    after.synchronize()
    return host, before.elapsed_time(after) / steps


def _retries(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def print_table(costs: dict[str, Cost]) -> None:
    """Print the table in Markdown."""
    print("| variant | tokens/s | step ms | vs unwrapped | host ms | allocated MB | reserved MB | retries |")
    print("|---|---|---|---|---|---|---|---|")
    alone = costs.get(UNWRAPPED)
    for name, cost in costs.items():
        against = f"{alone.step_ms / cost.step_ms:.3f}" if alone else "-"
        label = "unwrapped" if name == UNWRAPPED else name
        print(
            f"| {label} | {BATCH * SEQUENCE * 1000 / cost.step_ms:.0f} | {cost.step_ms:.2f} | {against} | "
            f"{cost.host_ms:.2f} | {cost.allocated_mb:.0f} | {cost.reserved_mb:.0f} | {cost.retries} |"
        )


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="default: bf16 on a GPU, fp32 on CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of one round")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is there; give --device cpu")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    name = torch.cuda.get_device_name(device) if options.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}, {dtype}, {options.rounds} rounds of {options.steps} steps\n")
    costs = {}
    for variant in options.variants:
        costs[variant] = measure(
            Variant(variant, DTYPES[dtype], torch.float32), device, options.rounds, options.steps
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print_table(costs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Compare FSDP's strategies with torch's FSDP2, DDP, ZeRO-1 and no communication at all, on local ranks.

    python -m benchmarks.fsdp                          2 ranks, fp32, all variants
    python -m benchmarks.fsdp --dtype bf16 --rounds 5
    python -m benchmarks.fsdp --ranks 4 --variants "torch FSDP2" "ours ZeRO-3"

Every variant has its own processes, which stay up; rounds alternate between variants, so that a machine that gets
slower slows all of them. Ratios are of medians within one run. Memory: peak RSS of a rank, and the peak of live
tensor bytes in one step, from the allocator's events. Bytes on the wire are what a rank hands to torch.distributed
or sends itself. Exposed communication is a step's time beyond the run without communication.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import socket
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fsdp_model import BATCH, SEQUENCE, VARIANTS, Trainee, Variant

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Report:
    """What one variant showed: milliseconds a step of every round, memory, and payload by collective."""

    step_ms: list[float]
    peak_rss_mb: float = 0.0
    peak_live_mb: float = 0.0
    wire: dict[str, tuple[int, float]] | None = None
    phases: list[dict[str, float]] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Median milliseconds a step."""
        return statistics.median(self.step_ms)


class CollectiveCounter(TorchDispatchMode):
    """Counts calls and input bytes of torch.distributed's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2].rstrip("_")
            tensors = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else [arg])]
            largest = max((t.nbytes for t in tensors if isinstance(t, torch.Tensor)), default=0)
            self.seen[name] += 1
            self.bytes[name] += largest
        return func(*args, **(kwargs or {}))


def count_wire(trainee: Trainee) -> dict[str, tuple[int, float]]:
    """Calls and megabytes of one step by collective."""
    groups = getattr(trainee.model, "groups", [])
    comms = {id(comm): comm for group in groups for comm in (group.comms.gather, group.comms.reduce)}
    if comms:
        for comm in comms.values():
            comm.traffic.clear()
        trainee.step()
        totals: dict[str, tuple[int, float]] = {}
        for comm in comms.values():
            for name, traffic in comm.traffic.items():
                calls, megabytes = totals.get(name, (0, 0.0))
                totals[name] = (calls + traffic.calls, megabytes + traffic.bytes / 1e6)
        return totals
    with CollectiveCounter() as counter:
        trainee.step()
    return {name: (calls, counter.bytes[name] / 1e6) for name, calls in counter.seen.items()}


def live_bytes() -> int:
    """Bytes of the distinct storages of all tensors that are alive."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor):
            local = getattr(item, "_local_tensor", item)
            for tensor in (local, getattr(item, "grad", None) if item.is_leaf else None):
                tensor = getattr(tensor, "_local_tensor", tensor)
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def peak_live_bytes(trainee: Trainee) -> int:
    """Peak of live tensor bytes in one step: what is alive before it, and the allocator's events."""
    before = live_bytes()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        trainee.step()
    current = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return before + peak


def rank_main(rank: int, ranks: int, port: int, variant: Variant, orders: Connection) -> None:
    """Serve one rank of one variant: "time N", "measure", "stop"."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    trainee = Trainee(variant, torch.device("cpu"))
    for _ in range(3):
        trainee.step()
    orders.send("ready")
    while (order := orders.recv()) != "stop":
        if order == "measure":
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            orders.send((rss, count_wire(trainee), peak_live_bytes(trainee) / 1e6))
            continue
        dist.barrier()
        seconds: dict[str, float] = {}
        start = time.perf_counter()
        for _ in range(order):
            trainee.step(seconds)
        dist.barrier()
        total = (time.perf_counter() - start) * 1000 / order
        orders.send((total, {name: value * 1000 / order for name, value in seconds.items()}))
    dist.destroy_process_group()


class Group:
    """The processes of one variant."""

    def __init__(self, variant: Variant, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(rank, ranks, port, variant, theirs), daemon=True
            )
            process.start()
            self.connections.append(mine)
            self.processes.append(process)
        self.receive()

    def order(self, order: Any) -> list[Any]:
        """Send an order to all ranks and return their answers."""
        for connection in self.connections:
            connection.send(order)
        return self.receive()

    def receive(self) -> list[Any]:
        """Return one answer of every rank."""
        return [connection.recv() for connection in self.connections]

    def stop(self) -> None:
        """End the processes."""
        for connection in self.connections:
            connection.send("stop")
        for process in self.processes:
            process.join(30)


def measure(options: argparse.Namespace) -> dict[str, Report]:
    """Run all rounds and return a report per variant."""
    dtype, reduce_dtype = DTYPES[options.dtype], DTYPES[options.reduce_dtype]
    groups = {name: Group(Variant(name, dtype, reduce_dtype), options.ranks) for name in options.variants}
    reports = {name: Report([]) for name in groups}
    for _ in range(options.rounds):
        for name, group in groups.items():
            answers = group.order(options.steps)
            reports[name].step_ms.append(max(total for total, _ in answers))
            reports[name].phases += [phases for _, phases in answers]
    for name, group in groups.items():
        measured = group.order("measure")
        reports[name].peak_rss_mb = max(rss for rss, _, _ in measured)
        reports[name].wire = measured[0][1]
        reports[name].peak_live_mb = max(live for _, _, live in measured)
        group.stop()
    return reports


def print_table(reports: dict[str, Report], ranks: int) -> None:
    """Print the table in Markdown."""
    alone = reports.get("no communication")
    fsdp2 = reports.get("torch FSDP2")
    print("| variant | tokens/s a rank | step ms | vs FSDP2 | vs none | exposed ms | RSS MB | live MB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, report in reports.items():
        tokens = BATCH * SEQUENCE * 1000 / report.median_ms
        versus = f"{fsdp2.median_ms / report.median_ms:.2f}" if fsdp2 else "-"
        against = f"{alone.median_ms / report.median_ms:.2f}" if alone else "-"
        exposed = f"{report.median_ms - alone.median_ms:.0f}" if alone else "-"
        print(
            f"| {name} | {tokens:.0f} | {report.median_ms:.0f} | {versus} | {against} | {exposed} | "
            f"{report.peak_rss_mb:.0f} | {report.peak_live_mb:.0f} |"
        )
    print(f"\nPayload of one step and rank ({ranks} ranks), calls x MB:\n")
    for name, report in reports.items():
        parts = [
            f"{op} {calls} x {mb / max(calls, 1):.2f}" for op, (calls, mb) in (report.wire or {}).items()
        ]
        print(f"- {name}: {', '.join(parts) or 'nothing'}")


def print_phases(reports: dict[str, Report]) -> None:
    """Print the median milliseconds of each phase of a step, so that a slower step can be placed."""
    names = list(next(iter(reports.values())).phases[0])
    print("\nMilliseconds of a step's phases, of a rank's main thread:\n")
    print(f"| variant | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for variant, report in reports.items():
        medians = [f"{statistics.median(phases[name] for phases in report.phases):.0f}" for name in names]
        print(f"| {variant} | {' | '.join(medians)} |")


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--reduce-dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant in one round")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {options.ranks} gloo ranks, {options.dtype}, {options.rounds} rounds\n"
    )
    reports = measure(options)
    print_table(reports, options.ranks)
    print_phases(reports)


if __name__ == "__main__":
    main()

"""Golden values: stored numbers of a case, who made them, and how near a run must come.

A file golden_values_<platform>.json holds `recorded` (where the numbers come from) and for every metric
{start_step, end_step, step_interval, values: {"1": number}}. Numbers are held exactly where platform, CPU capability,
torch and number of threads are those of the file and two runs gave them (`runs`), else within TOLERANCES. Times and
memory are recorded to be looked at; only a GPU's memory, which its allocator counts, is compared.
"""

from __future__ import annotations

import json
import math
import os
import platform as platforms
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Series = dict[int, float]
Metrics = dict[str, Series]

# Name in golden files -> name in a run's metrics file.
METRICS = {
    "lm loss": "lm_loss",
    "grad-norm": "grad_norm",
    "num-zeros": "num_zeros",
    "mtp loss": "mtp_loss",
    "load balancing loss": "load_balancing_loss",
    "seq load balancing loss": "seq_load_balancing_loss",
    "iteration-time": "iteration_time",
    "mem-peak": "memory_mib",
}
OBSERVED = ("iteration-time", "mem-peak")
TOLERANCES = {"fp32": 1e-5, "bf16": 5e-3}
"""Relative, of losses."""
NORM_FACTOR = 10.0
"""A norm is a square root of sums that cancel: this many times the tolerance of losses."""
GPU_MEMORY_TOLERANCE = 0.05
SAME = ("platform", "cpu_capability", "torch", "threads")


@dataclass(frozen=True)
class Difference:
    """A number that is not what it should be. `relative`: distance over the expected number."""

    metric: str
    step: int
    expected: float
    found: float

    @property
    def relative(self) -> float:
        if self.expected == self.found:
            return 0.0
        return abs(self.found - self.expected) / max(abs(self.expected), 1e-30)

    def __str__(self) -> str:
        return (
            f"{self.metric}, step {self.step}: {self.expected!r} expected, {self.found!r} found "
            f"(relative {self.relative:.1e})"
        )


def read_metrics(path: str | Path, names: tuple[str, ...]) -> Metrics:
    """The named metrics of a run's metrics file; a step that was written twice counts as the last time."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return select([line for line in lines if "lm_loss" in line], names)


def select(lines: list[dict[str, float]], names: tuple[str, ...]) -> Metrics:
    """{metric: {step: value}} of the lines that a run reported. ValueError for a metric that is not there."""
    found: Metrics = {}
    for name in names:
        series = {int(line["iteration"]): line[METRICS[name]] for line in lines if METRICS[name] in line}
        if not series:
            raise ValueError(f"the run has not reported {name}")
        found[name] = series
    return found


def here(threads: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Where numbers made now come from."""
    import torch

    machine = f"{platforms.system()} {platforms.machine()}, {_cpu_name()}"
    record: dict[str, Any] = {
        "platform": torch.cuda.get_device_name(0) if device == "gpu" else machine,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": threads,
        "commit": _commit(),
    }
    if device == "gpu":
        record["cuda"] = torch.version.cuda
    return record


def _cpu_name() -> str:
    """The processor's model: mathematical libraries choose their kernels by it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platforms.processor()


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=_ROOT)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "megatron", "pretrain_gpt.py", "pretrain_deepseek.py")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-changed" if changed else "")


_ROOT = Path(__file__).resolve().parents[2]


def same_place(recorded: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether numbers of the two places must be equal."""
    return recorded.get("runs", 2) > 1 and all(recorded.get(key) == now.get(key) for key in SAME)


def path_of(folder: Path, platform: str = "cpu") -> Path:
    """The golden file of a case's folder."""
    return folder / f"golden_values_{platform}.json"


def to_json(metrics: Metrics, recorded: dict[str, Any]) -> dict[str, Any]:
    """What a golden file holds."""
    content: dict[str, Any] = {"recorded": recorded}
    for name, series in metrics.items():
        steps = sorted(series)
        content[name] = {
            "start_step": steps[0],
            "end_step": steps[-1],
            "step_interval": steps[1] - steps[0] if len(steps) > 1 else 1,
            "values": {str(step): _short(name, series[step]) for step in steps},
        }
    return content


def _short(name: str, value: float) -> float:
    return round(value, 3) if name in OBSERVED else value


def save(path: Path, metrics: Metrics, recorded: dict[str, Any]) -> None:
    """Write a golden file."""
    path.write_text(json.dumps(to_json(metrics, recorded), indent=1) + "\n")


def load(path: Path) -> tuple[Metrics, dict[str, Any]]:
    """(metrics, record) of a golden file."""
    content = json.loads(path.read_text())
    recorded = content.pop("recorded")
    return {name: {int(k): v for k, v in one["values"].items()} for name, one in content.items()}, recorded


def compare(expected: Metrics, found: Metrics, precision: str | None) -> list[Difference]:
    """Numbers of `expected` that `found` lacks or has too far away.

    precision: fp32 or bf16 for TOLERANCES, None for equality. Observed metrics are left out.
    """
    faults = []
    for name, series in expected.items():
        if name in OBSERVED:
            continue
        for step, value in series.items():
            other = found.get(name, {}).get(step, math.nan)
            difference = Difference(name, step, value, other)
            if not _is_near(difference, precision):
                faults.append(difference)
    return faults


def lacking(expected: Metrics, found: Metrics) -> list[str]:
    """What `found` reports and `expected`, too thin to hold it, does not; observed metrics are left out."""
    lacks = []
    for name, series in found.items():
        if name in OBSERVED:
            continue
        steps = sorted(set(series) - set(expected.get(name, {})))
        if steps:
            lacks.append(f"{name} at step {', '.join(map(str, steps))}" if name in expected else name)
    return lacks


def _is_near(difference: Difference, precision: str | None) -> bool:
    expected, found = difference.expected, difference.found
    if precision is None:
        return expected == found
    if difference.metric == "num-zeros":
        # What underflows differs from machine to machine, what no token touched does not.
        slack, share = (64, 0.5) if precision == "bf16" else (16, 1e-3)
        return abs(expected - found) <= slack + share * expected
    factor = NORM_FACTOR if difference.metric == "grad-norm" else 1.0
    return abs(expected - found) <= factor * TOLERANCES[precision] * abs(expected)


def threads_of(environment: dict[str, str]) -> int:
    """OMP_NUM_THREADS of a run with these variables."""
    return int(environment.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1")))

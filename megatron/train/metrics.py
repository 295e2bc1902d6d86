"""What a run tells: Megatron's log lines, a progress bar on a terminal, and numbers for files (sinks.py).

Note "Numbers". Throughput counts all tokens that went through the model, masked or not. TFLOP/s is the
model's own arithmetic (recompute not counted), as Megatron reports it; MFU is its share of what the devices could do
(https://arxiv.org/abs/2204.02311, appendix B). On a GPU memory is torch's allocator, on CPU the process.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from megatron.train.evaluate import EvaluationResult
from megatron.train.interval import Extras
from megatron.train.sinks import Sink
from megatron.train.step import StepResult
from megatron.train.timers import BYTES_PER_MIB

_OF_EVERY_STEP = ("lm_loss", "grad_norm", "learning_rate")
# Losses and loads of the layers' own (megatron/models/auxiliary.py), in the order of the printed line.
AUXILIARY = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
    "mtp_loss",
    "max_expert_load",
)


@dataclass(frozen=True)
class ReportOptions:
    """What to print and what a step is worth.

    Attributes:
        train_iters: of the run.
        log_interval: iterations between lines.
        global_batch_size: samples a step.
        tokens_per_step: global batch size x sequence length.
        flops_per_step: of the whole model for one global batch, forward and backward.
        world_size: ranks.
        show_throughput: print TFLOP/s (--log-throughput).
        per_layer: also write each layer's losses and each expert's load (--moe-per-layer-logging).
        peak_tflops: of one device at the compute dtype; None where nobody knows it.
        step_interval: steps between points of the step sinks (--tensorboard-log-interval).
    """

    train_iters: int
    log_interval: int
    global_batch_size: int
    tokens_per_step: int
    flops_per_step: float
    world_size: int
    show_throughput: bool = True
    per_layer: bool = False
    peak_tflops: float | None = None
    step_interval: int = 1


class Reporter:
    """Collects step results and tells them every `log_interval` iterations. Rank 0 only is given sinks and
    a stream. step_sinks: also get loss, gradient norm and learning rate of single steps.
    """

    def __init__(
        self,
        options: ReportOptions,
        sinks: tuple[Sink, ...] = (),
        stream: TextIO | None = None,
        device: torch.device | str = "cpu",
        step_sinks: tuple[Sink, ...] = (),
    ) -> None:
        self.options = options
        self.sinks, self.step_sinks = sinks, step_sinks
        self.stream = stream
        self.device = torch.device(device)
        self._progress = _Progress(stream, options.train_iters) if stream is not None else None
        self._losses: list[float] = []
        self._skipped = 0
        self._nans = 0
        self._start = time.perf_counter()
        self._paused: float | None = None

    def record(self, result: StepResult, iteration: int = 0, lr: float = 0.0) -> None:
        """Take in one step."""
        if self.step_sinks and iteration % self.options.step_interval == 0:
            values = {"lm_loss": result.loss, "grad_norm": result.grad_norm, "learning_rate": lr}
            for sink in self.step_sinks:
                sink.write(iteration, values)
        if result.skipped:
            self._skipped += 1
        if result.loss != result.loss:
            self._nans += 1
        else:
            self._losses.append(result.loss)

    def start_timer(self) -> None:
        """Go on after a pause; at the beginning, begin the first interval now."""
        now = time.perf_counter()
        self._start = now if self._paused is None else self._start + now - self._paused
        self._paused = None

    def pause_timer(self) -> None:
        """Stop the clock for something that is not training."""
        self._paused = time.perf_counter()

    def due(self, iteration: int) -> bool:
        """Whether `iteration` ends an interval (also the first one, so that a run shows life)."""
        return iteration % self.options.log_interval == 0

    def report(
        self,
        iteration: int,
        samples: int,
        result: StepResult,
        lr: float,
        params_norm: float | None = None,
        extras: Extras | None = None,
    ) -> None:
        """Tell the interval that ends with `iteration`, whose last step gave `result`."""
        steps = len(self._losses) + self._nans
        seconds = (time.perf_counter() - self._start) / max(steps, 1)
        options = self.options
        values: dict[str, float] = {
            "lm_loss": sum(self._losses) / len(self._losses) if self._losses else float("nan"),
            "grad_norm": result.grad_norm,
            "learning_rate": lr,
            "loss_scale": result.loss_scale,
            "consumed_samples": samples,
            "iteration_time": seconds,
            "tokens_per_second": options.tokens_per_step / seconds,
            "throughput": options.flops_per_step / seconds / options.world_size / 1e12,
            "skipped_iterations": self._skipped,
            "nan_iterations": self._nans,
            "world_size": options.world_size,
            **memory_usage(self.device),
        }
        if options.peak_tflops is not None:
            values["mfu"] = values["throughput"] / options.peak_tflops
        values |= _shown(result.auxiliary, options.per_layer)
        if result.num_zeros is not None:
            values["num_zeros"] = result.num_zeros
        if params_norm is not None:
            values["params_norm"] = params_norm
        extras = extras or Extras()
        # Where phases reset the allocator's peak, theirs is the largest.
        values["memory_mib"] = max(values["memory_mib"], extras.values.get("memory/largest", 0.0))
        self._tell(training_line(iteration, values, options))
        values |= extras.values
        for line in extras.lines:
            self._tell(line)
        if self._progress is not None:
            self._progress.update(iteration, values)
        self._write(iteration, values)
        self._losses, self._skipped, self._nans = [], 0, 0
        self._start = time.perf_counter()

    def report_evaluation(self, iteration: int, split: str, result: EvaluationResult) -> None:
        """Tell a validation or test loss, framed as Megatron frames it."""
        line = (
            f" {split} loss at iteration {iteration} | lm loss value: {result.loss:.6E} | "
            f"lm loss PPL: {result.perplexity:.6E} | "
        )
        rule = "-" * len(line)
        self._tell(f"{rule}\n{line}\n{rule}")
        prefix = "validation" if split.startswith("validation") else split
        self._write(iteration, {f"lm_loss_{prefix}": result.loss, f"lm_loss_{prefix}_ppl": result.perplexity})

    def message(self, text: str) -> None:
        """Print one line, above the progress bar if there is one."""
        self._tell(text)

    def close(self) -> None:
        """End the progress bar and close the sinks."""
        if self._progress is not None:
            self._progress.close()
        for sink in (*self.sinks, *self.step_sinks):
            sink.close()

    def _tell(self, text: str) -> None:
        if self._progress is not None:
            self._progress.print(text)

    def _write(self, iteration: int, values: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.write(iteration, values)
        if self.step_sinks:
            rest = {name: value for name, value in values.items() if name not in _OF_EVERY_STEP}
            for sink in self.step_sinks:
                sink.write(iteration, rest)


def _shown(auxiliary: Mapping[str, float], per_layer: bool) -> dict[str, float]:
    """What is told of the layers' own numbers; those of a single layer have a slash in their name."""
    return {name: value for name, value in auxiliary.items() if per_layer or "/" not in name}


def training_line(iteration: int, values: Mapping[str, float], options: ReportOptions) -> str:
    """One interval as Megatron prints it (its log readers parse these words)."""
    parts = [
        f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {iteration:8d}/{options.train_iters:8d}",
        f"consumed samples: {int(values['consumed_samples']):12d}",
        f"elapsed time per iteration (ms): {values['iteration_time'] * 1e3:.1f}",
    ]
    if options.show_throughput:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {values['throughput']:.3g}")
        if "mfu" in values:
            parts.append(f"MFU: {100.0 * values['mfu']:.1f}%")
    parts += [
        f"tokens/s: {values['tokens_per_second']:.0f}",
        f"learning rate: {values['learning_rate']:.6E}",
        f"global batch size: {options.global_batch_size:5d}",
        f"lm loss: {values['lm_loss']:.6E}",
        f"loss scale: {values['loss_scale']:.1f}",
        f"grad norm: {values['grad_norm']:.3f}",
    ]
    parts += [f"{name.replace('_', ' ')}: {values[name]:.6E}" for name in AUXILIARY if name in values]
    if "num_zeros" in values:
        parts.append(f"num zeros: {int(values['num_zeros'])}")
    if "params_norm" in values:
        parts.append(f"params norm: {values['params_norm']:.3f}")
    parts += [
        f"memory (MiB): {values['memory_mib']:.0f}",
        f"number of skipped iterations: {int(values['skipped_iterations']):3d}",
        f"number of nan iterations: {int(values['nan_iterations']):3d}",
    ]
    return " | ".join(parts) + " |"


def memory_usage(device: torch.device) -> dict[str, float]:
    """Peak memory of this rank so far, in MiB: allocated on its GPU, or resident in the process."""
    if device.type == "cuda":
        return {"memory_mib": torch.cuda.max_memory_allocated(device) / BYTES_PER_MIB}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory_mib": peak / (1024 if sys.platform != "darwin" else BYTES_PER_MIB)}


class _Progress:
    """A progress bar at the bottom of a terminal; plain lines where the stream is none."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._bar: Any = None
        if stream.isatty():
            with suppress(ImportError):
                self._bar, self._task = _make_bar(stream, total)

    def update(self, iteration: int, values: Mapping[str, float]) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=iteration,
                loss=f"{values['lm_loss']:.3f}",
                speed=f"{values['tokens_per_second']:.0f}",
            )

    def print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _make_bar(stream: TextIO, total: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
    task = bar.add_task("train", total=total, loss="-", speed="-")
    bar.start()
    return bar, task

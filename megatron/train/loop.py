"""The training loop: step, report, evaluate, save, stop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from megatron.parallel.context.balance import split_batch
from megatron.train.arguments.batch import batch_schedule
from megatron.train.build import Run, step_options
from megatron.train.checkpoint import Progress
from megatron.train.data import DataIterator
from megatron.train.evaluate import EvaluationResult, evaluate
from megatron.train.grad_norm import parameter_norm
from megatron.train.metrics import Reporter
from megatron.train.profiler import Profiler
from megatron.train.replicas import check_replicas
from megatron.train.report import build_collector, build_timers
from megatron.train.resume import RunSaver, load_run
from megatron.train.signals import Deadline, SignalCatcher
from megatron.train.step import Batch, BatchSize, StepResult, StepTools, TrainStep
from megatron.train.watchdog import Watchdog, WatchdogOptions


def train(run: Run, reporter: Reporter, watchdog: Watchdog | None = None) -> Progress:
    """Load, train, evaluate and save as the run's configuration says. Collective. Returns how far it came.

    watchdog: told of phases and iterations.

    Raises:
        RunStopped: a loss that is no number, or a checkpoint that cannot be written.
        ValueError: the checkpoint to load, or the data, cannot be used.
    """
    config = run.config
    number = config.exit_signal if config.exit_signal_handler else None
    with SignalCatcher(number) as catcher, Profiler(config, run.launch.rank) as profiler:
        loop = _Loop(run, reporter, catcher, profiler, watchdog or Watchdog(WatchdogOptions(0.0), 0, 1))
        try:
            return loop.run_all()
        finally:
            loop.wait_for_save()
            run.data.close()
            reporter.close()


def local_batch(batch: Batch, run: Run) -> Batch:
    """This rank's part of a batch, on its device. All context-parallel ranks read whole sequences."""
    parts = run.mesh.size("cp")
    if parts > 1:
        batch = cast(Batch, split_batch(batch, parts, run.mesh.rank("cp")))
    if run.device.type == "cpu":
        return batch
    return {name: tensor.to(run.device, non_blocking=True) for name, tensor in batch.items()}


class _Loop:
    def __init__(
        self,
        run: Run,
        reporter: Reporter,
        catcher: SignalCatcher,
        profiler: Profiler,
        watchdog: Watchdog,
    ) -> None:
        self.run, self.config = run, run.config
        self.reporter = reporter
        self.catcher = catcher
        self.profiler = profiler
        self.watchdog = watchdog
        self.deadline = Deadline(run.config.exit_duration_in_mins)
        self.batch_schedule = batch_schedule(run.config)
        timers = build_timers(run)
        self.step = TrainStep(
            run.state,
            run.mesh,
            step_options(run.config),
            device=run.device,
            tools=StepTools(timers, run.streams),
        )
        self.saver = RunSaver(run) if run.config.save else None
        self.collector = build_collector(run, timers)
        self.steps_in_interval = 0
        self.progress = Progress()
        self.saved_iteration: int | None = None
        self.evaluated_iteration: int | None = None

    def run_all(self) -> Progress:
        """Everything, in order."""
        with self.watchdog.phase("loading a checkpoint"):
            self.progress, lines = load_run(self.run)
        self.watchdog.beat(self.progress.iteration)
        self.saved_iteration = self.progress.iteration if self.progress.iteration else None
        for line in lines:
            self.reporter.message(line)
        if not self.config.skip_train and self.progress.iteration < (self.config.train_iters or 0):
            with self.watchdog.phase("training"):
                reason = self._train()
            self._save_unless_saved()
            if reason is not None:
                self._finish_saving()
                self.reporter.message(f"stopping after iteration {self.progress.iteration}: {reason}")
                return self.progress
        self._evaluate_all()
        self._finish_saving()
        return self.progress

    def wait_for_save(self) -> None:
        """A checkpoint that is being written is completed even if the run ends badly."""
        if self.saver is not None:
            self.saver.wait()

    def _train(self) -> str | None:
        """Steps until the end; returns why it ended early, or None."""
        if self.config.manual_gc:
            gc.disable()
            gc.collect()
        self.run.state.model.train()
        batches = self._batches()
        self._start_clock()
        while self.progress.iteration < self.config.train_iters:
            result = self._iteration(batches)
            reason = self._after_iteration(result)
            if reason is not None:
                return reason
        return None

    def _start_clock(self) -> None:
        """Training begins, or goes on after something else."""
        self.reporter.start_timer()
        self.collector.start()

    def _batches(self) -> Iterator[Batch]:
        assert self.run.data.train is not None
        batches = iter(self.run.data.train)
        while True:
            with self.watchdog.phase("reading data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield local_batch(batch, self.run)

    def _iteration(self, batches: Iterator[Batch]) -> StepResult | None:
        """One iteration; None where its batch was read and skipped (--iterations-to-skip)."""
        consumed = self.progress.consumed_train_samples
        size = BatchSize(self.batch_schedule.microbatches_at(consumed), self.batch_schedule.at(consumed))
        iteration = self.progress.iteration + 1
        result = None
        if iteration in self.config.iterations_to_skip:
            for _ in range(size.num_microbatches):
                next(batches)
        else:
            failed = self.saver is not None and self.saver.failed
            stop = self.catcher.received or self.deadline.passed or failed
            result = self.step(batches, size, stop_requested=stop)
            self.reporter.record(result, iteration, self.run.state.schedule.lr)
            for line in result.notes:
                self.reporter.message(f"iteration {iteration}: {line}")
            self.steps_in_interval += 1
        self.progress = replace(
            self.progress,
            iteration=iteration,
            consumed_train_samples=consumed + size.samples,
            skipped_iterations=self.progress.skipped_iterations + int(result is None or result.skipped),
        )
        self.profiler.step(iteration)
        self.watchdog.beat(iteration)
        return result

    def _after_iteration(self, result: StepResult | None) -> str | None:
        iteration, config = self.progress.iteration, self.config
        if result is not None and self.reporter.due(iteration):
            self._report(result)
        if config.manual_gc and config.manual_gc_interval and iteration % config.manual_gc_interval == 0:
            gc.collect()
        if config.empty_unused_memory_level and self.run.device.type == "cuda":
            torch.cuda.empty_cache()
        if _is_multiple(iteration, config.check_weight_hash_across_dp_replicas_interval):
            check_replicas(self.step.named_parameters, self.run.mesh)
        if _is_multiple(iteration, config.eval_interval) and iteration >= (config.start_eval_at_iter or 0):
            self._evaluate_validation()
        self._tell_saved()
        if config.save and _is_multiple(iteration, config.save_interval):
            self._save()
        elif config.save and _is_multiple(iteration, config.non_persistent_save_interval):
            self._save(persistent=False)
        if result is not None and result.stop_requested:
            return "a signal or --exit-duration-in-mins asked for it"
        if _is_multiple(iteration, config.exit_interval):
            return f"--exit-interval {config.exit_interval}"
        return None

    def _report(self, result: StepResult) -> None:
        norm = None
        if self.config.log_params_norm:
            parameters = [parameter for _, parameter in self.step.named_parameters]
            norm = float(parameter_norm(parameters, self.run.mesh, self.run.device))
        extras = self.collector.collect(self.steps_in_interval, self.step.named_parameters, self.run.device)
        self.steps_in_interval = 0
        self.reporter.report(
            self.progress.iteration,
            self.progress.consumed_train_samples,
            result,
            self.run.state.schedule.lr,
            norm,
            extras,
        )

    def _save_unless_saved(self) -> None:
        if self.saver is not None and self.saved_iteration != self.progress.iteration:
            self._save()

    def _save(self, *, persistent: bool = True) -> None:
        assert self.saver is not None
        self.reporter.pause_timer()
        valid = self.run.data.valid
        self.progress = replace(
            self.progress, consumed_valid_samples=valid[0].consumed_samples if valid else 0
        )
        with self.watchdog.phase("saving a checkpoint"):
            self._finish_saving()
            self.reporter.message(self.saver.save(self.progress, persistent=persistent))
        if persistent:
            self.saved_iteration = self.progress.iteration
        self._start_clock()

    def _tell_saved(self) -> None:
        for line in [] if self.saver is None else self.saver.news():
            self.reporter.message(line)

    def _finish_saving(self) -> None:
        for line in [] if self.saver is None else self.saver.finish():
            self.reporter.message(line)

    def _evaluate_validation(self) -> None:
        self.reporter.pause_timer()
        several = len(self.run.data.valid) > 1
        for iterator in self.run.data.valid:
            result = self._evaluate(iterator)
            name = f"validation ({iterator.name.removeprefix('valid-')})" if several else "validation"
            self.reporter.report_evaluation(self.progress.iteration, name, result)
        self.evaluated_iteration = self.progress.iteration
        self._start_clock()

    def _evaluate_all(self) -> None:
        """The losses at the end of the run."""
        if self.config.eval_iters:
            if self.evaluated_iteration != self.progress.iteration:
                self._evaluate_validation()
            if self.run.data.test is not None:
                self.reporter.report_evaluation(
                    self.progress.iteration, "test", self._evaluate(self.run.data.test)
                )

    def _evaluate(self, iterator: DataIterator) -> EvaluationResult:
        config = self.config
        share = config.eval_micro_batch_size * config.data_parallel_size
        count = config.eval_iters * (config.eval_global_batch_size // share)
        batches = (local_batch(batch, self.run) for batch in iterator.evaluation(count))
        model = cast(nn.Module, self.run.state.model)
        with self.watchdog.phase("evaluating"):
            return evaluate(model, batches, self.run.mesh, device=self.run.device)


def _is_multiple(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0

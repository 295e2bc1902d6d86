"""The global batch as a function of the samples seen so far. Pure.

Three forms: constant; --rampup-batch-size START INCREMENT SAMPLES, which grows by INCREMENT in equal
stretches of SAMPLES; and --step-batch-size-schedule "0:256 10B:512 ...", whose thresholds are tokens (K,
M, B, T for powers of a thousand), as in Megatron-LM.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSchedule:
    """Steps of the global batch.

    steps: (samples, batch) pairs in ascending order, the first at 0: from `samples` seen on, the global
    batch is `batch`. unit: micro batch x data-parallel size; each batch is rounded down to a multiple of
    it when `round_down`.
    """

    steps: tuple[tuple[int, int], ...]
    unit: int
    round_down: bool = False

    def at(self, consumed_samples: int) -> int:
        """Global batch of the step that starts after `consumed_samples`."""
        batch = [size for start, size in self.steps if start <= consumed_samples][-1]
        return batch // self.unit * self.unit if self.round_down else batch

    def microbatches_at(self, consumed_samples: int) -> int:
        """Microbatches of each data-parallel rank in that step."""
        return self.at(consumed_samples) // self.unit

    def iterations_for(self, samples: int) -> int:
        """Whole steps that `samples` are enough for."""
        iterations, consumed = 0, 0
        while consumed < self.steps[-1][0] and consumed + self.at(consumed) <= samples:
            consumed += self.at(consumed)
            iterations += 1
        return iterations + (samples - consumed) // self.at(consumed)

    def samples_for(self, iterations: int) -> int:
        """Samples that the first `iterations` steps see."""
        consumed = 0
        while iterations and consumed < self.steps[-1][0]:
            consumed += self.at(consumed)
            iterations -= 1
        return consumed + iterations * self.at(consumed)


def batch_schedule(config: Any) -> BatchSchedule:
    """The schedule that a configuration asks for.

    config: anything with micro_batch_size, data_parallel_size, global_batch_size, rampup_batch_size,
    step_batch_size_schedule, seq_length and decrease_batch_size_if_needed. Raises ValueError naming the flag.
    """
    unit = config.micro_batch_size * config.data_parallel_size
    if config.rampup_batch_size is not None:
        return BatchSchedule(_rampup_steps(config), unit, config.decrease_batch_size_if_needed)
    if config.step_batch_size_schedule is not None:
        return BatchSchedule(parse_steps(config.step_batch_size_schedule, config.seq_length), unit)
    return BatchSchedule(((0, config.global_batch_size),), unit, config.decrease_batch_size_if_needed)


def _rampup_steps(config: Any) -> tuple[tuple[int, int], ...]:
    start, increment, samples = config.rampup_batch_size
    final = config.global_batch_size
    given = f"--rampup-batch-size {start} {increment} {samples}"
    if start <= 0 or increment <= 0 or samples < 0:
        raise ValueError(f"{given}: START and INCREMENT must be positive and SAMPLES not negative")
    if start > final or (final - start) % increment:
        raise ValueError(
            f"{given}: --global-batch-size {final} is not START plus a multiple of INCREMENT; "
            f"change one of them, for example START {final % increment or increment}"
        )
    count = (final - start) // increment
    # Batch k of the ramp begins where consumed / (samples / count) reaches k, rounded up to a whole sample.
    thresholds = [-(-index * samples // max(count, 1)) for index in range(count + 1)]
    return tuple((threshold, start + index * increment) for index, threshold in enumerate(thresholds))


def parse_steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """--step-batch-size-schedule "TOKENS:BATCH ..." as (samples, batch) pairs; ValueError names the flag."""
    flag = f"--step-batch-size-schedule {text!r}"
    steps = []
    for item in text.split():
        threshold, colon, batch = item.partition(":")
        try:
            steps.append((_count(threshold) // seq_length, int(batch)))
        except ValueError:
            colon = ""
        if not colon:
            raise ValueError(f"{flag}: {item!r} is not TOKENS:BATCH, such as 250B:1536")
    if not steps or _count(text.split()[0].partition(":")[0]) != 0:
        raise ValueError(f"{flag}: the first threshold must be 0, as in '0:768 250B:1536'")
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"{flag}: thresholds must grow by at least one sample of {seq_length} tokens")
    if any(batch <= 0 for _, batch in steps):
        raise ValueError(f"{flag}: batches must be positive")
    return tuple(steps)


def _count(text: str) -> int:
    suffix = text[-1:].upper()
    return int(float(text[:-1]) * _SUFFIXES[suffix]) if suffix in _SUFFIXES else int(text)

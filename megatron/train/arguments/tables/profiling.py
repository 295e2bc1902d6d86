"""Flags: profiling."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works

TITLE = "Profiling"

FLAGS: tuple[Flag, ...] = (
    works(
        "--profile",
        Switch.ON,
        False,
        "Profile the steps from --profile-step-start to --profile-step-end.",
        "train/profiler.py",
        test="train/test_profiler.py",
    ),
    works(
        "--profile-step-start",
        int,
        10,
        "First profiled step.",
        "train/profiler.py",
        test="train/test_loop.py",
    ),
    works(
        "--profile-step-end",
        int,
        12,
        "First step that is not profiled any more.",
        "train/profiler.py",
        test="train/test_loop.py",
    ),
    works(
        "--profile-ranks",
        int,
        [],
        "Ranks that profile; rank 0 when not given.",
        "train/profiler.py",
        test="train/test_profiler.py",
        nargs="+",
    ),
    works(
        "--use-pytorch-profiler",
        Switch.ON,
        False,
        "torch's profiler instead of cudaProfilerStart for nsys.",
        "train/profiler.py",
        test="train/test_profiler.py",
    ),
    works(
        "--pytorch-profiler-collect-callstack",
        Switch.ON,
        False,
        "With Python stacks.",
        "train/profiler.py",
        test="train/test_profiler.py",
    ),
    works(
        "--pytorch-profiler-collect-shapes",
        Switch.ON,
        False,
        "With shapes.",
        "train/profiler.py",
        test="train/test_profiler.py",
    ),
    refused(
        "--pytorch-profiler-collect-chakra",
        Switch.ON,
        False,
        "no Chakra trace is made; --use-pytorch-profiler writes a trace for Perfetto",
    ),
    refused(
        "--record-shapes", Switch.ON, False, "use --use-pytorch-profiler --pytorch-profiler-collect-shapes"
    ),
    no_op("--nvtx-ranges", Switch.ON, False, "phases are always marked by record_function"),
    works(
        "--record-memory-history",
        Switch.ON,
        False,
        "Record allocations and write a snapshot.",
        "train/profiler.py",
        test="train/test_profiler.py",
    ),
    works(
        "--memory-snapshot-path",
        str,
        "snapshot.pickle",
        "File of the snapshot.",
        "train/profiler.py",
        test="train/test_profiler.py",
    ),
)

"""Flags: training."""

from __future__ import annotations

import signal

from megatron.train.arguments.flag import Flag, Switch, no_op, not_yet, refused, works
from megatron.train.arguments.values import signal_name

TITLE = "Training"

FLAGS: tuple[Flag, ...] = (
    works(
        "--micro-batch-size",
        int,
        None,
        "Sequences in one forward pass of one data-parallel rank.",
        "train/data/build.py",
    ),
    works(
        "--global-batch-size",
        int,
        None,
        "Sequences in one optimizer step; micro batch x data-parallel size when not given.",
        "train/arguments/resolve.py",
    ),
    works(
        "--rampup-batch-size",
        int,
        None,
        "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT until SAMPLES were seen.",
        "train/arguments/batch.py",
        nargs=3,
    ),
    works(
        "--step-batch-size-schedule",
        str,
        None,
        '"SAMPLES:BATCH SAMPLES:BATCH ...": the global batch changes at these counts of '
        "samples (suffixes K, M, B allowed).",
        "train/arguments/batch.py",
    ),
    works(
        "--decrease-batch-size-if-needed",
        Switch.ON,
        False,
        "Round a batch of the ramp-up down to one that divides.",
        "train/arguments/batch.py",
    ),
    works(
        "--train-iters",
        int,
        None,
        "Optimizer steps.",
        "train/data/config.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--train-samples",
        int,
        None,
        "Sequences to train on, instead of --train-iters.",
        "train/arguments/resolve.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--seq-length",
        int,
        None,
        "Tokens in a sequence.",
        "train/data/build.py",
        test="parallel/context/test_balance.py",
    ),
    works(
        "--encoder-seq-length", int, None, "The older spelling of --seq-length.", "train/arguments/resolve.py"
    ),
    works(
        "--encoder-num-layers", int, None, "The older spelling of --num-layers.", "train/arguments/resolve.py"
    ),
    refused("--decoder-num-layers", int, None, "encoder-decoder models are not there; use --num-layers"),
    refused("--decoder-seq-length", int, None, "encoder-decoder models are not there; use --seq-length"),
    works(
        "--seed",
        int,
        1234,
        "Seed of weights, dropout and data order.",
        "train/data/build.py",
        test="models/helpers.py",
    ),
    works("--eval-iters", int, 100, "Global batches of one evaluation.", "train/data/config.py"),
    works("--eval-interval", int, None, "Steps between evaluations.", "train/data/config.py"),
    works(
        "--eval-global-batch-size",
        int,
        None,
        "Global batch of evaluations; the training one when not given.",
        "train/arguments/resolve.py",
    ),
    works(
        "--eval-micro-batch-size",
        int,
        None,
        "Micro batch of evaluations; the training one when not given.",
        "train/arguments/resolve.py",
    ),
    works("--start-eval-at-iter", int, None, "No evaluation before this step.", "train/loop.py"),
    works("--skip-train", Switch.ON, False, "Evaluate only.", "train/loop.py"),
    not_yet(
        "--full-validation",
        Switch.ON,
        False,
        "an evaluation of the whole validation set is not there; use --eval-iters",
    ),
    not_yet("--test-mode", Switch.ON, False, "the mode for tests of recovery is not there"),
    works("--exit-interval", int, None, "Stop at the next multiple of this step.", "train/loop.py"),
    works("--exit-duration-in-mins", int, None, "Stop after this many minutes.", "train/loop.py"),
    works(
        "--exit-signal-handler",
        Switch.ON,
        False,
        "On --exit-signal save a checkpoint and stop.",
        "train/arguments/resolve.py",
    ),
    works(
        "--exit-signal-handler-for-training",
        Switch.ON,
        False,
        "The same as --exit-signal-handler.",
        "train/arguments/resolve.py",
    ),
    no_op(
        "--exit-signal-handler-for-dataloader",
        Switch.ON,
        False,
        "loader workers ignore the signal and end with their rank",
    ),
    works(
        "--exit-signal", signal_name, signal.SIGTERM, "The signal of --exit-signal-handler.", "train/loop.py"
    ),
    works(
        "--iterations-to-skip",
        int,
        [],
        "Steps whose batch is read and not trained on.",
        "train/loop.py",
        nargs="+",
    ),
    not_yet(
        "--phase-transition-iterations", str, None, "dropping the optimizer state at given steps is not there"
    ),
    works(
        "--manual-gc",
        Switch.ON,
        False,
        "Collect garbage at fixed steps on all ranks, instead of whenever Python does.",
        "train/loop.py",
    ),
    works("--manual-gc-interval", int, 0, "Steps between collections under --manual-gc.", "train/loop.py"),
    works(
        "--no-manual-gc-eval",
        Switch.OFF,
        True,
        "No collection around evaluations under --manual-gc.",
        "train/loop.py",
        aliases=("--disable-manual-gc-eval",),
        dest="manual_gc_eval",
    ),
    works(
        "--empty-unused-memory-level",
        int,
        0,
        "Give cached device memory back: 0 never, 1 or 2 after each step.",
        "train/loop.py",
        choices=(
            0,
            1,
            2,
        ),
    ),
    works(
        "--train-sync-interval",
        int,
        None,
        "Steps between synchronisations of the device with the host.",
        "train/loop.py",
    ),
    works(
        "--check-weight-hash-across-dp-replicas-interval",
        int,
        None,
        "Steps between comparisons of the replicas' weights.",
        "train/loop.py",
    ),
    works(
        "--no-check-for-nan-in-loss-and-grad",
        Switch.OFF,
        True,
        "Train on when a loss or gradient norm is not finite.",
        "train/arguments/resolve.py",
        dest="check_for_nan_in_loss_and_grad",
    ),
    not_yet("--check-for-spiky-loss", Switch.ON, False, "the test for spikes in the loss is not there"),
    not_yet("--check-for-large-grads", Switch.ON, False, "the test for large gradients is not there"),
    no_op(
        "--cross-entropy-loss-fusion",
        Switch.ON,
        False,
        "the loss is chunked already and never makes whole logits in fp32",
    ),
    no_op(
        "--cross-entropy-fusion-impl",
        str,
        "native",
        "the loss is chunked already and never makes whole logits in fp32",
        choices=(
            "native",
            "te",
        ),
    ),
    no_op(
        "--use-mcore-models",
        Switch.ON,
        False,
        "there is one model implementation",
        dest="deprecated_use_mcore_models",
    ),
    works(
        "--yaml-cfg", str, None, "A YAML file with flags; the command line wins.", "train/arguments/parse.py"
    ),
    works("--finetune", Switch.ON, False, "Load weights only and start at step 0.", "train/loop.py"),
    not_yet("--pretrained-checkpoint", str, None, "use --load with --finetune"),
    no_op("--local-rank", int, 0, "taken from the launcher's environment"),
    refused("--lazy-mpu-init", Switch.ON, False, "process groups are made once, by the launch"),
    not_yet("--mlp-chunks-for-training", int, 1, "the MLP runs on whole sequences"),
)

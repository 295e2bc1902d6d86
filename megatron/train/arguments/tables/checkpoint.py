"""Flags: checkpoints."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works

WRITER = "tunes the process that writes checkpoints"
PARALLEL_SAVE = "every rank always writes what it holds"
PARALLEL_LOAD = "every rank always reads what it needs"
NO_REPLICATION = "copies of local checkpoints need nvidia-resiliency-ext"

TITLE = "Checkpoints"

FLAGS: tuple[Flag, ...] = (
    works(
        "--save",
        str,
        None,
        "Folder for checkpoints.",
        "train/loop.py",
        test="train/test_main.py",
    ),
    works(
        "--save-interval",
        int,
        None,
        "Steps between checkpoints.",
        "train/loop.py",
        test="train/test_resume.py",
        aliases=("--persistent-save-interval",),
    ),
    works(
        "--save-retain-interval",
        int,
        None,
        "Keep only checkpoints at multiples of this step, and the last.",
        "train/resume.py",
        test="train/checkpoint/test_kill.py",
    ),
    works(
        "--no-save-optim",
        Switch.ON,
        None,
        "Without optimizer state.",
        "train/resume.py",
        test="train/test_resume.py",
    ),
    works(
        "--no-save-rng",
        Switch.ON,
        None,
        "Without random states.",
        "train/resume.py",
        test="train/test_resume.py",
    ),
    works(
        "--load", str, None, "Folder to resume from.", "train/resume.py", test="tools/test_generate_text.py"
    ),
    works(
        "--no-load-optim",
        Switch.ON,
        None,
        "Without optimizer state.",
        "train/resume.py",
        test="train/test_resume.py",
    ),
    works(
        "--no-load-rng",
        Switch.ON,
        None,
        "Without random states.",
        "train/resume.py",
        test="train/test_resume.py",
    ),
    works(
        "--exit-on-missing-checkpoint",
        Switch.ON,
        False,
        "An error instead of a fresh start when --load holds no checkpoint.",
        "train/resume.py",
        test="train/test_resume.py",
    ),
    works(
        "--ckpt-step",
        int,
        None,
        "The step to load, instead of the last.",
        "train/resume.py",
        test="train/test_resume.py",
    ),
    no_op(
        "--ckpt-format",
        str,
        "torch_dist",
        "there is one format, torch.distributed.checkpoint's, which every layout loads (so for torch too)",
        choices=(
            "torch",
            "torch_dist",
            "torch_dcp",
            "fsdp_dtensor",
        ),
    ),
    no_op("--auto-detect-ckpt-format", Switch.ON, False, "there is one format"),
    works(
        "--async-save",
        Switch.ON,
        False,
        "Copy what is saved to host memory and write it while training goes on.",
        "train/resume.py",
        test="train/test_resume.py",
    ),
    no_op("--use-persistent-ckpt-worker", Switch.ON, False, WRITER),
    no_op(
        "--async-strategy",
        str,
        "nvrx",
        WRITER,
        choices=(
            "nvrx",
            "mcore",
        ),
    ),
    no_op("--async-ckpt-cpu-priority", int, 10, WRITER),
    no_op("--async-ckpt-io-priority", int, 3, WRITER),
    no_op("--async-ckpt-use-cpu-shm", Switch.ON, False, WRITER),
    no_op(
        "--ckpt-assume-constant-structure",
        Switch.ON,
        False,
        "a save takes over the plans of the last one where no rank's keys, shapes and dtypes differ, and never else",
    ),
    no_op(
        "--ckpt-fully-parallel-save",
        Switch.ON,
        False,
        PARALLEL_SAVE,
        dest="ckpt_fully_parallel_save_deprecated",
    ),
    no_op("--no-ckpt-fully-parallel-save", Switch.OFF, True, PARALLEL_SAVE, dest="ckpt_fully_parallel_save"),
    no_op(
        "--ckpt-fully-parallel-save-process-group",
        str,
        "dp",
        PARALLEL_SAVE,
        choices=(
            "dp",
            "ep_dp",
        ),
    ),
    no_op("--ckpt-fully-parallel-load", Switch.ON, False, PARALLEL_LOAD),
    no_op(
        "--ckpt-fully-parallel-load-exchange-algo",
        str,
        "broadcast",
        PARALLEL_LOAD,
        choices=(
            "broadcast",
            "gather_rounds",
            "gather_object",
        ),
    ),
    no_op("--ckpt-fully-parallel-load-per-rank-objects", Switch.ON, False, PARALLEL_LOAD),
    no_op(
        "--ckpt-fully-parallel-load-process-group",
        str,
        "dp",
        PARALLEL_LOAD,
        choices=(
            "dp",
            "ep_dp",
        ),
    ),
    no_op("--ckpt-drop-redundant-extra-state", Switch.ON, False, "no redundant extra state is written"),
    no_op("--ckpt-pg-tensors-cache-create", Switch.ON, False, "tunes the start of NCCL groups"),
    no_op("--ckpt-pg-tensors-cache-path", str, None, "tunes the start of NCCL groups"),
    no_op(
        "--no-ckpt-load-validate-sharding-integrity",
        Switch.OFF,
        True,
        "what is loaded is always checked",
        aliases=("--disable-ckpt-load-validate-sharding-integrity",),
        dest="ckpt_load_validate_sharding_integrity",
    ),
    works(
        "--dist-ckpt-strictness",
        str,
        "assume_ok_unexpected",
        "Keys that only the run or only the checkpoint has: an error, a line in the log, or nothing "
        "(docs/concepts/checkpoints.md).",
        "train/resume.py",
        test="train/checkpoint/test_load.py",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
    ),
    no_op(
        "--dist-ckpt-optim-fully-reshardable",
        Switch.ON,
        False,
        "optimizer state always loads in every layout",
    ),
    refused("--dist-ckpt-save-pre-mcore-014", Switch.ON, False, "an older layout of megatron-core"),
    no_op("--dist-ckpt-workers", int, 1, WRITER),
    no_op(
        "--distrib-optim-fully-reshardable-mem-efficient",
        Switch.ON,
        False,
        "optimizer state always loads in every layout",
    ),
    no_op(
        "--verify-integrity",
        Switch.ON,
        False,
        "every file is always compared with its checksum before it is loaded",
    ),
    refused(
        "--no-strict-fsdp-dtensor-load",
        Switch.OFF,
        True,
        "use --dist-ckpt-strictness",
        aliases=("--disable-strict-fsdp-dtensor-load",),
        dest="strict_fsdp_dtensor_load",
    ),
    works(
        "--use-checkpoint-args",
        Switch.ON,
        False,
        "What the user does not say of the model comes from --load's checkpoint; every difference is told.",
        "train/arguments/saved.py",
        test="train/test_arguments_saved.py",
    ),
    refused(
        "--use-mp-args-from-checkpoint-args",
        Switch.ON,
        False,
        "a checkpoint loads in every layout; give the layout of this run",
    ),
    no_op("--load-main-params-from-ckpt", Switch.ON, False, "main parameters are what checkpoints hold"),
    works(
        "--non-persistent-save-interval",
        int,
        None,
        "Steps between checkpoints that the next of their kind replaces; a resume takes the newest of both kinds.",
        "train/loop.py",
        test="train/test_resume.py",
    ),
    no_op(
        "--non-persistent-ckpt-type",
        str,
        None,
        "--non-persistent-save-interval writes global ones, checkpoints as every other",
        choices=(
            "global",
            "local",
            "in_memory",
        ),
        refused_values=(
            ("local", "copies on other nodes need nvidia-resiliency-ext; use global"),
            ("in_memory", "copies on other nodes need nvidia-resiliency-ext; use global"),
        ),
    ),
    works(
        "--non-persistent-global-ckpt-dir",
        str,
        None,
        "Where --non-persistent-save-interval writes; default: non_persistent in --save and --load.",
        "train/resume.py",
        test="train/test_resume.py",
    ),
    refused(
        "--non-persistent-local-ckpt-algo",
        str,
        "fully_parallel",
        NO_REPLICATION,
        choices=(
            "fully_parallel",
            "atomic",
        ),
    ),
    refused("--non-persistent-local-ckpt-dir", str, None, NO_REPLICATION),
    refused("--replication", Switch.ON, False, NO_REPLICATION),
    refused("--replication-factor", int, 2, NO_REPLICATION),
    refused("--replication-jump", int, None, NO_REPLICATION),
    refused(
        "--ckpt-convert-format",
        str,
        None,
        "use megatron/tools for conversions",
        choices=(
            "torch",
            "torch_dist",
        ),
    ),
    refused("--ckpt-convert-save", str, None, "use megatron/tools for conversions"),
    refused(
        "--ckpt-convert-update-legacy-dist-opt-format", Switch.ON, False, "use megatron/tools for conversions"
    ),
    refused(
        "--override-ckpt-iteration", int, None, "the step is the checkpoint's; --finetune begins at step 0"
    ),
    no_op(
        "--no-save-tokenizer-assets",
        Switch.OFF,
        True,
        "tokenizer files are not copied into checkpoints",
        aliases=("--disable-save-tokenizer-assets",),
        dest="save_tokenizer_assets",
    ),
    refused("--enable-msc", Switch.ON, False, "checkpoints and data lie in files"),
    no_op(
        "--disable-msc", Switch.ON, False, "checkpoints and data lie in files", dest="disable_msc_deprecated"
    ),
)

"""Flags: data parallelism: FSDP, DDP and distributed-optimizer flags."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works

ALLOCATION = "tunes the allocation of gathered parameters"
NCCL_BUFFERS = "tunes NCCL user buffers, which are not used"

TITLE = "Data parallelism: FSDP, DDP and distributed-optimizer flags"

FLAGS: tuple[Flag, ...] = (
    works(
        "--use-megatron-fsdp",
        Switch.ON,
        False,
        "FSDP with the strategy of --data-parallel-sharding-strategy.",
        "train/arguments/resolve.py",
        test="train/equivalence.py",
    ),
    works(
        "--data-parallel-sharding-strategy",
        str,
        "optim_grads_params",
        "What is sharded over data-parallel ranks, under --use-megatron-fsdp: no_shard, optim"
        " (ZeRO-1), optim_grads (ZeRO-2), optim_grads_params (ZeRO-3).",
        "train/arguments/resolve.py",
        test="train/equivalence.py",
        choices=(
            "no_shard",
            "optim",
            "optim_grads",
            "optim_grads_params",
        ),
    ),
    works(
        "--use-distributed-optimizer",
        Switch.ON,
        False,
        "Strategy optim, without --use-megatron-fsdp.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
    ),
    works(
        "--use-torch-fsdp2",
        Switch.ON,
        False,
        "Strategy optim_grads_params under our FSDP, which takes the place of torch's.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
    ),
    works(
        "--torch-fsdp2-no-reshard-after-forward",
        Switch.OFF,
        True,
        "Keep gathered parameters until the backward pass.",
        "train/arguments/resolve.py",
        dest="torch_fsdp2_reshard_after_forward",
        test="train/test_arguments.py",
    ),
    works(
        "--num-distributed-optimizer-instances",
        int,
        1,
        "Groups of data-parallel ranks that each hold a whole copy (HSDP).",
        "train/arguments/resolve.py",
        test="train/equivalence.py",
    ),
    works(
        "--outer-dp-sharding-strategy",
        str,
        "no_shard",
        "Over those groups: no_shard, or optim to shard optimizer states there too.",
        "train/arguments/resolve.py",
        test="fsdp/test_hybrid.py",
        choices=(
            "no_shard",
            "optim",
        ),
    ),
    refused(
        "--enable-full-sharding-in-hsdp",
        Switch.ON,
        False,
        "the older spelling of --outer-dp-sharding-strategy optim; use that",
    ),
    works(
        "--megatron-fsdp-main-params-dtype",
        str,
        "fp32",
        "Dtype of the sharded main parameters.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
        choices=(
            "fp32",
            "bf16",
            "fp16",
            "auto",
        ),
    ),
    works(
        "--megatron-fsdp-main-grads-dtype",
        str,
        "auto",
        "Dtype in which gradients accumulate.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
        choices=(
            "fp32",
            "bf16",
            "fp16",
            "auto",
        ),
    ),
    works(
        "--megatron-fsdp-grad-comm-dtype",
        str,
        "auto",
        "Dtype in which gradients travel.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
        choices=(
            "fp32",
            "fp16",
            "bf16",
            "auto",
        ),
    ),
    no_op(
        "--megatron-fsdp-version",
        int,
        1,
        "there is one FSDP here",
        choices=(
            1,
            2,
        ),
    ),
    no_op(
        "--megatron-fsdp-enable-fine-grained-param-gather",
        Switch.ON,
        False,
        "each unit is gathered by itself already",
    ),
    works(
        "--fsdp-double-buffer",
        Switch.ON,
        False,
        "Units whose parameters are released take turns on two sets of buffers that stay allocated.",
        "train/build.py",
        test="train/test_double_buffer.py",
    ),
    no_op(
        "--megatron-fsdp-max-pool-double-buffer",
        Switch.ON,
        False,
        "buffers of --fsdp-double-buffer are always as large as the largest unit",
    ),
    no_op("--fsdp-db-use-persist-buf-on-alloc-fail", Switch.ON, False, ALLOCATION),
    no_op("--fsdp-manual-registration", Switch.ON, False, NCCL_BUFFERS),
    no_op("--use-nccl-ub", Switch.ON, False, NCCL_BUFFERS, dest="nccl_ub"),
    no_op("--disable-symmetric-registration", Switch.ON, False, NCCL_BUFFERS),
    no_op("--suggested-communication-unit-size", int, None, "units are the model's blocks"),
    no_op("--overlap-grad-reduce", Switch.ON, False, "gradients are always reduced during the backward pass"),
    no_op("--overlap-param-gather", Switch.ON, False, "parameters are always gathered ahead of their use"),
    no_op(
        "--overlap-param-gather-with-optimizer-step",
        Switch.ON,
        False,
        "when parameters are gathered does not change the result",
    ),
    no_op(
        "--no-align-grad-reduce",
        Switch.OFF,
        True,
        "when stages reduce does not change the result",
        aliases=("--disable-align-grad-reduce",),
        dest="align_grad_reduce",
    ),
    no_op(
        "--no-align-param-gather",
        Switch.OFF,
        True,
        "when stages gather does not change the result",
        dest="align_param_gather",
    ),
    no_op(
        "--ddp-average-in-collective",
        Switch.ON,
        False,
        "a sum divided by the same number gives the same result",
    ),
    no_op(
        "--ddp-bucket-size", int, None, "a unit's parameters form one buffer, which is what buckets are for"
    ),
    no_op(
        "--ddp-num-buckets", int, None, "a unit's parameters form one buffer, which is what buckets are for"
    ),
    no_op("--ddp-pad-buckets-for-high-nccl-busbw", Switch.ON, False, "tunes the size of buffers"),
    no_op(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        str,
        [],
        "all gradients accumulate in fp32 already",
        nargs="+",
    ),
    refused(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        Switch.ON,
        False,
        "what a reduction sums in is the library's choice; use --megatron-fsdp-grad-comm-dtype fp32",
    ),
    no_op("--accumulate-allreduce-grads-in-fp32", Switch.ON, False, "gradients accumulate in fp32 already"),
    works(
        "--grad-reduce-in-bf16",
        Switch.ON,
        False,
        "Gradients travel in bf16.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
    ),
    no_op(
        "--no-gradient-reduce-div-fusion",
        Switch.OFF,
        True,
        "where the division happens does not change the result",
        dest="gradient_reduce_div_fusion",
    ),
    works(
        "--no-gradient-accumulation-fusion",
        Switch.OFF,
        True,
        "Weight gradients go through autograd instead of straight into the main gradient.",
        "train/build.py",
        test="train/test_resume.py",
        dest="gradient_accumulation_fusion",
    ),
    works(
        "--calculate-per-token-loss",
        Switch.ON,
        False,
        "The loss is the sum over the global batch divided by its valid tokens; without it "
        "the mean over microbatches of each one's mean.",
        "train/build.py",
        test="train/equivalence.py",
    ),
    no_op(
        "--no-use-layer-wise-param-layout",
        Switch.OFF,
        True,
        "buffers are laid out by unit",
        dest="use_layer_wise_param_layout",
    ),
    no_op(
        "--keep-fp8-transpose-cache",
        Switch.ON,
        False,
        "Transformer Engine decides what it keeps of quantised weights",
    ),
    refused("--nccl-all-reduce-for-prefill", Switch.ON, False, "inference is left to megatron-core"),
)

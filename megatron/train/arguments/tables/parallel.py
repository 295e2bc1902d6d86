"""Flags: parallelism."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, not_yet, refused, works

NO_PIPELINE = (
    "pipeline parallelism is planned; use tensor or context parallelism, or ZeRO-3 (--use-megatron-fsdp)"
)
NO_EXPERTS = "mixture-of-experts layers are planned; leave them out for a dense model"
SEE_SHARDS = "see --tensor-parallel-num-weight-shards"
USER_BUFFERS = "tunes kernels of Transformer Engine's user buffers"

TITLE = "Parallelism"

FLAGS: tuple[Flag, ...] = (
    works(
        "--tensor-model-parallel-size",
        int,
        1,
        "Ranks that share each layer's weights.",
        "train/build.py",
        test="models/test_gpt.py",
    ),
    works(
        "--sequence-parallel",
        Switch.ON,
        False,
        "Split norms and dropouts over the tensor-parallel ranks along the sequence; off with"
        " a warning at tensor-parallel size 1.",
        "train/build.py",
        test="parallel/test_sequence.py",
    ),
    works(
        "--context-parallel-size",
        int,
        1,
        "Ranks that share each sequence.",
        "train/build.py",
        test="parallel/context/test_attention.py",
    ),
    works(
        "--cp-comm-type",
        str,
        ["p2p"],
        "How attention crosses context-parallel ranks: p2p (ring), a2a (Ulysses) or "
        "all_gather; one for all layers, or one per layer.",
        "models/config.py",
        test="models/test_config.py",
        nargs="+",
        refused_values=(("a2a+p2p", "hierarchical context parallelism is not there; use p2p or a2a"),),
    ),
    not_yet(
        "--hierarchical-context-parallel-sizes",
        int,
        None,
        "hierarchical context parallelism is not there; use --cp-comm-type p2p or a2a",
        nargs="+",
    ),
    refused(
        "--hybrid-context-parallel",
        Switch.ON,
        False,
        "batches of very unequal sequences are left to fine-tuning frameworks",
    ),
    refused("--max-seqlen-per-dp-cp-rank", int, None, "see --hybrid-context-parallel"),
    not_yet("--pipeline-model-parallel-size", int, 1, NO_PIPELINE),
    not_yet("--num-layers-per-virtual-pipeline-stage", int, None, NO_PIPELINE),
    not_yet("--num-virtual-stages-per-pipeline-rank", int, None, NO_PIPELINE),
    not_yet(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        int,
        None,
        NO_PIPELINE,
        dest="microbatch_group_size_per_vp_stage",
    ),
    not_yet("--pipeline-model-parallel-layout", str, None, NO_PIPELINE),
    not_yet("--decoder-first-pipeline-num-layers", int, None, NO_PIPELINE),
    not_yet("--decoder-last-pipeline-num-layers", int, None, NO_PIPELINE),
    not_yet("--account-for-embedding-in-pipeline-split", Switch.ON, False, NO_PIPELINE),
    not_yet("--account-for-loss-in-pipeline-split", Switch.ON, False, NO_PIPELINE),
    not_yet(
        "--pipeline-model-parallel-comm-backend",
        str,
        None,
        NO_PIPELINE,
        choices=(
            "nccl",
            "ucc",
        ),
    ),
    no_op(
        "--no-overlap-p2p-communication",
        Switch.OFF,
        True,
        "when stages exchange activations does not change the result",
        dest="overlap_p2p_comm",
    ),
    no_op(
        "--overlap-p2p-communication-warmup-flush",
        Switch.ON,
        False,
        "when stages exchange activations does not change the result",
        dest="overlap_p2p_comm_warmup_flush",
    ),
    no_op("--use-ring-exchange-p2p", Switch.ON, False, "stages use batched point-to-point operations"),
    not_yet("--defer-embedding-wgrad-compute", Switch.ON, False, NO_PIPELINE),
    not_yet("--wgrad-deferral-limit", int, 0, NO_PIPELINE),
    not_yet(
        "--delay-wgrad-compute",
        Switch.ON,
        False,
        "splitting the backward pass comes with pipeline parallelism",
    ),
    not_yet("--expert-model-parallel-size", int, 1, NO_EXPERTS),
    not_yet("--expert-tensor-parallel-size", int, None, NO_EXPERTS),
    no_op(
        "--use-tp-pp-dp-mapping",
        Switch.ON,
        False,
        "changes the order of ranks only with pipeline parallelism",
    ),
    refused(
        "--tensor-parallel-num-weight-shards",
        int,
        None,
        "weight shards of generalised tensor parallelism are left to FSDP; use --use-megatron-fsdp",
    ),
    refused(
        "--expert-tensor-parallel-num-weight-shards",
        int,
        None,
        "weight shards of generalised tensor parallelism are left to FSDP; use --use-megatron-fsdp",
    ),
    refused("--gtp-expert-remat-nccl-ub", Switch.ON, False, SEE_SHARDS),
    refused("--gtp-remat-nccl-ub", Switch.ON, False, SEE_SHARDS),
    refused("--gtp-remat-opt-in-modules", str, [], SEE_SHARDS, nargs="+"),
    refused("--gtp-remat-reduce-scatter-with-fp32-accumulation", Switch.ON, False, SEE_SHARDS),
    no_op("--tp-comm-overlap", Switch.ON, False, "when a layer communicates does not change its result"),
    no_op("--tp-comm-overlap-cfg", str, None, USER_BUFFERS),
    no_op("--tp-comm-overlap-rs-dgrad", Switch.ON, False, USER_BUFFERS),
    no_op(
        "--tp-comm-bootstrap-backend",
        str,
        "nccl",
        USER_BUFFERS,
        choices=(
            "nccl",
            "mpi",
            "gloo",
        ),
    ),
    no_op(
        "--no-tp-comm-bulk-dgrad",
        Switch.OFF,
        True,
        USER_BUFFERS,
        aliases=("--disable-tp-comm-bulk-dgrad",),
        dest="tp_comm_bulk_dgrad",
    ),
    no_op(
        "--no-tp-comm-bulk-wgrad",
        Switch.OFF,
        True,
        USER_BUFFERS,
        aliases=("--disable-tp-comm-bulk-wgrad",),
        dest="tp_comm_bulk_wgrad",
    ),
    no_op(
        "--no-tp-comm-overlap-ag",
        Switch.OFF,
        True,
        USER_BUFFERS,
        aliases=("--disable-tp-comm-overlap-ag",),
        dest="tp_comm_overlap_ag",
    ),
    no_op(
        "--no-tp-comm-overlap-rs",
        Switch.OFF,
        True,
        USER_BUFFERS,
        aliases=("--disable-tp-comm-overlap-rs",),
        dest="tp_comm_overlap_rs",
    ),
    no_op(
        "--no-tp-comm-split-ag",
        Switch.OFF,
        True,
        USER_BUFFERS,
        aliases=("--disable-tp-comm-split-ag",),
        dest="tp_comm_split_ag",
    ),
    no_op(
        "--no-tp-comm-split-rs",
        Switch.OFF,
        True,
        USER_BUFFERS,
        aliases=("--disable-tp-comm-split-rs",),
        dest="tp_comm_split_rs",
    ),
    no_op(
        "--no-clone-scatter-output-in-embedding",
        Switch.OFF,
        True,
        "saves a copy that is not made here",
        aliases=("--disable-clone-scatter-output-in-embedding",),
        dest="clone_scatter_output_in_embedding",
    ),
    not_yet("--fake-process-group", Switch.ON, False, "a run over a fake process group is not there"),
)

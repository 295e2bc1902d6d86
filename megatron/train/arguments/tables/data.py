"""Flags: data."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, not_yet, refused, works

NO_FIM = "fill-in-the-middle data is not there"

TITLE = "Data"

FLAGS: tuple[Flag, ...] = (
    works(
        "--data-path",
        str,
        None,
        "Prefixes of .bin/.idx pairs, alone or as WEIGHT PREFIX pairs.",
        "train/data/config.py",
        nargs="*",
    ),
    works(
        "--split",
        str,
        None,
        "Shares of training, validation and test, such as 969,30,1.",
        "train/data/build.py",
    ),
    works("--train-data-path", str, None, "Prefixes for training alone.", "train/data", nargs="*"),
    works("--valid-data-path", str, None, "Prefixes for validation alone.", "train/data", nargs="*"),
    works("--test-data-path", str, None, "Prefixes for testing alone.", "train/data", nargs="*"),
    works("--data-args-path", str, None, "A file with the words of --data-path.", "train/data/config.py"),
    works(
        "--per-split-data-args-path",
        str,
        None,
        "A JSON file with lists for train, valid and test.",
        "train/data/config.py",
    ),
    works(
        "--data-cache-path",
        str,
        None,
        "Folder for index caches; beside the data when not given.",
        "train/data/build.py",
    ),
    works("--mock-data", Switch.ON, False, "Random tokens instead of files.", "train/data/config.py"),
    works("--num-workers", int, 2, "Loader processes of each rank.", "train/data/build.py"),
    works(
        "--dataloader-type",
        str,
        None,
        "single (in order) or cyclic (shuffled each epoch).",
        "train/data/build.py",
        choices=(
            "single",
            "cyclic",
            "external",
        ),
        refused_values=(
            ("external", "a loader from elsewhere cannot be handed over by flag; use single or cyclic"),
        ),
    ),
    not_yet(
        "--no-data-sharding", Switch.OFF, True, "cyclic sampling shards the samples", dest="data_sharding"
    ),
    works(
        "--num-dataset-builder-threads",
        int,
        1,
        "Threads that build the parts of a blend.",
        "train/data/build.py",
    ),
    works(
        "--no-mmap-bin-files",
        Switch.OFF,
        True,
        "Read .bin files instead of mapping them.",
        "train/data/build.py",
        dest="mmap_bin_files",
    ),
    works(
        "--no-create-attention-mask-in-dataloader",
        Switch.OFF,
        True,
        "The loader makes no mask; attention is causal.",
        "train/data",
        dest="create_attention_mask_in_dataloader",
    ),
    works("--eod-mask-loss", Switch.ON, False, "No loss on end-of-document tokens.", "train/data/build.py"),
    works(
        "--reset-position-ids",
        Switch.ON,
        False,
        "Positions start anew after an end of document.",
        "train/data/build.py",
    ),
    works(
        "--reset-attention-mask", Switch.ON, False, "No attention across documents.", "train/data/build.py"
    ),
    works(
        "--mid-level-dataset-surplus",
        float,
        0.005,
        "Spare share of samples built for each part of a blend.",
        "train/data/build.py",
    ),
    not_yet("--per-dataset-sequences-path", str, None, "a file of sequence counts is not read"),
    not_yet("--allow-ambiguous-pad-tokens", Switch.ON, False, "padding is never told from its value"),
    not_yet("--multiple-validation-sets", Switch.ON, False, "one validation set"),
    not_yet("--validation-set-names", str, None, "one validation set", nargs="+"),
    not_yet("--object-storage-cache-path", str, None, "data lies in files"),
    not_yet("--dataloader-defer-npy-index-mmap", Switch.ON, False, "index caches are mapped at once"),
    not_yet("--dataloader-fast-cache-load", Switch.ON, False, "index caches are checked at each start"),
    not_yet("--dataloader-inter-document-masking", Switch.ON, False, "use --reset-attention-mask"),
    not_yet("--fim-data", Switch.ON, False, NO_FIM),
    not_yet("--fim-rate", float, 0.5, NO_FIM),
    not_yet("--fim-spm-rate", float, 0.5, NO_FIM),
    not_yet("--fim-eod-token", str, "<|endoftext|>", NO_FIM),
    not_yet("--fim-fragment-rate", float, None, NO_FIM),
    not_yet("--fim-middle-token", str, "<fim_middle>", NO_FIM),
    not_yet("--fim-no-prefix", str, None, NO_FIM),
    not_yet("--fim-pad-token", str, "<fim_pad>", NO_FIM),
    not_yet("--fim-prefix-token", str, "<fim_prefix>", NO_FIM),
    not_yet("--fim-split-sample", str, None, NO_FIM),
    not_yet("--fim-suffix-token", str, "<fim_suffix>", NO_FIM),
    refused("--sft", Switch.ON, False, "fine-tuning on conversations is not there"),
    refused(
        "--sft-tokenizer-prompt-format",
        str,
        "nemotron-h-aligned",
        "fine-tuning on conversations is not there",
    ),
    refused("--chat-template", str, None, "fine-tuning on conversations is not there"),
)

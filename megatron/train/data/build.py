"""From a DataConfig to iterators: check the files, build the datasets, give each rank its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.train.data.config import (
    DEFAULT_SPLIT,
    SPLITS,
    Blend,
    DataConfig,
    split_shares,
    validate_config,
)
from megatron.train.data.core_import import quiet_core
from megatron.train.data.files import IndexedFiles, check_indexed_files, check_vocabulary
from megatron.train.data.iterators import DataIterator, DataIterators, LoaderOptions
from megatron.train.data.order import DatasetOrder, OnceOrder, Order, ShuffledOrder


def build_data_iterators(
    config: DataConfig,
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    consumed_train_samples: int = 0,
    consumed_valid_samples: int = 0,
) -> DataIterators:
    """Build the iterators of one data-parallel rank.

    Call it on every rank that feeds a model (ranks that differ only in tensor, context or pipeline position
    get equal
    batches: each reads its own; mmap shares the memory). No collectives: an error on one rank hangs no other.

    Args:
        config: from data_config_from_args.
        dp_rank, dp_size: place and size of the data-parallel axis (dp_outer x dp_shard, without context
            parallel).
        consumed_train_samples: global count to begin at; a later ``load_state_dict`` overrides it.
        consumed_valid_samples: the same for every validation set.

    Returns:
        DataIterators; see iterators.py for batches, evaluation and resuming.

    Raises:
        ValueError: missing, corrupt or unfitting data; names the flag or file and the fix.
    """
    validate_config(config)
    files = validate_data(config)
    datasets = _build_datasets(config, files)
    options = LoaderOptions(
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_batch_size=config.micro_batch_size,
        num_workers=config.num_workers,
        pin_memory=config.pin_memory,
        seed=config.seed,
    )
    eval_options = options.with_micro_batch_size(config.eval_micro_batch_size or config.micro_batch_size)

    def iterator(split: int, dataset: Any, name: str, consumed: int) -> DataIterator:
        order = _order(config, split, len(dataset))
        identity = _identity(config, files, split, name, dataset)
        return DataIterator(dataset, order, options if split == 0 else eval_options, name, identity, consumed)

    train, valid, test = datasets
    valid_sets = valid if isinstance(valid, list) else [valid]
    names = _valid_names(config, len(valid_sets))
    return DataIterators(
        train=None if train is None else iterator(0, train, "train", consumed_train_samples),
        valid=tuple(
            iterator(1, dataset, name, consumed_valid_samples)
            for dataset, name in zip(valid_sets, names, strict=True)
            if dataset is not None
        ),
        test=None if test is None else iterator(2, test, "test", 0),
    )


def validate_data(config: DataConfig) -> dict[str, IndexedFiles]:
    """Check all files that ``config`` names, in seconds, without megatron.core; return what they hold.

    Raises:
        ValueError: a file is missing or corrupt, holds ids that the vocabulary has not, or too few documents.
    """
    blends = [config.blend] if config.blend else [blend for blend in config.blend_per_split or () if blend]
    files: dict[str, IndexedFiles] = {}
    for blend in blends:
        for prefix in blend.prefixes:
            if prefix not in files:
                files[prefix] = check_indexed_files(prefix, blend.flag)
                check_vocabulary(files[prefix], config.tokenizer.vocab_size, blend.flag)
    _wanted_parts(config, files)
    return files


def _wanted_parts(config: DataConfig, files: dict[str, IndexedFiles]) -> list[bool]:
    """Return which of train, valid and test take part of the common documents of --data-path.

    A set without planned samples, or with a share of 0, is left out. So is a test set that the default split makes
    too small for one document: nobody asked for it.

    Raises:
        ValueError: another share is too small for one document of each corpus, or there is none to train on.
    """
    if config.blend is None:
        return [config.samples(split) != 0 for split in range(3)]
    shares = split_shares(config.split or DEFAULT_SPLIT)
    wanted = [config.samples(split) != 0 and shares[split] > 0 for split in range(3)]
    if config.train_samples and not wanted[0]:
        raise ValueError(f"--split {config.split} gives nothing to train: give it a share, such as 969,30,1")
    bounds = [0.0, shares[0], shares[0] + shares[1], 1.0]
    for split, name in enumerate(SPLITS):
        for prefix in config.blend.prefixes if wanted[split] else ():
            count = files[prefix].sequences
            if round(bounds[split + 1] * count) > round(bounds[split] * count):
                continue
            if split == 2 and config.split == DEFAULT_SPLIT:
                wanted[split] = False
                continue
            unless = "" if split == 0 else ", or pass --eval-iters 0"
            raise ValueError(
                f"--split {config.split} leaves none of the {count} documents of {prefix} for {name}: give {name} a "
                f"larger share or a path of its own (--{name}-data-path){unless}"
            )
    return wanted


def _build_datasets(config: DataConfig, files: dict[str, IndexedFiles]) -> Sequence[Any]:
    """Return [train, valid, test]: None where not wanted; valid a list with --multiple-validation-sets."""
    from megatron.train.data import gpt_samples

    sizes = [config.samples(split) for split in range(3)]
    with quiet_core():
        core = gpt_samples.SampleConfig(
            random_seed=config.seed,
            sequence_length=config.seq_length,
            blend=_core_blend(config.blend),
            blend_per_split=_core_blends(config, sizes),
            split=config.split if config.blend is not None else None,
            multiple_validation_sets=config.multiple_validation_sets,
            full_validation=config.full_validation,
            num_dataset_builder_threads=config.num_dataset_builder_threads,
            path_to_cache="",  # empty: megatron-core keeps nothing itself, cache.py does
            mmap_bin_files=config.mmap_bin_files,
            tokenizer=gpt_samples.VocabularyView(
                config.tokenizer.vocab_size, config.tokenizer.eod, dict(config.tokenizer.identity)
            ),
            mid_level_dataset_surplus=config.mid_level_dataset_surplus,
            reset_position_ids=config.reset_position_ids,
            reset_attention_mask=config.reset_attention_mask,
            eod_mask_loss=config.eod_mask_loss,
            create_attention_mask=False,
            drop_last_partial_validation_sequence=not config.full_validation,
            cache_folder=config.data_cache_path,
            files=files,
            fim=config.fim,
        )
        if core.split_matrix is not None:  # leave out what nobody will read: it may well be empty
            core.split_matrix = [
                part if wanted else None
                for part, wanted in zip(core.split_matrix, _wanted_parts(config, files), strict=True)
            ]
        kind = gpt_samples.MockSamples if config.mock else gpt_samples.GPTSamples
        try:
            return gpt_samples.SampleBuilder(kind, sizes, lambda: True, core).build()
        except IndexError as error:
            raise ValueError(
                f"--mid-level-dataset-surplus {config.mid_level_dataset_surplus} is too small for this "
                "blend: double it"
            ) from error


def _core_blend(blend: Blend | None) -> tuple[list[str], list[float] | None] | None:
    if blend is None:
        return None
    return list(blend.prefixes), None if blend.weights is None else list(blend.weights)


def _core_blends(config: DataConfig, sizes: Sequence[int | None]) -> list[Any] | None:
    if config.blend_per_split is None:
        return None
    blends: list[Any] = []
    for split, blend in enumerate(config.blend_per_split):
        if blend is None or sizes[split] == 0:
            blends.append(None)
        elif split == 1 and (config.full_validation or config.multiple_validation_sets):
            blends.append(
                (list(blend.prefixes), None)
            )  # each set by itself, or each document once: no weights
        else:
            blends.append(_core_blend(blend))
    return blends


def _order(config: DataConfig, split: int, length: int) -> Order:
    if split == 1 and config.full_validation:
        return OnceOrder(length)
    if split == 0 and config.dataloader_type == "cyclic":
        return ShuffledOrder(length, config.seed)
    return DatasetOrder(length)


def _valid_names(config: DataConfig, count: int) -> list[str]:
    valid = config.blend_per_split[1] if config.blend_per_split else None
    if not config.multiple_validation_sets or valid is None or count != len(valid.prefixes):
        return ["valid"] * count
    names = config.validation_set_names or [prefix.rsplit("/", 1)[-1] for prefix in valid.prefixes]
    return [f"valid-{name}" for name in names]


def _identity(
    config: DataConfig, files: dict[str, IndexedFiles], split: int, name: str, dataset: Any
) -> dict[str, object]:
    """Return what a saved position refers to: the data, how they are cut, and in which order (D12).

    Paths are left out (data may move), sizes of a run too (more iterations in the same epochs change
    nothing).
    """
    blend = config.blend or (config.blend_per_split[split] if config.blend_per_split else None)
    prefixes: tuple[str, ...] = blend.prefixes if blend else ()
    if config.multiple_validation_sets and split == 1:
        named = zip(prefixes, _valid_names(config, len(prefixes)), strict=True)
        prefixes = tuple(prefix for prefix, given in named if given == name)
    return {
        "data": [files[prefix].fingerprint for prefix in prefixes] or "mock",
        "weights": list(blend.weights) if blend and blend.weights else None,
        "split": config.split,
        "seq_length": config.seq_length,
        "seed": config.seed,
        "dataloader_type": config.dataloader_type,
        "tokenizer": dict(config.tokenizer.identity),
        "order": dataset.order_digest(),
    }

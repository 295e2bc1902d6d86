"""DataConfig: what the data needs to know, and how it follows from Megatron's arguments."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.train.data.fim import FillInTheMiddle, fill_in_the_middle
from megatron.train.tokenizers import Tokenizer

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"  # Megatron's


@dataclass(frozen=True)
class Blend:
    """Corpora to draw from.

    Attributes:
        prefixes: of .bin/.idx pairs.
        weights: shares of the samples, or None: each corpus once, one epoch.
        flag: the flag that gave them, for messages.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    flag: str = "--data-path"


@dataclass(frozen=True)
class DataConfig:
    """Everything about the data of a run. Names are Megatron's; samples are counted globally, over all ranks.

    Attributes:
        tokenizer: gives vocab_size, eod and the identity of cached indices.
        blend: one distribution, divided by ``split``; or
        blend_per_split: (train, valid, test), each may be None; or neither: mock data.
        split: weights of train, valid and test, such as "969, 30, 1". Whole documents are divided.
        train_samples, valid_samples, test_samples: how many are planned; 0 leaves that set out. valid_samples
            is ignored with full_validation.
        validation_set_names: of the sets of multiple_validation_sets, instead of their files'.
        seed: order of documents and samples.
        dataloader_type: "single" reads the dataset's own (already shuffled) order, "cyclic" shuffles each
            epoch anew.
        num_workers: loader processes per iterator; 0 loads in the caller.
        fim: fill-in-the-middle of samples, or None.
        data_cache_path: folder of sample indices; None: a folder "cache" beside each corpus.
    """

    seq_length: int
    micro_batch_size: int
    tokenizer: Tokenizer
    train_samples: int
    valid_samples: int = 0
    test_samples: int = 0
    blend: Blend | None = None
    blend_per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None
    split: str | None = None
    seed: int = 1234
    eval_micro_batch_size: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    full_validation: bool = False
    multiple_validation_sets: bool = False
    validation_set_names: tuple[str, ...] | None = None
    dataloader_type: str = "single"
    num_workers: int = 2
    data_cache_path: str | None = None
    mid_level_dataset_surplus: float = 0.005
    num_dataset_builder_threads: int = 1
    mmap_bin_files: bool = True
    pin_memory: bool = False
    fim: FillInTheMiddle | None = None

    @property
    def mock(self) -> bool:
        """Whether samples are made up."""
        return self.blend is None and self.blend_per_split is None

    def samples(self, split: int) -> int | None:
        """Return the planned samples of a split (0 train, 1 valid, 2 test); None: all there are, once."""
        if split == 1 and self.full_validation and self.valid_samples:
            return None
        return (self.train_samples, self.valid_samples, self.test_samples)[split]


def data_config_from_args(args: Any, tokenizer: Tokenizer) -> DataConfig:
    """Build the configuration from arguments with Megatron's attribute names.

    Reads seq_length, micro_batch_size, global_batch_size, train_iters or train_samples, eval_iters,
    eval_interval, seed, data_path, train_data_path, valid_data_path, test_data_path, data_args_path,
    per_split_data_args_path, mock_data, split and the names of DataConfig's own fields; absent attributes
    count as unset. Call it on a machine with CUDA and pin_memory is on.

    Raises:
        ValueError: contradictory or missing data flags.
    """
    blend, per_split = _blends(args)
    split = _get(args, "split")
    if per_split is not None and split:
        raise ValueError(f"--split {split} does not go with data paths per split: drop --split")
    loader = _get(args, "dataloader_type", "single")
    if loader not in ("single", "cyclic"):
        raise ValueError(f"--dataloader-type {loader} is not built here: choose single or cyclic")
    train, valid, test = _planned_samples(args)
    config = DataConfig(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        tokenizer=tokenizer,
        train_samples=train,
        valid_samples=valid,
        test_samples=test,
        blend=blend,
        blend_per_split=per_split,
        split=None if per_split is not None else split or DEFAULT_SPLIT,
        dataloader_type=loader,
        pin_memory=_cuda_is_there(),
        fim=fill_in_the_middle(args, tokenizer),
        **_plain_fields(args),
    )
    return validate_config(config)


_PLAIN = {
    "seed": 1234, "eval_micro_batch_size": None, "reset_position_ids": False, "reset_attention_mask": False,
    "eod_mask_loss": False, "full_validation": False, "multiple_validation_sets": False, "num_workers": 2,
    "validation_set_names": None,
    "data_cache_path": None, "mid_level_dataset_surplus": 0.005, "num_dataset_builder_threads": 1,
    "mmap_bin_files": True,
}  # fmt: skip


def _plain_fields(args: Any) -> dict[str, Any]:
    return {name: _get(args, name, default) for name, default in _PLAIN.items()}


def validate_config(config: DataConfig) -> DataConfig:
    """Return ``config`` if its parts fit together.

    Raises:
        ValueError: naming the flag, the value and the fix.
    """
    for flag, value in (("--seq-length", config.seq_length), ("--micro-batch-size", config.micro_batch_size)):
        if value is None or value < 1:
            raise ValueError(f"{flag} {value}: it must be at least 1")
    if config.num_workers < 0:
        raise ValueError(f"--num-workers {config.num_workers}: it must be 0 or more")
    valid = config.blend_per_split[1] if config.blend_per_split else None
    if config.multiple_validation_sets and valid is None:
        raise ValueError(
            "--multiple-validation-sets needs --valid-data-path with the sets to report one by one"
        )
    names = config.validation_set_names
    if names is not None and (valid is None or not config.multiple_validation_sets):
        raise ValueError(f"--validation-set-names {' '.join(names)} needs --multiple-validation-sets: add it")
    if names is not None and valid is not None and len(names) != len(valid.prefixes):
        raise ValueError(
            f"--validation-set-names has {len(names)} names: give one for each of the {len(valid.prefixes)} sets"
        )
    if config.full_validation and config.blend is not None and config.blend.weights is not None:
        raise ValueError(
            "--full-validation reads every document once, so the weights of --data-path have no meaning for "
            "it: give the "
            "validation corpora with --train-data-path and --valid-data-path"
        )
    if config.blend is not None:
        split_shares(config.split or DEFAULT_SPLIT)
    return config


def split_shares(split: str) -> tuple[float, float, float]:
    """Return the shares of train, valid and test that ``split`` names, adding up to 1.

    Raises:
        ValueError: not one to three numbers of which none is negative and one positive.
    """
    try:
        shares = [float(part) for part in split.replace(",", " ").split()]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < math.inf:
        raise ValueError(
            f"--split {split!r}: pass one to three numbers for train, valid and test, such as 969,30,1"
        )
    total = sum(shares)
    train, valid, test = (share / total for share in shares + [0.0] * (3 - len(shares)))
    return train, valid, test


def parse_blend(words: list[str] | tuple[str, ...], flag: str) -> Blend:
    """Read "A", "A B C" or "0.3 A 0.7 B" as Megatron does.

    Raises:
        ValueError: a weight without a prefix, a weight that is not positive, or nothing at all.
    """
    if not words:
        raise ValueError(f"{flag} is empty: pass at least one prefix")
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return Blend(tuple(words), None, flag)
    if any(weight is None for weight in weights):
        raise ValueError(f"{flag} {' '.join(words)}: give every prefix a weight (0.3 A 0.7 B), or none")
    if not all(weight > 0 and math.isfinite(weight) for weight in weights if weight is not None):
        raise ValueError(
            f"{flag} {' '.join(words)}: weights must be positive; leave out a corpus that you do not want"
        )
    return Blend(tuple(words[1::2]), tuple(weight for weight in weights if weight is not None), flag)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _blends(args: Any) -> tuple[Blend | None, tuple[Blend | None, Blend | None, Blend | None] | None]:
    """Return (blend, blend per split) from whichever flags are set; both None is mock data."""
    given = {
        "--data-path": _get(args, "data_path"),
        "--data-args-path": _get(args, "data_args_path"),
        "--per-split-data-args-path": _get(args, "per_split_data_args_path"),
        "--train-data-path, --valid-data-path, --test-data-path": _per_split_words(args),
        "--mock-data": _get(args, "mock_data", False) or None,
    }
    used = [flag for flag, value in given.items() if value]
    if not used:
        raise ValueError("--data-path is missing: pass the prefix of a .bin/.idx pair, or --mock-data")
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} contradict each other: pass one of them")
    if given["--data-path"]:
        return parse_blend(given["--data-path"], "--data-path"), None
    if given["--data-args-path"]:
        return parse_blend(_read(args.data_args_path, "--data-args-path").split(), "--data-args-path"), None
    if given["--per-split-data-args-path"]:
        return None, _per_split_file(args.per_split_data_args_path)
    words = given["--train-data-path, --valid-data-path, --test-data-path"]
    if not words:
        return None, None
    train, valid, test = (
        parse_blend(given_words, f"--{name}-data-path") if given_words else None
        for name, given_words in zip(SPLITS, words, strict=True)
    )
    return None, (train, valid, test)


def _per_split_words(args: Any) -> list[Any] | None:
    words = [_get(args, f"{name}_data_path") for name in SPLITS]
    return words if any(words) else None


def _per_split_file(path: str) -> tuple[Blend | None, Blend | None, Blend | None]:
    flag = "--per-split-data-args-path"
    try:
        content = json.loads(_read(path, flag))
        lists = [content.get(name) for name in SPLITS]
        words = [entry.split() if isinstance(entry, str) else entry for entry in lists]
        train, valid, test = (
            parse_blend([str(word) for word in part], flag) if part else None for part in words
        )
    except (json.JSONDecodeError, AttributeError, TypeError):
        raise ValueError(
            f"{flag} {path} must be JSON such as "
            f'{{"train": ["0.3", "A", "0.7", "B"], "valid": ["C"], "test": null}}'
        ) from None
    return train, valid, test


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path} cannot be read ({type(error).__name__}): pass a text file") from None


def _planned_samples(args: Any) -> tuple[int, int, int]:
    """Return the samples of each split, as Megatron counts them."""
    batch = args.global_batch_size
    if not batch or batch < 1:
        raise ValueError(f"--global-batch-size {batch}: it must be at least 1")
    train = _get(args, "train_samples") or (_get(args, "train_iters", 0)) * batch
    iterations = _get(args, "train_iters") or math.ceil(train / batch)
    per_evaluation = _get(args, "eval_iters", 100) * (_get(args, "eval_global_batch_size") or batch)
    interval = _get(args, "eval_interval")
    evaluations = iterations // interval + 1 if interval else 1
    return train, evaluations * per_evaluation, per_evaluation


def _get(args: Any, name: str, default: Any = None) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


def _cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()

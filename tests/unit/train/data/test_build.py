"""Datasets and iterators on small corpora: order, epochs, blends, resuming, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.train.data import DataIterator, DataIterators, build, build_data_iterators, unigram_entropy
from megatron.train.data.config import Blend
from tests.unit.train.data.corpora import data_config, null_tokenizer, unique_documents, write_corpus

LENGTHS = [1 + (7 * i) % 60 for i in range(40)]
TOTAL = sum(LENGTHS)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """40 documents in which no id comes twice."""
    return write_corpus(tmp_path / "corpus", unique_documents(LENGTHS))


def take(iterator: Iterator[dict[str, torch.Tensor]], count: int) -> list[dict[str, torch.Tensor]]:
    return list(islice(iterator, count))


def inputs(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch["tokens"]]


def train(config: Any, **where: int) -> DataIterator:
    iterator = build_data_iterators(config, **where).train
    assert iterator is not None
    return iterator


def test_samples_are_megatron_cores(prefix: str, tmp_path: Path) -> None:
    """Same documents, same order, same tokens as GPTDataset, over several epochs."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from megatron.train.data.gpt_samples import VocabularyView

    core = GPTDatasetConfig(
        random_seed=1234, sequence_length=8, blend=([prefix], None), split="1,0,0",
        path_to_cache=str(tmp_path / "core"), tokenizer=VocabularyView(5001, 5000, {}),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )  # fmt: skip
    documents = np.arange(40, dtype=np.int32)
    want = GPTDataset(IndexedDataset(prefix), prefix, documents, 350, Split.train, core)
    found = take(train(data_config(prefix, train_samples=350, micro_batch_size=1)), 350)
    for index, batch in enumerate(found):
        for key, value in want[index].items():
            assert torch.equal(batch[key][0], value), (index, key)


@pytest.mark.parametrize("loader", ["single", "cyclic"])
def test_same_global_order_whatever_the_ranks(prefix: str, loader: str) -> None:
    whole = inputs(take(train(data_config(prefix, micro_batch_size=1, dataloader_type=loader)), 24))
    for dp_size, micro in ((2, 1), (3, 2), (4, 3)):
        config = data_config(prefix, micro_batch_size=micro, dataloader_type=loader)
        ranks = [
            inputs(take(train(config, dp_rank=rank, dp_size=dp_size), 24 // (dp_size * micro)))
            for rank in range(dp_size)
        ]
        merged = [
            ranks[rank][microbatch * micro + sample]
            for microbatch in range(24 // (dp_size * micro))
            for rank in range(dp_size)
            for sample in range(micro)
        ]
        assert merged == whole


def test_an_epoch_reads_each_token_once(prefix: str) -> None:
    """D09: one epoch covers the corpus but for less than a sample; three epochs three times."""
    for epochs in (1, 3):
        samples = (epochs * TOTAL - 1) // 8
        counts = Counter(
            token
            for row in inputs(take(train(data_config(prefix, train_samples=samples)), samples // 2))
            for token in row
        )
        assert max(counts.values()) == epochs
        assert epochs * TOTAL - sum(counts.values()) < 8 * 3


@pytest.mark.parametrize(("share", "apart"), [(0.5, True), (0.95, False)])
def test_last_epoch_is_kept_apart_when_little_of_it_is_needed(prefix: str, share: float, apart: bool) -> None:
    """D09: under 80 % of a third epoch, the first two are shuffled together and the third is read last."""
    samples = int((2 + share) * TOTAL / 8)
    rows = inputs(take(train(data_config(prefix, train_samples=samples, micro_batch_size=1)), samples))
    two_epochs = Counter(token for row in rows[: (2 * TOTAL - 1) // 8] for token in row)
    assert (max(two_epochs.values()) == 2) == apart


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_is_exact(prefix: str, workers: int) -> None:
    config = data_config(prefix, train_samples=64, num_workers=workers, reset_attention_mask=True)
    iterators = build_data_iterators(config, dp_rank=1, dp_size=2)
    assert iterators.train is not None
    batches = take(iterators.train, 6)
    again = build_data_iterators(config, dp_rank=1, dp_size=2)
    take(again.train, 3)  # type: ignore[arg-type]
    state = again.state_dict()
    assert state["train"]["consumed_samples"] == 12
    again.close()
    resumed = build_data_iterators(config, dp_rank=1, dp_size=2)
    assert resumed.load_state_dict(state) == ()
    for want, found in zip(batches[3:], take(resumed.train, 3), strict=True):  # type: ignore[arg-type]
        assert (
            want.keys() == found.keys() == {"tokens", "labels", "loss_mask", "position_ids", "document_ids"}
        )
        assert all(torch.equal(want[key], found[key]) for key in want)
    counted = train(config, dp_rank=1, dp_size=2, consumed_train_samples=12)
    assert inputs(take(counted, 3)) == inputs(batches[3:])
    for each in (iterators, resumed):
        each.close()


def test_loading_leaves_the_global_generators_alone(prefix: str) -> None:
    """Dropout of a resumed run must not depend on how its data were loaded."""
    torch.manual_seed(5)
    np.random.seed(5)
    want = (torch.rand(1).item(), np.random.rand())
    torch.manual_seed(5)
    np.random.seed(5)
    take(train(data_config(prefix, num_workers=1, dataloader_type="cyclic")), 3)
    assert (torch.rand(1).item(), np.random.rand()) == want


def test_skip_counts_without_reading(prefix: str) -> None:
    """A middle pipeline stage."""
    config = data_config(prefix, train_samples=64)
    want = inputs(take(train(config), 6))[6:]
    iterator = train(config)
    next(iterator)
    iterator.skip(2)
    assert iterator.consumed_samples == 6
    assert inputs(take(iterator, 3)) == want


def test_stopping_at_the_last_sample_and_resuming(prefix: str) -> None:
    """D05: the next pass begins; nothing asserts that samples are left."""
    config = data_config(prefix, train_samples=16)
    first = train(config)
    rows = inputs(take(first, first.length // 2 + 3))
    resumed = train(config, consumed_train_samples=first.length)
    assert inputs(take(resumed, 2)) == [rows[(first.length + i) % first.length] for i in range(4)]


def test_more_iterations_in_the_same_epochs_change_nothing(prefix: str) -> None:
    short, long = (build_data_iterators(data_config(prefix, train_samples=n)) for n in (20, 100))
    assert long.load_state_dict(short.state_dict()) == ()
    assert inputs(take(short.train, 10)) == inputs(take(long.train, 10))  # type: ignore[arg-type]


def test_blend_by_weights(tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "one", unique_documents([30] * 20, first=1))
    two = write_corpus(tmp_path / "two", unique_documents([30] * 20, first=2001))
    rows = inputs(take(train(data_config(one, two, weights=(3, 1), train_samples=40)), 20))
    assert sum(row[0] > 2000 for row in rows) == 10
    for count in range(4, 41):  # evenly all along
        assert abs(sum(row[0] > 2000 for row in rows[:count]) - count / 4) <= 1
    cache = data_config(one, two, weights=(3, 1), train_samples=40, data_cache_path=str(tmp_path / "cache"))
    for _ in range(2):  # built, then loaded
        assert inputs(take(train(cache), 20)) == rows
    assert list((tmp_path / "cache").glob("*-blend-dataset_index.npy"))


def test_a_surplus_and_threads_of_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a blend are built longer by the surplus, by as many threads as asked."""
    from megatron.train.data import gpt_samples

    pools: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, max_workers: int) -> None:
            pools.append(max_workers)
            super().__init__(max_workers)

    lengths: list[int] = []
    original = gpt_samples.GPTSamples.__init__

    def recorded(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        lengths.append(len(self))

    monkeypatch.setattr(gpt_samples, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(gpt_samples.GPTSamples, "__init__", recorded)
    one = write_corpus(tmp_path / "one", unique_documents([30] * 20, first=1))
    two = write_corpus(tmp_path / "two", unique_documents([30] * 20, first=2001))
    for surplus in (0.005, 1.0):
        train(
            data_config(
                one,
                two,
                weights=(1, 1),
                train_samples=140,
                mid_level_dataset_surplus=surplus,
                num_dataset_builder_threads=3,
            )
        )
    assert pools == [3, 3]
    assert max(lengths[:2]) < min(lengths[2:]), lengths


def test_corpora_without_weights_are_read_once(tmp_path: Path) -> None:
    """One epoch of each, then from the beginning (D05)."""
    one = write_corpus(tmp_path / "one", unique_documents([30] * 2, first=1))
    two = write_corpus(tmp_path / "two", unique_documents([30] * 4, first=2001))
    iterator = train(data_config(one, two, train_samples=1000, micro_batch_size=1))
    assert iterator.length == 59 // 8 + 119 // 8
    rows = inputs(take(iterator, iterator.length + 5))
    assert max(Counter(token for row in rows[: iterator.length] for token in row).values()) == 1
    assert rows[iterator.length :] == rows[:5]


def test_split_divides_the_documents(prefix: str) -> None:
    iterators = build_data_iterators(
        data_config(prefix, split="50,25,25", train_samples=50, valid_samples=8, test_samples=8)
    )
    bounds = np.cumsum(LENGTHS)[[19, 29]]
    assert iterators.train and iterators.test and len(iterators.valid) == 1
    assert max(map(max, inputs(take(iterators.train, 25)))) <= bounds[0]
    valid = [token for row in inputs(take(iterators.valid[0], 4)) for token in row]
    assert bounds[0] < min(valid) and max(valid) <= bounds[1]
    assert min(map(min, inputs(take(iterators.test, 4)))) > bounds[1]


def test_full_validation_reads_everything_once_on_all_ranks(tmp_path: Path) -> None:
    """Last sample and last microbatch are filled up; their padding has no loss (D03)."""
    documents = unique_documents([9, 4, 16, 2, 10])  # 41 tokens
    path = write_corpus(tmp_path / "valid", documents)
    blends = (None, Blend((path,), None, "--valid-data-path"), None)
    config = data_config(
        blend_per_split=blends, split=None, train_samples=0, valid_samples=99, full_validation=True
    )
    for dp_size in (1, 2, 3):
        labels = []
        for rank in range(dp_size):
            valid = build_data_iterators(config, dp_rank=rank, dp_size=dp_size).valid[0]
            assert valid.microbatches == math.ceil(5 / (2 * dp_size))
            for _ in range(2):  # every evaluation alike
                batches = list(valid.evaluation(1))
                assert len(batches) == valid.microbatches
            labels += [
                token
                for batch in batches
                for row, mask in zip(batch["labels"].tolist(), batch["loss_mask"].tolist(), strict=True)
                for token, keep in zip(row, mask, strict=True)
                if keep
            ]
        assert sorted(labels) == list(range(2, 42))


def test_each_validation_set_has_its_own_counter(tmp_path: Path) -> None:
    """D10: two sets, three evaluations, resume: each goes on where its own last evaluation stopped."""
    one = write_corpus(tmp_path / "one", unique_documents([30] * 10, first=1))
    two = write_corpus(tmp_path / "two", unique_documents([25] * 10, first=2001))
    blend = Blend((one, two), None, "--valid-data-path")
    config = data_config(
        blend_per_split=(Blend((one,)), blend, None),
        split=None,
        valid_samples=24,
        multiple_validation_sets=True,
    )
    iterators = build_data_iterators(config)
    assert [valid.name for valid in iterators.valid] == ["valid-one", "valid-two"]
    seen: list[list[Any]] = [[], []]
    for evaluation in range(3):
        if evaluation == 2:
            state = iterators.state_dict()
            iterators = build_data_iterators(config)
            assert iterators.load_state_dict(state) == ()
        for index, valid in enumerate(iterators.valid):
            seen[index] += inputs(list(valid.evaluation(3)))
            assert valid.consumed_samples == 6 * (evaluation + 1)
    named = dataclasses.replace(config, validation_set_names=("easy", "hard"))
    assert [valid.name for valid in build_data_iterators(named).valid] == ["valid-easy", "valid-hard"]
    for index, rows in enumerate(seen):
        assert len(set(map(tuple, rows))) == 18  # never twice before the end
        assert all((row[0] > 2000) == bool(index) for row in rows)


def test_a_set_that_the_checkpoint_does_not_know_begins_anew(prefix: str) -> None:
    state = build_data_iterators(data_config(prefix)).state_dict()
    more = build_data_iterators(data_config(prefix, split="1,1,0", valid_samples=4))
    messages = more.load_state_dict(state)
    assert any("knows no valid data: they begin at sample 0" in message for message in messages)


def test_corpus_smaller_than_a_sample(tmp_path: Path) -> None:
    """D10: repeated for planned samples; one padded sample in full validation; else refused."""
    tiny = write_corpus(tmp_path / "tiny", [[1, 2, 3]])
    rows = inputs(take(train(data_config(tiny, train_samples=4)), 2))
    assert len(rows) == 4 and all(b == a % 3 + 1 for row in rows for a, b in pairwise(row))
    blends = (None, Blend((tiny,), None, "--valid-data-path"), None)
    valid = data_config(
        blend_per_split=blends, split=None, train_samples=0, valid_samples=9, full_validation=True
    )
    (batch,) = build_data_iterators(valid).valid[0].evaluation(1)
    assert batch["labels"][0].tolist() == [2, 3, 0, 0, 0, 0, 0, 0] and batch["loss_mask"].sum() == 2
    with pytest.raises(ValueError, match="holds 3 tokens for train, fewer than one sample of 9"):
        build_data_iterators(data_config(tiny, tiny, train_samples=4))


def test_changed_data_are_warned_of(prefix: str, tmp_path: Path) -> None:
    """D12: the position is kept for the new order, and that is said; moved files are the same data."""
    iterators = build_data_iterators(data_config(prefix))
    take(iterators.train, 2)  # type: ignore[arg-type]
    state = iterators.state_dict()
    for suffix in (".bin", ".idx"):
        (tmp_path / f"moved{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
    assert build_data_iterators(data_config(str(tmp_path / "moved"))).load_state_dict(state) == ()
    other = write_corpus(tmp_path / "other", unique_documents([50] * 10))
    changes = {
        "data, order": data_config(other),
        "seed": data_config(prefix, seed=1),
        "order, seq_length": data_config(prefix, seq_length=16),
        "weights": data_config(prefix, other, weights=(1, 1)),
    }
    for what, config in changes.items():
        changed = build_data_iterators(config)
        (message,) = changed.load_state_dict(state)
        assert (
            "going on at sample 4 of the new order. To read them from the beginning, pass --finetune"
            in message
        )
        assert all(word in message for word in what.split(", "))
        assert changed.train is not None and changed.train.consumed_samples == 4


def test_a_corpus_made_anew_gets_a_new_index(tmp_path: Path) -> None:
    """The cache is tied to the content, not to the name."""
    cache = str(tmp_path / "cache")
    path = write_corpus(tmp_path / "corpus", unique_documents([30] * 4))
    take(train(data_config(path, data_cache_path=cache)), 2)
    write_corpus(tmp_path / "corpus", unique_documents([3] * 40))
    rows = inputs(take(train(data_config(path, data_cache_path=cache)), 7))
    assert max(Counter(token for row in rows for token in row).values()) == 1


def test_every_node_builds_its_own_cache(prefix: str, tmp_path: Path) -> None:
    """D08: rank 1 of 2 finds an empty cache and needs no other rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = data_config(prefix, prefix, weights=(1, 1), data_cache_path=str(tmp_path / "node1"))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        rows = inputs(take(train(config), 8))
    finally:
        dist.destroy_process_group()
    assert rows == inputs(take(train(data_config(prefix, prefix, weights=(1, 1))), 8))
    assert len(list((tmp_path / "node1").glob("*-sample_index.npy"))) >= 1


def test_samples_beyond_two_to_the_31(tmp_path: Path) -> None:
    """D06: pointers and offsets are 64-bit all the way to the tokens."""
    from tests.unit.train.data.test_files import sparse_corpus

    path = sparse_corpus(tmp_path / "large")
    config = data_config(
        path, split="75,25,0", seq_length=11, train_samples=0, valid_samples=9, micro_batch_size=1
    )
    valid = build_data_iterators(config).valid[0]
    assert sorted(token for row in inputs(take(valid, 9)) for token in row) == list(range(1, 100))


def test_mock_data() -> None:
    config = data_config(tokenizer=null_tokenizer(50), split=None, seq_length=1024, valid_samples=4)
    iterators = build_data_iterators(config)
    assert inputs(take(iterators.train, 2)) == inputs(take(train(config), 2))  # type: ignore[arg-type]
    assert next(iterators.valid[0])["tokens"].shape == (2, 1024)


def test_evaluation_has_its_own_micro_batch_size(prefix: str) -> None:
    iterators = build_data_iterators(
        data_config(prefix, split="1,1,0", valid_samples=9, eval_micro_batch_size=3)
    )
    assert next(iterators.valid[0])["tokens"].shape == (3, 8)


def test_no_samples_no_iterator(prefix: str) -> None:
    found = build_data_iterators(data_config(prefix, train_samples=0))
    assert found == DataIterators(None) and found.state_dict() == {}


def refused(match: str, config: Any) -> None:
    with pytest.raises(ValueError, match=match):
        build_data_iterators(config)


def test_bad_data_are_refused(prefix: str, tmp_path: Path) -> None:
    refused(r"--data-path .*none\.idx does not exist", data_config(str(tmp_path / "none")))
    refused(
        f"token id {TOTAL}, but the vocabulary has 101", data_config(prefix, tokenizer=null_tokenizer(100))
    )
    refused(
        "--split 1,0.001,0 leaves none of the 40", data_config(prefix, split="1,0.001,0", valid_samples=4)
    )
    refused("--split 99,0,1 leaves none .* for test", data_config(prefix, split="99,0,1", test_samples=4))
    refused("--split 0,1,0 gives nothing to train", data_config(prefix, split="0,1,0"))


def test_documents_without_text_for_a_set(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "corpus", [*unique_documents([30] * 3), []])
    refused("the 1 documents for valid hold no text", data_config(path, split="3,1,0", valid_samples=4))


def test_default_split_needs_no_test_documents(prefix: str) -> None:
    """Of 40 documents 969,30,1 leaves one for validation and none for a test that nobody asked for."""
    found = build_data_iterators(data_config(prefix, split="969, 30, 1", valid_samples=4, test_samples=4))
    assert len(found.valid) == 1 and found.test is None


def test_an_id_outside_the_vocabulary_is_named_by_a_worker_too(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large corpora are checked in part beforehand: the rest as it is read, without a worker's traceback."""
    monkeypatch.setattr(build, "check_vocabulary", lambda *args: None)
    iterator = train(data_config(prefix, tokenizer=null_tokenizer(100), num_workers=1))
    with pytest.raises(
        ValueError, match=r"^--data-path \S+ holds the token id \d+, but the vocabulary has 101"
    ) as info:
        take(iterator, 50)
    assert "Traceback" not in str(info.value)


def test_unigram_entropy(tmp_path: Path) -> None:
    uniform = write_corpus(tmp_path / "uniform", [list(range(16)) * 3], np.uint16)
    assert unigram_entropy(uniform, block=7) == pytest.approx(math.log(16))
    skewed = write_corpus(tmp_path / "skewed", [[300] * 3, [1]])
    assert unigram_entropy(skewed, block=3) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))

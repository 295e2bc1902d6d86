"""Less mock data for tests, whose sequences are short."""

from __future__ import annotations

DOCUMENTS = 2000


def shrink_mock_data() -> None:
    """Make later mock datasets of this process smaller.

    megatron-core makes 100,000 documents of up to 4,096 tokens: 17 million samples of length 12, which every rank would
    shuffle anew for each of the three splits.
    """
    from megatron.train.data.core_import import import_core_datasets

    import_core_datasets()
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = DOCUMENTS

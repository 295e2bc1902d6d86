"""Flags: BERT, T5 and retrieval."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused

RETRIEVAL = "decoder-only language models only"

TITLE = "BERT, T5 and retrieval"

FLAGS: tuple[Flag, ...] = (
    refused(
        "--bert-embedder-type",
        str,
        "megatron",
        RETRIEVAL,
        choices=(
            "megatron",
            "huggingface",
        ),
    ),
    refused("--bert-load", str, None, RETRIEVAL),
    refused("--bert-no-binary-head", Switch.OFF, True, RETRIEVAL, dest="bert_binary_head"),
    refused("--biencoder-projection-dim", int, 0, RETRIEVAL),
    refused("--biencoder-shared-query-context-model", Switch.ON, False, RETRIEVAL),
    refused("--block-data-path", str, None, RETRIEVAL),
    refused("--embedding-path", str, None, RETRIEVAL),
    refused("--evidence-data-path", str, None, RETRIEVAL),
    refused("--ict-head-size", int, None, RETRIEVAL),
    refused("--ict-load", str, None, RETRIEVAL),
    refused("--indexer-batch-size", int, 128, RETRIEVAL),
    refused("--indexer-log-interval", int, 1000, RETRIEVAL),
    refused("--mask-prob", float, 0.15, RETRIEVAL),
    refused("--output-bert-embeddings", Switch.ON, False, RETRIEVAL),
    refused("--query-in-block-prob", float, 0.1, RETRIEVAL),
    refused("--retriever-report-topk-accuracies", int, [], RETRIEVAL, nargs="+"),
    refused("--retriever-score-scaling", Switch.ON, False, RETRIEVAL),
    refused("--sample-rate", float, 1.0, RETRIEVAL),
    refused("--short-seq-prob", float, 0.1, RETRIEVAL),
    refused("--titles-data-path", str, None, RETRIEVAL),
    refused("--use-one-sent-docs", Switch.ON, False, RETRIEVAL),
)

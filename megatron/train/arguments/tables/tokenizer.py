"""Flags: tokenizer."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, not_yet, refused, works

TITLE = "Tokenizer"

FLAGS: tuple[Flag, ...] = (
    works(
        "--tokenizer-type",
        str,
        None,
        "Which tokenizer.",
        "train/tokenizers/factory.py",
        test="train/equivalence.py",
        choices=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
            "ByteLevelTokenizer",
        ),
        refused_values=(
            ("BertWordPieceLowerCase", "WordPiece (BERT) is not there; use HuggingFaceTokenizer"),
            ("BertWordPieceCase", "WordPiece (BERT) is not there; use HuggingFaceTokenizer"),
            ("MultimodalTokenizer", "text only"),
            ("NullMultimodalTokenizer", "text only"),
            ("SFTTokenizer", "fine-tuning on conversations is not there"),
        ),
    ),
    works(
        "--tokenizer-model",
        str,
        None,
        "Its model file or name.",
        "train/tokenizers/factory.py",
        test="train/tokenizers/test_tokenizers.py",
    ),
    works(
        "--vocab-file",
        str,
        None,
        "vocab.json of GPT2BPETokenizer.",
        "train/tokenizers/factory.py",
        test="train/test_arguments_rules.py",
    ),
    works(
        "--merge-file",
        str,
        None,
        "merges.txt of GPT2BPETokenizer.",
        "train/tokenizers/factory.py",
        test="train/tokenizers/test_tokenizers.py",
    ),
    works(
        "--vocab-size",
        int,
        None,
        "Size of the vocabulary before padding (NullTokenizer).",
        "models/config.py",
        test="train/equivalence.py",
    ),
    not_yet("--vocab-extra-ids", int, 0, "extra ids (T5) are not there"),
    works(
        "--tiktoken-pattern",
        str,
        None,
        "Splitting pattern of TikTokenizer: v1 or v2.",
        "train/tokenizers/factory.py",
        test="train/tokenizers/test_tokenizers.py",
        choices=(
            "v1",
            "v2",
        ),
    ),
    works(
        "--tiktoken-num-special-tokens",
        int,
        1000,
        "Special tokens of TikTokenizer.",
        "train/tokenizers/factory.py",
    ),
    not_yet(
        "--tokenizer-special-tokens",
        str,
        None,
        "special tokens come from the tokenizer's files",
        nargs="+",
        dest="special_tokens",
    ),
    not_yet("--tokenizer-metadata", str, None, "metadata files are not read", dest="metadata_path"),
    not_yet(
        "--tokenizer-sentencepiece-legacy", Switch.ON, False, "the legacy mode of sentencepiece is not there"
    ),
    not_yet(
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        Switch.OFF,
        True,
        "the model decides about extra whitespace",
        aliases=("--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",),
        dest="tokenizer_sentencepiece_ignore_extra_whitespaces",
    ),
    not_yet(
        "--tokenizer-hf-no-include-special-tokens",
        Switch.ON,
        False,
        "text is encoded without special tokens; --append-eod adds the end of document",
    ),
    refused("--tokenizer-hf-no-use-fast", Switch.ON, False, "only fast tokenizers"),
    refused("--trust-remote-code", Switch.ON, False, "no code is taken from tokenizers' folders"),
    works(
        "--null-tokenizer-eod-id",
        int,
        None,
        "End of document of NullTokenizer; its last id when not given.",
        "train/tokenizers/factory.py",
    ),
    works("--null-tokenizer-pad-id", int, -1, "Padding of NullTokenizer.", "train/tokenizers/factory.py"),
    refused("--use-gigatoken", Switch.ON, False, "a tokenizer that is not public"),
    no_op(
        "--no-use-tokenizer-model-from-checkpoint-args",
        Switch.OFF,
        True,
        "the tokenizer always comes from the command line",
        aliases=("--disable-use-tokenizer-model-from-checkpoint-args",),
        dest="use_tokenizer_model_from_checkpoint_args",
    ),
)

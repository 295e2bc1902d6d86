"""All tokenizers: text there and back, special ids, and clear errors."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.train.tokenizers import TOKENIZER_TYPES, Tokenizer, build_tokenizer, padded_vocab_size

SHIPPED = str(Path(__file__).parents[4] / "data" / "shakespeare_spm_2k.model")
TEXT = "ROMEO:\n  But soft! What light through yonder window breaks?\n\nÜber 12 €\t😀 "


def build(tokenizer_type: str | None, **flags: Any) -> Tokenizer:
    return build_tokenizer(SimpleNamespace(tokenizer_type=tokenizer_type, **flags))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Vocabularies in all file formats, made here."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("vocabularies")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT] * 5, vocab_size=300, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))
    (folder / "hf").mkdir()
    bpe.save(str(folder / "hf" / "tokenizer.json"))
    pieces = [bytes([i]) for i in range(256)] + [b"ou", b"th", b"But"]
    lines = (f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces))
    (folder / "pieces.tiktoken").write_text("\n".join(lines))
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": ""}
        for rank, piece in enumerate(pieces)
    ]
    (folder / "pieces.json").write_text(json.dumps(entries))
    return {"folder": str(folder), "hf": str(folder / "hf")}


def every(files: dict[str, str]) -> dict[str, Tokenizer]:
    folder = files["folder"]
    return {
        "SentencePieceTokenizer": build("SentencePieceTokenizer", tokenizer_model=SHIPPED),
        "GPTSentencePieceTokenizer": build("GPTSentencePieceTokenizer", tokenizer_model=SHIPPED),
        "Llama2Tokenizer": build("Llama2Tokenizer", tokenizer_model=SHIPPED),
        "HuggingFaceTokenizer": build("HuggingFaceTokenizer", tokenizer_model=files["hf"]),
        "GPT2BPETokenizer": build(
            "GPT2BPETokenizer", vocab_file=f"{folder}/vocab.json", merge_file=f"{folder}/merges.txt"
        ),
        "TikTokenizer": build("TikTokenizer", tokenizer_model=f"{folder}/pieces.tiktoken"),
        "ByteLevelTokenizer": build("ByteLevelTokenizer"),
        "NullTokenizer": build("NullTokenizer", vocab_size=100),
    }


def test_every_type_gives_the_text_back(files: dict[str, str]) -> None:
    tokenizers = every(files)
    assert set(tokenizers) == set(TOKENIZER_TYPES)
    for name, tokenizer in tokenizers.items():
        text = "3 14 15 92" if name == "NullTokenizer" else TEXT
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text, name
        assert tokenizer.name == name and all(0 <= i < tokenizer.vocab_size for i in ids)
        assert 0 <= tokenizer.eod < tokenizer.vocab_size
        assert tokenizer.detokenize([*ids, tokenizer.eod]) == text, name
        for special in (tokenizer.bos, tokenizer.pad):
            assert special is None or 0 <= special < tokenizer.vocab_size
        json.dumps(tokenizer.identity)
        assert tokenizer.tokenize("") == ([tokenizer.bos] if name == "Llama2Tokenizer" else [])


def test_llama_puts_bos_in_front() -> None:
    llama = build("Llama2Tokenizer", tokenizer_model=SHIPPED)
    plain = build("SentencePieceTokenizer", tokenizer_model=SHIPPED)
    assert llama.tokenize("to be") == [llama.bos, *plain.tokenize("to be")]


def test_shipped_model_is_lossless_and_small() -> None:
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=SHIPPED)
    assert tokenizer.vocab_size == 2048 and (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1, 2, 3)
    for text in (" leading", "double  spaces", "line\nends\n\n", "\ttab", "中文", "trailing  "):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_null_tokenizer_counts_its_end_of_document_as_megatron_does() -> None:
    tokenizer = build("NullTokenizer", vocab_size=100, null_tokenizer_pad_id=-1)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (101, 100, None)
    inside = build("NullTokenizer", vocab_size=100, null_tokenizer_eod_id=0, null_tokenizer_pad_id=5)
    assert (inside.vocab_size, inside.eod, inside.pad) == (100, 0, 5)


def test_tiktoken_formats_agree_and_keep_room_for_special_tokens(files: dict[str, str]) -> None:
    text, listed = (
        build("TikTokenizer", tokenizer_model=f"{files['folder']}/{name}", tiktoken_pattern="v1")
        for name in ("pieces.tiktoken", "pieces.json")
    )
    assert text.tokenize(TEXT) == listed.tokenize(TEXT)
    assert text.vocab_size == 1000 + 259 and (text.bos, text.eod, text.pad) == (1, 2, 4)
    assert text.tokenize("But") == [1000 + 258]
    cut = build("TikTokenizer", tokenizer_model=f"{files['folder']}/pieces.json", vocab_size=1256)
    assert cut.vocab_size == 1256 and len(cut.tokenize("But")) == 3


def test_hugging_face_takes_file_or_folder_and_the_named_eos(files: dict[str, str], tmp_path: Path) -> None:
    one = build("HuggingFaceTokenizer", tokenizer_model=files["hf"])
    other = build("HuggingFaceTokenizer", tokenizer_model=files["hf"] + "/tokenizer.json")
    assert one.tokenize(TEXT) == other.tokenize(TEXT) and one.eod == other.eod == 0
    (tmp_path / "tokenizer.json").write_text(Path(files["hf"], "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "!"}, "pad_token": "a"})
    )
    named = build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert (named.eod, named.pad) == (named.tokenize("!")[0], named.tokenize("a")[0])


def test_a_moved_vocabulary_is_the_same(tmp_path: Path) -> None:
    copy = tmp_path / "copy.model"
    copy.write_bytes(Path(SHIPPED).read_bytes())
    ours, moved = (build("SentencePieceTokenizer", tokenizer_model=str(path)) for path in (SHIPPED, copy))
    assert ours.identity == moved.identity


MODEL = {"tokenizer_model": __file__}


@pytest.mark.parametrize(
    ("tokenizer_type", "flags", "match"),
    [
        (None, {}, "--tokenizer-type is missing: pass one of"),
        ("SentencePiece", {}, "--tokenizer-type SentencePiece .*did you mean SentencePieceTokenizer"),
        ("BertWordPieceCase", {}, "--tokenizer-type BertWordPieceCase is not built here"),
        ("NullTokenizer", {}, "--vocab-size None"),
        ("SentencePieceTokenizer", {}, "needs --tokenizer-model"),
        ("SentencePieceTokenizer", {"tokenizer_model": "/no"}, "--tokenizer-model /no: no such file"),
        ("SentencePieceTokenizer", MODEL, "is not a SentencePiece model"),
        ("HuggingFaceTokenizer", MODEL, "is not a Hugging Face tokenizer.json"),
        ("TikTokenizer", MODEL, "is not a tiktoken vocabulary"),
        ("TikTokenizer", {**MODEL, "tiktoken_pattern": "v9"}, "--tiktoken-pattern v9"),
        ("TikTokenizer", {**MODEL, "tiktoken_num_special_tokens": 3}, "tokens 3: it must be at least 7"),
        ("GPT2BPETokenizer", {"vocab_file": __file__}, "needs --merge-file"),
        ("GPT2BPETokenizer", {"vocab_file": __file__, "merge_file": __file__}, "are not a GPT-2 vocabulary"),
    ],
)
def test_bad_flags_are_refused(tokenizer_type: str | None, flags: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(tokenizer_type, **flags)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.model").touch()
    with pytest.raises(ValueError, match="--tokenizer-model .*the file is empty"):
        build("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "empty.model"))


def test_null_tokenizer_refuses_text_and_large_ids() -> None:
    tokenizer = build("NullTokenizer", vocab_size=10)
    with pytest.raises(ValueError, match="numbers separated by spaces"):
        tokenizer.tokenize("to be")
    with pytest.raises(ValueError, match="--vocab-size"):
        tokenizer.tokenize("1 11")


def test_padded_vocab_size() -> None:
    assert padded_vocab_size(2048, 128, 1) == 2048
    assert padded_vocab_size(2049, 128, 1) == 2176
    assert padded_vocab_size(50257, 128, 8) == 51200
    assert padded_vocab_size(7, 1, 1) == 7
    for wrong in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            padded_vocab_size(*wrong)

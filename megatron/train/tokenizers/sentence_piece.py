"""SentencePiece models, for three values of --tokenizer-type."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.train.tokenizers.base import Tokenizer, digest, missing_package, require_file


class SentencePieceTokenizer(Tokenizer):
    """A .model file. The end of a document is the piece <EOD> where there is one, else eos.

    Args:
        model: --tokenizer-model.
        name: the --tokenizer-type asked for.
        add_bos: put bos in front of every text, as Llama 2 does.

    Raises:
        ValueError: no file, no SentencePiece model, or a model without any end-of-document piece.
    """

    def __init__(
        self, model: str | None, name: str = "SentencePieceTokenizer", add_bos: bool = False
    ) -> None:
        self.name = name
        self._path = require_file("--tokenizer-model", model, "a SentencePiece .model file", name)
        try:
            import sentencepiece
        except ImportError:
            raise missing_package("sentencepiece", name) from None
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._path.read_bytes())
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--tokenizer-model {model} is not a SentencePiece model ({type(error).__name__}); pass the "
                ".model file, "
                "or the --tokenizer-type that fits this file"
            ) from None
        self._add_bos = add_bos
        self.vocab_size = self._processor.get_piece_size()
        self.bos = _none_if_negative(self._processor.bos_id())
        self.pad = _none_if_negative(self._processor.pad_id())
        self.eod = self._end_of_document()
        if add_bos and self.bos is None:
            raise ValueError(
                f"--tokenizer-model {model} has no bos piece, which {name} needs: use "
                "GPTSentencePieceTokenizer"
            )

    def _end_of_document(self) -> int:
        candidate = self._processor.piece_to_id("<EOD>")
        if self._processor.id_to_piece(candidate) == "<EOD>":
            return candidate
        if self._processor.eos_id() < 0:
            raise ValueError(
                f"--tokenizer-model {self._path} has neither an <EOD> nor an eos piece to end documents "
                "with: "
                "train it with an eos id"
            )
        return self._processor.eos_id()

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return self._processor.encode(text, add_bos=self._add_bos)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        return self._processor.decode([int(i) for i in ids])

    def _file_identity(self) -> dict[str, object]:
        return digest(self._path)


def _none_if_negative(token: int) -> int | None:
    return token if token >= 0 else None

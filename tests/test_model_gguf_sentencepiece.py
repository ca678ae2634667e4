"""SentencePiece vocabularies of GGUF files: ids and texts equal those of the sentencepiece library."""

import io
from typing import Any

import pytest
import sentencepiece
from test_model_gguf_tokenizer import CORPUS, read

from graphport.model_def.checkpoint import CheckpointError


@pytest.fixture(scope="module")
def sentence_model() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE as Llama 2's: byte fallback, identity normaliser, dummy prefix, digits split."""
    model = io.BytesIO()
    lines = [line for text in CORPUS for line in text.replace("\0", "").splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _sentence_metadata(model: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    def kind(number: int) -> int:
        checks = ((model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6))
        if model.id_to_piece(number) == "<think>":
            return 4
        return next((value for check, value in checks if check(number)), 1)

    numbers = range(model.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(number) for number in numbers],
        "tokenizer.ggml.scores": [model.get_score(number) for number in numbers],
        "tokenizer.ggml.token_type": [kind(number) for number in numbers],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_sentencepiece_ids_and_texts_equal_the_sentencepiece_library(
    sentence_model: sentencepiece.SentencePieceProcessor,
) -> None:
    mine = read(_sentence_metadata(sentence_model))
    for text in CORPUS:
        expected = sentence_model.encode(text)
        assert mine.encode(text, add_special_tokens=False).ids == expected, text
        assert mine.encode(text).ids == [sentence_model.bos_id(), *expected]
        assert mine.decode(expected) == text


def test_a_sentencepiece_merge_order_by_id_alone_would_be_noticed(
    sentence_model: sentencepiece.SentencePieceProcessor,
) -> None:
    metadata = _sentence_metadata(sentence_model)
    mine = read(metadata | {"tokenizer.ggml.scores": [-score for score in metadata["tokenizer.ggml.scores"]]})
    assert any(mine.encode(text, add_special_tokens=False).ids != sentence_model.encode(text) for text in CORPUS)


def test_sentencepiece_without_prefix_space_keeps_the_text(
    sentence_model: sentencepiece.SentencePieceProcessor,
) -> None:
    mine = read(_sentence_metadata(sentence_model, add_space_prefix=False, add_bos_token=False))
    ids = mine.encode("fox").ids
    assert ids == mine.encode("fox", add_special_tokens=False).ids
    assert mine.id_to_token(ids[0])[0] == "f"
    assert mine.decode(mine.encode(" fox").ids) == " fox"


def test_a_sentencepiece_vocabulary_without_scores_is_refused(
    sentence_model: sentencepiece.SentencePieceProcessor,
) -> None:
    with pytest.raises(CheckpointError, match="needs one score and one token_type a token"):
        read(_sentence_metadata(sentence_model, scores=[0.0]))

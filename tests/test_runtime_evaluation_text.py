"""From a file to ids that can be scored, and back to its characters; what is refused says why."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_bundles import tiny_tokenizer

from graphport.model_def.text_file import read_text
from graphport.runtime.evaluation_text import (
    EvaluationText,
    Excerpt,
    evaluation_text,
    require_same_tokens,
)
from graphport.runtime.tokenizer import Tokenizer

TEXT = "The cat sat on the mat.\nGröße 😀 and the end."
BYTES = Tokenizer(tiny_tokenizers.byte_level())
WITH_BOS = Tokenizer(tiny_tokenizers.with_bos(tiny_tokenizers.byte_level()))


def _text(content: str, tokenizer: Tokenizer | None = BYTES, vocab_size: int = 1000) -> EvaluationText:
    return evaluation_text(content, tokenizer, vocab_size=vocab_size, name="text.txt")


def test_ids_are_those_that_are_served_without_what_stands_before_them() -> None:
    plain, begun = _text(TEXT), _text(TEXT, WITH_BOS)
    assert plain.prefix_ids == ()
    assert plain.ids.tolist() == BYTES.encode(TEXT)
    assert [*begun.prefix_ids, *begun.ids.tolist()] == WITH_BOS.encode(TEXT)
    assert len(begun.prefix_ids) == 1


@pytest.mark.parametrize("written", ["<s>", "</s>", "<s> <s>a"])
def test_special_tokens_written_in_the_text_belong_to_it(written: str) -> None:
    text = _text(written + TEXT, WITH_BOS)
    assert [*text.prefix_ids, *text.ids.tolist()] == WITH_BOS.encode(written + TEXT)
    assert len(text.prefix_ids) == 1


def test_what_a_tokenizer_puts_after_a_text_is_left_out() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    ends = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = tiny_tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", ends)]
    )
    text = _text(TEXT, Tokenizer(tokenizer))
    assert [*text.prefix_ids, *text.ids.tolist(), ends] == tokenizer.encode(TEXT).ids


@pytest.mark.parametrize("kind", sorted(tiny_tokenizers.KINDS))
def test_excerpts_lie_in_the_text_in_order(kind: str) -> None:
    text = _text(TEXT, Tokenizer(tiny_tokenizers.KINDS[kind]()))
    for index in range(len(text.ids)):
        excerpt = text.excerpt(index)
        assert excerpt is not None
        assert excerpt.before + excerpt.token + excerpt.after in TEXT
    places = [begin for begin, _ in text.spans.tolist()]  # type: ignore[union-attr]
    assert places == sorted(places)


def test_an_excerpt_shows_the_token_and_what_stands_around_it() -> None:
    text = _text("." * 100 + " the" + "\n" * 100)
    index = text.spans.tolist().index([100, 104])  # type: ignore[union-attr]
    assert text.excerpt(index) == Excerpt(before="." * 40, token=" the", after="\n" * 20)


def test_bytes_leave_out_the_characters_that_only_unscored_tokens_stand_for() -> None:
    text = _text(TEXT)
    every = np.ones(len(text.ids), bool)
    assert text.num_bytes(every) == len(TEXT.encode())
    first = every.copy()
    first[0] = False
    begin, end = text.spans[0].tolist()  # type: ignore[index]
    assert text.num_bytes(first) == len(TEXT.encode()) - len(TEXT[begin:end].encode())
    # one of the four byte tokens of a character: the others still stand for it
    place = TEXT.index("😀")
    tokens = [i for i, span in enumerate(text.spans.tolist()) if span == [place, place + 1]]  # type: ignore[union-attr]
    assert len(tokens) > 1
    part, whole = every.copy(), every.copy()
    part[tokens[0]], whole[tokens] = False, False
    assert text.num_bytes(part) == len(TEXT.encode())
    assert text.num_bytes(whole) == len(TEXT.encode()) - 4


@given(st.text(), st.randoms(use_true_random=False))
def test_bytes_of_scored_and_unscored_tokens_never_exceed_the_text(content: str, random: object) -> None:
    text = _text("ab" + content)
    is_scored = np.array([random.random() < 0.5 for _ in text.ids], bool)  # type: ignore[attr-defined]
    total = len(content.encode()) + 2
    scored, unscored = text.num_bytes(is_scored), text.num_bytes(~is_scored)
    assert scored is not None
    assert unscored is not None
    assert 0 <= scored <= total
    assert scored + unscored >= total


def test_without_a_tokenizer_the_file_is_a_json_list_of_ids() -> None:
    text = _text(" [3, 1, 4]\n", None)
    assert text.ids.tolist() == [3, 1, 4]
    assert text.excerpt(1) is None
    assert text.num_bytes(np.ones(3, bool)) is None


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "no tokenizer, so TEXTFILE must hold a JSON list of token ids, .*; it is no JSON"),
        ("hello", "must hold a JSON list of token ids, .*; it is no JSON"),
        ('{"ids": [1, 2]}', "must hold a JSON list of token ids, .*; it holds a dict"),
        ("[]", "text.txt is empty"),
        ("[1]", "text.txt has 1 tokens; at least two are needed"),
        ("[1, 2.0]", r"holds 2.0 \(float\); ids are integers; this bundle has no tokenizer"),
        ("[1, true]", r"holds True \(bool\); ids are integers"),
        ("[1, -1]", "has id -1, outside the vocabulary: ids are 0 to 999"),
        ("[1, 1000]", "has id 1000, outside the vocabulary: ids are 0 to 999"),
    ],
)
def test_files_that_hold_no_ids_are_refused(content: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _text(content, None)


def test_texts_too_short_to_score_are_refused() -> None:
    with pytest.raises(ValueError, match=r"text.txt is empty; give a text of at least two tokens"):
        _text("")
    with pytest.raises(ValueError, match=r"text.txt has 1 tokens; at least two are needed"):
        _text("a")
    assert len(_text("a", WITH_BOS).ids) == 1  # what stands before it predicts it
    with pytest.raises(ValueError, match=r"text.txt is empty"):
        _text("", WITH_BOS)


def test_a_text_beyond_the_models_vocabulary_is_refused_with_the_place() -> None:
    tool = BYTES.encode("<tool>")[0]
    with pytest.raises(
        ValueError, match=rf"holds '<tool>' \(id {tool}, character 3\), outside .*: ids are 0 to {tool - 1}"
    ):
        _text("a b<tool> c", vocab_size=tool)
    assert _text("a b c", vocab_size=tool).ids.max() < tool


def test_files_that_are_no_text_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no file at {tmp_path}/none.txt; TEXTFILE names a text"):
        read_text(tmp_path / "none.txt", argument="TEXTFILE")
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder; TEXTFILE names one file"):
        read_text(tmp_path, argument="TEXTFILE")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("one\ntwo ö".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is no UTF-8: byte 0xF6 at position 8 \(line 2\)"):
        read_text(latin, argument="TEXTFILE")


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_text(path, argument="TEXTFILE") == "\ufeffone\r\ntwo\r\n"


def test_models_of_one_vocabulary_can_be_compared() -> None:
    other = tiny_tokenizers.byte_level()
    other.decoder = None  # how ids become text does not matter here
    require_same_tokens(_text(TEXT), BYTES, Tokenizer(other), name="other")
    require_same_tokens(_text("[1, 2]", None), None, None, name="other")


def test_models_that_read_a_text_differently_cannot_be_compared() -> None:
    text = _text(TEXT)
    with pytest.raises(ValueError, match="other has no tokenizer and the bundle has one"):
        require_same_tokens(text, BYTES, None, name="other")
    with pytest.raises(ValueError, match="other has a tokenizer and the bundle has none"):
        require_same_tokens(_text("[1, 2]", None), None, BYTES, name="other")
    with pytest.raises(
        ValueError, match=r"other has another vocabulary: \d+ tokens differ, '.+' is id \S+ in the bundle"
    ):
        require_same_tokens(text, BYTES, Tokenizer(tiny_tokenizer()), name="other")
    with pytest.raises(ValueError, match=r"other puts ids \[1\] before a text, the bundle \[\]"):
        require_same_tokens(text, BYTES, WITH_BOS, name="other")
    merges = json.loads(tiny_tokenizers.byte_level().to_str())
    merges["model"]["merges"] = merges["model"]["merges"][:5]
    fewer = Tokenizer(tiny_tokenizers.Tokenizer.from_str(json.dumps(merges)))
    with pytest.raises(ValueError, match=r"other splits the text into other tokens, first at token \d+"):
        require_same_tokens(text, BYTES, fewer, name="other")

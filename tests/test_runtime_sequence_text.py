"""The text of a sequence as its ids come: what ends it, what is held back, and what is shown at the end."""

from pathlib import Path
from typing import Any

import pytest
from test_runtime_engine import GREEDY, request
from tiny_bundles import VOCAB, tiny_tokenizer

from graphport.runtime.device_memory import HostMemory
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import Sequence
from graphport.runtime.step_outputs import StepOutputs
from graphport.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def _fed(tokenizer: Tokenizer | None, ids: list[int], **options: Any) -> Sequence:
    """A request for which the model chooses `ids` one after the other."""
    text = {} if tokenizer is None else {"text_stream": tokenizer.stream(), "num_text_ids": tokenizer.vocab_size}
    sequence = request((1,), options.pop("new", 50), options.pop("params", GREEDY), **text, **options)
    for token_id in ids:
        memory = HostMemory()
        logits = memory.tensor((1, VOCAB), "float32")
        logits.host[0, token_id] = 9
        sequence.accept(StepOutputs(memory, logits, {}, num_rows=1, vocab_size=VOCAB))
        if sequence.is_finished:
            break
    return sequence


def test_b105_any_of_several_end_ids_ends_the_text_and_is_kept_among_the_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat")
    for end in (0, 1, 282):
        sequence = _fed(tokenizer, [*ids, end, 5], end_ids=frozenset({0, 1, 282}))
        assert (sequence.text, sequence.finish_reason) == ("the cat", "stop")
        assert sequence.token_ids == [*ids, end]


def test_a_stop_string_across_tokens_cuts_the_text_and_is_never_shown(tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, stop=["t sa"])
    sequence = _fed(tokenizer, tokenizer.encode("the cat sat on"), params=params)
    assert (sequence.text, sequence.finish_reason) == ("the ca", "stop")
    assert "".join(event.text for event in sequence.events) == "the ca"
    assert len(sequence.token_ids) < len(tokenizer.encode("the cat sat on"))


@pytest.mark.parametrize("end", ["length", "stop"])
def test_what_a_stop_string_held_back_is_flushed_at_the_end(tokenizer: Tokenizer, end: str) -> None:
    ids = tokenizer.encode("the cat")
    params = SamplingParams(temperature=0.0, stop=["cat!"])
    sequence = _fed(tokenizer, [*ids, 0], params=params, new=len(ids) + (end == "stop"), end_ids=frozenset({0}))
    assert (sequence.text, sequence.finish_reason) == ("the cat", end)
    events = list(sequence.events)
    assert "".join(event.text for event in events) == "the cat"
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [end]


def test_an_unfinished_character_is_shown_as_invalid_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")[:1]
    sequence = _fed(tokenizer, [*tokenizer.encode("a"), *ids], new=1 + len(ids))
    assert [event.text for event in sequence.events] == ["a", "\ufffd"]


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size < VOCAB
    sequence = _fed(tokenizer, [*tokenizer.encode("a"), VOCAB - 1, *tokenizer.encode("b")], new=3)
    assert (sequence.text, len(sequence.token_ids)) == ("ab", 3)

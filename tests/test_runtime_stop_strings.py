"""Stop strings: the text ends where a search of the whole text would end it, however it is cut into pieces."""

import random
import time

import pytest
from tiny_tokenizers import byte_level

from graphport.runtime.stop_strings import StopStrings
from graphport.runtime.tokenizer import Tokenizer

STOP_SETS = (('",',), ("b",), ("\n\n",), ("👋",), ("aab", "ab"), ("abab",), ("abcd", "bc"), ("a",), ("aaa", "ba"), ())


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Whole-text search: the first end at which a stop is complete; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


def pushed(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    watcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, is_over = watcher.push(piece)
        shown += text
        if is_over:
            return shown + watcher.flush(), True
    return shown + watcher.flush(), False


def random_pieces(rng: random.Random, alphabet: str) -> list[str]:
    return ["".join(rng.choices(alphabet, k=rng.randrange(4))) for _ in range(rng.randrange(15))]


def test_b106_random_texts_in_random_pieces_end_where_a_whole_text_search_ends() -> None:
    rng = random.Random(106)
    for _ in range(5000):
        stops = rng.choice(STOP_SETS)
        pieces = random_pieces(rng, 'abc",\n👋')
        assert pushed(pieces, stops) == naive("".join(pieces), stops), (pieces, stops)


def test_b106_random_stops_over_two_letters_end_where_a_whole_text_search_ends() -> None:
    rng = random.Random(107)
    for _ in range(5000):
        stops = tuple("".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4)))
        pieces = random_pieces(rng, "ab")
        assert pushed(pieces, stops) == naive("".join(pieces), stops), (pieces, stops)


def test_b106_what_is_shown_is_never_taken_back_and_held_back_only_while_undecided() -> None:
    rng = random.Random(108)
    for _ in range(1000):
        stops = rng.choice(STOP_SETS)
        watcher, seen, shown = StopStrings(stops), "", ""
        for piece in random_pieces(rng, "abc"):
            text, is_over = watcher.push(piece)
            seen, shown = seen + piece, shown + text
            if is_over:
                break
            held = seen[len(shown) :]
            assert shown + held == seen
            longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
            assert len(held) == longest


@pytest.mark.parametrize(
    ("stop", "shown"),
    [('",', "ab"), ("b", "a"), ("a", ""), ('"', "ab"), ("\n\n", 'ab","c"]'), ("👋", 'ab","c"]\n\n'), ("never", None)],
)
def test_b106_a_stop_inside_or_across_tokens_cuts_the_text_just_before_it(stop: str, shown: str | None) -> None:
    tokenizer = Tokenizer(byte_level())
    text = 'ab","c"]\n\n👋 end'
    ids = tokenizer.encode(text)
    assert len(tokenizer.encode("👋")) >= 1
    stream, watcher, got, is_over = tokenizer.stream(), StopStrings((stop,)), "", False
    for id_ in ids:
        piece, is_over = watcher.push(stream.push(id_))
        got += piece
        if is_over:
            break
    if not is_over:
        piece, is_over = watcher.push(stream.flush())
        got += piece + watcher.flush()
    assert got == (text if shown is None else shown)
    assert is_over == (shown is not None)


def test_b106_overlapping_stops_never_show_a_part_of_the_longer_one() -> None:
    watcher = StopStrings(("ab", "aab"))
    assert [watcher.push(c) for c in "xaa"] == [("x", False), ("", False), ("", False)]
    assert watcher.push("b") == ("", True)
    assert naive("xaab", ("ab",)) == ("xa", True)  # what a suffix comparison with the first stop would show


def test_b106_a_stop_never_completed_is_flushed_at_the_end() -> None:
    watcher = StopStrings(("</end>",))
    assert watcher.push("text </en") == ("text ", False)
    assert watcher.flush() == "</en"
    assert watcher.flush() == ""


def test_b106_comparing_only_the_end_of_the_text_would_fail_this_suite() -> None:
    def suffix_compare(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
        text = ""
        for piece in pieces:
            text += piece
            for stop in stops:
                if text.endswith(stop):
                    return text[: -len(stop)], True
        return text, False

    assert suffix_compare(['ab","c'], ('",',)) != naive('ab","c', ('",',))


def test_without_stops_all_text_is_shown_at_once() -> None:
    watcher = StopStrings(())
    assert watcher.push("abc") == ("abc", False)
    assert watcher.flush() == ""


def test_nothing_may_follow_a_stop() -> None:
    watcher = StopStrings(("b",))
    assert watcher.push("abc") == ("a", True)
    assert watcher.flush() == ""
    with pytest.raises(ValueError, match="push nothing after a stop"):
        watcher.push("d")


@pytest.mark.parametrize("bad", ["abc", ("a", "")])
def test_stops_must_be_a_sequence_of_non_empty_strings(bad: object) -> None:
    with pytest.raises(ValueError, match="must be a sequence of non-empty strings"):
        StopStrings(bad)


def test_a_long_self_similar_stop_costs_no_more_than_its_text() -> None:
    stop, text = "a" * 5000 + "b", "a" * 60000
    start = time.process_time()
    watcher = StopStrings((stop,))
    for i in range(0, len(text), 10):
        watcher.push(text[i : i + 10])
    assert time.process_time() - start < 5
    assert len(watcher.flush()) == 5000

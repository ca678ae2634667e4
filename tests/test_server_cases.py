"""Rows of reported faults that can be seen through HTTP: ends, stop strings, sampling, characters in pieces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_bundles import VOCAB, write_tiny_bundle
from tiny_server import Reply, TinyServer, serving

END = 1
PATH = "/v1/completions"
TEXT = "the cat sat on the mat, the end of the story. "


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server") / "tiny"
    return write_tiny_bundle(folder, tokenizer=True, eos_token_ids=(END,)).folder


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[TinyServer]:
    with serving({"tiny": bundle}, max_batch=4, prefix_cache_bytes=1 << 20) as running:
        yield running


def ask(server: TinyServer, **fields: Any) -> Reply:
    return server.ask(PATH, {"model": "tiny", "prompt": "the cat", "max_tokens": 60, "temperature": 0, **fields})


def streamed(server: TinyServer, **fields: Any) -> tuple[list[str], str]:
    choices = [event["choices"][0] for event in ask(server, stream=True, **fields).events]
    return [choice["text"] for choice in choices], choices[-1]["finish_reason"]


def test_b105_every_end_id_ends_it_and_is_no_text(server: TinyServer) -> None:
    ended = ask(server, logit_bias={str(END): 100}).json["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    own = ask(server, logit_bias={"65": 100}, stop_token_ids=[65]).json["choices"][0]
    assert (own["text"], own["finish_reason"]) == ("", "stop")
    going_on = ask(server, logit_bias={str(END): 100}, ignore_eos=True, max_tokens=5).json
    assert going_on["choices"][0]["finish_reason"] == "length"
    assert going_on["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ('ab","c', '",', "ab"),
        ('ab","c', "b", "a"),
        ("x\n\ny", "\n\n", "x"),
        ("a😀b", "😀", "a"),
        ("aaab", ["aab", "ab"], "a"),
        ("abc", "a", ""),
        ("abcab", "abx", "abcab"),
    ],
)
def test_b106_stop_strings_are_found_in_the_text_and_never_shown(
    text: str, stop: str | list[str], expected: str, server: TinyServer
) -> None:
    forced = text.replace("\n", "\\n")
    assert ask(server, regex=forced, stop=stop).text == expected
    pieces, reason = streamed(server, regex=forced, stop=stop)
    assert ("".join(pieces), reason) == (expected, "stop")


def test_b118_characters_that_span_tokens_come_whole(server: TinyServer) -> None:
    text = "é👨‍👩‍👧🇫🇷한नम"
    pieces, _ = streamed(server, regex=text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 5
    assert ask(server, regex=text).json["usage"]["completion_tokens"] > len(pieces)  # the characters did span tokens


def test_b110_b111_b113_filters_at_their_bounds(server: TinyServer) -> None:
    greedy = ask(server, max_tokens=12).text
    for fields in ({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-8}, {"min_p": 1}, {"temperature": 1e-8}):
        assert ask(server, **{"temperature": 1.3, "seed": 4, "max_tokens": 12, **fields}).text == greedy, fields
    plain = ask(server, temperature=1.3, seed=4, max_tokens=12).text
    assert plain != greedy
    for fields in ({"top_k": 0}, {"top_k": VOCAB + 5}, {"top_p": 1}, {"top_k": None, "min_p": 0}):
        assert ask(server, temperature=1.3, seed=4, max_tokens=12, **fields).text == plain, fields


def test_b114_b115_a_seed_repeats_and_none_differs(server: TinyServer) -> None:
    seeded = [ask(server, temperature=1.5, seed=seed, max_tokens=12).text for seed in (42, 43, 42)]
    assert seeded[0] == seeded[2] != seeded[1]
    assert len({ask(server, temperature=1.5, max_tokens=12).text for _ in range(5)}) > 1


def test_b102_a_beginning_that_is_known_changes_nothing(bundle: Path, server: TinyServer) -> None:
    prompts = [TEXT, TEXT[:30] + "rain", TEXT + "rain", TEXT[:20], TEXT]
    with serving({"tiny": bundle}) as cold:
        expected = [ask(cold, prompt=prompt, max_tokens=20).json["choices"] for prompt in prompts]
        assert cold.decoder.lm.statistics.prefix_cache is None
    assert [ask(server, prompt=prompt, max_tokens=20).json["choices"] for prompt in prompts] == expected
    statistics = server.decoder.lm.statistics.prefix_cache
    assert statistics is not None
    assert statistics.num_hits >= 2

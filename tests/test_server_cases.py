"""Rows of reported faults that can be seen through HTTP, beside neighbours: ends, sampling, turns, characters."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_bundles import VOCAB, write_manifest, write_tiny_bundle
from tiny_server import Reply, TinyServer, serving, wait_until

from graphport.model_def.signature import CHAT_TEMPLATE_FILE
from graphport.runtime import SamplingParams, load

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


@pytest.fixture(scope="module", autouse=True)
def _neighbours(server: TinyServer) -> Iterator[None]:
    """Others who ask all the time, so that every request here runs in a batch."""
    is_over = threading.Event()

    def talk(number: int) -> None:
        body = {"model": "tiny", "prompt": TEXT[: 5 + 20 * number], "max_tokens": 50, "temperature": 1.5}
        while not is_over.is_set():
            assert ask(server, **body, ignore_eos=True).status == 200

    with ThreadPoolExecutor(2) as threads:
        talking = [threads.submit(talk, number) for number in range(2)]
        wait_until(lambda: server.active == 2, "both run")
        yield
        is_over.set()
        for each in talking:
            each.result()


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


def test_b118_the_bytes_of_a_characters_parts_join_to_it(server: TinyServer) -> None:
    text = "é👨‍👩‍👧 नम"
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "regex": text, "logprobs": True}
    content = server.ask("/v1/chat/completions", asked | {"top_logprobs": 3}).json["choices"][0]["logprobs"]["content"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == text
    assert any(bytes(each["bytes"]).decode(errors="replace") == "\ufffd" for each in content)  # some are parts


def test_b110_b111_b113_filters_at_their_bounds(server: TinyServer) -> None:
    greedy = ask(server, max_tokens=12).text
    for fields in ({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-8}, {"min_p": 1}, {"temperature": 1e-8}):
        assert ask(server, **{"temperature": 1.3, "seed": 4, "max_tokens": 12, **fields}).text == greedy, fields
    plain = ask(server, temperature=1.3, seed=4, max_tokens=12).text
    assert plain != greedy
    for fields in ({"top_k": 0}, {"top_k": VOCAB + 5}, {"top_p": 1}, {"top_k": None, "min_p": 0}):
        assert ask(server, temperature=1.3, seed=4, max_tokens=12, **fields).text == plain, fields


def test_b108_a_repetition_penalty_is_that_of_the_library(bundle: Path, server: TinyServer) -> None:
    fields: dict[str, Any] = {"repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": -0.3}
    with load(bundle, threads=1) as lm:
        (expected,) = lm.generate(["the cat"], SamplingParams(max_new_tokens=30, temperature=0.0, **fields))
        (plain,) = lm.generate(["the cat"], SamplingParams(max_new_tokens=30, temperature=0.0))
    assert ask(server, max_tokens=30, **fields).text == expected.text != plain.text
    assert len(set(expected.token_ids)) > len(set(plain.token_ids))


def test_b112_both_filters_apply(server: TinyServer) -> None:
    by_k, by_p = {"top_k": 4}, {"top_p": 0.5}

    def drawn(**fields: Any) -> list[str]:
        """First tokens, one a seed: a seed draws the same from what is left of one row."""
        asked = {"max_tokens": 1, "temperature": 1.6, **fields}
        return [ask(server, seed=seed, **asked).text for seed in range(25)]

    k, p, both = drawn(**by_k), drawn(**by_p), drawn(**by_k, **by_p)
    assert len(set(k)) <= 4
    assert k != p
    assert set(both) <= set(k) & set(p)
    assert both not in (k, p)


def test_b100_b121_a_second_turn_is_the_one_shot_run_of_the_templates_ids(bundle: Path, server: TinyServer) -> None:
    def chat(*turns: str) -> Reply:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        return server.ask("/v1/chat/completions", asked)

    first = chat("<bos>the cat").text  # a text that looks like a special token is rendered as it is
    second = chat("<bos>the cat", first, "and then?")
    with load(bundle, threads=1) as lm:
        assert lm.tokenizer is not None
        turns = [("user", "<bos>the cat"), ("assistant", first), ("user", "and then?")]
        ids = lm.tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in turns])
        (expected,) = lm.generate([ids], SamplingParams(max_new_tokens=12, temperature=0.0))
        by_ids = ask(server, prompt=ids, max_tokens=12)
    assert second.text == expected.text == by_ids.text
    assert second.json["usage"]["prompt_tokens"] == len(ids)


def test_b101_after_callers_who_leave_and_fail_it_answers_as_a_fresh_one(bundle: Path, server: TinyServer) -> None:
    with server.post(PATH, {"model": "tiny", "prompt": TEXT, "max_tokens": 60, "stream": True}) as left:
        assert left.recv(10)
    assert ask(server, prompt=TEXT, regex="abc", bad_words=["a", "abc"]).status == 400  # fails at its first token
    with load(bundle, threads=1) as lm:
        (expected,) = lm.generate([TEXT], SamplingParams(max_new_tokens=20, temperature=0.0))
    assert ask(server, prompt=TEXT, max_tokens=20).text == expected.text


def test_b120_spaces_and_line_ends_come_as_they_are(server: TinyServer) -> None:
    for text in (" the cat  sat", "\n\n the\n", "  "):
        forced = text.replace("\n", "\\n")
        assert ask(server, regex=forced).text == text
        assert "".join(streamed(server, regex=forced)[0]) == text


def test_b123_a_template_that_breaks_out_or_never_ends_fails_alone(tmp_path: Path) -> None:
    folders = {}
    for name, template in (
        ("tiny", "{{ messages[0].content }}"),
        ("breaks", "{{ messages.__class__.__mro__ }}"),
        ("loops", "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"),
    ):
        folders[name] = write_tiny_bundle(tmp_path / name, tokenizer=True).folder
        (folders[name] / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
        write_manifest(folders[name])
    with serving(folders) as running:
        asked = {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}], "max_tokens": 1}
        for name in ("breaks", "loops"):
            refused = running.ask("/v1/chat/completions", asked | {"model": name})
            assert (refused.status, refused.json["error"]["param"]) == (400, "messages")
            assert "the chat template failed" in refused.json["error"]["message"]
        rendered = running.ask("/v1/chat/completions", asked | {"model": "tiny"})
        direct = running.ask(PATH, {"model": "tiny", "prompt": "{{ 7 * 7 }}", "max_tokens": 1})
    assert rendered.json["usage"] == direct.json["usage"]  # a message is data, and not a template


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

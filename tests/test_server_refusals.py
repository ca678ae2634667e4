"""What a server refuses: each bad field by name, bad bodies, missing keys, unknown paths, a full queue."""

import gzip
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tiny_bundles import MAX_LENGTH, VOCAB, write_tiny_bundle
from tiny_server import TinyServer, serving, wait_until

from graphport.runtime.server_settings import ServerSettings, read_api_keys

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = [{"role": "user", "content": "the cat"}]
KEYS = ("a-key-of-the-first-user", "a-key-of-the-second-user")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("server") / "tiny", tokenizer=True).folder


@pytest.fixture(scope="module")
def server(bundle: Path) -> Any:
    with serving({"tiny": bundle}, ServerSettings(max_queue=4), max_batch=2) as running:
        yield running


BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "0 \\(greedy\\) or a finite positive number"),
    ({"temperature": "hot"}, "temperature", "not str"),
    ({"top_p": 1.5}, "top_p", "from 0 .* to 1"),
    ({"top_k": -1}, "top_k", "positive integer"),
    ({"min_p": 2}, "min_p", "from 0"),
    ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": True}, "frequency_penalty", "from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.001"),
    ({"seed": -1}, "seed", "from 0"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"n": 0}, "n", "integer from 1"),
    ({"n": 3}, "n", "max_batch"),
    ({"n": 100}, "n", "places for 6"),
    ({"max_tokens": -1}, "max_tokens", "integer from 0"),
    ({"max_tokens": MAX_LENGTH}, "max_tokens", "room for 128 tokens"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": [1]}, "stop", "string or a sequence of strings"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", "outside the vocabulary"),
    ({"stop_token_ids": "x"}, "stop_token_ids", "sequence of token ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "keys are token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", "outside the vocabulary"),
    ({"logit_bias": {"1": 2, "01": 3}}, "logit_bias", "the id 1 twice, the second time as '01'"),
    ({"logit_bias": []}, "logit_bias", "must be an object"),
    ({"bad_words": [" "]}, "bad_words", "without a character"),
    ({"ignore_eos": 1}, "ignore_eos", "True or False"),
    ({"regex": "("}, "regex", "cannot be followed"),
    ({"grammar": "start: ("}, "grammar", "cannot be followed"),
    ({"regex": "a", "grammar": "start: /a/"}, "grammar", "exclude each other"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what", "Unrecognized"),
    ({"timeout": 0}, "timeout", "above 0"),
    ({"timeout": 1e9}, "timeout", "below 1e9"),
    ({"model": None}, "model", "is needed"),
    ({"model": 3}, "model", "a string, not a number"),
    ({"colour": "red"}, "colour", "Unrecognized request argument supplied: colour"),
    ({"\ud800": 1}, "\ud800", "Unrecognized"),
    ({"x" * 100_000: 1}, "x{97} [.]{3} x{97}", "Unrecognized"),
    (
        {"temperature": "x" * 100_000},
        "temperature",
        "^temperature='x+ ... x+' must be 0 .* finite positive number, not str",
    ),
    ({"bad_words": ["x"] * 1025}, "bad_words", "at most 1024 strings; got 1025"),
]
IN_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "is needed"),
    ({"prompt": 5}, "prompt", "a string, a list of strings"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": ["a", 1]}, "prompt", "not a mixture"),
    ({"prompt": [[1, "x"]]}, "prompt", "ids are integers"),
    ({"prompt": [VOCAB]}, "prompt", "outside the vocabulary"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    ({"prompt": [5] * (MAX_LENGTH + 1)}, "prompt", "has 129 tokens; tiny has room for 128"),
    ({"prompt": ["x"] * 7}, "prompt", "7 sequences at once"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"logprobs": True}, "logprobs", "whole number"),
    ({"best_of": 2}, "best_of", "nothing is ranked"),
    ({"echo": True}, "echo", "left out or false"),
    ({"suffix": "x"}, "suffix", "left out"),
    ({"response_format": {"type": "text"}}, "response_format", "Unrecognized"),
]
IN_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "at least one message"),
    ({"messages": "hello"}, "messages", "must be a list"),
    ({"messages": ["hello"]}, "messages\\[0\\]", "must be an object"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages\\[0\\].role", "one of system"),
    ({"messages": [{"role": "user"}]}, "messages\\[0\\].content", "is needed"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages\\[0\\].content", "list of text parts"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages\\[0\\].content\\[0\\].type",
        "must be text",
    ),
    ({"messages": [{**CHAT[0], "mood": "good"}]}, "messages\\[0\\].mood", "Unrecognized"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages\\[0\\].tool_calls\\[0\\].function.arguments",
        "JSON text",
    ),
    ({"messages": [{"role": "user", "content": "the " * 200}]}, "messages", "room for 128 tokens"),
    ({"tools": [{"type": "function"}]}, "tools\\[0\\].function", "is needed"),
    ({"tools": [{"type": "retrieval"}]}, "tools\\[0\\].type", "must be function"),
    ({"tool_choice": "required", "tools": [{"type": "x"}]}, "tool_choice", "none or auto"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"logprobs": 3}, "logprobs", "true or false"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "one of them"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is needed"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        "response_format",
        "cannot be followed",
    ),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", "exclude each other"),
    ({"functions": []}, "functions", "not supported"),
    ({"modalities": ["audio"]}, "modalities", 'left out or \\["text"\\]'),
]
CASES = [
    *((COMPLETIONS, *case) for case in (*BOTH, *IN_COMPLETIONS)),
    *((CHATS, *case) for case in (*BOTH, *IN_CHATS)),
]


@pytest.mark.parametrize(("path", "fields", "param", "why"), CASES, ids=range(len(CASES)))
def test_a_bad_field_is_refused_by_name_with_what_is_allowed(
    path: str, fields: dict[str, Any], param: str, why: str, server: TinyServer
) -> None:
    body = {"model": "tiny", **({"prompt": "x"} if path == COMPLETIONS else {"messages": CHAT}), **fields}
    reply = server.ask(path, body)
    error = reply.json["error"]
    assert reply.status == 400, error
    with pytest.raises(ValueError, match=f"^({param})$"):
        raise ValueError(error["param"])
    with pytest.raises(ValueError, match=why):
        raise ValueError(error["message"])
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert len(error["message"]) <= 400
    assert server.places == 0


def test_a_wrong_type_and_a_wrong_value_have_their_own_codes(server: TinyServer) -> None:
    for fields, code in (
        ({"temperature": "1"}, "invalid_type"),
        ({"temperature": -1}, "invalid_value"),
        ({"stop": [1]}, "invalid_type"),
        ({"stop": [""]}, "invalid_value"),
        ({"max_tokens": 1.5}, "invalid_type"),
        ({"prompt": [[1, "x"]]}, "invalid_type"),
    ):
        error = server.ask(COMPLETIONS, {"model": "tiny", "prompt": "x", **fields}).json["error"]
        assert (error["param"], error["code"]) == (next(iter(fields)), code)


def test_null_is_a_field_left_out_and_ignored_fields_are_told(server: TinyServer) -> None:
    nothing = dict.fromkeys(("n", "stop", "seed", "logprobs", "suffix", "echo", "stream", "colour", "timeout"))
    reply = server.ask(COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 2, **nothing})
    assert reply.status == 200
    assert "x-graphport-ignored" not in reply.headers
    reply = server.ask(COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 2, "user": "me", "store": True})
    assert reply.headers["x-graphport-ignored"] == "user, store"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b'{"model": "tiny", "prompt": "\xff"}', "no UTF-8"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": NaN}', "NaN is no JSON number"),
        (b'{"x": ' + b"9" * 5000 + b"}", "x holds a whole number of more than 640 digits"),
        (b'{"y": {"x": [[1, ' + b"9" * 641 + b"]]}}", "x holds a whole number of more than 640 digits"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 64"),
        (b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64"),
        (b"\xef\xbb\xbf{}", "no JSON"),
        (b'{"n": 1, "x": [{"y": 1, "z": 2, "y": 1}]}', "the field 'y' twice"),
    ],
    ids=["empty", "cut", "utf-8", "list", "nan", "digits", "digits in lists", "very deep", "deep", "mark", "twice"],
)
def test_a_bad_body_is_refused(raw: bytes, why: str, server: TinyServer) -> None:
    reply = server.ask(CHATS, raw=raw)
    assert (reply.status, reply.json["error"]["code"]) == (400, "bad_body")
    assert why in reply.json["error"]["message"]


def test_a_deep_value_within_the_limit_is_no_fault(server: TinyServer) -> None:
    deep: Any = "x"
    for _ in range(60):
        deep = [deep]
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "metadata": {"a": deep, "b": [[]] * 200}}
    assert server.ask(COMPLETIONS, body).status == 200


def test_a_form_of_another_site_is_refused(server: TinyServer) -> None:
    reply = server.ask(COMPLETIONS, raw=b'{"model": "tiny"}', content_type="text/plain")
    assert (reply.status, reply.json["error"]["code"]) == (415, "bad_content_type")
    assert server.ask(COMPLETIONS, raw=b"{}", content_type="application/json; charset=utf-8").status == 400
    packed = server.ask(COMPLETIONS, raw=gzip.compress(b"{}"), content_encoding="gzip")
    assert (packed.status, packed.json["error"]["code"]) == (415, "bad_content_encoding")


def test_unknown_paths_and_methods_are_told(server: TinyServer) -> None:
    assert server.ask("/v2/x").json["error"]["code"] == "unknown_path"
    wrong = server.ask(COMPLETIONS)
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert server.ask("/v1/models", {}).status == 405
    unknown = server.ask(COMPLETIONS, {"model": "\ud800", "prompt": "x"})
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


def test_a_body_of_ten_megabytes_is_refused_when_it_has_come(server: TinyServer) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x" * 10_000_000}).encode()
    reply = server.ask(COMPLETIONS, raw=body)
    assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")
    assert "4194304 bytes" in reply.json["error"]["message"]
    assert server.ask("/health").status == 200


def test_a_full_queue_gives_429_with_a_time_to_come_back(bundle: Path) -> None:
    with serving({"tiny": bundle}, ServerSettings(max_queue=1), max_batch=1) as server:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 120, "ignore_eos": True, "stream": True}
        with server.decoder.lm._turns._turn:  # nothing runs while the test looks
            running = [server.post(COMPLETIONS, body) for _ in range(2)]
            wait_until(lambda: server.places == 2, "both are in")
            refused = server.ask(COMPLETIONS, body)
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json["error"]["type"] == "rate_limit_error"
        for connection in running:
            with connection, connection.makefile("rb") as answer:
                assert b" 200 " in answer.readline()
        wait_until(lambda: server.places == 0, "their places are free again")
        assert server.ask(COMPLETIONS, body | {"max_tokens": 1}).status == 200


def test_keys_are_asked_for_where_there_are_some(bundle: Path) -> None:
    with serving({"tiny": bundle}, ServerSettings(api_keys=KEYS)) as server:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEYS[0]}, {"authorization": "Bearer "}):
            refused = server.ask(COMPLETIONS, body, **given)
            assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
            assert server.ask("/v1/models", **given).status == 401
        for key in KEYS:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError, match="give an API key"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0][:-1], max_retries=0).models.list()
        assert server.ask("/health").status == server.ask("/metrics").status == 200


def test_settings_are_checked_and_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# for the test\n\n{KEYS[0]}\n  {KEYS[1]}  \n")
    assert read_api_keys(path) == KEYS
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no API key"):
        read_api_keys(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="no UTF-8"):
        read_api_keys(path)
    with pytest.raises(ValueError, match="shorter than 16"):
        ServerSettings(api_keys=("short",))
    with pytest.raises(ValueError, match="max_queue must be a whole number from 0; got -1"):
        ServerSettings(max_queue=-1)
    with pytest.raises(TypeError, match="max_body_bytes must be a whole number"):
        ServerSettings(max_body_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grace must be a number of seconds above 0"):
        ServerSettings(grace=float("nan"))
    with pytest.raises(TypeError, match="request_timeout must be a number of seconds"):
        ServerSettings(request_timeout="1")  # type: ignore[arg-type]
    assert KEYS[0] not in repr(ServerSettings(api_keys=KEYS))

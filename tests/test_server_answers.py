"""What a server answers: the same texts as the library, whole and streamed, by the official client and by raw HTTP."""

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_bundles import write_manifest, write_tiny_bundle
from tiny_server import TinyServer, serving, wait_until

from graphport.model_def.signature import CHAT_TEMPLATE_FILE
from graphport.runtime import SamplingParams, load
from graphport.runtime.server_log import JsonLines

END = 1
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<{{ call.function.arguments.city }}>{% endfor %}\n{% endfor %}"
)
CHAT = [{"role": "user", "content": "the cat"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server") / "tiny"
    write_tiny_bundle(folder, tokenizer=True, eos_token_ids=(END,))
    return folder


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    tools = tmp_path_factory.mktemp("tools") / "tools"
    write_tiny_bundle(tools, tokenizer=True)
    (tools / CHAT_TEMPLATE_FILE).write_text(TEMPLATE, encoding="utf-8")
    write_manifest(tools, eos_token_ids=(END,))
    with serving({"tiny": bundle, "tools": tools}, max_batch=4, prefix_cache_bytes=1 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TinyServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Any:
    with load(bundle, threads=1, max_batch=4) as lm:
        yield lm


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "the story", "max_tokens": 12, "temperature": 0, **fields}


def test_a_completion_is_what_the_library_gives(client: openai.OpenAI, model: Any) -> None:
    options: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": 7}
    (expected,) = model.generate(["the story"], SamplingParams(max_new_tokens=12, **options))
    got = client.completions.create(model="tiny", prompt="the story", max_tokens=12, **options)
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == expected.finish_reason
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert got.usage.completion_tokens == len(expected.token_ids)
    other = client.completions.create(model="tiny", prompt="the story", max_tokens=12, **(options | {"seed": 8}))
    assert other.choices[0].text != expected.text
    ids = client.completions.create(model="tiny", prompt=list(expected.prompt_token_ids), max_tokens=12, **options)
    assert ids.choices[0].text == expected.text


def test_streams_join_to_the_whole_answer_and_tell_usage(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "temperature": 1.2, "seed": 3}
    whole = client.completions.create(prompt="the story", **options)
    chunks = list(
        client.completions.create(prompt="the story", stream=True, stream_options={"include_usage": True}, **options)
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len(chunks) > 3


def test_a_chat_is_rendered_by_the_template_whole_and_streamed(client: openai.OpenAI, model: Any) -> None:
    ids = model.tokenizer.apply_chat_template(CHAT)
    (expected,) = model.generate([ids], SamplingParams(max_new_tokens=15, temperature=0.0))
    whole = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=15, temperature=0)
    assert whole.choices[0].message.content == expected.text
    chunks = list(
        client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=15, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


def test_parts_of_text_are_joined_and_the_developer_is_the_system(server: TinyServer, model: Any) -> None:
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    fields = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    got = server.ask("/v1/chat/completions", {**fields, "messages": [*parts, *CHAT]})
    ids = model.tokenizer.apply_chat_template([{"role": "system", "content": "ab"}, *CHAT])
    (expected,) = model.generate([ids], SamplingParams(max_new_tokens=8, temperature=0.0))
    assert got.text == expected.text


def test_tools_reach_the_template_or_are_refused_where_it_would_pass_them_over(server: TinyServer) -> None:
    fields = {"model": "tools", "max_tokens": 1}
    counts = []
    for more in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}):
        got = server.ask("/v1/chat/completions", {**fields, "messages": CHAT, **more})
        counts.append(got.json["usage"]["prompt_tokens"])
    assert counts[1] > counts[0] == counts[2]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "1", "content": "sun"})
    assert server.ask("/v1/chat/completions", {**fields, "messages": turns}).status == 200
    refused = server.ask("/v1/chat/completions", {"model": "tiny", "messages": CHAT, "tools": [TOOL]})
    assert refused.status == 400
    assert refused.json["error"]["param"] == "tools"


def test_n_samples_of_several_prompts_have_their_own_indices(client: openai.OpenAI, model: Any) -> None:
    params = SamplingParams(max_new_tokens=10, temperature=1.3, seed=5, n=2)
    outputs = model.generate(["the cat", "the mat"], params)
    expected = [sample.text for output in outputs for sample in output.samples]
    options: dict[str, Any] = {"model": "tiny", "prompt": ["the cat", "the mat"], "max_tokens": 10}
    options |= {"temperature": 1.3, "seed": 5, "n": 2}
    whole = client.completions.create(**options)
    assert [choice.text for choice in whole.choices] == expected
    texts = [""] * 4
    for chunk in client.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert len(set(texts)) == 4


def test_stop_strings_cut_the_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "the story", "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[5:8]
    cut = client.completions.create(stop=[stop, "never there"], **options).choices[0]
    assert (cut.text, cut.finish_reason) == (text.split(stop)[0], "stop")
    streamed = client.completions.create(stop=stop, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text


def test_log_probabilities_are_the_librarys(client: openai.OpenAI, model: Any) -> None:
    (expected,) = model.generate(["the cat"], SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=3))
    got = client.completions.create(model="tiny", prompt="the cat", max_tokens=6, temperature=0, logprobs=3)
    logprobs = got.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([sample.logprob for sample in expected.logprobs])
    assert [len(top) for top in logprobs.top_logprobs or ()] == [3] * 6
    ids = model.tokenizer.apply_chat_template(CHAT)
    (expected,) = model.generate([ids], SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=2))
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert [each.logprob for each in content] == pytest.approx([sample.logprob for sample in expected.logprobs])
    assert [each.top_logprobs[0].token for each in content] == [each.token for each in content]  # greedy
    assert all(math.isfinite(top.logprob) for each in content for top in each.top_logprobs)
    streamed = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=6, temperature=0, logprobs=True, stream=True
    )
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    found = [each.logprob for piece in pieces if piece for each in piece.content or ()]
    assert found == pytest.approx([each.logprob for each in content])


def test_response_formats_are_followed(client: openai.OpenAI, server: TinyServer) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["color", "count"],
        "additionalProperties": False,
    }
    shape: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    for seed in range(3):
        got = client.chat.completions.create(model="tiny", messages=CHAT, response_format=shape, seed=seed)
        assert set(json.loads(got.choices[0].message.content or "")) == {"color", "count"}
        assert got.choices[0].finish_reason == "stop"
    free = server.ask(
        "/v1/chat/completions",
        {"model": "tiny", "messages": CHAT, "response_format": {"type": "json_object"}, "seed": 1, "max_tokens": 20},
    )
    assert free.text.startswith("{")
    assert server.ask("/v1/completions", completion(regex="[0-9]{3}")).text.isdigit()


def test_concurrent_requests_get_what_each_gets_alone(server: TinyServer) -> None:
    bodies = [
        completion(
            prompt="the cat sat on the mat "[: 3 + i], seed=i, temperature=i % 3 * 0.7, max_tokens=4 + i, n=1 + i % 2
        )
        for i in range(20)
    ]
    alone = [server.ask("/v1/completions", body).json["choices"] for body in bodies]
    with ThreadPoolExecutor(10) as threads:
        together = list(threads.map(lambda body: server.ask("/v1/completions", body).json["choices"], bodies))
    assert together == alone
    assert len({json.dumps(each) for each in alone}) > 15  # they can be told apart


def test_models_are_listed_and_others_are_not_found(client: openai.OpenAI, server: TinyServer) -> None:
    assert [each.id for each in client.models.list()] == ["tiny", "tools"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert server.ask("/v1/models/tiny").json["capabilities"] == ["completions", "chat"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here; there is tiny, tools"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_health_readiness_and_the_page(server: TinyServer) -> None:
    assert server.ask("/health").json == {"status": "ok"}
    assert server.ask("/ready").json == {"status": "ready"}
    page = server.ask("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert b"//" not in page.body.replace(b"// The records", b"")  # no address: nothing comes from outside


def test_metrics_count_tokens_requests_and_reuse(server: TinyServer) -> None:
    def numbers() -> dict[str, float]:
        text = server.ask("/metrics").body.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        labels = [(sample, sample.labels.get("model", "tiny")) for sample in samples]
        found: dict[str, float] = {}
        for sample, name in labels:
            if name == "tiny":
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    prompt = "the cat sat on the mat, the end of the story. the cat sat on the mat, the end of"
    server.ask("/v1/completions", completion(prompt=prompt))
    before = numbers()
    reply = server.ask("/v1/completions", completion(prompt=prompt))
    after = numbers()
    grown = {name: after[name] - before[name] for name in after if name in before}
    assert grown["graphport_generated_tokens_total"] == reply.json["usage"]["completion_tokens"]
    assert grown["graphport_prefix_cache_hits_total"] == 1
    reused = grown["graphport_prefix_cache_reused_tokens_total"]
    assert reused > 0
    assert grown["graphport_prompt_tokens_total"] == reply.json["usage"]["prompt_tokens"] - reused
    assert grown["graphport_requests_total"] == 2  # with the look at /metrics before
    assert grown["graphport_time_to_first_token_seconds_count"] == 1
    assert after["graphport_batch_size"] == after["graphport_sequences_waiting"] == after["graphport_places_taken"] == 0


def test_the_log_has_a_line_a_request_and_no_text_of_it(server: TinyServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="graphport.runtime.server_app"):
        reply = server.ask("/v1/completions", completion(prompt="my secret: the cat"))
        server.ask("/v1/completions", completion(prompt="my secret", stop=["my secret", 4]))
        server.ask("/v1/completions", completion() | {"my secret": 1})
        wait_until(lambda: len(caplog.records) == 3, "a line for each request, which comes after its answer")
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    done, refused, unknown = (line for line in lines if line["event"] == "request")
    assert (done["route"], done["status"], done["outcome"]) == ("/v1/completions", 200, "done")
    assert (done["model"], done["new_tokens"]) == ("tiny", reply.json["usage"]["completion_tokens"])
    assert done["request_id"] == reply.headers["x-request-id"]
    assert (refused["status"], refused["param"], refused["outcome"]) == (400, "stop", "refused")
    assert (unknown["code"], unknown.get("param")) == ("unknown_parameter", None)
    assert "secret" not in json.dumps(lines)


def test_a_log_line_of_a_failure_says_where_and_not_what() -> None:
    try:
        raise ValueError("my secret")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failure in %s", ("1",), (ValueError, error, None))
    line = json.loads(JsonLines().format(record))
    assert (line["error"], line["event"]) == ("ValueError", "failure in 1")
    assert "test_server_answers" in line["at"][0]
    assert "secret" not in json.dumps(line)

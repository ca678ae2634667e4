"""`/v1/embeddings`: the encoder's own vectors, a place for every text, callers that leave, an end in between."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tiny_encoders import TEXTS, make_encoder, save_sentence_folder
from tiny_server import TinyServer, serving, wait_until

from graphport.export import export
from graphport.runtime import load_encoder
from graphport.runtime.encoder import Encoder, require_finite
from graphport.runtime.server_models import HostedEncoder
from graphport.runtime.server_settings import ServerSettings

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embeddings")
    export(
        save_sentence_folder(folder / "source", make_encoder("bert")), folder / "bert", precision="fp32", verify=False
    )
    return folder / "bert"


class Held:
    """Encoders that wait before they encode. `begun`: the texts of each call that has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.begun: list[int] = []
        encode = Encoder.encode

        def held(encoder: Encoder, rows: Any) -> Any:
            self.begun.append(len(rows))
            self.may_go_on.wait(30)
            return encode(encoder, rows)

        monkeypatch.setattr(Encoder, "encode", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def texts(count: int) -> dict[str, Any]:
    return {"model": "bert", "input": ["x"] * count}


def served(server: TinyServer) -> HostedEncoder:
    return server.server._models.encoder("bert")


def test_embeddings_are_the_encoders(bundle: Path) -> None:
    expected = load_encoder(bundle, threads=1).encode(TEXTS)
    with serving({"bert": bundle}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        got = client.embeddings.create(model="bert", input=list(TEXTS))  # as base64: the client's own choice
        assert np.array_equal(np.array([each.embedding for each in got.data], np.float32), expected)
        floats = server.ask(PATH, {"model": "bert", "input": TEXTS[0], "encoding_format": "float"})
        assert np.allclose(floats.json["data"][0]["embedding"], expected[0], atol=1e-6)
        assert floats.json["usage"]["prompt_tokens"] > 0
        for fields, status, param in (
            ({"input": "the " * 300}, 400, "input"),
            ({"input": []}, 400, "input"),
            ({"input": "x", "dimensions": 3}, 400, "dimensions"),
            ({"input": "x", "encoding_format": "hex"}, 400, "encoding_format"),
            ({"input": "x", "colour": 1}, 400, "colour"),
            ({"input": [[1, 99999]]}, 400, "input"),
        ):
            refused = server.ask(PATH, {"model": "bert", **fields})
            assert (refused.status, refused.json["error"]["param"]) == (status, param)
        wrong = server.ask("/v1/completions", {"model": "bert", "prompt": "x"})
        assert (wrong.status, wrong.json["error"]["code"]) == (400, "wrong_model")


def test_each_text_takes_a_place(bundle: Path, held: Held) -> None:
    with (
        serving({"bert": bundle}, ServerSettings(max_queue=3), max_batch=2) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        never = server.ask(PATH, texts(6))
        assert (never.status, never.json["error"]["code"]) == (400, "too_many_sequences")
        assert "input asks for 6 sequences at once; bert has places for 5" in never.json["error"]["message"]
        running = threads.submit(server.ask, PATH, texts(3))
        wait_until(lambda: held.begun == [3], "it runs")
        full = server.ask(PATH, texts(3))
        assert (full.status, full.json["error"]["code"]) == (429, "queue_full")
        assert full.headers["retry-after"]
        held.may_go_on.set()
        assert running.result().status == 200
        assert server.ask(PATH, texts(5)).status == 200
        assert served(server).places.num_taken == 0


def test_texts_of_a_caller_who_leaves_the_queue_are_never_run(bundle: Path, held: Held) -> None:
    with serving({"bert": bundle}) as server:
        running = server.post(PATH, texts(1))
        wait_until(lambda: held.begun == [1], "it runs")
        waiting = server.post(PATH, texts(2))
        wait_until(lambda: served(server).places.num_taken == 3, "the second waits")
        waiting.close()
        wait_until(lambda: served(server).places.num_taken == 1, "it is gone")
        running.close()
        wait_until(lambda: served(server).places.num_taken == 0, "both are gone")
        held.may_go_on.set()
        assert server.ask(PATH, texts(3)).status == 200
    assert held.begun == [1, 3]


def test_what_waits_at_the_end_is_told_and_not_run(bundle: Path, held: Held) -> None:
    settings = ServerSettings(grace=0.2)
    with serving({"bert": bundle}, settings) as server, ThreadPoolExecutor(2) as threads:
        running = threads.submit(server.ask, PATH, texts(1))
        wait_until(lambda: held.begun == [1], "it runs")
        waiting = threads.submit(server.ask, PATH, texts(2))
        wait_until(lambda: served(server).places.num_taken == 3, "the second waits")
        server.server.begin_to_end()
        reply = waiting.result()
        assert (reply.status, reply.json["error"]["code"]) == (503, "draining")
        held.may_go_on.set()
        assert running.result().status == 200
    assert held.begun == [1]


def test_an_overflow_is_told_as_one(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "encode", lambda *_: require_finite(np.full((1, 2), np.nan, np.float32)))
    with serving({"bert": bundle}) as server:
        reply = server.ask(PATH, texts(1))
    assert (reply.status, reply.json["error"]["code"]) == (500, "model_overflow")
    assert "bf16" in reply.json["error"]["message"]

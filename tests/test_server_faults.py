"""Callers that leave, stall, send rubbish or ask too long; a server that is told to end: the others are served."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_bundles import write_tiny_bundle
from tiny_server import TinyServer, serving, wait_until

from graphport.runtime.sampling import NonFiniteLogitsError
from graphport.runtime.server_settings import ServerSettings

COMPLETIONS = "/v1/completions"
LONG = {"model": "tiny", "prompt": "the story", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
SHORT = {"model": "tiny", "prompt": "the cat", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("server") / "tiny", tokenizer=True).folder


@pytest.fixture
def server(bundle: Path) -> Any:
    settings = ServerSettings(read_timeout=0.5, send_timeout=0.5, grace=20)
    with serving({"tiny": bundle}, settings, max_batch=2) as running:
        yield running


@pytest.fixture
def slow_steps(server: TinyServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Make every step of the engine take longer, so that a test can look at what runs."""

    def slow(seconds: float) -> None:
        engine = server.decoder.lm._engine
        assert engine is not None
        step = engine.step

        def stepped() -> None:
            time.sleep(seconds)
            step()

        monkeypatch.setattr(engine, "step", stepped)

    return slow


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_frees_his_place(
    stream: bool, server: TinyServer, slow_steps: Callable[[float], None]
) -> None:
    slow_steps(0.05)
    expected = server.ask(COMPLETIONS, SHORT).text
    connection = server.post(COMPLETIONS, LONG | {"stream": stream})
    wait_until(lambda: server.active == 1, "it runs")
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    begin = server.decoder.lm.statistics.num_generated_tokens
    connection.close()
    wait_until(lambda: server.places == 0, "its place is free")
    assert server.active == 0
    assert server.decoder.lm.statistics.num_generated_tokens - begin < 20  # of 100: it was not run to its end
    assert server.ask(COMPLETIONS, SHORT).text == expected


def test_a_caller_who_leaves_the_queue_never_runs(server: TinyServer, slow_steps: Callable[[float], None]) -> None:
    slow_steps(0.02)
    running = [server.post(COMPLETIONS, LONG) for _ in range(2)]
    wait_until(lambda: server.active == 2, "the batch is full")
    waiting = server.post(COMPLETIONS, LONG)
    wait_until(lambda: server.places == 3, "the third waits")
    waiting.close()
    wait_until(lambda: server.places == 2, "it is gone")
    for connection in running:
        connection.close()
    wait_until(lambda: server.places == 0, "all are gone")


def test_a_time_out_ends_a_request_with_an_error_whole_and_streamed(
    server: TinyServer, slow_steps: Callable[[float], None]
) -> None:
    slow_steps(0.05)
    late = server.ask(COMPLETIONS, LONG | {"timeout": 0.3})
    assert (late.status, late.json["error"]["code"]) == (504, "timeout")
    streamed = server.ask(COMPLETIONS, LONG | {"timeout": 0.3, "stream": True})
    assert streamed.status == 200
    assert [event.get("error", {}).get("code") for event in streamed.events][-2:] == [None, "timeout"]
    wait_until(lambda: server.places == 0, "their places are free")


def test_the_servers_own_time_out_holds_for_those_who_ask_for_more(bundle: Path) -> None:
    with serving({"tiny": bundle}, ServerSettings(request_timeout=1e-4)) as server:
        assert server.ask(COMPLETIONS, LONG | {"timeout": 60}).status == 504


def test_a_request_that_fails_is_told_and_the_others_go_on(server: TinyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphport.runtime.sequence import Sequence

    accept = Sequence.accept

    def failing(self: Sequence, outputs: Any, index: int = 0) -> None:
        if self.params.seed == 13 and len(self.token_ids) == 3:
            raise NonFiniteLogitsError("the model overflowed")
        if self.params.seed == 14:
            raise KeyError("a fault of ours, with my secret")
        accept(self, outputs, index)

    alone = server.ask(COMPLETIONS, LONG).text
    monkeypatch.setattr(Sequence, "accept", failing)
    bodies = [LONG | {"seed": 13}, LONG, LONG | {"seed": 13, "stream": True}, LONG | {"seed": 14}]
    with ThreadPoolExecutor(4) as threads:
        whole, other, streamed, ours = threads.map(lambda body: server.ask(COMPLETIONS, body), bodies)
    assert (whole.status, whole.json["error"]["code"]) == (500, "model_overflow")
    assert other.text == alone
    assert (streamed.status, streamed.events[-1]["error"]["code"]) == (200, "model_overflow")
    assert (ours.status, ours.json["error"]["code"]) == (500, "internal")
    assert "secret" not in ours.body.decode()
    wait_until(lambda: server.places == 0, "all places are free")


def test_a_step_that_fails_ends_its_requests_and_not_the_thread(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.decoder.lm._engine
    assert engine is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_decode", lambda: 1 / 0 if engine.scheduler.decoding else None)
        assert server.ask(COMPLETIONS, LONG).status == 500
    wait_until(lambda: server.places == 0, "its place is free")
    assert server.active == 0  # with no step after the one that failed
    assert server.ask(COMPLETIONS, SHORT).status == 200


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET / SMTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["tls", "no path", "negative length", "bad chunk", "long header", "version"],
)
def test_malformed_http_is_refused_and_the_others_are_served(rubbish: bytes, server: TinyServer) -> None:
    with server.connect() as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):  # closed while we were still sending
            connection.sendall(rubbish)
            answer = connection.recv(1000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer
    assert server.ask(COMPLETIONS, SHORT).status == 200


def test_a_head_or_a_body_that_does_not_come_is_given_up(server: TinyServer) -> None:
    with server.connect() as silent, server.connect() as half, server.connect() as bodyless:
        half.sendall(b"GET / HTT")
        bodyless.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        assert silent.recv(10) == half.recv(10) == b""  # closed
        assert bodyless.recv(1000).startswith(b"HTTP/1.1 408")


def test_idle_connections_and_slow_readers_hold_up_nobody(bundle: Path) -> None:
    with serving({"tiny": bundle}, max_batch=1) as server:
        expected = server.ask(COMPLETIONS, LONG).text
        idle = [server.connect() for _ in range(100)]
        slow = server.post(COMPLETIONS, LONG | {"stream": True})
        received = bytearray()
        wait_until(lambda: server.places == 0, "the answer is computed, though it is not read")
        for _ in range(3):  # a byte a second
            received += slow.recv(1)
            end = time.monotonic() + 1
            while time.monotonic() < end:
                assert server.ask(COMPLETIONS, LONG).text == expected  # in the one place that there is
        while not received.endswith(b"0\r\n\r\n"):
            received += slow.recv(1)
        pieces = [line for line in received.decode().splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in pieces) == expected
        for connection in (*idle, slow):
            connection.close()


def test_a_reader_who_never_reads_is_cut_off(server: TinyServer) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((server.host, server.port))
        request = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
        connection.sendall(request * 2000)  # answers of 10 MB, more than the system keeps for us
        connections = server.server._uvicorn.server_state.connections
        wait_until(lambda: not connections, "it is cut off")
    assert server.ask("/health").status == 200


def test_told_to_end_it_finishes_what_runs_and_refuses_the_new(bundle: Path) -> None:
    with serving({"tiny": bundle}) as server:
        expected = server.ask(COMPLETIONS, LONG).text
        engine = server.decoder.lm._engine
        assert engine is not None
        step, may_go_on = engine.step, threading.Event()

        def held() -> None:
            may_go_on.wait(30)
            step()

        engine.step = held  # type: ignore[method-assign]
        with ThreadPoolExecutor(2) as threads:
            running = threads.submit(server.ask, COMPLETIONS, LONG)
            wait_until(lambda: server.places == 1, "it runs")
            server.server.begin_to_end()
            refused = server.ask(COMPLETIONS, SHORT)
            assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"]
            assert server.ask("/ready").status == 503
            assert server.ask("/health").status == 200
            may_go_on.set()
            assert running.result().text == expected


def test_what_runs_longer_than_the_grace_is_cut_off_and_told(bundle: Path) -> None:
    with serving({"tiny": bundle}, ServerSettings(grace=0.2)) as server:
        engine = server.decoder.lm._engine
        assert engine is not None
        step = engine.step

        def slow() -> None:
            time.sleep(0.1)
            step()

        engine.step = slow  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(server.ask, COMPLETIONS, LONG)
            wait_until(lambda: server.active == 1, "it runs")
            server.server.begin_to_end()
            reply = running.result()
        assert (reply.status, reply.json["error"]["code"]) == (503, "draining")


def test_the_command_serves_without_torch_and_ends_gently_at_sigterm(bundle: Path) -> None:
    code = "import sys; from graphport.cli import main; status = main(); "
    code += "print([n for n in ('torch', 'onnx', 'transformers') if n in sys.modules]); sys.exit(status)"
    command = [sys.executable, "-c", code, "serve", f"mine={bundle}", "--port", "0", "--prefix-cache", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        host, port = address.removeprefix("http://").split(":")
        assert host == "127.0.0.1"
        data = json.dumps(LONG | {"model": "mine", "stream": True}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
            received = connection.recv(10)
            process.send_signal(signal.SIGTERM)
            while piece := connection.recv(65536):
                received += piece
        assert b"data: [DONE]" in received
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.strip() == "[]"
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["event"] for line in lines if line["event"] == "request"] == ["request"]
    assert "the story" not in err

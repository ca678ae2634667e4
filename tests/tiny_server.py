"""A server on tiny bundles, on a free port in a thread of the test's process, and small ways to ask it.

In: bundles by name, settings. Out: a base URL, JSON answers, raw sockets. It checks nothing.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from graphport.runtime import load
from graphport.runtime.server import Server, open_socket
from graphport.runtime.server_models import HostedDecoder
from graphport.runtime.server_settings import ServerSettings

JSON = {"content-type": "application/json"}


class TinyServer:
    """A running server. `port`, `url`; `places`: those taken of the model `tiny`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.host, self.port = server.address
        self.url = f"http://{self.host}:{self.port}"

    def ask(self, path: str, body: object = None, *, raw: bytes | None = None, **headers: str) -> "Reply":
        """POST `body` as JSON (or `raw`), or GET when there is neither."""
        connection = HTTPConnection(self.host, self.port, timeout=60)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        try:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET" if data is None else "POST", path, data, JSON | names)
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection((self.host, self.port), timeout=60)

    def post(self, path: str, body: object) -> socket.socket:
        """A raw connection over which a request was sent, its answer unread."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        connection = self.connect()
        connection.sendall(head.encode() + data)
        return connection

    @property
    def decoder(self) -> HostedDecoder:
        return self.server._models.decoder("tiny")

    @property
    def places(self) -> int:
        return self.decoder.places.num_taken

    @property
    def active(self) -> int:
        return self.decoder.lm.num_active


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """Of the first choice."""
        choice = self.json["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def events(self) -> list[Any]:
        """Records of a stream, whose last word must be [DONE]."""
        *pieces, last, rest = self.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


@contextlib.contextmanager
def serving(bundles: dict[str, Path], settings: ServerSettings | None = None, **options: Any) -> Iterator[TinyServer]:
    """A server on `bundles`, ended gently at the end."""
    opened = {name: load(folder, threads=1, **options) for name, folder in bundles.items()}
    server = Server(opened, open_socket("127.0.0.1", 0), settings or ServerSettings())
    thread = _in_thread(server)
    try:
        yield TinyServer(server)
    finally:
        server.begin_to_end()
        thread.join(timeout=60)
        assert not thread.is_alive()


def _in_thread(server: Server) -> threading.Thread:
    """Run a server on a thread of its own, and return when it answers."""
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), name="graphport-server", daemon=True)
    thread.start()
    while not ready.wait(0.1):
        assert thread.is_alive(), "the server ended before it answered"
    return thread


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another thread does; it is long in coming only where the test fails."""
    last = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < last, f"never: {what}"
        time.sleep(0.005)

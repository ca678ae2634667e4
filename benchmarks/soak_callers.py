"""The callers of the soak: mixed requests, and ways to ask them whole, streamed, in part, or a byte a second.

In: the name of a model, a seed, an address. Out: requests, and what is said to them. It compares nothing.
"""

import dataclasses
import io
import json
import random
import socket
import threading
from http.client import HTTPConnection, HTTPResponse
from typing import Any

WORDS = ("the", "cat", "sat", "on", "mat,", "and", "told", "a", "long", "story", "42", "& “gold”", "😀", "你好", "\n")
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. `is_left`: its caller reads some bytes and leaves."""

    kind: str
    path: str
    body: dict[str, Any]
    is_left: bool = False


def mixed_cases(model: str, count: int, *, seed: int, most_words: int, most_tokens: int) -> list[Case]:
    """`count` different requests of all kinds."""
    rng = random.Random(seed)
    return [_case(model, number, rng, most_words, most_tokens) for number in range(count)]


def _case(model: str, number: int, rng: random.Random, most_words: int, most_tokens: int) -> Case:
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, most_words)))
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randint(1, most_tokens), "temperature": 0}
    plain, chat = body | {"prompt": text}, body | {"messages": [{"role": "user", "content": text}]}
    sampled = {"temperature": 1.1, "top_p": 0.95, "seed": number}
    shape = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    match number % 8:
        case 0:
            return Case(kind="greedy", path=COMPLETIONS, body=plain)
        case 1:
            return Case(kind="chat, streamed", path=CHATS, body=chat | {"stream": True})
        case 2:
            return Case(kind="sampled", path=CHATS, body=chat | sampled)
        case 3:
            return Case(kind="two samples, streamed", path=COMPLETIONS, body=plain | sampled | {"n": 2, "stream": True})
        case 4:
            constrained = {"response_format": shape, "max_tokens": 40}
            return Case(kind="constrained", path=CHATS, body=chat | sampled | constrained)
        case 5:
            return Case(kind="cancelled", path=CHATS, body=chat | {"stream": True, "ignore_eos": True}, is_left=True)
        case 6:
            wrong = rng.choice(({"temperature": -1}, {"max_tokens": 10**9}, {"stop": [""]}, {"colour": 1}))
            return Case(kind="refused", path=CHATS, body=chat | wrong)
    return Case(kind="stop string", path=COMPLETIONS, body=plain | sampled | {"stop": ["e", "the"], "logprobs": 2})


Said = tuple[int, Any] | None  # status and texts with reasons, or the error


def ask(host: str, port: int, case: Case) -> Said:
    """What an answer says: the status, and texts and reasons by index (of a refusal, the error)."""
    connection = HTTPConnection(host, port, timeout=600)
    try:
        connection.request("POST", case.path, json.dumps(case.body), {"content-type": "application/json"})
        response = connection.getresponse()
        if case.is_left:
            response.read1(1 + case.body["max_tokens"] % 400)
            return None
        data = response.read()
    finally:
        connection.close()
    if response.status != 200 or not case.body.get("stream"):
        record = json.loads(data)
        return response.status, record.get("error") or [_said(choice) for choice in record["choices"]]
    return response.status, _streamed(data.decode())


def _said(choice: dict[str, Any]) -> tuple[str, str]:
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


def _streamed(text: str) -> list[tuple[str, str]]:
    *pieces, end, _ = text.split("\n\n")
    assert end == "data: [DONE]", end
    found: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        record = json.loads(piece.removeprefix("data: "))
        assert "error" not in record, record
        for choice in record["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            before = found.get(choice["index"], ("", ""))[0]
            found[choice["index"]] = before + said, choice["finish_reason"] or ""
    return [found[index] for index in sorted(found)]


class SlowReader:
    """A caller who reads a byte a second of a streamed answer, until he is told to take the rest."""

    def __init__(self, host: str, port: int, case: Case) -> None:
        self._socket = socket.create_connection((host, port))
        data = json.dumps(case.body | {"stream": True}).encode()
        head = f"POST {case.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self._socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        self._is_over = threading.Event()
        self._received = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def rest(self) -> Said:
        """What was said in all."""
        self._is_over.set()
        self._thread.join()
        with self._socket:
            while piece := self._socket.recv(1 << 16):
                self._received += piece
        response = HTTPResponse(_Received(bytes(self._received)))  # type: ignore[arg-type]  # all that it asks of a socket
        response.begin()
        return response.status, _streamed(response.read().decode())

    def _read(self) -> None:
        while not self._is_over.wait(1):
            self._received += self._socket.recv(1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Received:
    data: bytes

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self.data)

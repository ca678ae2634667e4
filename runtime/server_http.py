"""What HTTP brings and takes: bodies within limits, answers piece by piece, callers that leave.

In: ASGI's `receive` and `send`. Out: bytes, JSON responses, a response of server-sent events. It knows no models.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest  # `Request` is what the engine runs
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphport.runtime.server_errors import ApiError
from graphport.runtime.server_settings import ServerSettings

_MOST_DISCARDED = 64 << 20  # of a body that is refused: its sender reads the answer when it has sent
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The caller has left: nobody waits for the answer."""


class JsonAnswer(Response):
    """A JSON body, in ASCII, which every text survives (lone surrogates too)."""

    def __init__(self, record: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json.dumps(record), status, headers, "application/json")


def error_answer(error: ApiError) -> JsonAnswer:
    """The response of a refusal or failure."""
    return JsonAnswer(error.body(), status=error.status, headers=error.headers())


async def read_body(request: HttpRequest, settings: ServerSettings) -> bytes:
    """The body. Raises ApiError: 415 if compressed or not said to be JSON, 413 beyond the limit, 408 when late."""
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":  # a form of another web site could send text/plain without being asked
        raise ApiError(415, "the header content-type must be application/json", code="bad_content_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"bodies are read as they are, not as {encoding!r}", code="bad_content_encoding")
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(settings.read_timeout):
            async for piece in request.stream():
                size += len(piece)
                if size <= settings.max_body_bytes:
                    body += piece
                elif size > _MOST_DISCARDED:
                    break
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {settings.read_timeout:g} s", code="late_body") from error
    if size > settings.max_body_bytes:
        raise ApiError(
            413, f"the body has more than {settings.max_body_bytes} bytes; send a shorter one", code="body_too_large"
        )
    return bytes(body)


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the caller leaves before. Raises ClientGoneError then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for each in (working, leaving):
            each.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: `records` as data, then the word that ends them. `on_end` is called whatever happens.

    A failure on the way is sent as a record with `error`: the status is out by then.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        records: AsyncIterator[list[dict[str, Any]]],
        *,
        as_error: Callable[[Exception], ApiError],
        on_end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._records = records
        self._as_error = as_error
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send it all."""
        try:
            await unless_gone(receive, self._send_all(send))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for records in self._records:
                await self._piece(send, b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in records))
        except Exception as error:  # whatever it is, the caller must not take what came for the whole
            await self._piece(send, b"data: " + json.dumps(self._as_error(error).body()).encode() + b"\n\n")
        await self._piece(send, b"data: [DONE]\n\n", more_body=False)

    async def _piece(self, send: Send, piece: bytes, *, more_body: bool = True) -> None:
        if piece or not more_body:
            await send({"type": "http.response.body", "body": piece, "more_body": more_body})

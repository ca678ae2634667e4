"""The routes of a server: OpenAI's, and those for operators and browsers.

In: HTTP requests by ASGI. Out: answers. It opens no socket (see `server.py`) and checks no fields (see
`server_calls.py`).
"""

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest  # `Request` is what the engine runs
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from graphport.runtime.server_answers import Answer, TokenTexts
from graphport.runtime.server_calls import GenerationCall, read_chat, read_completion, read_embedding
from graphport.runtime.server_errors import ApiError, failure
from graphport.runtime.server_fields import parse_body
from graphport.runtime.server_http import (
    ClientGoneError,
    EventStream,
    JsonAnswer,
    error_answer,
    read_body,
    unless_gone,
)
from graphport.runtime.server_log import RequestRecord
from graphport.runtime.server_metrics import ServerMetrics
from graphport.runtime.server_models import HostedDecoder, Models
from graphport.runtime.server_running import CallEvent, RunningCall
from graphport.runtime.server_settings import ServerSettings

_log = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("server_page.html")
# The page runs its own script and style, talks to this server, and cannot be put into another site's frame.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MODELS = "/v1/models"

Handler = Callable[[HttpRequest], Awaitable[Response]]


class ServerApp:
    """The ASGI application.

    `num_running`: requests for models that are not answered yet. `is_draining`: new ones are refused.
    """

    def __init__(self, models: Models, settings: ServerSettings) -> None:
        self.num_running = 0
        self.is_draining = False
        self._models = models
        self._settings = settings
        self._metrics = ServerMetrics(models)
        self._began = int(time.time())
        self._page = PAGE.read_bytes()
        self._texts = {
            name: TokenTexts(model.lm.tokenizer)
            for name, model in models.by_name.items()
            if isinstance(model, HostedDecoder)
        }
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/embeddings": ("POST", self._embeddings),
            _MODELS: ("GET", self._show_models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._show_metrics),
            "/": ("GET", self._show_page),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request: check the key, answer, count and log it."""
        assert scope["type"] == "http"
        record = RequestRecord(
            request_id=uuid.uuid4().hex, method=scope["method"], route=self._route(scope["path"]) or "other"
        )
        scope["graphport.record"] = record
        begin = time.monotonic()
        is_model_call = scope["method"] == "POST"
        self.num_running += is_model_call

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._answer(scope, receive, noting_send, record)
        finally:
            self.num_running -= is_model_call
            record.seconds = round(time.monotonic() - begin, 6)
            status = 499 if record.outcome == "gone" else record.status or 500
            record.status = status
            self._metrics.note_request(record.route, status, record.seconds)
            level = logging.ERROR if record.outcome == "failed" else logging.INFO
            quiet = record.method == "GET" and status < 400
            _log.log(logging.DEBUG if quiet else level, "request", extra={"request": record})

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        try:
            self._admit(scope)
            response = await self._handler(scope)(HttpRequest(scope, receive))
            await response(scope, receive, send)
        except ClientGoneError:
            record.outcome = "gone"
        except Exception as error:  # the last place that can answer: every failure is told in one form
            answer = self._told(error, record)
            if record.status is None:
                await error_answer(answer)(scope, receive, send)

    def _told(self, error: Exception, record: RequestRecord) -> ApiError:
        """What the caller is told of a failure; what he is not told is logged."""
        told = failure(error)
        record.code = told.code
        record.param = None if told.code == "unknown_parameter" else told.param  # which is the caller's own text
        record.outcome = "failed" if told.status >= 500 and told.code not in ("draining", "timeout") else "refused"
        if told.code == "internal":
            _log.error("failure in request %s", record.request_id, exc_info=error)
        return told

    def _admit(self, scope: Scope) -> None:
        path = scope["path"]
        if not path.startswith("/v1/"):
            return
        headers = dict(scope["headers"])
        words = headers.get(b"authorization", b"").decode("latin-1").split(None, 1)
        key = words[1].strip() if len(words) == 2 and words[0].lower() == "bearer" else None
        if not self._settings.admits(key):
            raise ApiError(401, "give an API key: the header `Authorization: Bearer KEY`", code="invalid_api_key")
        if self.is_draining and scope["method"] == "POST":
            raise ApiError(503, "the server is stopping; try again later", code="draining", retry_after=5)

    def _route(self, path: str) -> str | None:
        """The route of a path; others have none, so that callers cannot make up labels of metrics without end."""
        if path.startswith(f"{_MODELS}/"):
            return _MODELS
        return path if path in self._routes else None

    def _handler(self, scope: Scope) -> Handler:
        route = self._route(scope["path"])
        if route is None:
            raise ApiError(404, f"there is no such path; there is {', '.join(self._routes)}", code="unknown_path")
        method, handler = self._routes[route]
        if scope["method"] != method and (scope["method"], method) != ("HEAD", "GET"):
            raise ApiError(405, f"{route} takes {method}", code="wrong_method", allow=method)
        return handler

    async def _completions(self, request: HttpRequest) -> Response:
        body = await read_body(request, self._settings)
        return await self._generate(request, await asyncio.to_thread(lambda: read_completion(parse_body(body))))

    async def _chat(self, request: HttpRequest) -> Response:
        body = await read_body(request, self._settings)
        return await self._generate(request, await asyncio.to_thread(lambda: read_chat(parse_body(body))))

    async def _generate(self, request: HttpRequest, call: GenerationCall) -> Response:
        record: RequestRecord = request.scope["graphport.record"]
        begin = time.monotonic()
        served = self._models.decoder(call.model)
        record.model, record.stream = call.model, call.stream
        served.places.take(call.num_sequences, field="n" if call.is_chat or call.params.n > 1 else "prompt")
        running = None
        try:
            requests = await asyncio.to_thread(served.requests, call)
            running = RunningCall(served, requests, self._metrics, begin=begin)
        finally:
            if running is None:
                served.places.give_back(call.num_sequences)
        running.start()
        record.prompt_tokens = running.num_prompt_tokens
        answer = Answer(call, self._texts[call.model], num_prompt_tokens=running.num_prompt_tokens)
        headers = {"x-graphport-ignored": ", ".join(call.ignored)} if call.ignored else {}
        try:
            return await self._first_of(request, running, answer, call, headers)
        except BaseException:
            running.cancel()
            raise

    async def _first_of(
        self, request: HttpRequest, running: RunningCall, answer: Answer, call: GenerationCall, headers: dict[str, str]
    ) -> Response:
        """The whole answer; or a stream, once its first token is there: failures before have a status of their own."""
        record: RequestRecord = request.scope["graphport.record"]
        events = running.events()
        if not call.stream:
            await unless_gone(request.receive, _collect(events, answer))
            record.new_tokens = answer.num_new_tokens
            return JsonAnswer(answer.whole(), headers=headers)
        first = await unless_gone(request.receive, anext(events))

        def end() -> None:
            running.cancel()
            record.new_tokens = answer.num_new_tokens

        return EventStream(
            _chunks(first, events, answer),
            as_error=lambda error: self._told(error, record),
            on_end=end,
            headers=headers,
        )

    async def _embeddings(self, request: HttpRequest) -> Response:
        body = await read_body(request, self._settings)
        call = await asyncio.to_thread(lambda: read_embedding(parse_body(body)))
        served = self._models.encoder(call.model)
        record: RequestRecord = request.scope["graphport.record"]
        record.model = call.model
        begin = time.monotonic()
        served.places.take(len(call.texts), field="input")
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                vectors, num_tokens = await unless_gone(request.receive, served.embed(call))
        except TimeoutError as error:
            raise ApiError(504, "the request took longer than the server allows", code="timeout") from error
        finally:
            served.places.give_back(len(call.texts))
            served.places.note(time.monotonic() - begin)
        record.prompt_tokens = num_tokens
        sent: list[Any] = [
            base64.b64encode(row.astype("<f4").tobytes()).decode() if call.as_base64 else row.tolist()
            for row in vectors
        ]
        data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(sent)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        headers = {"x-graphport-ignored": ", ".join(call.ignored)} if call.ignored else {}
        return JsonAnswer({"object": "list", "data": data, "model": call.model, "usage": usage}, headers=headers)

    async def _show_models(self, request: HttpRequest) -> Response:
        name = request.scope["path"].removeprefix(_MODELS).removeprefix("/")
        if name:
            return JsonAnswer(self._described(name))
        return JsonAnswer({"object": "list", "data": [self._described(name) for name in self._models.by_name]})

    def _described(self, name: str) -> dict[str, Any]:
        model = self._models.find(name)
        longest = model.lm.max_length if isinstance(model, HostedDecoder) else model.encoder.max_length
        head = {"id": name, "object": "model", "created": self._began, "owned_by": "graphport"}
        return {**head, "capabilities": list(model.capabilities), "max_length": longest}

    async def _health(self, _: HttpRequest) -> Response:
        return JsonAnswer({"status": "ok"})

    async def _ready(self, _: HttpRequest) -> Response:
        if self.is_draining:
            return JsonAnswer({"status": "stopping"}, status=503)
        return JsonAnswer({"status": "ready"})

    async def _show_metrics(self, _: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _show_page(self, _: HttpRequest) -> Response:
        headers = {"content-security-policy": _PAGE_POLICY, "x-content-type-options": "nosniff"}
        return Response(self._page, media_type="text/html; charset=utf-8", headers=headers)


async def _collect(events: AsyncIterator[list[CallEvent]], answer: Answer) -> None:
    async for each in events:
        answer.add(each)


async def _chunks(
    first: list[CallEvent], events: AsyncIterator[list[CallEvent]], answer: Answer
) -> AsyncIterator[list[dict[str, Any]]]:
    yield [*answer.opening(), *answer.chunks(first)]
    async for each in events:
        yield answer.chunks(each)
    yield answer.closing()

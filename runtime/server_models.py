"""The models that a server has open, by name: places in their queues, and calls made into requests.

In: bundles by name, calls. Out: `HostedDecoder`s and `HostedEncoder`s whose places are counted, checked requests, and
refusals with their HTTP status. It reads and writes no HTTP.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.chat_template_error import ChatTemplateError
from graphport.runtime.encoder import Encoder
from graphport.runtime.field_error import FieldError
from graphport.runtime.language_model import LanguageModel
from graphport.runtime.request import Request
from graphport.runtime.sequence import StreamEvent
from graphport.runtime.server_calls import EmbeddingCall, GenerationCall, Prompt
from graphport.runtime.server_errors import ApiError, refusal
from graphport.runtime.server_settings import ServerSettings

_LONGEST_RETRY = 60  # seconds
_NEWEST_SHARE = 0.2  # of the newest call in the running mean of durations


class Places:
    """Places for sequences of one model, those that run and those that wait, counted on the event loop."""

    def __init__(self, model: str, *, running: int, waiting: int) -> None:
        self.num_taken = 0
        self._model = model
        self._running = running
        self._most = running + waiting
        self._mean_seconds = 1.0

    def take(self, count: int, *, field: str) -> None:
        """Take places for a call. Raises ApiError: 429 while there are too few, 400 for more than there ever are."""
        if count > self._most:
            raise ApiError(
                400,
                f"{field} asks for {count} sequences at once; {self._model} has places for {self._most} "
                f"({self._running} running, {self._most - self._running} waiting): send several requests",
                param=field,
                code="too_many_sequences",
            )
        if self.num_taken + count > self._most:
            rounds = (self.num_taken + count - self._running) / self._running
            retry_after = min(max(round(rounds * self._mean_seconds), 1), _LONGEST_RETRY)
            raise ApiError(
                429,
                f"{self._model} has {self.num_taken} of {self._most} places taken; try again in {retry_after} s",
                code="queue_full",
                retry_after=retry_after,
            )
        self.num_taken += count

    def give_back(self, count: int) -> None:
        """Free places."""
        self.num_taken -= count

    def note(self, seconds: float) -> None:
        """Learn how long a call took, for the advice when to try again."""
        self._mean_seconds += _NEWEST_SHARE * (seconds - self._mean_seconds)


class HostedDecoder:
    """A language model that a server has open, and the thread that runs it."""

    def __init__(self, name: str, lm: LanguageModel, settings: ServerSettings) -> None:
        self.name = name
        self.lm = lm
        self.places = Places(name, running=lm.memory_plan.limits.max_batch, waiting=settings.max_queue)
        if lm.tokenizer is not None and lm.tokenizer.has_chat_template:
            lm.tokenizer.compile_chat_template()  # a broken one is told at the start, not to the first caller
        self.background = lm.background()
        self.is_closing = False
        self._longest_timeout = settings.request_timeout

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What it can be asked for."""
        has_chat = self.lm.tokenizer is not None and self.lm.tokenizer.has_chat_template
        return ("completions", "chat") if has_chat else ("completions",)

    def requests(self, call: GenerationCall) -> list[Request[StreamEvent]]:
        """The requests of a call, one a prompt; it takes a while, and is for a thread of its own. Raises ApiError."""
        timeout = min(call.timeout or self._longest_timeout, self._longest_timeout)
        if call.is_chat:
            return [self._request(call, self._chat_ids(call), "messages", timeout)]
        return [self._request(call, self._ids(prompt), "prompt", timeout) for prompt in call.prompts]

    def _request(self, call: GenerationCall, ids: list[int], field: str, timeout: float) -> Request[StreamEvent]:
        if len(ids) > self.lm.max_length:
            raise self._too_long(f"{field} has {len(ids)} tokens", field)
        if call.limit is not None and len(ids) + call.limit > self.lm.max_length:
            raise self._too_long(
                f"{field} has {len(ids)} tokens and {call.limit_field} is {call.limit}", call.limit_field
            )
        try:
            return self.lm.request(ids, call.params, timeout=timeout)
        except RuntimeError as error:  # an optional package that is not there, a model that is being closed
            raise ApiError(503, str(error), code="unavailable") from error
        except (TypeError, ValueError, MemoryError) as error:
            raise refusal(error, _blamed(error, call, field)) from error

    def _too_long(self, what: str, field: str) -> ApiError:
        return ApiError(
            400,
            f"{what}; {self.name} has room for {self.lm.max_length} tokens, prompt and answer together: shorten it",
            param=field,
            code="context_length_exceeded",
        )

    def _ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.lm.tokenizer is None:
            raise ApiError(
                400, f"{self.name} has no tokenizer; give prompts as lists of ids", param="prompt", code="no_tokenizer"
            )
        try:
            return self.lm.tokenizer.encode(prompt)
        except ValueError as error:
            raise refusal(error, "prompt") from error

    def _chat_ids(self, call: GenerationCall) -> list[int]:
        if "chat" not in self.capabilities or self.lm.tokenizer is None:
            raise ApiError(
                400, f"{self.name} has no chat template; use /v1/completions", param="model", code="no_chat_template"
            )
        try:
            return self.lm.tokenizer.apply_chat_template(call.messages, tools=call.tools)
        except ChatTemplateError as error:
            raise refusal(error, error.field) from error
        except ValueError as error:
            raise refusal(error, "messages") from error

    async def close(self) -> None:
        """End what runs and give the memory back."""
        self.is_closing = True
        await asyncio.to_thread(self.background.close)
        self.lm.close()


def _blamed(error: Exception, call: GenerationCall, prompt: str) -> str:
    """The caller's name of the field that a refusal is about; `prompt` is that of his text."""
    if not isinstance(error, FieldError) or error.field == "prompt":
        return prompt
    in_chats = {"json_schema": "response_format", "logprobs": "top_logprobs"}
    return in_chats.get(error.field, error.field) if call.is_chat else error.field


class HostedEncoder:
    """An encoder that a server has open; one thread runs it."""

    capabilities = ("embeddings",)

    def __init__(self, name: str, encoder: Encoder, settings: ServerSettings) -> None:
        self.name = name
        self.encoder = encoder
        self.places = Places(name, running=encoder.max_batch, waiting=settings.max_queue)
        self.is_closing = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graphport-encoder")

    async def embed(self, call: EmbeddingCall) -> tuple[NDArray[np.float32], int]:
        """Vectors [texts, W] and the number of tokens. Raises ApiError."""
        if call.dimensions not in (None, self.encoder.dimension):
            raise ApiError(
                400,
                f"dimensions must be left out or {self.encoder.dimension}, which {self.name} has; got "
                f"{call.dimensions}",
                param="dimensions",
                code="invalid_value",
            )
        if self.is_closing:
            raise _stopped()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._embed, call)
        except asyncio.CancelledError as error:
            if self.is_closing:  # it waited, and `close` took it out of the queue
                raise _stopped() from error
            raise

    def _embed(self, call: EmbeddingCall) -> tuple[NDArray[np.float32], int]:
        tokenizer = self.encoder.tokenizer
        try:
            if tokenizer is None and any(isinstance(text, str) for text in call.texts):
                raise ValueError(f"{self.name} has no tokenizer; give input as lists of ids")
            rows = [tokenizer.encode(text) if tokenizer and isinstance(text, str) else text for text in call.texts]
            return self.encoder.encode(rows), sum(len(row) for row in rows)
        except (TypeError, ValueError) as error:
            raise refusal(error, "input") from error

    async def close(self) -> None:
        """End what waits, let what runs end, and give the memory back."""
        self.is_closing = True
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self.encoder.close()


def _stopped() -> ApiError:
    return ApiError(503, "the server stopped before the answer was complete", code="draining", retry_after=5)


Hosted = HostedDecoder | HostedEncoder


class Models:
    """The open models by name, in the order in which they were named."""

    def __init__(self, opened: Mapping[str, LanguageModel | Encoder], settings: ServerSettings) -> None:
        self.by_name: dict[str, Hosted] = {
            name: HostedEncoder(name, model, settings)
            if isinstance(model, Encoder)
            else HostedDecoder(name, model, settings)
            for name, model in opened.items()
        }

    def decoder(self, name: str) -> HostedDecoder:
        """The language model of that name. Raises ApiError (404, or 400 for an encoder)."""
        model = self.find(name)
        if not isinstance(model, HostedDecoder):
            raise ApiError(400, f"{name!r} embeds texts and generates none", param="model", code="wrong_model")
        return model

    def encoder(self, name: str) -> HostedEncoder:
        """The encoder of that name. Raises ApiError (404, or 400 for a language model)."""
        model = self.find(name)
        if not isinstance(model, HostedEncoder):
            raise ApiError(400, f"{name!r} generates text and embeds none", param="model", code="wrong_model")
        return model

    def find(self, name: str) -> Hosted:
        """The model of that name. Raises ApiError (404)."""
        if name not in self.by_name:
            raise ApiError(
                404,
                f"there is no model {name!r} here; there is {', '.join(self.by_name)}",
                param="model",
                code="model_not_found",
            )
        return self.by_name[name]

    async def close(self) -> None:
        """End what runs and give the memory back."""
        for model in self.by_name.values():
            await model.close()

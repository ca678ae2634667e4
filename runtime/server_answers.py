"""Events of a call put into the records that OpenAI's clients read, whole or piece by piece.

In: a call, its events, a tokenizer for the names of tokens. Out: plain JSON records. It sends nothing.
"""

import time
import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from graphport.runtime.sequence import StreamEvent
from graphport.runtime.server_calls import GenerationCall
from graphport.runtime.server_running import CallEvent
from graphport.runtime.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's number for a probability of 0, which JSON has no logarithm of


class TokenTexts:
    """How single tokens read, for log probabilities; a bundle without a tokenizer has `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._spellings = {} if tokenizer is None else {id_: token for token, id_ in tokenizer.vocabulary().items()}
        self._before = [] if tokenizer is None else tokenizer.encode("a", add_special_tokens=False)[-1:]
        self.named = lru_cache(maxsize=4096)(self._named)

    def text(self, token_id: int) -> str:
        """Its text after another token, which keeps a leading space; as the vocabulary spells it if that is none."""
        return self.named(token_id)[0]

    def _named(self, token_id: int) -> tuple[str, list[int] | None]:
        """Its text and its bytes; None where these are unknown."""
        if self._tokenizer is None or token_id not in self._spellings:
            return f"token_id:{token_id}", None
        pair = self._tokenizer.decode([*self._before, token_id], skip_special_tokens=False)
        alone = self._tokenizer.decode(self._before, skip_special_tokens=False)
        text = pair.removeprefix(alone)
        if text and "\ufffd" not in text:
            return text, list(text.encode())
        data = self._tokenizer.bytes_of_part(self._spellings[token_id])
        return self._spellings[token_id], None if data is None else list(data)


class Answer:
    """One answer under way: give it all events, then take the whole; or take a chunk for every step's events."""

    def __init__(self, call: GenerationCall, tokens: TokenTexts, *, num_prompt_tokens: int) -> None:
        self._call = call
        self._tokens = tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._events: list[list[StreamEvent]] = [[] for _ in range(call.num_sequences)]
        self._lengths = [0] * call.num_sequences  # of the texts of tokens so far, for text_offset
        self.num_new_tokens = 0
        prefix = "chatcmpl" if call.is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": call.model}

    def add(self, events: Sequence[CallEvent]) -> None:
        """Take the events of a step."""
        for each in events:
            self._events[each.index].append(each.event)
            self.num_new_tokens += each.event.token_id is not None

    def whole(self) -> dict[str, Any]:
        """The record of an answer that is complete."""
        kind = "chat.completion" if self._call.is_chat else "text_completion"
        choices = [self._choice(index, events) for index, events in enumerate(self._events)]
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first token: in a chat, who speaks."""
        if not self._call.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._delta(index, delta)]) for index in range(self._call.num_sequences)]

    def chunks(self, events: Sequence[CallEvent]) -> list[dict[str, Any]]:
        """The chunks of a step's events; a token without text, whose text comes later, has none."""
        self.add(events)
        made = []
        for each in events:
            event, index = each.event, each.index
            if not (event.text or event.finish_reason or self._call.logprobs):
                continue
            logprobs = self._logprobs(index, [event])
            if self._call.is_chat:
                choice = self._delta(index, {"content": event.text} if event.text else {}, logprobs)
            else:
                choice = {"index": index, "text": event.text, "logprobs": logprobs}
            made.append(self._chunk([{**choice, "finish_reason": event.finish_reason}]))
        return made

    def closing(self) -> list[dict[str, Any]]:
        """The chunk after the last token: the usage, if it was asked for."""
        return [{**self._chunk([]), "usage": self.usage()}] if self._call.include_usage else []

    def usage(self) -> dict[str, int]:
        """Tokens of prompts and answers."""
        prompt, new = self._num_prompt_tokens, self.num_new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _choice(self, index: int, events: list[StreamEvent]) -> dict[str, Any]:
        text = "".join(event.text for event in events)
        choice: dict[str, Any] = {"index": index}
        if self._call.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {**choice, "logprobs": self._logprobs(index, events), "finish_reason": events[-1].finish_reason}

    def _delta(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        return {**chunk, "usage": None} if self._call.include_usage else chunk

    def _logprobs(self, index: int, events: list[StreamEvent]) -> dict[str, Any] | None:
        if not self._call.logprobs:
            return None
        with_token = [event for event in events if event.token_id is not None]
        if self._call.is_chat:
            return {"content": [self._chat_logprob(event) for event in with_token], "refusal": None}
        return self._completion_logprobs(index, with_token)

    def _chat_logprob(self, event: StreamEvent) -> dict[str, Any]:
        assert event.token_id is not None
        assert event.logprob is not None
        top = [self._named(id_, logprob) for id_, logprob in event.top_logprobs]
        return {**self._named(event.token_id, event.logprob), "top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._tokens.named(token_id)
        return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": data}

    def _completion_logprobs(self, index: int, events: list[StreamEvent]) -> dict[str, Any]:
        record: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for event in events:
            assert event.token_id is not None
            assert event.logprob is not None
            text = self._tokens.text(event.token_id)
            record["tokens"].append(text)
            record["token_logprobs"].append(max(event.logprob, _LOWEST))
            record["top_logprobs"].append(
                {self._tokens.text(id_): max(logprob, _LOWEST) for id_, logprob in event.top_logprobs}
            )
            record["text_offset"].append(self._lengths[index])
            self._lengths[index] += len(text)
        return record

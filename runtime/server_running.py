"""One call while it runs: what the engine's thread brings, waited for on the event loop.

In: a served model and checked requests. Out: the events of all prompts as they come, the failure if one fails. No place
stays taken: it is given back when the engine says that the request is over, whatever became of the caller.
"""

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from graphport.runtime.background import Arrival
from graphport.runtime.request import Request
from graphport.runtime.sequence import StreamEvent
from graphport.runtime.server_errors import ApiError
from graphport.runtime.server_metrics import ServerMetrics
from graphport.runtime.server_models import HostedDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvent:
    """An event of sample `index` of the call, counted over its prompts."""

    index: int
    event: StreamEvent


class RunningCall:
    """Made and read on the event loop. Its places have been taken; it gives them back."""

    def __init__(
        self, served: HostedDecoder, requests: list[Request[StreamEvent]], metrics: ServerMetrics, *, begin: float
    ) -> None:
        self.num_prompt_tokens = sum(len(request.sequences[0].prompt_ids) for request in requests)
        self._served = served
        self._requests = requests
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._arrivals: asyncio.Queue[tuple[int, Arrival]] = asyncio.Queue()
        self._num_running = len(requests)
        self._begin = begin
        self._last_time: float | None = None

    def start(self) -> None:
        """Hand the requests to the engine."""
        for number, request in enumerate(self._requests):
            try:
                self._served.background.start(request, functools.partial(self._deliver, number))
            except RuntimeError as error:
                self._arrive(number, Arrival(results=(), is_over=True, error=error))

    def cancel(self) -> None:
        """End what still runs; nobody reads it any more."""
        for request in self._requests:
            if not request.is_finished:
                self._served.background.cancel(request)

    async def events(self) -> AsyncIterator[list[CallEvent]]:
        """The events of each step that brought any. Raises what a request failed with, ApiError when time is over."""
        num_left = len(self._requests)
        while num_left:
            number, arrival = await self._arrivals.get()
            if arrival.error is not None:
                raise arrival.error
            events = [self._event(number, event) for event in arrival.results]
            if any(each.event.finish_reason == "cancelled" for each in events):
                raise self._cut_off()
            num_left -= arrival.is_over
            if events:
                yield events

    def _event(self, number: int, event: StreamEvent) -> CallEvent:
        return CallEvent(index=number * len(self._requests[number].sequences) + event.index, event=event)

    def _cut_off(self) -> ApiError:
        if self._served.is_closing:
            return ApiError(503, "the server stopped before the answer was complete", code="draining", retry_after=5)
        return ApiError(504, "the request took longer than its time-out", param="timeout", code="timeout")

    def _deliver(self, number: int, arrival: Arrival) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._arrive, number, arrival)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        now = time.monotonic()
        if arrival.results:
            self._metrics.note_tokens(self._served.name, since_begin=now - self._begin, since_last=self._gap(now))
        if arrival.is_over:
            self._served.places.give_back(len(self._requests[number].sequences))
            self._num_running -= 1
            if not self._num_running:
                self._served.places.note(now - self._begin)
        self._arrivals.put_nowait((number, arrival))

    def _gap(self, now: float) -> float | None:
        """Seconds since the last step that brought something, None for the first."""
        last, self._last_time = self._last_time, now
        return None if last is None else now - last

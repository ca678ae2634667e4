"""Threads share one engine by turns: whoever waits for a result runs the next step, or waits for another's step.

In: requests. Out: their results, by and by. So there is no thread of our own (`background.py` has one), and a result
that nobody reads holds up no one. It schedules nothing (see `engine.py`).
"""

import threading
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any, Generic, Protocol, TypeVar

from graphport.runtime.request import Request, Result
from graphport.runtime.sequence import Sequence


class Steps(Protocol):
    """What runs sequences step by step; see `Engine` and `RecurrentEngine`."""

    cancellations: deque[Sequence]

    def submit(self, *sequences: Sequence) -> None: ...  # noqa: D102 - as of Engine
    def require_possible(self, sequences: Many[Sequence]) -> None: ...  # noqa: D102 - as above
    def step(self) -> None: ...  # noqa: D102 - as above
    def drop_cancelled(self) -> None: ...  # noqa: D102 - as above
    def all_sequences(self) -> list[Sequence]: ...  # noqa: D102 - as above


AnEngine = TypeVar("AnEngine", bound=Steps)


class Turns(Generic[AnEngine]):
    """The engine of an open model; `engine` is None once it is closed."""

    def __init__(self, engine: AnEngine) -> None:
        self.engine: AnEngine | None = engine
        # A plain lock, not the default one: a collector that runs while this thread holds it must not get in.
        self._turn = threading.Condition(threading.Lock())
        self._is_stepping = False
        self._num_steps = 0

    def run(self, requests: Many[Request[Any]]) -> None:
        """Run requests to their end, their results unread. Raises the first error; none goes on after that."""
        try:
            self.submit(requests)
            for request in requests:
                while not request.is_finished:
                    request.results.clear()  # what they are is read from the sequences at the end
                    self.advance([request])
                self._let_step_end()  # rows are handed over after the last token
                request.raise_error()
        finally:
            self.cancel(requests)

    def admit(self, requests: Many[Request[Any]]) -> None:
        """Raise NotEnoughMemoryError if one of the requests could never run, however long it waited."""
        for request in requests:
            self.need_engine().require_possible(request.sequences)

    def results(self, request: Request[Result]) -> Iterator[Result]:
        """Run `request` and give its results as they come. Closing the iterator, or dropping it, cancels it."""
        try:
            self.submit([request])
            while not request.is_finished or request.results:
                if request.results:
                    yield request.results.popleft()
                else:
                    self.advance([request])
            request.raise_error()
        finally:
            self.cancel([request])

    def close(self) -> None:
        """Give the engine back; requests that run end as cancelled, later ones raise."""
        with self._turn:
            while self._is_stepping:
                self._turn.wait()
            engine, self.engine = self.engine, None
            for sequence in engine.all_sequences() if engine is not None else ():
                sequence.cancel()
            self._turn.notify_all()

    def need_engine(self) -> AnEngine:
        """The engine. Raises RuntimeError once it is closed."""
        if self.engine is None:
            raise RuntimeError("this LanguageModel is closed; load the bundle again")
        return self.engine

    def submit(self, requests: Many[Request[Any]]) -> None:
        """Queue requests; they run when somebody advances. Raises RuntimeError once the engine is closed."""
        engine = self.need_engine()
        for request in requests:
            engine.submit(*request.sequences)

    def cancel_later(self, requests: Many[Request[Any]]) -> None:
        """End what is left of requests with the next step, which the caller knows to come."""
        if self.engine is not None:
            self.engine.cancellations.extend(_unfinished(requests))

    def cancel(self, requests: Many[Request[Any]]) -> None:
        """Free the places of sequences that have not ended, now or with the next step.

        It never waits: the garbage collector may call it, by way of a dropped stream, in the middle of a step.
        """
        engine, unfinished = self.engine, _unfinished(requests)
        if engine is None or not unfinished:
            return
        engine.cancellations.extend(unfinished)
        if self._turn.acquire(blocking=False):
            try:
                if not self._is_stepping:
                    engine.drop_cancelled()
            finally:
                self._turn.release()

    def advance(self, requests: Many[Request[Any]]) -> None:
        """Run one step, or wait for the steps of another thread until they reach one of `requests`."""
        with self._turn:
            while self._is_stepping and not _is_reached(requests):
                self._turn.wait()
            if _is_reached(requests):
                return
            engine = self.need_engine()
            self._is_stepping = True
            self._num_steps += 1
        try:
            engine.step()
        finally:
            with self._turn:
                self._is_stepping = False
                self._turn.notify_all()

    def _let_step_end(self) -> None:
        """Wait for the end of the step that another thread runs, if one does."""
        with self._turn:
            number = self._num_steps
            while self._is_stepping and self._num_steps == number:
                self._turn.wait()


def _is_reached(requests: Many[Request[Any]]) -> bool:
    return any(request.results or request.is_finished for request in requests)


def _unfinished(requests: Many[Request[Any]]) -> list[Sequence]:
    return [each for request in requests for each in request.sequences if not each.is_finished]

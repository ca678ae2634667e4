"""A thread that runs requests of one model and hands over what each of them brings, for callers that must not wait.

In: requests, and for each a function that takes its results. Out: calls of these functions, on that thread. It checks
no requests (see `intake.py`) and schedules nothing (see `engine.py`).
"""

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from graphport.runtime.request import Request
from graphport.runtime.turns import Turns

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a step brought a request. `is_over`: nothing more comes; `error` is then why, if it failed."""

    results: tuple[Any, ...]  # of the request's own type
    is_over: bool = False
    error: Exception | None = field(default=None, compare=False)


Deliver = Callable[[Arrival], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    request: Request[Any]
    deliver: Deliver


class Background:
    """Steps the engine for as long as there are requests, and sleeps otherwise.

    Each step's results are handed over before the next step, in the order in which requests came; `deliver` must be
    quick and raise nothing. Threads that call the model's other methods take turns with this one.
    """

    def __init__(self, turns: Turns[Any]) -> None:
        self._turns = turns
        self._jobs: list[_Job] = []
        self._is_closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="graphport-engine", daemon=True)
        self._thread.start()

    def start(self, request: Request[Any], deliver: Deliver) -> None:
        """Run `request`; `deliver` gets its results, the last time with `is_over`. Raises RuntimeError once closed."""
        with self._change:
            if self._is_closed:
                raise RuntimeError("this model is being closed; load the bundle again")
            self._turns.submit([request])
            self._jobs.append(_Job(request, deliver))
            self._change.notify()

    def cancel(self, request: Request[Any]) -> None:
        """End `request` with the next step, with reason "cancelled"; its place is free then. It never waits."""
        self._turns.cancel_later([request])

    def close(self) -> None:
        """End all requests as cancelled, hand that over, and end the thread."""
        with self._change:
            self._is_closed = True
            self._turns.cancel_later([job.request for job in self._jobs])
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while jobs := self._next_jobs():
            over: Many[_Job]
            try:
                self._turns.advance([job.request for job in jobs])
                over = [job for job in jobs if _hand_over(job)]
            except Exception as error:  # of the engine itself: every owner is told, and the thread goes on
                self._fail(jobs, error)
                over = jobs
            with self._change:
                self._jobs = [job for job in self._jobs if job not in over]

    def _fail(self, jobs: Many[_Job], error: Exception) -> None:
        """Free the slots of all jobs now, as no step may follow, and tell every owner."""
        try:
            self._turns.cancel([job.request for job in jobs])
        except Exception:  # the engine fails at this too: what is left ends with the next step
            _log.exception("slots could not be freed after a failure of the engine")
        for job in jobs:
            job.deliver(Arrival(results=(), is_over=True, error=error))

    def _next_jobs(self) -> Many[_Job]:
        """The requests that run now, when there are some; none once it is closed and all have ended."""
        with self._change:
            while not self._jobs and not self._is_closed:
                self._change.wait()
            return list(self._jobs)


def _hand_over(job: _Job) -> bool:
    """Hand over what there is; whether nothing more comes."""
    is_over = job.request.is_finished  # asked first: what came with the end is then among the results
    results = []
    while job.request.results:
        results.append(job.request.results.popleft())
    if results or is_over:
        job.deliver(Arrival(results=tuple(results), is_over=is_over, error=job.request.error if is_over else None))
    return is_over

"""Choose how to open a bundle on this machine by measuring: one alternative after the other against the best so far.

In: a way to open a choice and time a request with it. Out: the choice, and every trial with its figures and verdict. It
opens no graph (see `tuning_trial.py`) and writes nothing.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from graphport.model_def.certificate import Check
from graphport.runtime.tuning import Choice, Trial

FEWEST_ROUNDS, MOST_ROUNDS = 3, 7  # the fewest already tell what is slower
LEAST_GAIN = 0.01  # of the time: less is not worth a choice, however quiet the machine

NO_TIME = "not measured: no time was left"

_CHUNKS = (16, 32, 64, 128, 256, 512)
_MOST_LISTED_THREADS = 8  # beyond, powers of two


class Candidate(Protocol):
    """A bundle opened as one choice says; it is closed when nobody holds it any more."""

    def checks(self) -> Sequence[Check]:
        """What it computes, held to the bundle's certificate."""
        ...

    def seconds(self) -> float:
        """Run the request once; the seconds it took."""
        ...


Open = Callable[[Choice], Candidate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A field of `Choice`, and the values that it may have here."""

    name: str
    values: tuple[int, ...]


def questions(*, has_packed: bool, processors: int, longest_chunk: int) -> tuple[Question, ...]:
    """What is asked, in this order: the graph, threads, how they wait, the pieces of a prompt."""
    return (
        Question(name="packed", values=(True, False) if has_packed else (False,)),
        Question(name="threads", values=thread_counts(processors)),
        Question(name="spinning", values=(True, False)),
        Question(name="prefill_chunk", values=tuple(size for size in _CHUNKS if size <= longest_chunk)),
    )


def thread_counts(processors: int) -> tuple[int, ...]:
    """1 to `processors`: all up to 8, beyond that powers of two and the last."""
    return tuple(
        n for n in range(1, processors + 1) if n <= _MOST_LISTED_THREADS or n & (n - 1) == 0 or n == processors
    )


def tune_choice(
    first: Choice,
    asked: Sequence[Question],
    open_candidate: Open,
    *,
    max_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    observe: Callable[[str], None] = lambda _: None,
) -> tuple[Choice, tuple[Trial, ...]]:
    """The fastest choice found, beginning with `first`, and all trials; none begins after `max_seconds`.

    An alternative takes the place of the best when its checks pass and it is faster by more than the noise. Raises
    ValueError when `first` itself is not within tolerance.
    """
    end = clock() + max_seconds
    best, incumbent = first, open_candidate(first)
    failed = [check.name for check in incumbent.checks() if not check.passed]
    if failed:
        raise ValueError(
            f"nothing can be tuned: as it is opened now it fails {', '.join(failed)}; run graphport verify"
        )
    trials: list[Trial] = []
    for question in asked:
        for value in _others(question, best):
            option = _changed(best, question.name, value)
            what = _words(question.name, value)
            if clock() >= end:
                trials.append(unmeasured(what, NO_TIME))
                continue
            observe(f"measuring {what}")
            try:
                challenger = open_candidate(option)
            except (ValueError, OSError) as error:  # of this alternative alone: what was measured so far is kept
                trials.append(unmeasured(what, f"left: it cannot be opened ({error})"))
                continue
            trial = run_trial(what, incumbent, challenger, has_time=lambda: clock() < end)
            trials.append(trial)
            if trial.kept:
                best, incumbent = option, challenger
    return best, tuple(trials)


def _others(question: Question, best: Choice) -> list[int]:
    return [value for value in question.values if value != getattr(best, question.name)]


def _changed(choice: Choice, name: str, value: int) -> Choice:
    fields: dict[str, Any] = {name: value}  # bools and numbers, as the field is
    return dataclasses.replace(choice, **fields)


def _words(name: str, value: int) -> str:
    return {
        "packed": "the graph packed for this processor" if value else "the graph as exported",
        "threads": f"threads: {value}",
        "spinning": "idle threads spinning" if value else "idle threads sleeping",
        "prefill_chunk": f"{value} prompt tokens a step",
    }[name]


def run_trial(what: str, incumbent: Candidate, challenger: Candidate, *, has_time: Callable[[], bool]) -> Trial:
    """Time both in turns, so that a machine that slows down slows both; `challenger` is kept if it is faster."""
    failed = [check for check in challenger.checks() if not check.passed]
    if failed:
        figures = "; ".join(f"{check.name} {check.measured:.3g} > {check.tolerance:.3g}" for check in failed)
        return unmeasured(what, f"left: not within tolerance ({figures})")
    challenger.seconds()  # the first run takes memory that later ones have
    ours: list[float] = []
    theirs: list[float] = []
    while len(ours) < FEWEST_ROUNDS or (
        len(ours) < MOST_ROUNDS and has_time() and statistics.median(theirs) < statistics.median(ours)
    ):
        ours.append(incumbent.seconds())
        theirs.append(challenger.seconds())
    return _judged(what, ours, theirs)


def _judged(what: str, ours: list[float], theirs: list[float]) -> Trial:
    before, after = statistics.median(ours), statistics.median(theirs)
    noise = max(_spread(ours), _spread(theirs), LEAST_GAIN * before)
    is_kept = before - after > noise
    words = "kept: faster by more than the noise" if is_kept else "left: not faster by more than the noise"
    return Trial(what=what, best_seconds=before, seconds=after, noise=noise, kept=is_kept, verdict=words)


def unmeasured(what: str, verdict: str) -> Trial:
    """A trial that was not run, and why."""
    return Trial(what=what, best_seconds=None, seconds=None, noise=None, kept=False, verdict=verdict)


def _spread(values: list[float]) -> float:
    """The distance of the quartiles: one disturbed run does not count."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low

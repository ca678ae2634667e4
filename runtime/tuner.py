"""Choose how to open a bundle on this machine by measuring: one alternative after the other against the best so far.

In: a way to open a choice and time a request with it. Out: the choice, and every trial with its figures and verdict. It
opens no graph (see `tuning_trial.py`) and writes nothing.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from graphport.runtime.device import PrefillProducts
from graphport.runtime.prefill_products import FLOAT_STEP, default_chunk
from graphport.runtime.trials import Candidate, run_trial, unmeasured
from graphport.runtime.tuning import Choice, Trial

NO_TIME = "not measured: no time was left"

_CHUNKS = (16, 32, 64, 128, 256, 512)
_MOST_LISTED_THREADS = 8  # beyond, powers of two

Open = Callable[[Choice], Candidate]
Value = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A field of `Choice`, and the values that it may have here.

    `is_ordered`: the nearest values are tried first, and none beyond one that is slower. `also`: other fields that
    change with a value.
    """

    name: str
    values: tuple[Value, ...]
    is_ordered: bool = False
    also: Mapping[Value, Mapping[str, Value]] = field(default_factory=dict)

    def directions(self, best: Choice) -> list[list[Value]]:
        """The other values, in the order in which they are tried, in each direction."""
        now = getattr(best, self.name)
        if not self.is_ordered:
            return [[value] for value in self.values if value != now]
        numbers = [value for value in self.values if isinstance(value, int)]
        return [[n for n in numbers if n > now], [n for n in reversed(numbers) if n < now]]

    def changed(self, choice: Choice, value: Value) -> Choice:
        """`choice` with this answer."""
        fields: dict[str, Any] = {self.name: value, **self.also.get(value, {})}
        return dataclasses.replace(choice, **fields)


def questions(
    *, has_packed: bool, has_float_products: bool, processors: int, longest_chunk: int
) -> tuple[Question, ...]:
    """What is asked, in this order: the graph, threads, how they wait, products of prompts, the pieces of a prompt."""
    chunks = tuple(size for size in _CHUNKS if size <= longest_chunk)
    products = get_args(PrefillProducts) if has_float_products and longest_chunk >= FLOAT_STEP else ("as_exported",)
    usual: dict[Value, dict[str, Value]] = {
        name: {"prefill_chunk": min(default_chunk("cpu", name), longest_chunk)} for name in products
    }
    return (
        Question(name="packed", values=(True, False) if has_packed else (False,)),
        Question(name="threads", values=thread_counts(processors), is_ordered=True),
        Question(name="spinning", values=(True, False)),
        Question(name="prefill_products", values=products, also=usual),
        Question(name="prefill_chunk", values=chunks, is_ordered=True),
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

    Each question has its share of the time that is left, so that a busy machine leaves none unasked. An alternative
    takes the place of the best when its checks pass and it is faster by more than the noise. Raises ValueError when
    `first` itself is not within tolerance.
    """
    end = clock() + max_seconds
    incumbent = open_candidate(first)
    require_within_tolerance(incumbent)
    tuner = _Tuner(best=first, incumbent=incumbent, open_candidate=open_candidate, clock=clock, observe=observe)
    for number, question in enumerate(asked):
        now = clock()
        tuner.ask(question, end=now + max(0.0, end - now) / (len(asked) - number))
    return tuner.best, tuple(tuner.trials)


def require_within_tolerance(candidate: Candidate) -> None:
    """Raise ValueError when a bundle does not compute what its certificate says, as it is opened now."""
    failed = [check.name for check in candidate.checks() if not check.passed]
    if failed:
        raise ValueError(
            f"nothing can be tuned: as it is opened now it fails {', '.join(failed)}; run graphport verify"
        )


@dataclass(slots=True, kw_only=True)
class _Tuner:
    """The best choice so far, open, and the trials that led to it."""

    best: Choice
    incumbent: Candidate
    open_candidate: Open
    clock: Callable[[], float]
    observe: Callable[[str], None]
    trials: list[Trial] = field(default_factory=list)

    def ask(self, question: Question, *, end: float) -> None:
        """Try the values of `question`; no trial begins after `end`."""
        left = ""  # why the others are not measured
        for values in question.directions(self.best):
            before = self.best
            for value in values:
                option = question.changed(self.best, value)
                what = _words(question.name, option)
                trial = unmeasured(what, left) if left else self._try(option, what, end=end)
                self.trials.append(trial)
                if question.is_ordered and trial.is_slower:
                    left = f"not measured: {what} is slower already"
            left = "not measured: the other way is faster" if question.is_ordered and self.best != before else ""

    def _try(self, option: Choice, what: str, *, end: float) -> Trial:
        if self.clock() >= end:
            return unmeasured(what, NO_TIME)
        self.observe(f"measuring {what}")
        try:
            challenger = self.open_candidate(option)
        except (ValueError, OSError) as error:  # of this alternative alone: what was measured so far is kept
            return unmeasured(what, f"left: it cannot be opened ({error})")
        trial = run_trial(what, self.incumbent, challenger, has_time=lambda: self.clock() < end)
        if trial.kept:
            self.best, self.incumbent = option, challenger
        return trial


def _words(name: str, choice: Choice) -> str:
    products = "float32 products" if choice.prefill_products == "float32" else "products as exported"
    return {
        "packed": "the graph packed for this processor" if choice.packed else "the graph as exported",
        "threads": f"threads: {choice.threads}",
        "spinning": "idle threads spinning" if choice.spinning else "idle threads sleeping",
        "prefill_products": f"prompts with {products}, {choice.prefill_chunk} tokens a step",
        "prefill_chunk": f"{choice.prefill_chunk} prompt tokens a step",
    }[name]

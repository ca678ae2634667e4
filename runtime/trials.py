"""One trial of `graphport tune`: an alternative beside the best so far, timed in turns and judged by ratios.

In: two candidates, open. Out: a `Trial` with figures and verdict. It opens and chooses nothing (see `tuner.py`).
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from graphport.model_def.certificate import Check
from graphport.runtime.memory import MIB
from graphport.runtime.tuning import Trial

FEWEST_ROUNDS, MOST_ROUNDS = 3, 7  # the fewest already tell what is slower
LEAST_GAIN = 0.01  # of the time: less is not worth a choice, however quiet the machine
MUCH_NOISE = 0.05  # of the time: what is not clear beyond more than this is not told, neither way

_SLOWER, _NOT_FASTER = "left: slower", "left: not faster by more than the noise"


class Candidate(Protocol):
    """A bundle opened as one choice says; it is closed when nobody holds it any more."""

    @property
    def planned_bytes(self) -> int:
        """Memory that it is planned to take."""
        ...

    def checks(self) -> Sequence[Check]:
        """What it computes, held to the bundle's certificate."""
        ...

    def seconds(self) -> float:
        """Run the request once; the seconds it took."""
        ...


def run_trial(what: str, incumbent: Candidate, challenger: Candidate, *, has_time: Callable[[], bool]) -> Trial:
    """Time both in turns; `challenger` is kept if it is within tolerance and faster by more than the noise.

    Every run of the challenger lies between two of the incumbent, and is compared with their mean: a machine that slows
    down steadily, or for good, favours neither.
    """
    failed = [check for check in challenger.checks() if not check.passed]
    if failed:
        figures = "; ".join(f"{check.name} {check.measured:.3g} > {check.tolerance:.3g}" for check in failed)
        return unmeasured(what, f"left: not within tolerance ({figures})")
    challenger.seconds()  # the first run takes memory that later ones have
    ours, theirs = [incumbent.seconds()], list[float]()
    while len(theirs) < FEWEST_ROUNDS or (len(theirs) < MOST_ROUNDS and has_time() and _is_open(ours, theirs)):
        theirs.append(challenger.seconds())
        ours.append(incumbent.seconds())
    return _judged(what, ours, theirs, more_bytes=challenger.planned_bytes - incumbent.planned_bytes)


def unmeasured(what: str, verdict: str) -> Trial:
    """A trial that was not run, and why."""
    return Trial(
        what=what,
        best_seconds=None,
        seconds=None,
        ratio=None,
        noise=None,
        more_bytes=None,
        kept=False,
        verdict=verdict,
    )


def _is_open(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether more runs may show a gain."""
    ratio, noise = _ratio(ours, theirs)
    return ratio < 1 or (noise > MUCH_NOISE and ratio - 1 <= noise)


def _judged(what: str, ours: Sequence[float], theirs: Sequence[float], *, more_bytes: int) -> Trial:
    ratio, noise = _ratio(ours, theirs)
    is_kept = 1 - ratio > max(noise, LEAST_GAIN)
    words = _SLOWER if ratio - 1 > max(noise, LEAST_GAIN) else _NOT_FASTER
    if is_kept:
        memory = f", {more_bytes / MIB:+.0f} MiB of memory" if abs(more_bytes) >= MIB else ""
        words = f"kept: faster by more than the noise{memory}"
    elif noise > MUCH_NOISE and abs(1 - ratio) <= noise:
        words = f"left: too noisy to tell (ratios of its time spread by {noise:.0%})"
    return Trial(
        what=what,
        best_seconds=statistics.median(ours),
        seconds=statistics.median(theirs),
        ratio=ratio,
        noise=noise,
        more_bytes=more_bytes,
        kept=is_kept,
        verdict=words,
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """How many times as long the challenger takes: the median, and the distance of the quartiles.

    One disturbed run does not count.
    """
    ratios = [2 * time / (before + after) for (before, after), time in zip(pairwise(ours), theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, high - low

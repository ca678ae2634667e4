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
MUCH_NOISE = 0.05  # of the time: beyond, what is not clear is said to be too noisy to tell
MOST_NOISE = 0.2  # of the time: beyond, no gain is believed
FEW_ROUNDS_GAIN = 3  # times the noise, which few rounds tell too small: needed where there was no time for all of them

_FAR_SLOWER = 1.1  # times as long, twice running on a quiet machine: not worth a third round


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
    while _is_open(ours, theirs, has_time=has_time):
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


def _is_open(ours: Sequence[float], theirs: Sequence[float], *, has_time: Callable[[], bool]) -> bool:
    """Whether another round may still show a gain."""
    if len(theirs) < 2:  # of which there are quartiles
        return True
    ratio, noise = _median_and_noise(ours, theirs)
    if len(theirs) < FEWEST_ROUNDS:
        return noise > MUCH_NOISE or min(_ratios(ours, theirs)) < _FAR_SLOWER
    if len(theirs) == MOST_ROUNDS or not has_time():
        return False
    return ratio < 1 or (noise > MUCH_NOISE and ratio - 1 <= noise)


def _judged(what: str, ours: Sequence[float], theirs: Sequence[float], *, more_bytes: int) -> Trial:
    ratio, noise = _median_and_noise(ours, theirs)
    needed = max(LEAST_GAIN, noise * (1 if len(theirs) == MOST_ROUNDS else FEW_ROUNDS_GAIN))
    is_kept = noise <= MOST_NOISE and 1 - ratio > needed
    if ratio - 1 > max(LEAST_GAIN, noise):
        words = "left: slower"
    elif is_kept:
        memory = f", {more_bytes / MIB:+.0f} MiB planned" if abs(more_bytes) >= MIB else ""
        words = f"kept: faster by more than the noise{memory}"
    elif noise > MUCH_NOISE:
        words = f"left: too noisy to tell (ratios of the times spread by {noise:.0%})"
    else:
        words = "left: not faster by more than the noise"
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


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times as long each run of the challenger took as those before and after it."""
    return [2 * time / (before + after) for (before, after), time in zip(pairwise(ours), theirs, strict=True)]


def _median_and_noise(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The median of the ratios, and the distance of their quartiles, or of those of the incumbent's to its next run.

    One disturbed run does not count; a machine that disturbs many shows in the incumbent too.
    """
    ratios = _ratios(ours, theirs)
    itself = [after / before for before, after in pairwise(ours)]
    return statistics.median(ratios), max(_spread(ratios), _spread(itself))


def _spread(values: Sequence[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low

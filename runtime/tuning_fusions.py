"""Fusions that a bundle is faster without: measured one after the other, and left out of it if that is asked for.

In: a bundle opened as it is now, and what exports its source without some rules. Out: rules, and a trial for each. It
exports nothing itself (see `export/fusion_variants.py`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from graphport.runtime.trials import Candidate, run_trial, unmeasured
from graphport.runtime.tuner import NO_TIME
from graphport.runtime.tuning import Trial


class Fusions(Protocol):
    """The rules that fused something in a bundle and can be done without."""

    @property
    def rules(self) -> Sequence[str]:
        """Their names."""
        ...

    def without(self, rules: Sequence[str]) -> Path:
        """A bundle like it, beside it and without a certificate, in which `rules` fuse nothing."""
        ...

    def drop(self, rules: Sequence[str]) -> None:
        """Put such a bundle, certified, in its place; it appears whole or stays as it was."""
        ...


def measure_fusions(
    fusions: Fusions,
    incumbent: Candidate,
    open_folder: Callable[[Path], Candidate],
    *,
    has_time: Callable[[], bool],
    observe: Callable[[str], None],
) -> tuple[tuple[str, ...], tuple[Trial, ...]]:
    """The rules without which the bundle is faster by more than the noise, and all trials, each without those before.

    No trial begins when there is no time.
    """
    dropped: tuple[str, ...] = ()
    trials = []
    for rule in fusions.rules:
        what = f"without fusion {rule}"
        if not has_time():
            trials.append(unmeasured(what, NO_TIME))
            continue
        observe(f"measuring {what}")
        try:
            challenger = open_folder(fusions.without((*dropped, rule)))
        except (ValueError, OSError) as error:  # of this one alone: what was measured so far is kept
            trials.append(unmeasured(what, f"left: it cannot be made or opened ({error})"))
            continue
        trials.append(run_trial(what, incumbent, challenger, has_time=has_time))
        if trials[-1].kept:
            dropped, incumbent = (*dropped, rule), challenger
    return dropped, tuple(trials)


def retold(trials: Sequence[Trial], verdict: str, *, kept: bool = True) -> tuple[Trial, ...]:
    """`trials`, with another verdict in place of that of those that were kept."""
    return tuple(dataclasses.replace(trial, kept=kept, verdict=verdict) if trial.kept else trial for trial in trials)

"""One row of logits as a step leaves it, of which no more is read than the choice of an id needs.

In: arrays on the host, or functions that fetch from the device. Out: the same, by name. It computes nothing (see
`sampling.py` and `candidate_filters.py`). K: candidates; V: vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The highest logits of a row: `logits` float32 [K], descending, of `ids` int64 [K]; K is less than `vocab_size`.

    No id outside has a higher logit than the last of them; among equals, ids are in no particular order, and outside
    may be more.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedRow:
    """What the graph reduced a row to, on its device.

    `greedy_id`: the lowest id of the highest logit. `log_total`: the logarithm of the sum of exp(logit - highest); NaN
    or infinite when a logit is NaN or +inf, or all are -inf. `candidates` fetches when called; None where the whole row
    is no longer than the candidates would be.
    """

    greedy_id: int
    log_total: float
    candidates: Callable[[], Candidates] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRow:
    """One row: `full` fetches it, float32 [V], until the next step; `reduced` is there already, if the graph has it."""

    full: Callable[[], NDArray[np.float32]]
    reduced: ReducedRow | None = None

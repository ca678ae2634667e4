"""Ids that must or must not come, whatever the logits are: those of an encoder-decoder's generation config.

In: `ForcedTokens`, a request's limit, the ids so far. Out: scores with -inf where nothing may come. It draws nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.forced_tokens import ForcedTokens
from graphport.runtime.timestamps import TimestampRule


class ForcedIds:
    """The rules of one text of at most `most` new ids; `ignore_end` leaves out the id that ends a full text.

    `timestamps`: where marks of time are wanted.
    """

    def __init__(
        self,
        forced: ForcedTokens,
        *,
        first: int | None,
        most: int,
        ignore_end: bool,
        timestamps: TimestampRule | None = None,
    ) -> None:
        self._first = first
        self._last = None if ignore_end else forced.last
        self._most = most
        self._never = np.array(forced.never, np.int64)
        self._never_first = np.array(forced.never_first, np.int64)
        self.bad = forced.bad
        self._timestamps = timestamps

    def apply(self, scores: NDArray[np.float64], generated: Sequence[int]) -> None:
        """Change `scores` [V] of the id after `generated` in place, in the order of transformers."""
        count = len(generated)
        if count == 0 and self._first is not None:
            _force(scores, self._first)
        if self._last is not None and count == self._most - 1:
            _force(scores, self._last)
        scores[self._never] = -np.inf
        if count == (self._first is not None):
            scores[self._never_first] = -np.inf
        if self._timestamps is not None:
            self._timestamps.apply(scores, generated)


def _force(scores: NDArray[np.float64], id_: int) -> None:
    scores[:] = -np.inf
    scores[id_] = 0.0

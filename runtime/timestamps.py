"""When the marks of time of a model that hears may come, and when they must.

In: scores of the next id, the ids so far. Out: scores with -inf where nothing may come. The rule is that of
`WhisperTimeStampLogitsProcessor` of transformers: marks come in pairs around words and never go back; a text begins
with one; where all marks together are likelier than any other id, one of them comes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TimestampRule:
    """`first`: the id of the first mark, all from there on are marks; `end`: the id that ends a text."""

    def __init__(self, *, first: int, end: int, latest_first: int | None) -> None:
        self._first = first
        self._end = end
        self._latest_first = latest_first

    def apply(self, scores: NDArray[np.float64], generated: Sequence[int]) -> None:
        """Change `scores` [V] of the id after `generated` in place."""
        first = self._first
        scores[first - 1] = -np.inf  # what says that there are no marks
        is_mark = [id_ >= first for id_ in generated[-2:]]
        marks = [id_ for id_ in generated if id_ >= first]
        opens = bool(is_mark) and is_mark[-1]
        is_pair = opens and (len(generated) == 1 or is_mark[0])
        if is_pair:
            scores[first:] = -np.inf
        elif opens:
            scores[: self._end] = -np.inf
        if marks:
            scores[first : marks[-1] if opens and not is_pair else marks[-1] + 1] = -np.inf
        if not generated:
            scores[:first] = -np.inf
            if self._latest_first is not None:
                scores[first + self._latest_first + 1 :] = -np.inf
        self._prefer_marks(scores)

    def _prefer_marks(self, scores: NDArray[np.float64]) -> None:
        highest = scores.max()
        if not np.isfinite(highest):
            return
        total = np.exp(scores[self._first :] - highest).sum()
        if total > np.exp(scores[: self._first].max() - highest):
            scores[: self._first] = -np.inf

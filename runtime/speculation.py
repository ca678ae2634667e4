"""Guesses of the next tokens, which the model then checks several at once: how many, and where they come from.

In: the ids of a sequence. Out: draft ids, as many as are likely to pay. It runs no model and accepts nothing: the
engine has every id chosen by the sequence's own sampler from the model's own logits, and a draft only decides how many
of these come from one step. So greedy ids, random streams and distributions are those without drafts, whatever is
guessed.
"""

from collections.abc import Sequence as Many
from typing import Protocol

# Drafts in one step. A step of 1 + n tokens takes 1.8 (n = 4), 2.6 (8) and 4.0 (16) times that of one token on a CPU
# (SmolLM2-135M, its exact GGUF, 200 tokens cached, one thread), so drafts of 16 that are right gain most.
FIRST_DRAFT, LONGEST_DRAFT = 4, 16
# Over a quantised cache, where longer steps read their new rows before they are rounded (`export/float_prefill.py`).
LONGEST_QUANTISED_DRAFT = 7
LONGEST_PAUSE = 32  # tokens

_NGRAM = 2  # ids that must have stood together before; with three, a copy begins later and gains less


class Drafter(Protocol):
    """Guesses how one sequence goes on."""

    def propose(self, ids: Many[int], most: int) -> list[int]:
        """At most `most` ids that may follow `ids`, prompt and answer so far; none where there is no good guess."""


class PromptLookup:
    """Guesses that what followed the last two ids when they stood together before follows again.

    Saxena 2023, "Prompt lookup decoding". A guess that reaches the end of the ids goes on in itself, as a loop does.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # of n-grams: where what follows the latest of each stands
        self._num_known = _NGRAM

    def propose(self, ids: Many[int], most: int) -> list[int]:
        """See Drafter."""
        for end in range(self._num_known, len(ids)):
            self._places[tuple(ids[end - _NGRAM : end])] = end
        self._num_known = max(self._num_known, len(ids))
        begin = self._places.get(tuple(ids[-_NGRAM:]))
        if begin is None:
            return []
        draft: list[int] = []
        for place in range(begin, begin + most):
            draft.append(ids[place] if place < len(ids) else draft[place - len(ids)])
        return draft


class Speculation:
    """The drafts of one sequence: longer while all of them are right, shorter and rarer when they are not."""

    def __init__(self, drafter: Drafter, *, longest: int) -> None:
        self._drafter = drafter
        self._longest = longest
        self._length = min(FIRST_DRAFT, longest)
        self._pause = 0  # tokens to let pass after the last draft that was wrong from the beginning
        self._next_at = 0

    def propose(self, ids: Many[int], most: int) -> list[int]:
        """Draft ids to follow `ids`, at most `most`; often none."""
        length = min(self._length, most)
        return [] if length < 1 or len(ids) < self._next_at else self._drafter.propose(ids, length)

    def note(self, *, num_drafted: int, num_right: int, num_ids: int) -> None:
        """Learn from a draft of which the first `num_right` ids were right; the sequence has `num_ids` now."""
        if num_right == num_drafted:
            self._length, self._pause = min(2 * self._length, self._longest), 0
        elif num_right:
            self._length, self._pause = max(FIRST_DRAFT // 2, num_right), 0
        else:
            self._length = max(1, self._length // 2)
            self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
        self._next_at = num_ids + self._pause

"""Changes to one sequence's logits that depend on what was said: bias, penalties, bad words.

In: `SamplingParams`, the prompt's ids, then each id chosen. Out: scores float64 [V]. It draws nothing, and it never
changes the logits given (see `sampling.py`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.forced_ids import ForcedIds
from graphport.runtime.logit_filters import penalise_generated, penalise_repetition
from graphport.runtime.sampling_params import SamplingParams


def has_penalty(params: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def new_edits(
    params: SamplingParams,
    prompt_ids: NDArray[np.int64],
    *,
    vocab_size: int,
    bad_ids: Sequence[tuple[int, ...]],
    forced: ForcedIds | None,
) -> "LogitEdits | None":
    """The changes that `params` and the model ask for, None when there are none."""
    if not (has_penalty(params) or params.logit_bias or bad_ids or forced is not None):
        return None
    return LogitEdits(params, prompt_ids, vocab_size=vocab_size, bad_ids=bad_ids, forced=forced)


class LogitEdits:
    """The changes of one sequence, and its history as far as they need it."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: NDArray[np.int64],
        *,
        vocab_size: int,
        bad_ids: Sequence[tuple[int, ...]],
        forced: ForcedIds | None = None,
    ) -> None:
        self._params = params
        self._history = _History(vocab_size, prompt_ids) if has_penalty(params) else None
        bias = params.logit_bias or {}
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float64)
        self._bad_ends = _bad_ends((*bad_ids, *(() if forced is None else forced.bad)))
        self._forced = forced
        self._generated: list[int] = []

    def add_prompt(self, token_id: int) -> None:
        """Remember an id of the prompt that was not known at the beginning."""
        if self._history is not None:
            self._history.add_prompt(token_id)

    def add_generated(self, token_id: int) -> None:
        """Remember an id that was chosen."""
        self._generated.append(token_id)
        if self._history is not None:
            self._history.add_generated(token_id)

    def edited(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores float64 [V] (a penalty may leave float32's range), -inf for what would complete a bad word."""
        scores = logits.astype(np.float64)
        scores[self._biased] += self._bias
        if self._history is not None:
            self._history.penalise(scores, self._params)
        for length, ends in self._bad_ends.items():
            begun = tuple(self._generated[len(self._generated) - length :]) if length <= len(self._generated) else None
            scores[ends.get(begun, [])] = -np.inf
        if self._forced is not None:
            self._forced.apply(scores, self._generated)
        return scores


def _bad_ends(words: Sequence[tuple[int, ...]]) -> dict[int, dict[tuple[int, ...] | None, list[int]]]:
    """Last ids of words by what comes before them, by its length: a step costs the lengths, not the words."""
    ends: dict[int, dict[tuple[int, ...] | None, list[int]]] = {}
    for word in words:
        ends.setdefault(len(word) - 1, {}).setdefault(word[:-1], []).append(word[-1])
    return ends


class _History:
    """Distinct ids seen so far and how often each was generated, kept so that a step costs what is distinct."""

    def __init__(self, vocab_size: int, prompt_ids: NDArray[np.int64]) -> None:
        self._is_seen = np.zeros(vocab_size, dtype=np.bool_)
        self._seen = np.empty(vocab_size, dtype=np.int64)  # the first _num_seen entries: prompt and output
        self._generated = np.empty(vocab_size, dtype=np.int64)  # the first _num_generated entries: output
        self._num_generated = 0
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        distinct = np.unique(prompt_ids)
        self._is_seen[distinct] = True
        self._seen[: len(distinct)] = distinct
        self._num_seen = len(distinct)

    def add_prompt(self, token_id: int) -> None:
        if not self._is_seen[token_id]:
            self._is_seen[token_id] = True
            self._seen[self._num_seen] = token_id
            self._num_seen += 1

    def add_generated(self, token_id: int) -> None:
        self.add_prompt(token_id)
        if self._counts[token_id] == 0:
            self._generated[self._num_generated] = token_id
            self._num_generated += 1
        self._counts[token_id] += 1

    def penalise(self, scores: NDArray[np.float64], params: SamplingParams) -> None:
        """All three penalties, in place."""
        if params.repetition_penalty != 1:
            penalise_repetition(scores, self._seen[: self._num_seen], params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids = self._generated[: self._num_generated]
            penalise_generated(
                scores, ids, self._counts, presence=params.presence_penalty, frequency=params.frequency_penalty
            )

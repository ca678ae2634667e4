"""Beam search over one prompt: which hypotheses go on, which are done, and when nothing better can come.

In: the log probabilities of the next id of each beam. Out: each next beam's parent and id, and the best texts at the
end. It runs no model and holds no cache (see `beam_sequences.py`). K: beams; V: vocabulary.

Rules and arithmetic (float32) are those of `transformers`: K beams from the first step on, all but one of them
hopeless; candidates enough for K that go on; scores divided by length ** length_penalty when a text is done.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_HOPELESS = np.float32(-1e9)

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that is done and its score; `score` is the sum of its ids' log probabilities / length ** penalty."""

    token_ids: tuple[int, ...]
    score: float


class BeamSearch:
    """The state of one search for texts of at most `most` ids that end with one of `end_ids`."""

    def __init__(
        self,
        *,
        num_beams: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        end_ids: frozenset[int],
        num_end_ids: int,
        most: int,
    ) -> None:
        """`num_end_ids`: of the model; transformers keeps that many times K candidates more."""
        self.num_beams = num_beams
        self.beams: list[tuple[int, ...]] = [()] * num_beams
        self.chosen: list[int] = []  # the ids of the last step's best candidates that do not end a text, a beam each
        self.is_over = False
        self._penalty = length_penalty
        self._early_stopping = early_stopping
        self._end_ids = end_ids
        self._most = most
        self._num_candidates = max(2, 1 + num_end_ids) * num_beams
        self._scores = np.full(num_beams, _HOPELESS, np.float32)
        self._scores[0] = 0.0
        self._done: list[tuple[int, ...]] = [()] * num_beams
        self._done_scores = np.full(num_beams, _HOPELESS, np.float32)
        self._is_done = np.zeros(num_beams, np.bool_)
        self._can_improve = True

    def advance(self, log_probs: NDArray[np.float32]) -> list[int]:
        """Take one step with `log_probs` [K, V] of the beams in order; the parent of each next beam, by number."""
        total = (log_probs + self._scores[:, None]).reshape(-1)
        chosen = _highest(total, self._num_candidates)
        scores = total[chosen]
        parents, ids = np.divmod(chosen, log_probs.shape[1])
        texts = [(*self.beams[parent], int(id_)) for parent, id_ in zip(parents, ids, strict=True)]
        self.chosen = [text[-1] for text in texts if text[-1] not in self._end_ids][: self.num_beams]
        length = len(self.beams[0]) + 1
        ends = np.array([text[-1] in self._end_ids or length >= self._most for text in texts])
        running = scores + ends.astype(np.float32) * _HOPELESS
        going_on = _highest(running, self.num_beams)
        self._finish(texts, scores, ends, length)
        self.beams = [texts[place] for place in going_on]
        self._scores = running[going_on]
        self._judge(length)
        is_settled = self._early_stopping is True and bool(self._is_done.all())
        self.is_over = not self._can_improve or is_settled or bool(ends.all())
        return [int(parents[place]) for place in going_on]

    def best(self, count: int) -> list[Hypothesis]:
        """The `count` best texts that are done, the best first."""
        pairs = zip(self._done[:count], self._done_scores[:count].tolist(), strict=True)
        return [Hypothesis(text, score) for text, score in pairs]

    def _finish(
        self, texts: list[tuple[int, ...]], scores: NDArray[np.float32], ends: NDArray[np.bool_], length: int
    ) -> None:
        """Keep the best of what is done and what ends now; only the K best candidates may end."""
        may_end = ends & (np.arange(len(texts)) < self.num_beams)
        final = scores / np.float32(length**self._penalty)
        is_full = self._early_stopping is True and self._is_done.all()
        final = final + np.float32(is_full) * _HOPELESS
        final = final + np.float32(not self._can_improve) * _HOPELESS
        final = final + (~may_end).astype(np.float32) * _HOPELESS
        merged = np.concatenate([self._done_scores, final])
        all_texts = [*self._done, *texts]
        kept = _highest(merged, self.num_beams)
        self._done = [all_texts[place] for place in kept]
        self._done_scores = merged[kept]
        self._is_done = np.concatenate([self._is_done, may_end])[kept]

    def _judge(self, length: int) -> None:
        """Whether the best beam could still pass the worst text that is done."""
        likely = self._most if self._early_stopping == "never" and self._penalty > 0 else length
        possible = self._scores[0] / np.float32(likely**self._penalty)
        worst = np.where(self._is_done, self._done_scores.min(), _HOPELESS)
        self._can_improve = self._can_improve and bool((possible > worst).any())


def _highest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The places of the `count` highest values, the highest first and the lower place first among equals."""
    if count < len(values):
        border = -np.partition(-values, count - 1)[count - 1]
        places = np.flatnonzero(values >= border)
    else:
        places = np.arange(len(values))
    order: NDArray[np.int64] = places[np.argsort(-values[places], kind="stable")][:count]
    return order

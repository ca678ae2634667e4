"""Beams as sequences: K rows of one batch that are chosen together, each holding one hypothesis.

In: the outputs of a step, one row a beam. Out: each row's next id, which rows must become copies of others, and the
best texts at the end. The search itself is `beam_search.py`; slots are the scheduler's.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.beam_search import BeamSearch, Hypothesis
from graphport.runtime.diverse_beams import DiverseBeamSearch
from graphport.runtime.logit_edits import LogitEdits
from graphport.runtime.sampling import require_finite
from graphport.runtime.sequence import FinishReason, Sequence, StreamEvent
from graphport.runtime.step_outputs import StepOutputs


class BeamSequence(Sequence):
    """One row of a search; the first `SamplingParams.n` of a group end with texts and their `score`, others empty."""

    keeps_rows = False  # what is in its slot at the end is not what it says
    score: float | None = None
    log_probs: NDArray[np.float32] | None = None
    group: "BeamGroup | None" = None

    def accept_prompt(self, outputs: StepOutputs, *, is_last: bool) -> None:
        """Keep the row of the prompt's last token; all beams begin with it. Raises NonFiniteLogitsError."""
        if is_last and self._is_full():
            super().accept_prompt(outputs, is_last=is_last)
        elif is_last:
            self.accept(outputs, outputs.num_rows - 1)

    def accept(self, outputs: StepOutputs, index: int = 0) -> None:
        """Keep the row of this beam until the group has all of them. Raises NonFiniteLogitsError."""
        logits = outputs.row(index).full()
        require_finite(logits)
        shifted = logits - logits.max()
        self.log_probs = shifted - np.log(np.exp(shifted).sum())

    def end(self, hypothesis: Hypothesis | None) -> None:
        """Become a text of the search, or nothing."""
        self.token_ids = []
        self.score = None if hypothesis is None else hypothesis.score
        reason: FinishReason = "length"
        for id_ in () if hypothesis is None else hypothesis.token_ids:
            self.token_ids.append(id_)
            text, ended = self._next_text(id_)
            self.text += text
            reason = ended or reason
        last = self.token_ids[-1] if self.token_ids else None
        event = StreamEvent(text=self.text, token_id=last, logprob=None, finish_reason=reason, index=self.index)
        self._emit(event)


class BeamGroup:
    """The rows of one search. `new_edits` makes what changes a beam's log probabilities, None for nothing."""

    def __init__(
        self,
        sequences: Many[BeamSequence],
        search: BeamSearch | DiverseBeamSearch,
        new_edits: Callable[[], LogitEdits | None],
    ) -> None:
        self._order = list(sequences)  # the sequence that holds beam 0, 1, ...
        self._sequences = tuple(sequences)
        self._search = search
        self._new_edits = new_edits
        for sequence in sequences:
            sequence.group = self

    def settle(self) -> list[tuple[Sequence, Sequence]]:
        """Choose once every beam has its row; (source, target) of rows to copy. Ends the sequences with the search.

        A failure of one beam is one of all. Nothing happens before all rows are there, or after the end.
        """
        error = next((sequence.error for sequence in self._order if sequence.error is not None), None)
        if error is not None:
            for sequence in self._sequences:
                sequence.fail(error)
        if any(sequence.is_finished or sequence.log_probs is None for sequence in self._order):
            return []
        rows = [self._edited(s.log_probs, beam) for s, beam in zip(self._order, self._search.beams, strict=True)]
        parents = self._search.advance(np.stack(rows))
        if self._search.is_over:
            num_texts = self._sequences[0].params.n
            texts: list[Hypothesis | None] = list(self._search.best(num_texts))
            for sequence, text in zip(self._sequences, texts + [None] * len(self._sequences), strict=False):
                sequence.end(text)
            return []
        return self._move(parents)

    def _move(self, parents: list[int]) -> list[tuple[Sequence, Sequence]]:
        """Hand the beams to the sequences: a beam's first child stays where it is, others take rows without children.

        So no row is overwritten that is still to be read, in whatever order the copies are made.
        """
        free = [sequence for place, sequence in enumerate(self._order) if place not in parents]
        taken: set[int] = set()
        copies: list[tuple[Sequence, Sequence]] = []
        order: list[BeamSequence] = []
        for parent in parents:
            source = self._order[parent]
            target = source if parent not in taken else free.pop()
            if target is not source:
                copies.append((source, target))
            taken.add(parent)
            order.append(target)
        for sequence, beam in zip(order, self._search.beams, strict=True):
            sequence.token_ids, sequence.log_probs = list(beam), None
        self._order = order
        return copies

    def _edited(self, log_probs: NDArray[np.float32] | None, beam: tuple[int, ...]) -> NDArray[np.float32]:
        assert log_probs is not None
        edits = self._new_edits()
        if edits is None:
            return log_probs
        for id_ in beam:
            edits.add_generated(id_)
        return edits.edited(log_probs).astype(np.float32)

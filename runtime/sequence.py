"""One request on its way: its prompt, what has been generated, its text, and why it ended.

In: a prompt, SamplingParams, and the outputs of a step. Out: `StreamEvent`s and a finish reason. It runs no model
and knows no slot (see `scheduler.py`).
"""

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.cache_buffer import KeptRows
from graphport.runtime.constraints import Constraint
from graphport.runtime.forced_ids import ForcedIds
from graphport.runtime.sampling import NonFiniteLogitsError, Sample, Sampler, scored
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence_state import SequenceState
from graphport.runtime.speculation import Speculation
from graphport.runtime.step_outputs import StepOutputs
from graphport.runtime.stop_strings import StopStrings
from graphport.runtime.text_stream import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One generated token and the text that may be shown since the last one.

    `text` may be empty (an unfinished character, or the possible beginning of a stop string). `finish_reason` stands in
    the last event only, whose text holds all that was held back. An event that brings no token (a request that
    generates nothing, or that was cancelled) has `token_id` and `logprob` None. `index`: which of the prompt's
    `SamplingParams.n` samples it belongs to.
    """

    text: str
    token_id: int | None
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    index: int = 0


class Sequence:
    """A request and its state. The engine calls `accept`, `fail` and `finish`; owners read `events` and the results.

    Ids that end it: `end_ids`. The end id is part of `token_ids` and not of the text. It also ends, with reason
    "length", when prompt and new tokens reach `max_total`. Ids from `num_text_ids` on have no text: heads are often
    padded beyond the tokenizer. `first_row` is the first prompt position whose logits are asked for, None when only the
    last one's are. `index`: which of the samples of its prompt it is; `events` may be shared by all of them.
    `priority`: the lower runs first. `deadline`: when it ends as cancelled, in seconds of the engine's clock.
    `state`: rows of a beginning of the prompt. `keeps_state`: whether `kept_rows` are asked for, those of all ids that
    have run; `prompt_rows` are those of the prompt alone, where only these are used again. `speculation`: guesses how
    it goes on. `bad_ids`, `constraint`, `forced`: see Sampler. `source`: what an encoder reads of it, ids or features.
    `languages`: ids of which one is still to stand as the prompt's second. `keeps_rows`: whether the slot holds rows of
    its ids when it ends.
    """

    first_row: int | None = None
    keeps_rows = True

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        vocab_size: int,
        max_total: int,
        end_ids: frozenset[int] = frozenset(),
        text_stream: TextStream | None = None,
        num_text_ids: int = 0,
        index: int = 0,
        events: deque[StreamEvent] | None = None,
        priority: int = 0,
        deadline: float | None = None,
        state: SequenceState | None = None,
        keeps_state: bool = False,
        speculation: Speculation | None = None,
        bad_ids: Many[tuple[int, ...]] = (),
        constraint: Constraint | None = None,
        forced: ForcedIds | None = None,
        source: tuple[int, ...] | NDArray[np.float32] | None = None,
        languages: tuple[int, ...] = (),
    ) -> None:
        self.source = source
        self.languages = languages
        self.prompt_ids = np.array(prompt_ids, np.int64)
        self.params = params
        self.token_ids: list[int] = []
        self.samples: list[Sample] = []
        self.text = ""
        self.events: deque[StreamEvent] = deque() if events is None else events
        self.index = index
        self.priority = priority
        self.deadline = deadline
        self.state = state
        self.keeps_state = keeps_state
        self.speculation = speculation
        self.kept_rows: KeptRows | None = None
        self.prompt_rows: KeptRows | None = None
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self._sampler = Sampler(
            params,
            prompt_ids,
            vocab_size=vocab_size,
            index=index,
            bad_ids=bad_ids,
            constraint=constraint,
            forced=forced,
        )
        self.prompt_samples: list[Sample] = []
        if params.prompt_logprobs is not None and index == 0:
            self.first_row = 0
        self._text_stream = text_stream
        self._num_text_ids = num_text_ids
        self._stops = StopStrings(params.stop)
        self._end_ids = end_ids
        self._max_total = max_total
        if self._is_full() and self.first_row is None:
            self._emit(StreamEvent(text="", token_id=None, logprob=None, finish_reason="length", index=index))

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for any reason or by an error."""
        return self.finish_reason is not None or self.error is not None

    def accept_prompt(self, outputs: StepOutputs, *, is_last: bool) -> None:
        """Take what a chunk of the prompt gave: the positions that were asked for, and after the last the next token.

        Raises NonFiniteLogitsError.
        """
        if self.first_row is not None:
            self._score_prompt(outputs.logits())
        if is_last and self._is_full():
            self._emit(StreamEvent(text="", token_id=None, logprob=None, finish_reason="length", index=self.index))
        elif is_last:
            self.accept(outputs, outputs.num_rows - 1)

    def name_language(self, token_id: int) -> None:
        """Put the language that was heard where the prompt left it open."""
        self.prompt_ids[1] = token_id
        self.languages = ()
        self._sampler.note_prompt(token_id)

    def draft(self) -> list[int]:
        """Ids that may come next, to be checked with the next step; often none.

        There is one less than may still come: a step that checks n ids gives one more.
        """
        if self.speculation is None:
            return []
        ids = [*self.prompt_ids.tolist(), *self.token_ids]
        return self.speculation.propose(ids, self._max_total - len(ids) - 1)

    def accept_draft(self, outputs: StepOutputs, draft: list[int]) -> int:
        """`accept` from the rows of a step that ran the last id and `draft`, as long as they apply.

        Returns how many ids of the draft were right. Raises as `accept` does.
        """
        assert self.speculation is not None
        num_right = 0
        for index in range(len(draft) + 1):
            self.accept(outputs, index)
            if self.is_finished or index == len(draft) or self.token_ids[-1] != draft[index]:
                break
            num_right += 1
        num_ids = len(self.prompt_ids) + len(self.token_ids)
        self.speculation.note(num_drafted=len(draft), num_right=num_right, num_ids=num_ids)
        return num_right

    def accept(self, outputs: StepOutputs, index: int = 0) -> None:
        """Choose the next token from row `index` of a step and add its text. Raises NonFiniteLogitsError."""
        sample = self._sampler.sample_row(outputs.row(index))
        self.token_ids.append(sample.token_id)
        self.samples.append(sample)
        text, reason = self._next_text(sample.token_id)
        self.text += text
        self._emit(
            StreamEvent(
                text=text,
                token_id=sample.token_id,
                logprob=sample.logprob,
                top_logprobs=sample.top_logprobs,
                finish_reason=reason,
                index=self.index,
            )
        )

    def cancel(self) -> None:
        """End it without a further token; what was held back of its text is shown."""
        if not self.is_finished:
            text = self._last_text()[0]
            self.text += text
            self._emit(StreamEvent(text=text, token_id=None, logprob=None, finish_reason="cancelled", index=self.index))

    def fail(self, error: Exception) -> None:
        """End it with an error, which its owner raises."""
        self.error = error

    def _score_prompt(self, logits: NDArray[np.float32]) -> None:
        """Score the prompt's next ids from logits [R, V] of the positions before them; after the last none is given."""
        begin = len(self.prompt_samples) + 1
        for row, token_id in zip(logits, self.prompt_ids[begin : begin + len(logits)].tolist(), strict=False):
            self.prompt_samples.append(scored(row, token_id, self.params.prompt_logprobs or 0))

    def _next_text(self, token_id: int) -> tuple[str, FinishReason | None]:
        if token_id in self._end_ids:
            return self._last_text()[0], "stop"
        piece = self._text_stream.push(token_id) if self._text_stream and token_id < self._num_text_ids else ""
        text, is_stopped = self._stops.push(piece)
        if is_stopped:
            return text, "stop"
        if not self._is_full() and not self._sampler.is_complete:
            return text, None
        rest, is_stopped = self._last_text()
        return text + rest, "stop" if is_stopped or self._sampler.is_complete else "length"

    def _last_text(self) -> tuple[str, bool]:
        """What is held back when no further token comes, and whether it completes a stop string, which cuts it."""
        piece = "" if self._text_stream is None else self._text_stream.flush()
        text, is_stopped = self._stops.push(piece)
        return (text, True) if is_stopped else (text + self._stops.flush(), False)

    def _is_full(self) -> bool:
        return len(self.prompt_ids) + len(self.token_ids) >= self._max_total

    def _emit(self, event: StreamEvent) -> None:
        self.events.append(event)  # before the reason: a reader that sees the reason also sees the event
        self.finish_reason = event.finish_reason


class ScoringSequence(Sequence):
    """A request for the logits of its prompt's positions from `first_row` on; it generates nothing.

    They come as `pieces` [n, vocab] float32, which are the reader's own.
    """

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        *,
        vocab_size: int,
        first_row: int = 0,
        state: SequenceState | None = None,
        keeps_state: bool = False,
    ) -> None:
        super().__init__(
            prompt_ids,
            SamplingParams(),
            vocab_size=vocab_size,
            max_total=len(prompt_ids) + 1,
            state=state,
            keeps_state=keeps_state,
        )
        self.first_row = first_row
        self.pieces: deque[NDArray[np.float32]] = deque()
        self._next_row = first_row

    def accept_prompt(self, outputs: StepOutputs, *, is_last: bool) -> None:  # noqa: ARG002 - it counts positions
        """Keep the logits of all rows of a step, the next positions. Raises NonFiniteLogitsError."""
        logits = outputs.logits()
        if not np.isfinite(logits).all():
            position = self._next_row + int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
            raise NonFiniteLogitsError(
                f"the logits at position {position} are not finite: the model overflowed; export it with "
                "--precision fp32 or bf16"
            )
        self.pieces.append(logits.copy())
        self._next_row += len(logits)
        if self._next_row == len(self.prompt_ids):
            self.finish_reason = "length"

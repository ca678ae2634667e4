"""Continuous batching of a recurrent decoder: prompts run in chunks, rows decode together, each with its own state.

In: sequences. Out: tokens, handed to each sequence as they come. What `engine.py` is over a KV cache, over states of
fixed size: nothing grows, nothing is reused, and rows of any lengths run together. Legend: B rows, V vocabulary.
"""

import functools
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.device_memory import HostMemory
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.recurrent_steps import Tensors, empty_tensors, run_step
from graphport.runtime.scheduler import PromptGroup
from graphport.runtime.sequence import Sequence
from graphport.runtime.step_outputs import StepOutputs

# of a prompt, at most, in a step: the graph computes all pairs of a step's tokens, and rows wait for it
_PREFILL_CHUNK = 64


@dataclass(slots=True)
class _Prompt:
    """A prompt in prefill: the state [1, ...] after its first `length` ids."""

    group: PromptGroup
    tensors: Tensors
    length: int = 0


class RecurrentEngine:
    """Runs sequences over one session. A step decodes once, then runs at most one chunk of one prompt.

    Chunks end at multiples of their size, whatever else runs. A failure of a sequence ends that one, its error kept for
    its owner; of a step, those that ran in it. `clock` is what deadlines are compared with, in seconds.
    """

    def __init__(
        self, session: EncoderSession, *, max_batch: int, vocab_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.arrivals: deque[PromptGroup] = deque()
        self.cancellations: deque[Sequence] = deque()
        self._session = session
        self._max_batch = max_batch
        self._vocab_size = vocab_size
        self._clock = clock
        self._memory = HostMemory()
        self._waiting: list[PromptGroup] = []
        self._prompt: _Prompt | None = None
        self._rows: list[Sequence] = []
        self._tensors = empty_tensors(session, 0)  # [B, ...], those of `_rows`

    def submit(self, *sequences: Sequence) -> None:
        """Queue the samples of one prompt; those finished already are left alone. May be called during a step."""
        unfinished = [sequence for sequence in sequences if not sequence.is_finished]
        if unfinished:
            self.arrivals.append(PromptGroup(unfinished))

    def require_possible(self, sequences: Many[Sequence]) -> None:
        """Nothing grows with a text: what `max_batch` rows take was planned when the model was opened."""

    def step(self) -> None:
        """Advance every running sequence by one token, and the prompt at work by one chunk."""
        self.drop_cancelled()
        now = self._clock()
        for sequence in self.all_sequences():
            if sequence.deadline is not None and now >= sequence.deadline:
                sequence.cancel()
        self._drop_finished()
        self._decode()
        self._prefill()
        self._drop_finished()

    def drop_cancelled(self) -> None:
        """End the sequences in `cancellations`, and free their places. Not during a step."""
        self._take_arrivals()
        while self.cancellations:
            self.cancellations.popleft().cancel()
        self._drop_finished()

    def all_sequences(self) -> list[Sequence]:
        """Every sequence that has not ended, in no particular order. Not during a step."""
        self._take_arrivals()
        groups = [*self._waiting, *([] if self._prompt is None else [self._prompt.group])]
        return [*self._rows, *(sequence for group in groups for sequence in group.sequences)]

    def _take_arrivals(self) -> None:
        while self.arrivals:
            insort(self._waiting, self.arrivals.popleft(), key=lambda group: group.priority)

    def _drop_finished(self) -> None:
        """Take sequences that have ended out, wherever they are."""
        keep = [index for index, sequence in enumerate(self._rows) if not sequence.is_finished]
        if len(keep) < len(self._rows):
            self._rows = [self._rows[index] for index in keep]
            self._tensors = tuple(tensor[keep] for tensor in self._tensors)
        groups = [*self._waiting, *([] if self._prompt is None else [self._prompt.group])]
        for group in groups:
            group.sequences = [sequence for sequence in group.sequences if not sequence.is_finished]
        self._waiting = [group for group in self._waiting if group.sequences]
        if self._prompt is not None and not self._prompt.group.sequences:
            self._prompt = None

    def _decode(self) -> None:
        rows = self._rows
        if not rows:
            return
        ids = np.array([[sequence.token_ids[-1]] for sequence in rows], np.int64)
        lengths = np.array([len(row.prompt_ids) + len(row.token_ids) - 1 for row in rows], np.int64)
        try:
            logits, self._tensors = run_step(self._session, ids, lengths, self._tensors)
        except Exception as error:  # whatever it is, every owner of a row of this step raises it
            _fail(rows, error)
            return
        outputs = self._outputs(logits[:, -1])
        for index, sequence in enumerate(rows):
            _accept(sequence, functools.partial(sequence.accept, outputs, index))

    def _prefill(self) -> None:
        prompt = self._prompt or self._begin()
        if prompt is None:
            return
        group, first = prompt.group, prompt.group.first
        end = min(prompt.length + _PREFILL_CHUNK, len(first.prompt_ids))
        ids = first.prompt_ids[np.newaxis, prompt.length : end]
        lengths = np.array([prompt.length], np.int64)
        try:
            logits, prompt.tensors = run_step(self._session, ids, lengths, prompt.tensors)
        except Exception as error:  # as above
            _fail(group.sequences, error)
            return
        prompt.length, is_last = end, end == len(first.prompt_ids)
        if not is_last and first.first_row is None:
            return
        outputs = self._outputs(logits[0] if first.first_row is not None else logits[0, -1:])
        for sequence in group.sequences:
            _accept(sequence, functools.partial(sequence.accept_prompt, outputs, is_last=is_last))
        if is_last:
            going_on = [sequence for sequence in group.sequences if not sequence.is_finished]
            pairs = zip(self._tensors, prompt.tensors, strict=True)
            self._tensors = tuple(np.concatenate([rows, np.repeat(own, len(going_on), axis=0)]) for rows, own in pairs)
            self._rows = [*self._rows, *going_on]
            self._prompt = None

    def _begin(self) -> _Prompt | None:
        """Take up the first that waits, if there are places for all of its samples, and those that have ended are gone.

        The others wait behind it: who came first is served first.
        """
        self._drop_finished()
        if not self._waiting or len(self._rows) + len(self._waiting[0].sequences) > self._max_batch:
            return None
        self._prompt = _Prompt(self._waiting.pop(0), empty_tensors(self._session, 1))
        return self._prompt

    def _outputs(self, logits: NDArray[np.float32]) -> StepOutputs:
        """Logits [R, V] as sequences read them."""
        tensor = self._memory.tensor(logits.shape, "float32")
        tensor.host[:] = logits
        return StepOutputs(self._memory, tensor, {}, num_rows=len(logits), vocab_size=self._vocab_size)


def _accept(sequence: Sequence, accept: Callable[[], None]) -> None:
    try:
        accept()
    except Exception as error:  # whatever it is, its owner raises it; the other sequences go on
        sequence.fail(error)


def _fail(sequences: Many[Sequence], error: Exception) -> None:
    for sequence in sequences:
        sequence.fail(error)

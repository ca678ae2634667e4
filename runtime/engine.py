"""Continuous batching: prompts run in chunks, rows decode together, finished rows leave and waiting ones join.

In: sequences. Out: tokens, handed to each sequence as they come. It validates no requests and chooses no tokens itself.
One thread at a time may run a step (see `language_model.py`); others may `submit` and append to `cancellations`.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.kv_cache import KVCache
from graphport.runtime.limits import checked_count
from graphport.runtime.memory_plan import SCORING_BYTES
from graphport.runtime.scheduler import Scheduler
from graphport.runtime.sequence import Sequence
from graphport.runtime.session import Session


class Engine:
    """Runs sequences over one session and one cache. A step decodes once, then prefills at most `prefill_chunk` tokens.

    In this order a prompt's first token reaches its owner before the second is computed.

    A failure of a sequence ends that sequence, with its error kept for its owner; the others go on.
    """

    def __init__(self, session: Session, *, max_batch: int, max_length: int, prefill_chunk: int) -> None:
        self.session = session
        self.cache: KVCache = session.new_cache(max_slots=max_batch, max_length=max_length)
        self.scheduler = Scheduler(self.cache)
        self.arrivals: deque[Sequence] = deque()
        self.cancellations: deque[Sequence] = deque()
        self.num_steps = 0
        self._prefill_chunk = checked_count("prefill_chunk", prefill_chunk)
        self._scoring_chunk = max(1, SCORING_BYTES // (4 * session.vocab_size))
        self._last_ids = np.zeros((max_batch, 1), np.int64)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; one that is finished already is left alone. May be called during a step."""
        if not sequence.is_finished:
            self.arrivals.append(sequence)

    def step(self) -> None:
        """Advance every running sequence by one token, and waiting prompts by up to one chunk."""
        self.drop_cancelled()
        self._decode()
        self._prefill()

    def drop_cancelled(self) -> None:
        """End the sequences in `cancellations`, and free their slots. Not during a step."""
        self._take_arrivals()
        while self.cancellations:
            sequence = self.cancellations.popleft()
            self.scheduler.remove(sequence)
            sequence.cancel()

    def all_sequences(self) -> list[Sequence]:
        """Every sequence that has not ended, in no particular order. Not during a step."""
        self._take_arrivals()
        return self.scheduler.all_sequences()

    def _take_arrivals(self) -> None:
        while self.arrivals:
            self.scheduler.waiting.append(self.arrivals.popleft())

    def _prefill(self) -> None:
        budget = self._prefill_chunk
        while budget > 0 and (sequence := self.scheduler.next_prefill()) is not None:
            ids, rows = self._next_chunk(sequence)
            if len(ids) > budget:
                return
            self._run_chunk(sequence, ids, rows)
            # logits of many positions take it all: their owner can read them before the next step makes more
            budget -= len(ids) if rows is None else budget

    def _next_chunk(self, sequence: Sequence) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Ids [S] of the part of a prompt that runs next, and which of them [R] are asked for logits.

        None asks for the last one at most. A part begins and ends wherever it would if the prompt were alone: over a
        quantised cache, results depend on that.
        """
        begin, first = int(self.cache.lengths[self.scheduler.prefill_slot]), sequence.first_row
        if first is None:
            return sequence.prompt_ids[begin : begin + self._prefill_chunk], None
        before = max(first - begin, 0)
        ids = sequence.prompt_ids[begin : begin + min(self._prefill_chunk, before + self._scoring_chunk)]
        return ids, np.arange(before, len(ids)) if before < len(ids) else None

    def _run_chunk(self, sequence: Sequence, ids: NDArray[np.int64], rows: NDArray[np.int64] | None) -> None:
        """Run `ids` [S] of a prompt, at batch 1 on its slot."""
        slot = self.scheduler.prefill_slot
        begin = int(self.cache.lengths[slot])
        try:
            # room for the whole prompt and a token after it: the cache grows, or refuses, once and before the work
            room = min(len(sequence.prompt_ids) + 1, self.cache.max_length)
            self.cache.reserve(slot + 1, room)
            self.num_steps += 1
            outputs = self.session.run(self.cache, ids[np.newaxis], rows, first_slot=slot)
            is_last = begin + len(ids) == len(sequence.prompt_ids)
            if is_last or rows is not None:
                sequence.accept(outputs)
        except Exception as error:  # whatever it is, its owner raises it; the other sequences go on
            sequence.fail(error)
            is_last = True
        if sequence.is_finished:
            self.scheduler.remove(sequence)
        elif is_last:
            self.scheduler.start_decoding()

    def _decode(self) -> None:
        rows = list(self.scheduler.decoding)
        if not rows:
            return
        for slot, sequence in enumerate(rows):
            self._last_ids[slot, 0] = sequence.token_ids[-1]
        try:
            self.num_steps += 1
            outputs = self.session.run(self.cache, self._last_ids[: len(rows)])
        except MemoryError as error:  # the cache could not grow: only the rows that need it fail
            longest = self.cache.lengths[: len(rows)].max()
            self._fail([row for slot, row in enumerate(rows) if self.cache.lengths[slot] == longest], error)
            return
        except Exception as error:  # as above: every owner of a row of this step raises it
            self._fail(rows, error)
            return
        for slot, sequence in enumerate(rows):
            try:
                sequence.accept(outputs, slot)
            except Exception as error:  # as above: this row's alone
                sequence.fail(error)
        for sequence in rows:
            if sequence.is_finished:
                self.scheduler.remove(sequence)

    def _fail(self, rows: list[Sequence], error: Exception) -> None:
        for sequence in rows:
            sequence.fail(error)
            self.scheduler.remove(sequence)

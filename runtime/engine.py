"""Continuous batching: prompts run in chunks, rows decode together, finished rows leave and waiting ones join.

In: sequences. Out: tokens, handed to each sequence as they come. It validates no requests and chooses no tokens itself.
One thread at a time may run a step (see `turns.py`); others may `submit` and append to `cancellations`.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.beam_sequences import BeamSequence
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.limits import checked_count
from graphport.runtime.memory_plan import SCORING_BYTES
from graphport.runtime.row_reuse import RowReuse
from graphport.runtime.scheduler import PromptGroup, Scheduler
from graphport.runtime.sequence import Sequence
from graphport.runtime.session import Session
from graphport.runtime.step_outputs import StepOutputs

GROWTH_BYTES = 32 << 20  # of a growing cache, taken beside each step of the running rows: less than a chunk's time

_log = logging.getLogger(__name__)


class Engine:
    """Runs sequences over one session and one cache. A step decodes once, then prefills at most one chunk of prompts.

    In this order a prompt's first token reaches its owner before the second is computed. A chunk has `prefill_chunk`
    tokens at most: no row waits for its next token for longer than one decode step and one such chunk take. Chunks end
    at multiples of `prefill_chunk`, whatever else runs, so that results do not depend on that.

    A failure of a sequence ends that sequence, with its error kept for its owner; the others go on. `clock` is what
    deadlines are compared with, in seconds. `prefix_cache_bytes`: what rows of earlier prompts may take.
    `reused_chunk`: the size of the pieces of prompts that may be used again, None where any may.
    """

    def __init__(
        self,
        session: Session,
        *,
        max_batch: int,
        max_length: int,
        prefill_chunk: int,
        prefix_cache_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self._prefill_chunk = checked_count("prefill_chunk", prefill_chunk)
        self.cache: KVCache = session.new_cache(
            max_slots=max_batch, max_length=max_length, longest_step=self._prefill_chunk
        )
        self.scheduler = Scheduler(self.cache)
        self.arrivals: deque[PromptGroup] = deque()
        self.cancellations: deque[Sequence] = deque()
        self.num_steps = self.num_prompt_tokens = self.num_generated_tokens = 0
        self.num_drafted = self.num_drafted_right = 0
        self.reused_chunk = self._prefill_chunk if session.depends_on_cuts else None
        self.reuse = RowReuse(self.cache, budget=prefix_cache_bytes, chunk=self.reused_chunk)
        self._scoring_chunk = max(1, SCORING_BYTES // (4 * session.vocab_size))
        self._last_ids = np.zeros((max_batch, 1), np.int64)
        self._clock = clock

    def submit(self, *sequences: Sequence) -> None:
        """Queue the samples of one prompt; those finished already are left alone. May be called during a step."""
        unfinished = [sequence for sequence in sequences if not sequence.is_finished]
        if unfinished:
            self.arrivals.append(PromptGroup(unfinished))

    def require_possible(self, sequences: Many[Sequence]) -> None:
        """Raise NotEnoughMemoryError if samples of one prompt could never have their rows. May be called at any time.

        Rows are those of the tokens that the request asks for; where it sets no limit, of its prompt and one more.
        """
        first = sequences[0]
        length = len(first.prompt_ids) + min(first.params.max_new_tokens or 1, self.cache.max_length)
        self.cache.require_possible(len(sequences), min(length, self.cache.max_length))

    def step(self) -> None:
        """Advance every running sequence by one token, and waiting prompts by up to one chunk."""
        self.drop_cancelled()
        self._drop_late()
        self._decode()
        self._prefill()

    def drop_cancelled(self) -> None:
        """End the sequences in `cancellations`, and free their slots. Not during a step."""
        self._take_arrivals()
        while self.cancellations:
            self._cancel(self.cancellations.popleft())

    def all_sequences(self) -> list[Sequence]:
        """Every sequence that has not ended, in no particular order. Not during a step."""
        self._take_arrivals()
        return self.scheduler.all_sequences()

    def _take_arrivals(self) -> None:
        while self.arrivals:
            self.scheduler.add(self.arrivals.popleft())

    def _drop_late(self) -> None:
        now = self._clock()
        for sequence in self.scheduler.all_sequences():
            if sequence.deadline is not None and now >= sequence.deadline:
                self._cancel(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        sequence.cancel()
        self._remove(sequence)

    def _prefill(self) -> None:
        used = 0
        while used < self._prefill_chunk:
            group = self.scheduler.next_prefill()
            if group is None:
                self.cache.stop_growing()
                return
            if not self._begin(group):
                continue
            if not group.has_begun:
                return
            ids, rows = self._next_chunk(group)
            if used + len(ids) > self._prefill_chunk:
                return
            self._run_chunk(group, ids, rows)
            # logits of many positions take it all: their owner can read them before the next step makes more
            used += len(ids) if rows is None else self._prefill_chunk

    def _begin(self, group: PromptGroup) -> bool:
        """Make room in the cache and fill in the rows that are known already; False when that failed.

        Room is for the whole prompt and a token after it, for all samples: the cache grows, or refuses, once and before
        the work. Beside running rows it grows over several steps, and `has_begun` says whether it is done.
        """
        if group.has_begun:
            return True
        try:
            room, slot = (
                (self.scheduler.num_slots_needed, self.scheduler.room_needed),
                self.scheduler.slot_of_prompt(group),
            )
            if self.scheduler.decoding and not self.cache.reserve_part(*room, slot=slot, most_bytes=GROWTH_BYTES):
                return True
            self.cache.reserve(*room)
            if group.first.source is not None:
                self.session.encode(self.cache, slot, group.first.source)
            if group.first.languages:
                self._hear_language(group, slot)
            self.reuse.restore(group.first, slot)
        except Exception as error:  # whatever it is, its owner raises it; the other sequences go on
            self._fail(list(group.sequences), error)
            return False
        group.has_begun = True
        return True

    def _hear_language(self, group: PromptGroup, slot: int) -> None:
        """Let a step after the prompt's first id choose its second, the likeliest language, for all samples."""
        first = group.first
        logits = self._run([first], first.prompt_ids[np.newaxis, :1], first_slot=slot).row(0).full()
        language = max(first.languages, key=lambda token_id: float(logits[token_id]))
        self.cache.rewind(slot, 0)
        for sequence in group.sequences:
            sequence.name_language(language)

    def _next_chunk(self, group: PromptGroup) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Ids [S] of the part of a prompt that runs next, and which of them [R] are asked for logits.

        None asks for the last one at most.
        """
        sequence = group.first
        begin, first = int(self.cache.lengths[self.scheduler.slot_of_prompt(group)]), sequence.first_row
        size = self._prefill_chunk - begin % self._prefill_chunk
        if first is None:
            return sequence.prompt_ids[begin : begin + size], None
        before = max(first - begin, 0)
        ids = sequence.prompt_ids[begin : begin + min(size, before + self._scoring_chunk)]
        return ids, np.arange(before, len(ids)) if before < len(ids) else None

    def _run_chunk(self, group: PromptGroup, ids: NDArray[np.int64], rows: NDArray[np.int64] | None) -> None:
        """Run `ids` [S] of a prompt, at batch 1 on its slot."""
        slot = self.scheduler.slot_of_prompt(group)
        is_last = int(self.cache.lengths[slot]) + len(ids) == len(group.first.prompt_ids)
        try:
            outputs = self._run([group.first], ids[np.newaxis], rows, first_slot=slot)
        except Exception as error:  # as above
            self._fail(list(group.sequences), error)
            return
        self.num_prompt_tokens += len(ids)
        self.scheduler.note_chunk(group)
        if not is_last and rows is None:
            return
        for sequence in group.sequences:
            self._accept(sequence, functools.partial(sequence.accept_prompt, outputs, is_last=is_last))
        if is_last:
            self._settle(group.sequences)  # all samples get copies of the prompt's rows
            self._keep(group.first, slot)
            for sequence in group.sequences:
                self.reuse.note_prompt(sequence, slot)
                if sequence.is_finished:
                    self._hand_over(sequence, slot)
            self.scheduler.start_decoding(group)
        else:
            self._remove_finished(list(group.sequences))

    def _decode(self) -> None:
        rows = list(self.scheduler.decoding)
        if not rows or (len(rows) == 1 and self._decode_with_draft(rows[0])):
            return
        for slot, sequence in enumerate(rows):
            self._last_ids[slot, 0] = sequence.token_ids[-1]
        try:
            outputs = self._run(rows, self._last_ids[: len(rows)])
        except MemoryError as error:  # the cache could not grow: only the rows that need it fail
            longest = self.cache.lengths[: len(rows)].max()
            self._fail([row for slot, row in enumerate(rows) if self.cache.lengths[slot] == longest], error)
            return
        except Exception as error:  # as above: every owner of a row of this step raises it
            self._fail(rows, error)
            return
        for slot, sequence in enumerate(rows):
            self._accept(sequence, functools.partial(sequence.accept, outputs, slot))
        for source, target in self._settle(rows):
            self.cache.copy_slot(rows.index(source), rows.index(target))
        self._remove_finished(rows)

    def _settle(self, rows: Many[Sequence]) -> list[tuple[Sequence, Sequence]]:
        """Let the searches among `rows` choose; the (source, target) rows that must become copies."""
        groups = {id(row.group): row.group for row in rows if isinstance(row, BeamSequence) and row.group is not None}
        copies = []
        for group in groups.values():
            before = sum(len(row.token_ids) for row in rows if isinstance(row, BeamSequence) and row.group is group)
            copies += group.settle()
            after = sum(len(row.token_ids) for row in rows if isinstance(row, BeamSequence) and row.group is group)
            self.num_generated_tokens += max(0, after - before)
        return copies

    def _decode_with_draft(self, sequence: Sequence) -> bool:
        """Check what `sequence`, which decodes alone, drafts; whether it drafted anything.

        Rows that decode together share one pass over the weights, which is worth more than drafts, and a long step of
        one would hold up the others. Where there is no memory for the rows of a draft, there may be for one token.
        """
        try:
            draft = sequence.draft()
            before, count = int(self.cache.lengths[0]), len(sequence.token_ids)
            if not draft or not self.cache.has_room(1, before + 1 + len(draft)):
                return False
            ids = np.array([[sequence.token_ids[-1], *draft]], np.int64)
            outputs = self._run([sequence], ids, np.arange(len(draft) + 1))
            self.cache.rewind(0, before + 1)
            num_right = sequence.accept_draft(outputs, draft)
            self.cache.advance(0, 1, num_right)
            self.num_drafted += len(draft)
            self.num_drafted_right += num_right
            self.num_generated_tokens += len(sequence.token_ids) - count
        except Exception as error:  # as above
            sequence.fail(error)
        self._remove_finished([sequence])
        return True

    def _run(
        self,
        sequences: Many[Sequence],
        ids: NDArray[np.int64],
        rows: NDArray[np.int64] | None = None,
        *,
        first_slot: int = 0,
    ) -> StepOutputs:
        """A step of the session for `sequences`, whose slots begin at `first_slot`."""
        self.num_steps += 1
        for slot, sequence in enumerate(sequences, first_slot):
            self.reuse.keep_dropped(sequence, slot)
        return self.session.run(self.cache, ids, rows, first_slot=first_slot)

    def _accept(self, sequence: Sequence, accept: Callable[[], None]) -> None:
        count = len(sequence.token_ids)
        try:
            accept()
        except Exception as error:  # as above: this sequence's alone
            sequence.fail(error)
        self.num_generated_tokens += len(sequence.token_ids) - count

    def _fail(self, rows: list[Sequence], error: Exception) -> None:
        for sequence in rows:
            sequence.fail(error)
        self._remove_finished(rows)

    def _remove_finished(self, rows: list[Sequence]) -> None:
        for sequence in rows:
            if sequence.is_finished:
                self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended; its rows are kept unless it failed."""
        slot = self.scheduler.slot_of(sequence)
        if slot is not None and sequence.error is None and sequence.keeps_rows:
            self._keep(sequence, slot)
            self._hand_over(sequence, slot)
        self.scheduler.remove(sequence)

    def _keep(self, sequence: Sequence, slot: int) -> None:
        """Keep rows for later prompts, which is no part of the request: a failure there is the log's alone."""
        try:
            self.reuse.keep(sequence, slot)
        except Exception:  # as above; what was kept before stays right
            _log.warning("rows of a prompt could not be kept for later ones", exc_info=True)

    def _hand_over(self, sequence: Sequence, slot: int) -> None:
        try:
            self.reuse.hand_over(sequence, slot)
        except Exception as error:  # as above: its owner asked for them
            sequence.fail(error)

"""Who runs next: the most urgent first, then first come, first served, over the slots of one KV cache.

In: groups of sequences. Out: the one to prefill, the rows to decode. It runs nothing; it keeps rows and cache slots in
step.
"""

from bisect import insort
from collections.abc import Sequence as Many

from graphport.runtime.kv_cache import KVCache
from graphport.runtime.sequence import Sequence


class PromptGroup:
    """The samples of one prompt: it is run once, then each of them goes on in a slot of its own.

    A group is taken up when there are slots for all of it, so that samples never wait for one another.
    """

    def __init__(self, sequences: Many[Sequence]) -> None:
        self.sequences = list(sequences)
        self.first = self.sequences[0]
        self.has_begun = False


class Scheduler:
    """Waiting groups, at most one in prefill, and the sequences that decode.

    `decoding[i]` owns cache slot i; the group in prefill owns the slot after them. So decoding rows are always a dense
    prefix, which is what one batched step takes. `waiting` is in order of `Sequence.priority`, the lowest first, and of
    arrival: nobody overtakes a request of the same priority.
    """

    def __init__(self, cache: KVCache) -> None:
        self.waiting: list[PromptGroup] = []
        self.prefilling: PromptGroup | None = None
        self.decoding: list[Sequence] = []
        self._cache = cache

    @property
    def num_active(self) -> int:
        """Sequences that own a slot."""
        return len(self.decoding) + (self.prefilling is not None)

    @property
    def prefill_slot(self) -> int:
        """The slot of the group in prefill."""
        return len(self.decoding)

    def add(self, group: PromptGroup) -> None:
        """Let a group wait, behind all that are as urgent."""
        insort(self.waiting, group, key=lambda each: each.first.priority)

    def next_prefill(self) -> PromptGroup | None:
        """The group whose prompt runs next: the one begun, else the first waiting if it has a place, or None."""
        if self.prefilling is None and self.waiting and self._has_place(self.waiting[0]):
            self.prefilling = self.waiting.pop(0)
            self._cache.claim()
        return self.prefilling

    def room_for(self, group: PromptGroup) -> int:
        """Tokens a row that a group needs to begin: its prompt's, and one after it."""
        return min(len(group.first.prompt_ids) + 1, self._cache.max_length)

    def start_decoding(self) -> None:
        """The prompt in prefill is done: its samples that have not ended join the decoding rows, each in a slot.

        The first keeps the prompt's slot, and the others get copies of it. Needs room in the cache for their rows.
        """
        assert self.prefilling is not None
        slot = self.prefill_slot
        going_on = [sequence for sequence in self.prefilling.sequences if not sequence.is_finished]
        for sequence in going_on:
            if sequence is not going_on[0]:
                self._cache.copy_slot(slot, self._cache.claim())
            self.decoding.append(sequence)
        if not going_on:
            self._cache.release(slot)
        self.prefilling = None

    def slot_of(self, sequence: Sequence) -> int | None:
        """The slot that holds the rows of a sequence; None while it waits."""
        if sequence in self.decoding:
            return self.decoding.index(sequence)
        is_in_prefill = self.prefilling is not None and sequence in self.prefilling.sequences
        return self.prefill_slot if is_in_prefill else None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its slot; later slots close the gap."""
        if sequence in self.decoding:
            self._remove_row(self.decoding.index(sequence))
        elif self.prefilling is not None and sequence in self.prefilling.sequences:
            self.prefilling.sequences.remove(sequence)
            if not self.prefilling.sequences:
                self._cache.release(self.prefill_slot)
                self.prefilling = None
        else:
            for group in self.waiting:
                if sequence in group.sequences:
                    group.sequences.remove(sequence)
            self.waiting = [group for group in self.waiting if group.sequences]

    def all_sequences(self) -> list[Sequence]:
        """Every sequence that has not ended, in no particular order."""
        groups = [*self.waiting, *([] if self.prefilling is None else [self.prefilling])]
        return [*self.decoding, *(sequence for group in groups for sequence in group.sequences)]

    def _has_place(self, group: PromptGroup) -> bool:
        """Whether there are slots for a group, and memory for its prompt; with nobody to wait for, trying will tell."""
        num_slots = self.num_active + len(group.sequences)
        if num_slots > self._cache.max_slots:
            return False
        return self.num_active == 0 or self._cache.has_room(num_slots, self.room_for(group))

    def _remove_row(self, slot: int) -> None:
        last = len(self.decoding) - 1
        if slot != last:
            self._cache.copy_slot(last, slot)
            self.decoding[slot] = self.decoding[last]
        self.decoding.pop()
        self._cache.release(last)  # the group in prefill, if any, moves from the slot after it

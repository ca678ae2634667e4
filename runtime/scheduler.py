"""Who runs next: first come, first served, over the slots of one KV cache.

In: sequences. Out: the one to prefill, the ones to decode. It runs nothing; it keeps rows and cache slots in step.
"""

from collections import deque

from graphport.runtime.kv_cache import KVCache
from graphport.runtime.sequence import Sequence


class Scheduler:
    """Waiting sequences, at most one in prefill, and those that decode.

    `decoding[i]` owns cache slot i; the one in prefill owns the slot after them. So decoding rows are always a dense
    prefix, which is what one batched step takes.
    """

    def __init__(self, cache: KVCache) -> None:
        self.waiting: deque[Sequence] = deque()
        self.prefilling: Sequence | None = None
        self.decoding: list[Sequence] = []
        self._cache = cache

    @property
    def num_active(self) -> int:
        """Sequences that own a slot."""
        return len(self.decoding) + (self.prefilling is not None)

    @property
    def prefill_slot(self) -> int:
        """The slot of the sequence in prefill."""
        return len(self.decoding)

    def next_prefill(self) -> Sequence | None:
        """The sequence whose prompt runs next: the one begun, else the first waiting if a slot is free, else None."""
        if self.prefilling is None and self.waiting and self.num_active < self._cache.max_slots:
            self.prefilling = self.waiting.popleft()
            self._cache.claim()
        return self.prefilling

    def start_decoding(self) -> None:
        """The sequence in prefill has its first token: it joins the decoding rows."""
        assert self.prefilling is not None
        self.decoding.append(self.prefilling)
        self.prefilling = None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its slot; later slots close the gap."""
        if sequence is self.prefilling:
            self._cache.release(self.prefill_slot)
            self.prefilling = None
        elif sequence in self.decoding:
            slot, last = self.decoding.index(sequence), len(self.decoding) - 1
            if slot != last:
                self._cache.copy_slot(last, slot)
                self.decoding[slot] = self.decoding[last]
            self.decoding.pop()
            self._cache.release(last)  # the one in prefill, if any, moves from the slot after it
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def all_sequences(self) -> list[Sequence]:
        """Every sequence that has not ended, in no particular order."""
        return [*self.waiting, *self.decoding, *([] if self.prefilling is None else [self.prefilling])]

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

    @property
    def priority(self) -> int:
        """How urgent it is: the lower, the more."""
        return self.first.priority

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.first.prompt_ids)


class Scheduler:
    """Waiting groups, those in prefill, and the sequences that decode.

    `decoding[i]` owns cache slot i; the groups in prefill own the slots after them, in the order of `prefilling`. So
    decoding rows are always a dense prefix, which is what one batched step takes. `waiting` is in order of
    `Sequence.priority`, the lowest first, and of arrival.

    In prefill a prompt is overtaken by one that is more urgent, and by a shorter one of its own priority: shorter than
    what is left of it. The more urgent gets every chunk; of equals, the one begun first and the one begun last take
    turns. So a short prompt does not wait for a long one, and a long one never has less than half of the chunks.
    """

    def __init__(self, cache: KVCache) -> None:
        self.waiting: list[PromptGroup] = []
        self.prefilling: list[PromptGroup] = []
        self.decoding: list[Sequence] = []
        self._begun: list[PromptGroup] = []  # those in prefill, as they began
        self._latest: PromptGroup | None = None  # whose chunk ran last
        self._cache = cache

    @property
    def num_active(self) -> int:
        """Sequences that own a slot."""
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_slots_needed(self) -> int:
        """Slots that those who have begun need: of a group in prefill one a sample, and one to change places."""
        return self._num_slots(self.prefilling)

    @property
    def room_needed(self) -> int:
        """Tokens a row that those in prefill need: their prompts, and one after each."""
        return self._room(self.prefilling)

    def add(self, group: PromptGroup) -> None:
        """Let a group wait, behind all that are as urgent."""
        insort(self.waiting, group, key=lambda each: each.priority)

    def next_prefill(self) -> PromptGroup | None:
        """The group whose prompt runs next, or None."""
        joining = self._joining()
        if joining is not None:
            self.waiting.remove(joining)
            self.prefilling.append(joining)
            self._begun.append(joining)
            self._cache.claim()
        if not self._begun:
            return None
        most_urgent = min(group.priority for group in self._begun)
        equals = [group for group in self._begun if group.priority == most_urgent]
        return equals[-1] if self._latest is equals[0] else equals[0]

    def note_chunk(self, group: PromptGroup) -> None:
        """A chunk of `group` has run."""
        self._latest = group

    def start_decoding(self, group: PromptGroup) -> None:
        """The prompt of `group` is done: its samples that have not ended join the decoding rows, each in a slot.

        The first keeps the prompt's rows, and the others get copies of them. Needs room in the cache for their rows.
        """
        going_on = [sequence for sequence in group.sequences if not sequence.is_finished]
        if not going_on:
            self._leave_prefill(group)
            return
        slot = len(self.decoding)
        self._move_to(slot, group)
        self.prefilling.remove(group)
        self._begun.remove(group)
        self._make_way(slot + 1, len(going_on) - 1)
        for target in range(slot + 1, slot + len(going_on)):
            self._cache.copy_slot(slot, target)
        self.decoding += going_on

    def slot_of(self, sequence: Sequence) -> int | None:
        """The slot that holds the rows of a sequence; None while it waits."""
        if sequence in self.decoding:
            return self.decoding.index(sequence)
        group = self._in_prefill(sequence)
        return None if group is None else self.slot_of_prompt(group)

    def slot_of_prompt(self, group: PromptGroup) -> int:
        """The slot of a group in prefill."""
        return len(self.decoding) + self.prefilling.index(group)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its slot; later slots close the gap."""
        if sequence in self.decoding:
            self._remove_row(self.decoding.index(sequence))
        elif (group := self._in_prefill(sequence)) is not None:
            group.sequences.remove(sequence)
            if not group.sequences:
                self._leave_prefill(group)
        else:
            for group in self.waiting:
                if sequence in group.sequences:
                    group.sequences.remove(sequence)
            self.waiting = [group for group in self.waiting if group.sequences]

    def all_sequences(self) -> list[Sequence]:
        """Every sequence that has not ended, in no particular order."""
        groups = [*self.waiting, *self.prefilling]
        return [*self.decoding, *(sequence for group in groups for sequence in group.sequences)]

    def _joining(self) -> PromptGroup | None:
        """The waiting group that begins now, if one does: the first, or one that overtakes all in prefill."""
        if not self.waiting:
            return None
        group = self.waiting[0]
        if self.prefilling:
            group = min(self.waiting, key=lambda each: (each.priority, each.num_tokens))
            left = min((each.priority, self._num_left(each)) for each in self.prefilling)
            if (group.priority, group.num_tokens) >= left:
                return None
        return group if self._has_place(group) else None

    def _num_left(self, group: PromptGroup) -> int:
        """Tokens of a prompt in prefill that have not run."""
        return group.num_tokens - int(self._cache.lengths[self.slot_of_prompt(group)])

    def _has_place(self, group: PromptGroup) -> bool:
        """Whether there are slots for a group, and memory for its prompt; with nobody to wait for, trying will tell."""
        in_prefill = [*self.prefilling, group]
        num_slots = self._num_slots(in_prefill)
        if num_slots > self._cache.max_slots:
            return False
        return self.num_active == 0 or self._cache.has_room(num_slots, self._room(in_prefill))

    def _num_slots(self, in_prefill: Many[PromptGroup]) -> int:
        counts = [len(group.sequences) for group in in_prefill]
        has_to_change = len(counts) > 1 and max(counts) == 1
        return len(self.decoding) + sum(counts) + has_to_change

    def _room(self, in_prefill: Many[PromptGroup]) -> int:
        return min(max(group.num_tokens for group in in_prefill) + 1, self._cache.max_length)

    def _in_prefill(self, sequence: Sequence) -> PromptGroup | None:
        return next((group for group in self.prefilling if sequence in group.sequences), None)

    def _move_to(self, slot: int, group: PromptGroup) -> None:
        """Let a group in prefill change places with the first of them, in `slot`, by way of a free one."""
        own = self.slot_of_prompt(group)
        if own == slot:
            return
        free = self._cache.claim()
        for source, target in ((own, free), (slot, own), (free, slot)):  # the longer of the two is copied once
            self._cache.copy_slot(source, target)
        self._cache.release(free)
        place = self.prefilling.index(group)
        self.prefilling[0], self.prefilling[place] = group, self.prefilling[0]

    def _make_way(self, slot: int, count: int) -> None:
        """Take `count` slots, so that those from `slot` on are free: groups in prefill there move behind."""
        for _ in range(count):
            self._cache.claim()
        moving = min(count, len(self.prefilling))
        behind = slot + max(count, len(self.prefilling))
        for place in range(moving):
            self._cache.copy_slot(slot + place, behind + place)
        self.prefilling = [*self.prefilling[moving:], *self.prefilling[:moving]]

    def _leave_prefill(self, group: PromptGroup) -> None:
        slot, place = self.slot_of_prompt(group), self.prefilling.index(group)
        self._begun.remove(group)
        last = self.prefilling.pop()
        if last is not group:  # it moves into the slot that becomes free
            self.prefilling[place] = last
        self._cache.release(slot)

    def _remove_row(self, slot: int) -> None:
        last = len(self.decoding) - 1
        if slot != last:
            self._cache.copy_slot(last, slot)
            self.decoding[slot] = self.decoding[last]
        self.decoding.pop()
        self._cache.release(last)  # the last of the groups in prefill, if any, moves into it
        if self.prefilling:
            self.prefilling.insert(0, self.prefilling.pop())

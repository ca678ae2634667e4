"""Which cached rows a prompt need not compute again, and which a sequence leaves behind for others.

In: sequences and the slots that they hold. Out: slots filled with rows known already, rows kept. It runs nothing; the
store itself is `prefix_cache.py`.
"""

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.cache_buffer import KeptRows
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.prefix_cache import PrefixCache
from graphport.runtime.sequence import Sequence
from graphport.runtime.sequence_state import SequenceState

# Tokens of a block: what two prompts share beyond the last whole block is computed again. Smaller blocks save a step of
# few tokens and cost more to copy.
BLOCK_TOKENS = 16


class RowReuse:
    """Rows of one cache, kept within `budget` bytes (0: none) and in the states that callers hold.

    `chunk`: the size of a prompt's chunks where results depend on them (`Session.depends_on_cuts`). There only whole
    chunks of prompts are used again: they are what a prompt that runs alone computes, to the last bit.
    """

    def __init__(self, cache: KVCache, *, budget: int, chunk: int | None) -> None:
        self._cache = cache
        self._chunk = chunk
        self.prefixes: PrefixCache | None = None
        if budget:
            self.prefixes = PrefixCache(
                budget=budget, block_tokens=chunk or BLOCK_TOKENS, bytes_per_token=cache.bytes_per_token
            )

    def restore(self, sequence: Sequence, slot: int) -> None:
        """Fill empty `slot`, which has room for the prompt, with as many of its rows as are known.

        The last token is always left to run, and so are all positions whose logits are asked for.
        """
        ids = sequence.prompt_ids
        most = len(ids) - 1 if sequence.first_row is None else min(sequence.first_row, len(ids) - 1)
        shared = self._shared_with_state(sequence, most)
        found = [] if self.prefixes is None else self.prefixes.find(ids, most=most, least=shared)
        if found:
            self._cache.append_rows(slot, [np.concatenate(pieces, axis=1) for pieces in zip(*found, strict=True)])
        elif sequence.state is not None and shared:
            self._cache.append_kept(slot, self._beginning(sequence.state, shared))

    def keep(self, sequence: Sequence, slot: int) -> None:
        """Keep the rows of `slot` for later prompts that begin with the same ids."""
        if self.prefixes is None or (self._chunk is not None and sequence.first_row is not None):
            return
        first = int(self._cache.firsts[slot])
        ids = self._ids(sequence, slot)
        self.prefixes.keep(ids, lambda begin, end: self._cache.read_rows(slot, begin, end), first=first)

    def keep_dropped(self, sequence: Sequence, slot: int) -> None:
        """`keep`, if the next step drops rows of `slot`."""
        if self._cache.drops_rows(slot):
            self.keep(sequence, slot)

    def note_prompt(self, sequence: Sequence, slot: int) -> None:
        """The prompt of `sequence` has just run: what layers with a window have of it goes while it generates.

        Where any rows may be used again, those at the end are the ones; else those of the last whole chunk of the
        prompt, which are still there.
        """
        if sequence.keeps_state and self._cache.window is not None and self._chunk is not None:
            sequence.prompt_rows = self._cache.read_kept(slot, windows_only=True)

    def hand_over(self, sequence: Sequence, slot: int) -> None:
        """Give a sequence that ends its rows, if its owner asked for them."""
        if not sequence.keeps_state:
            return
        kept, prompt = self._cache.read_kept(slot), sequence.prompt_rows
        if prompt is not None:
            pairs = zip(kept.rows, prompt.rows, self._cache.moving, strict=True)
            rows = tuple(early if moves else late for late, early, moves in pairs)
            kept = KeptRows(kept.length, rows, prompt.firsts)
        sequence.kept_rows = kept

    def _ids(self, sequence: Sequence, slot: int) -> NDArray[np.int64]:
        """Ids whose rows may be used again, of those in `slot`; the last id chosen has no rows yet."""
        ids = sequence.prompt_ids
        if self._chunk is None:
            ids = np.concatenate([ids, np.array(sequence.token_ids, np.int64)])
        return ids[: int(self._cache.lengths[slot])]

    def _shared_with_state(self, sequence: Sequence, most: int) -> int:
        if sequence.state is None:
            return 0
        state = sequence.state
        length = shared_length(state.token_ids, sequence.prompt_ids[:most])
        if self._chunk is not None:
            length = min(length, state.num_prompt_tokens) // self._chunk * self._chunk
        return length if self._has_window(state, length) else 0

    def _has_window(self, state: SequenceState, length: int) -> bool:
        """Whether `state` has what layers with a window need after `length` tokens.

        Where results depend on cuts that is what a cold run would have there, to the last row.
        """
        window, first = self._cache.window, max(state.firsts)
        if window is None or first == 0:
            return True
        return window.reaches(first, length) if self._chunk is None else first <= window.first(length)

    def _beginning(self, state: SequenceState, length: int) -> KeptRows:
        """The first `length` tokens of `state`, without what no step after them sees."""
        window = self._cache.window
        first = 0 if window is None else max(*state.firsts, window.first(length))
        wanted = [first if moves else 0 for moves in self._cache.moving]
        rows = tuple(
            rows[:, begin - had : length - had]
            for rows, begin, had in zip(state.rows, wanted, state.firsts, strict=True)
        )
        return KeptRows(length, rows, tuple(wanted))


def shared_length(ids: Many[int], other: NDArray[np.int64]) -> int:
    """How many ids two lists have in common at their beginning."""
    count = min(len(ids), len(other))
    differing = np.flatnonzero(np.asarray(ids[:count], np.int64) != other[:count])
    return int(differing[0]) if len(differing) else count

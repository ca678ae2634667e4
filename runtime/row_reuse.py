"""Which cached rows a prompt need not compute again, and which a sequence leaves behind for others.

In: sequences and the slots that they hold. Out: slots filled with rows known already, rows kept. It runs nothing; the
store itself is `prefix_cache.py`.
"""

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.kv_cache import KVCache
from graphport.runtime.prefix_cache import PrefixCache
from graphport.runtime.sequence import Sequence

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
            self._cache.append_rows(slot, [rows[:, :shared] for rows in sequence.state.rows])

    def keep(self, sequence: Sequence, slot: int) -> None:
        """Keep the rows of `slot` for later prompts that begin with the same ids."""
        if self.prefixes is None or (self._chunk is not None and sequence.first_row is not None):
            return
        self.prefixes.keep(self._ids(sequence, slot), lambda begin, end: self._cache.read_rows(slot, begin, end))

    def hand_over(self, sequence: Sequence, slot: int) -> None:
        """Give a sequence that ends its rows, if its owner asked for them."""
        if sequence.keeps_state:
            sequence.kept_rows = self._cache.read_rows(slot, 0, int(self._cache.lengths[slot]))

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
        return length if self._chunk is None else min(length, state.num_prompt_tokens) // self._chunk * self._chunk


def shared_length(ids: Many[int], other: NDArray[np.int64]) -> int:
    """How many ids two lists have in common at their beginning."""
    count = min(len(ids), len(other))
    differing = np.flatnonzero(np.asarray(ids[:count], np.int64) != other[:count])
    return int(differing[0]) if len(differing) else count

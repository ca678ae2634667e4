"""A larger cache taken from the system piece by piece, so that no step of the running rows waits for all of it.

In: new buffers in host memory, and which of their rows will hold how many tokens. Out: their pages, touched. It copies
no rows (see `kv_cache.py`). The first write to a page has the system clear it, with huge pages 2 MiB around it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from graphport.runtime.cache_buffer import CacheBuffer, HostBuffer

# The first capacity in tokens; every further step doubles, so that copying stays a constant share of the work.
FIRST_CAPACITY = 64
_PAGE_BYTES = 4096


def shapes_for(
    needed: tuple[int, int], held: tuple[int, int], most: tuple[int, int], *, longest: int | None
) -> list[tuple[int, int]]:
    """Slots and capacities that would do, the one to prefer first: by doubling, then no more than is needed.

    needed, held, most: slots and capacity that are asked for, that are there, and that there may be. longest: tokens of
    the longest row, for a last shape that gives up slots that nobody holds. None leaves it out, while a prompt is in
    prefill whose samples have not got theirs: then fewer slots are asked for than are active.
    """
    (num_slots, length), (old_slots, old_capacity), (max_slots, max_length) = needed, held, most
    doubled = _next_size(old_capacity or min(FIRST_CAPACITY, max_length), length, max_length)
    capacity = min(_whole(max(length, old_capacity)), max_length)
    slots = _next_size(old_slots or 1, num_slots, max_slots)
    shapes = [(slots, doubled), (slots, capacity), (max(old_slots, num_slots), capacity)]
    if longest is not None:
        shapes.append((num_slots, min(_whole(max(length, longest)), max_length)))
    return shapes


def _whole(length: int) -> int:
    return -(-length // FIRST_CAPACITY) * FIRST_CAPACITY


def _next_size(size: int, needed: int, limit: int) -> int:
    while size < needed:
        size *= 2
    return min(size, limit)


class GrowthWish(NamedTuple):
    """What a cache is asked for: rows of so many tokens, in steps of at most `longest_step`."""

    num_slots: int
    length: int
    longest_step: int


class Growth:
    """`buffers` of `slots` rows of `capacity` tokens; `new` are those of them that hold nothing yet.

    `tokens` [slot] are what a row will hold soon, and so what there must be memory for.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        longest_step: int,
        *,
        buffers: Sequence[CacheBuffer],
        new: Iterable[CacheBuffer],
        tokens: Sequence[int],
    ) -> None:
        self.slots = slots
        self.capacity = capacity
        self.longest_step = longest_step
        self.buffers = tuple(buffers)
        self._pieces = _touch(new, tokens)

    def gives(self, wish: GrowthWish) -> bool:
        """Whether it is enough for `wish`, which may have become less since."""
        is_enough = wish.num_slots <= self.slots and wish.length <= self.capacity
        return is_enough and wish.longest_step == self.longest_step

    def advance(self, most_bytes: int) -> bool:
        """Touch pages of about `most_bytes`; whether nothing is left to touch."""
        touched = 0
        for num_bytes in self._pieces:
            touched += num_bytes
            if touched >= most_bytes:
                return False
        return True


def _touch(buffers: Iterable[CacheBuffer], tokens: Sequence[int]) -> Iterator[int]:
    """Write to every page of the rows of host buffers, a head of a row at a time; yields the bytes it spans."""
    for buffer in buffers:
        if not isinstance(buffer, HostBuffer):
            continue
        for slot, count in enumerate(tokens):
            for head in buffer.array[slot, :, :count]:
                flat = head.reshape(-1)  # a view: tokens of a head lie one after the other
                flat[:: _PAGE_BYTES // flat.itemsize] = np.zeros((), flat.dtype)
                flat[-1:] = np.zeros((), flat.dtype)
                yield flat.nbytes

"""The KV cache: one buffer a layer for keys and one for values, appended to in place, one slot a sequence.

In: the cache inputs of a graph and two limits. Out: slots, per-slot lengths, addresses to bind. It runs nothing and
knows no token ids. Legend: a buffer is [slots, kv_heads, capacity, head_dim].
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import DType, TensorSpec
from graphport.runtime.cache_buffer import CacheBuffer, HostBuffer
from graphport.runtime.device import Device
from graphport.runtime.memory import cache_bytes_per_token, free_memory, require_memory
from graphport.runtime.source_rows import SourceRows

# The first capacity in tokens; every further step doubles, so that copying stays a constant share of the work.
FIRST_CAPACITY = 64


class KVCache:
    """Slots of cached tokens; active slots are the dense prefix 0 .. num_active-1.

    Slots and capacity grow by doubling as sequences need them, to `max_slots` and `max_length` at most, keeping what is
    cached, and by no more than is needed where twice as much would not fit; nothing is allocated before the first
    `reserve`. Rows of a slot beyond its length are undefined, and no kernel reads them. `new_buffer` makes the memory,
    on `device`. `source`: what the slots keep of their sources, where the model reads one. Not thread-safe.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        max_slots: int,
        max_length: int,
        device: Device = "cpu",
        new_buffer: Callable[[tuple[int, int, int, int], DType], CacheBuffer] = HostBuffer,
        free: Callable[[], int] = free_memory,
        source: SourceRows | None = None,
    ) -> None:
        for name, value in (("max_slots", max_slots), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.specs = tuple(specs)
        self.max_slots = max_slots
        self.max_length = max_length
        self.num_active = 0
        self.num_slots = 0
        self.capacity = 0
        self.lengths: NDArray[np.int32] = np.zeros(max_slots, np.int32)
        self.buffers: tuple[CacheBuffer, ...] = ()
        self.generation = 0
        self.source = source
        self._device: Device = device
        self._new_buffer = new_buffer
        self._free = free
        self.bytes_per_token = cache_bytes_per_token(self.specs)

    def claim(self) -> int:
        """Take the next free slot, empty, and return its index. Raises RuntimeError when all are taken."""
        if self.num_active == self.max_slots:
            raise RuntimeError(f"all {self.max_slots} cache slots are taken; release one first")
        self.num_active += 1
        self.lengths[self.num_active - 1] = 0
        return self.num_active - 1

    def release(self, slot: int) -> None:
        """Give `slot` back; the last active slot moves into it, so that active slots stay a dense prefix."""
        self._require_active(slot)
        last = self.num_active - 1
        if slot != last:
            self.copy_slot(last, slot)
        self.num_active = last

    def copy_slot(self, source: int, target: int) -> None:
        """Make active slot `target` hold what active slot `source` holds."""
        self._require_active(source)
        self._require_active(target)
        length = int(self.lengths[source])
        for buffer in self.buffers if length else ():
            buffer.copy_row(buffer, source, target, length)
        self.lengths[target] = length
        if self.source is not None:
            self.source.copy_slot(source, target)

    def read_rows(self, slot: int, begin: int, end: int) -> tuple[NDArray[np.generic], ...]:
        """Copies on the host of tokens begin .. end-1 of active `slot`: of each buffer [kv_heads, tokens, width]."""
        self._require_active(slot)
        assert 0 <= begin <= end <= self.lengths[slot]
        return tuple(buffer.read_tokens(slot, begin, end) for buffer in self.buffers)

    def append_rows(self, slot: int, rows: Sequence[NDArray[np.generic]]) -> None:
        """Put what `read_rows` gave behind the tokens of active `slot`, for which there must be room."""
        self._require_active(slot)
        begin, count = int(self.lengths[slot]), rows[0].shape[1]
        assert begin + count <= self.capacity
        for buffer, tokens in zip(self.buffers, rows, strict=True):
            buffer.write_tokens(slot, begin, tokens)
        self.lengths[slot] = begin + count

    def rewind(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens of `slot`. Raises ValueError, changing nothing, if it has fewer."""
        self._require_active(slot)
        cached = int(self.lengths[slot])
        if not 0 <= length <= cached:
            raise ValueError(f"cannot rewind slot {slot} to {length} tokens; it holds {cached}, give 0 to {cached}")
        self.lengths[slot] = length

    def advance(self, first_slot: int, num_slots: int, num_tokens: int) -> None:
        """Record that a step appended `num_tokens` to each of `num_slots` slots."""
        self.lengths[first_slot : first_slot + num_slots] += num_tokens

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `length` tokens in each of the first `num_slots` slots, growing the buffers if needed.

        Slots that are not active may be given up for that. Raises ValueError beyond `max_slots` or `max_length`, and
        NotEnoughMemoryError, before anything is taken, when no buffers that would do fit; the cache is unchanged then.
        """
        if num_slots <= self.num_slots and length <= self.capacity:
            return
        if num_slots > self.max_slots or length > self.max_length:
            raise ValueError(
                f"{num_slots} rows of {length} tokens exceed the cache's limits of {self.max_slots} rows and "
                f"{self.max_length} tokens; load the bundle with larger max_batch or max_length"
            )
        shapes = self._shapes(num_slots, length)
        shape = next((shape for shape in shapes if self._fits(*shape)), None)
        if shape is None:
            self._require_room(*shapes[0])
        self._resize(*(shape or shapes[0]))

    def has_room(self, num_slots: int, length: int) -> bool:
        """Whether `reserve` would succeed as far as memory goes."""
        is_there = num_slots <= self.num_slots and length <= self.capacity
        return is_there or any(self._fits(*shape) for shape in self._shapes(num_slots, length))

    def require_possible(self, num_slots: int, length: int) -> None:
        """Raise NotEnoughMemoryError if rows of `length` tokens could not be had even if these were the only ones."""
        held = self.bytes_for(self.num_slots, self.capacity)
        require_memory(
            self.bytes_for(num_slots, length),
            self._free() + held,
            what=f"a request of {num_slots} rows of {length} tokens",
            advice="give a shorter prompt, or fewer max_new_tokens or samples",
        )

    def _shapes(self, num_slots: int, length: int) -> list[tuple[int, int]]:
        """Slots and capacities that would do, the one to prefer first: by doubling, then no more than is needed.

        The last one gives up slots that nobody holds. It is left out while a prompt is in prefill whose samples have
        not got theirs: then fewer slots are asked for than are active.
        """
        doubled = _next_size(self.capacity or min(FIRST_CAPACITY, self.max_length), length, self.max_length)
        needed = min(-(-max(length, self.capacity) // FIRST_CAPACITY) * FIRST_CAPACITY, self.max_length)
        slots = _next_size(self.num_slots or 1, num_slots, self.max_slots)
        shapes = [(slots, doubled), (slots, needed), (max(self.num_slots, num_slots), needed)]
        if num_slots >= self.num_active:
            longest = max(length, int(self.lengths[: self.num_active].max(initial=0)))
            shapes.append((num_slots, min(-(-longest // FIRST_CAPACITY) * FIRST_CAPACITY, self.max_length)))
        return shapes

    def bytes_for(self, slots: int, capacity: int) -> int:
        """Bytes of all buffers for `slots` slots of `capacity` tokens."""
        return self.bytes_per_token * slots * capacity

    def _require_active(self, slot: int) -> None:
        if not 0 <= slot < self.num_active:
            raise ValueError(f"slot {slot} is not active; {self.num_active} slots are")

    def _peak(self, slots: int, capacity: int) -> int:
        """Bytes that must be free for `_resize`.

        In host memory that is the new size and one old buffer: pages are taken when written, rows are moved one buffer
        after the other. A device takes all of the new size at once, beside the old.
        """
        if self._device != "cpu":
            return self.bytes_for(slots, capacity)
        written = self.bytes_per_token * int(self.lengths[: self.num_active].sum())
        extra = self.bytes_for(self.num_slots, self.capacity) // len(self.specs)
        return self.bytes_for(slots, capacity) - written + extra

    def _fits(self, slots: int, capacity: int) -> bool:
        return self._peak(slots, capacity) <= self._free()

    def _require_room(self, slots: int, capacity: int) -> None:
        """Raise NotEnoughMemoryError, with what would fit, if that size does not."""
        free, beside = self._free(), self._peak(slots, capacity) - self.bytes_for(slots, capacity)
        room = max(0, free - beside) // self.bytes_per_token
        require_memory(
            self._peak(slots, capacity),
            free,
            what=f"a KV cache of {slots} rows of {capacity} tokens",
            advice=f"{room // slots} tokens a row would fit with {slots} rows, {room // capacity} rows with {capacity} "
            "tokens; lower max_length or max_batch",
        )

    def _resize(self, slots: int, capacity: int) -> None:
        # All new buffers are allocated before the first old one is given up, so that a failure changes nothing.
        new: list[CacheBuffer] = []
        for spec in self.specs:
            heads, head_dim = (size for size in spec.shape if isinstance(size, int))
            new.append(self._new_buffer((slots, heads, capacity, head_dim), spec.dtype))
        old = list(reversed(self.buffers))
        self.buffers = ()
        for buffer in new if old else ():
            source = old.pop()
            for slot in range(self.num_active):
                if self.lengths[slot]:
                    buffer.copy_row(source, slot, slot, int(self.lengths[slot]))
        self.buffers = tuple(new)
        self.num_slots, self.capacity = slots, capacity
        self.generation += 1


def _next_size(size: int, needed: int, limit: int) -> int:
    while size < needed:
        size *= 2
    return min(size, limit)

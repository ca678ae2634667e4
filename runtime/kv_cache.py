"""The KV cache: one buffer a layer for keys and one for values, appended to in place, one slot a sequence.

In: the cache inputs of a graph and two limits. Out: slots, per-slot lengths, addresses to bind. It runs nothing and
knows no token ids. Legend: a buffer is [slots, kv_heads, capacity, head_dim]; those of layers with a window may have a
smaller capacity and hold a row's newest tokens, the oldest of them first.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.free_memory import free_memory
from graphport.model_def.signature import DType, TensorSpec
from graphport.model_def.window_rows import WindowRows
from graphport.runtime.cache_buffer import CacheBuffer, HostBuffer, KeptRows, Rows
from graphport.runtime.cache_growth import Growth, GrowthWish, shapes_for
from graphport.runtime.cache_sizes import cache_sizes, is_moving
from graphport.runtime.device import Device
from graphport.runtime.memory import require_memory
from graphport.runtime.source_rows import SourceRows


class KVCache:
    """Slots of cached tokens; active slots are the dense prefix 0 .. num_active-1.

    Slots and capacity grow by doubling as sequences need them, to `max_slots` and `max_length` at most, keeping what is
    cached, and by no more than is needed where twice as much would not fit; nothing is allocated before the first
    `reserve`. Rows of a slot beyond its length are undefined, and no kernel reads them. `new_buffer` makes the memory,
    on `device`. `source`: what the slots keep of their sources, where the model reads one. Not thread-safe.

    `window`: what buffers of layers with a window hold, None if all hold everything; `moving` says of each buffer
    whether it is one of them. A slot's `firsts` is the position of the oldest token there; `drop_rows` raises it before
    a step. `longest_step`: tokens of the largest step to make room for; a larger one makes them grow.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        max_slots: int,
        max_length: int,
        window: WindowRows | None = None,
        longest_step: int = 1,
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
        self.firsts: NDArray[np.int32] = np.zeros(max_slots, np.int32)
        self.window = window
        self._longest_step = longest_step
        self.buffers: tuple[CacheBuffer, ...] = ()
        self.generation = 0
        self._growth: Growth | None = None
        self.source = source
        self._device: Device = device
        self._new_buffer = new_buffer
        self._free = free
        self._sizes = cache_sizes(self.specs, window)
        self.moving = tuple(is_moving(spec) for spec in self.specs)
        self.bytes_per_token = self._sizes.whole + self._sizes.moving

    def claim(self) -> int:
        """Take the next free slot, empty, and return its index. Raises RuntimeError when all are taken."""
        if self.num_active == self.max_slots:
            raise RuntimeError(f"all {self.max_slots} cache slots are taken; release one first")
        self.num_active += 1
        self.lengths[self.num_active - 1] = self.firsts[self.num_active - 1] = 0
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
        for buffer, first in zip(self.buffers, self._firsts_of(source), strict=False):
            if self.lengths[source]:
                buffer.copy_row(buffer, source, target, int(self.lengths[source]) - first)
        self.lengths[target], self.firsts[target] = self.lengths[source], self.firsts[source]
        if self.source is not None:
            self.source.copy_slot(source, target)

    def read_rows(self, slot: int, begin: int, end: int) -> Rows:
        """Copies on the host of tokens begin .. end-1 of active `slot`, which all buffers must hold."""
        self._require_active(slot)
        assert self.firsts[slot] <= begin <= end <= self.lengths[slot]
        firsts = self._firsts_of(slot)
        return tuple(
            buffer.read_tokens(slot, begin - first, end - first)
            for buffer, first in zip(self.buffers, firsts, strict=True)
        )

    def read_kept(self, slot: int, *, windows_only: bool = False) -> KeptRows:
        """Copies on the host of all that active `slot` holds, or of what layers with a window do alone."""
        self._require_active(slot)
        length, firsts = int(self.lengths[slot]), self._firsts_of(slot)
        ends = [
            length - first if moves or not windows_only else 0 for first, moves in zip(firsts, self.moving, strict=True)
        ]
        rows = tuple(buffer.read_tokens(slot, 0, end) for buffer, end in zip(self.buffers, ends, strict=True))
        return KeptRows(length, rows, firsts)

    def append_rows(self, slot: int, rows: Sequence[NDArray[np.generic]]) -> None:
        """Put what `read_rows` gave behind the tokens of active `slot`, for which there must be room.

        What of it no later step sees is left out where the slot is empty.
        """
        begin, count = int(self.lengths[slot]), rows[0].shape[1]
        firsts = [begin] * len(rows)
        if begin == 0 and self.window is not None:
            firsts = [self.window.first(count) if moves else 0 for moves in self.moving]
        parts = tuple(tokens[:, first - begin :] for tokens, first in zip(rows, firsts, strict=True))
        self.append_kept(slot, KeptRows(begin + count, parts, tuple(firsts)))

    def append_kept(self, slot: int, kept: KeptRows) -> None:
        """Put rows behind the tokens of active `slot`, so that it holds `kept.length` of them.

        There must be room. Buffers that hold the newest tokens alone may begin later in an empty slot.
        """
        self._require_active(slot)
        assert kept.length <= self.capacity
        if self.lengths[slot] == 0:
            self.firsts[slot] = max(kept.firsts)
        for buffer, tokens, begin, first in zip(
            self.buffers, kept.rows, kept.firsts, self._firsts_of(slot), strict=True
        ):
            buffer.write_tokens(slot, begin - first, tokens)
        self.lengths[slot] = kept.length

    def drops_rows(self, slot: int) -> bool:
        """Whether `drop_rows` would drop any of `slot`."""
        return self.window is not None and self.window.first(int(self.lengths[slot])) > self.firsts[slot]

    def drop_rows(self, first_slot: int, num_slots: int) -> None:
        """Let layers with a window forget, of each slot, what the next step and a short rewind do not need."""
        for slot in range(first_slot, first_slot + num_slots):
            if self.window is None or not self.drops_rows(slot):
                continue
            length, old = int(self.lengths[slot]), int(self.firsts[slot])
            first = self.window.first(length)
            for buffer, moves in zip(self.buffers, self.moving, strict=True):
                if moves:
                    buffer.write_tokens(slot, 0, buffer.read_tokens(slot, first - old, length - old))
            self.firsts[slot] = first

    def rewind(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens of `slot`.

        Raises ValueError, changing nothing, if it has fewer, or if layers with a window no longer have what comes
        before them; back to 0 is always possible.
        """
        self._require_active(slot)
        cached = int(self.lengths[slot])
        if not 0 <= length <= cached:
            raise ValueError(f"cannot rewind slot {slot} to {length} tokens; it holds {cached}, give 0 to {cached}")
        if not self.can_rewind(slot, length):
            assert self.window is not None
            least = int(self.firsts[slot]) + self.window.needed
            raise ValueError(
                f"cannot rewind slot {slot} to {length} tokens; layers with a window hold the tokens from "
                f"{self.firsts[slot]} on: give {least} to {cached}, or 0 and run the text again"
            )
        self.lengths[slot] = length
        if length == 0:
            self.firsts[slot] = 0

    def can_rewind(self, slot: int, length: int) -> bool:
        """Whether the first `length` tokens of `slot`, which has so many, are still what a step needs."""
        return length == 0 or self.window is None or self.window.reaches(int(self.firsts[slot]), length)

    def advance(self, first_slot: int, num_slots: int, num_tokens: int) -> None:
        """Record that a step appended `num_tokens` to each of `num_slots` slots."""
        self.lengths[first_slot : first_slot + num_slots] += num_tokens

    def reserve(self, num_slots: int, length: int, *, num_new: int = 1) -> None:
        """Make room for `length` tokens in each of the first `num_slots` slots, growing the buffers if needed.

        `num_new`: those of the step that comes next. Slots that are not active may be given up for that. Raises
        ValueError beyond `max_slots` or `max_length`, and NotEnoughMemoryError, before anything is taken, when no
        buffers that would do fit; the cache is unchanged then.
        """
        wish = GrowthWish(num_slots, length, max(self._longest_step, num_new))
        if self._has_room(*wish):
            return
        growth, self._growth = self._growth, None
        if growth is None or not growth.gives(wish):
            growth = None  # what it took is free again before more is
            growth = self._new_growth(wish)
        self._take(growth)

    def reserve_part(self, num_slots: int, length: int, *, slot: int, most_bytes: int) -> bool:
        """Do a part of what `reserve` would, about `most_bytes`; whether the rest is quickly done.

        That is to take memory for row `slot`, which will hold `length` tokens, and for what active rows hold. Raises as
        `reserve` does. Only host memory is taken in parts.
        """
        wish = GrowthWish(num_slots, length, self._longest_step)
        if self._device != "cpu" or self._has_room(*wish):
            return True
        if self._growth is None or not self._growth.gives(wish):
            self._growth = None  # as above
            self._growth = self._new_growth(wish, {slot: length})
        return self._growth.advance(most_bytes)

    def stop_growing(self) -> None:
        """Give back what `reserve_part` took, if nobody waits for it any more."""
        self._growth = None

    def _new_growth(self, wish: GrowthWish, tokens: Mapping[int, int] = MappingProxyType({})) -> Growth:
        """Buffers for `wish`, whose rows will hold what they do, or `tokens` by slot. Raises as `reserve` does."""
        num_slots, length, longest_step = wish
        if num_slots > self.max_slots or length > self.max_length:
            raise ValueError(
                f"{num_slots} rows of {length} tokens exceed the cache's limits of {self.max_slots} rows and "
                f"{self.max_length} tokens; load the bundle with larger max_batch or max_length"
            )
        shapes = self._shapes(num_slots, length)
        shape = next((shape for shape in shapes if self._fits(*shape, longest_step)), None)
        if shape is None:
            self._require_room(*shapes[0], longest_step)
        slots, capacity = shape or shapes[0]
        buffers = self._new_buffers(slots, capacity, longest_step)
        held = {id(buffer) for buffer in self.buffers}
        return Growth(
            slots,
            capacity,
            longest_step,
            buffers=buffers,
            new=[buffer for buffer in buffers if id(buffer) not in held],
            tokens=[tokens.get(slot, int(self.lengths[slot])) for slot in range(min(self.num_active, slots))],
        )

    def has_room(self, num_slots: int, length: int) -> bool:
        """Whether `reserve` would succeed as far as memory goes."""
        is_there = self._has_room(num_slots, length, self._longest_step)
        return is_there or any(self._fits(*shape, self._longest_step) for shape in self._shapes(num_slots, length))

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
        """Slots and capacities that would do, the one to prefer first: see `shapes_for`."""
        longest = int(self.lengths[: self.num_active].max(initial=0)) if num_slots >= self.num_active else None
        return shapes_for(
            (num_slots, length),
            (self.num_slots, self.capacity),
            (self.max_slots, self.max_length),
            longest=longest,
        )

    def bytes_for(self, slots: int, capacity: int) -> int:
        """Bytes of all buffers for `slots` slots of `capacity` tokens."""
        return self._sizes.num_bytes(slots, capacity, self._longest_step)

    def held(self, first_slot: int, num_slots: int) -> NDArray[np.int32]:
        """Tokens of each slot that layers with a window hold."""
        slots = slice(first_slot, first_slot + num_slots)
        return self.lengths[slots] - self.firsts[slots]

    def _firsts_of(self, slot: int) -> tuple[int, ...]:
        """Of each buffer, the position of the first token of `slot` that it holds."""
        return tuple(int(self.firsts[slot]) if moves else 0 for moves in self.moving)

    def _has_room(self, num_slots: int, length: int, longest_step: int) -> bool:
        is_enough = num_slots <= self.num_slots and length <= self.capacity
        capacities = (self._sizes.moving_capacity(self.capacity, step) for step in (self._longest_step, longest_step))
        return is_enough and len(set(capacities)) == 1

    def _require_active(self, slot: int) -> None:
        if not 0 <= slot < self.num_active:
            raise ValueError(f"slot {slot} is not active; {self.num_active} slots are")

    def _peak(self, slots: int, capacity: int, longest_step: int) -> int:
        """Bytes that must be free to grow.

        In host memory that is the new size and one old buffer: pages are taken when written, rows are moved one buffer
        after the other. A device takes all of the new size at once, beside the old.
        """
        size = self._sizes.num_bytes(slots, capacity, longest_step)
        if self._device != "cpu":
            return size
        lengths, held = self.lengths[: self.num_active].sum(), self.held(0, self.num_active).sum()
        written = self._sizes.whole * int(lengths) + self._sizes.moving * int(held)
        return size - written + self.bytes_for(self.num_slots, self.capacity) // len(self.specs)

    def _fits(self, slots: int, capacity: int, longest_step: int) -> bool:
        return self._peak(slots, capacity, longest_step) <= self._free()

    def _require_room(self, slots: int, capacity: int, longest_step: int) -> None:
        """Raise NotEnoughMemoryError, with what would fit, if that size does not."""
        free, peak = self._free(), self._peak(slots, capacity, longest_step)
        size = self._sizes.num_bytes(1, capacity, longest_step)
        room = max(0, free - (peak - slots * size))
        length = self._sizes.longest(room // slots, longest_step, most=self.max_length)
        require_memory(
            peak,
            free,
            what=f"a KV cache of {slots} rows of {capacity} tokens",
            advice=f"{length} tokens a row would fit with {slots} rows, {room // size} rows with {capacity} "
            "tokens; lower max_length or max_batch",
        )

    def _new_buffers(self, slots: int, capacity: int, longest_step: int) -> list[CacheBuffer]:
        """Buffers of that size; those whose size stays are the old ones."""
        buffers: list[CacheBuffer] = []
        for index, (spec, moves) in enumerate(zip(self.specs, self.moving, strict=True)):
            heads, head_dim = (size for size in spec.shape if isinstance(size, int))
            length = self._sizes.moving_capacity(capacity, longest_step) if moves else capacity
            shape = (slots, heads, length, head_dim)
            is_same = bool(self.buffers) and self.buffers[index].shape == shape
            buffers.append(self.buffers[index] if is_same else self._new_buffer(shape, spec.dtype))
        return buffers

    def _take(self, growth: Growth) -> None:
        # All new buffers are allocated before the first old one is given up, so that a failure changes nothing.
        old = list(reversed(self.buffers))
        self.buffers = ()
        for buffer, moves in zip(growth.buffers if old else (), self.moving, strict=False):
            source = old.pop()
            held = self.held(0, self.num_active) if moves else self.lengths[: self.num_active]
            for slot, length in enumerate(held.tolist() if buffer is not source else ()):
                if length:
                    buffer.copy_row(source, slot, slot, length)
        self.buffers = growth.buffers
        self.num_slots, self.capacity, self._longest_step = growth.slots, growth.capacity, growth.longest_step
        self.generation += 1

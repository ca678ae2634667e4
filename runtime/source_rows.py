"""What a decoder keeps of its sources: keys and values of each slot's source, computed once, read by every step.

In: the source inputs of a graph. Out: buffers to bind, and each slot's length. It runs nothing (see `session.py`); the
cache of the decoder's own text is `kv_cache.py`. Legend: a buffer is [slots, heads, capacity, head_dim].
"""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import SOURCE_CAPACITY_STEP, DType, TensorSpec
from graphport.runtime.cache_buffer import CacheBuffer
from graphport.runtime.memory import ELEMENT_BYTES, require_memory


def source_bytes_per_token(specs: Sequence[TensorSpec]) -> int:
    """Bytes that one token of one source takes in all buffers."""
    return sum(ELEMENT_BYTES[spec.dtype] * prod(size for size in spec.shape if isinstance(size, int)) for spec in specs)


class SourceRows:
    """Sources by slot; slots and capacity grow as they are needed and keep what is there.

    Rows beyond a slot's length are finite (`new_buffer` makes buffers of zeros), for kernels multiply them by 0.
    `generation` counts moves of the buffers.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        max_slots: int,
        max_length: int,
        new_buffer: Callable[[tuple[int, int, int, int], DType], CacheBuffer],
        free: Callable[[], int],
    ) -> None:
        self.specs = tuple(specs)
        self.max_length = max_length
        self.lengths: NDArray[np.int32] = np.zeros(max_slots, np.int32)
        self.buffers: tuple[CacheBuffer, ...] = ()
        self.generation = 0
        self.capacity = 0
        self._max_slots = max_slots
        self._marks = np.zeros(max_slots, np.int64)  # slots of one mark hold one source
        self._num_written = 0
        self._num_slots = 0
        self._new_buffer = new_buffer
        self._free = free

    def write(self, slot: int, rows: Sequence[NDArray[np.generic]]) -> None:
        """Make `rows`, of each buffer [heads, tokens, head_dim], the source of `slot`. Raises NotEnoughMemoryError."""
        length = rows[0].shape[1]
        self.reserve(slot + 1, length)
        for buffer, tokens in zip(self.buffers, rows, strict=True):
            buffer.write_tokens(slot, 0, tokens)
        self.lengths[slot] = length
        self._num_written += 1
        self._marks[slot] = self._num_written

    def copy_slot(self, source: int, target: int) -> None:
        """Give slot `target` the source of slot `source`; nothing moves where it has that already, as beams do."""
        if self._marks[source] == self._marks[target]:
            return
        self.reserve(target + 1, 1)
        length = int(self.lengths[source])
        for buffer in self.buffers if length else ():
            buffer.copy_row(buffer, source, target, length)
        self.lengths[target] = length
        self._marks[target] = self._marks[source]

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for sources of `length` tokens in the first `num_slots` slots. Raises NotEnoughMemoryError."""
        if num_slots <= self._num_slots and length <= self.capacity:
            return
        slots = max(self._num_slots, min(max(num_slots, 2 * self._num_slots), self._max_slots))
        capacity = max(self.capacity, min(-(-length // SOURCE_CAPACITY_STEP) * SOURCE_CAPACITY_STEP, self.max_length))
        require_memory(
            source_bytes_per_token(self.specs) * slots * capacity,
            self._free(),
            what=f"keeping {slots} sources of {capacity} tokens",
            advice="give a shorter source, or load the bundle with a smaller max_batch",
        )
        new = [self._new_buffer(self._shape(spec, slots, capacity), spec.dtype) for spec in self.specs]
        for buffer, old in zip(new, self.buffers, strict=False):
            for slot in range(self._num_slots):
                if self.lengths[slot]:
                    buffer.copy_row(old, slot, slot, int(self.lengths[slot]))
        self.buffers = tuple(new)
        self._num_slots, self.capacity = slots, capacity
        self.generation += 1

    @staticmethod
    def _shape(spec: TensorSpec, slots: int, capacity: int) -> tuple[int, int, int, int]:
        heads, head_dim = (size for size in spec.shape if isinstance(size, int))
        return slots, heads, capacity, head_dim

"""Bytes of a KV cache whose layers with a window may hold fewer tokens than the others.

In: the cache inputs of a graph. Out: bytes for rows of a length, and the length that bytes suffice for. It takes none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from graphport.model_def.signature import WINDOW_CAPACITY, TensorSpec
from graphport.model_def.window_rows import WindowRows
from graphport.runtime.memory import ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Bytes a token of one row: in layers that hold all tokens, and in those that hold what `window` says."""

    whole: int
    moving: int = 0
    window: WindowRows | None = None

    def moving_capacity(self, capacity: int, longest_step: int) -> int:
        """Tokens that layers with a window have room for, where the others have `capacity`."""
        return capacity if self.window is None else min(capacity, self.window.most(longest_step))

    def num_bytes(self, num_rows: int, capacity: int, longest_step: int) -> int:
        """Bytes of rows of `capacity` tokens, for steps of up to `longest_step`."""
        return num_rows * (self.whole * capacity + self.moving * self.moving_capacity(capacity, longest_step))

    def longest(self, num_bytes: int, longest_step: int, *, most: int) -> int:
        """Tokens, up to `most`, of one row that `num_bytes` hold."""
        per_token = self.whole + self.moving
        length = num_bytes // per_token
        if self.window is not None and length > self.window.most(longest_step):
            rest = num_bytes - self.moving * self.window.most(longest_step)
            length = rest // self.whole if self.whole else most
        return min(length, most)


def cache_sizes(specs: Sequence[TensorSpec], window: WindowRows | None) -> CacheSizes:
    """Sizes of the buffers of `specs`."""
    sizes = [(_token_bytes(spec), is_moving(spec)) for spec in specs]
    return CacheSizes(
        whole=sum(size for size, moves in sizes if not moves),
        moving=sum(size for size, moves in sizes if moves),
        window=window,
    )


def is_moving(spec: TensorSpec) -> bool:
    """Whether a cache tensor holds a row's newest tokens alone."""
    return WINDOW_CAPACITY in spec.shape


def _token_bytes(spec: TensorSpec) -> int:
    return ELEMENT_BYTES[spec.dtype] * prod(size for size in spec.shape if isinstance(size, int))

"""Which cached rows a layer with a sliding window keeps, and from which position on.

In: a window, the tokens cached before a step. Out: the first position that is kept. It moves nothing: the cache that
serves (`runtime/kv_cache.py`) and the one that certifies (`export/cached_graph.py`) both follow it.
"""

from dataclasses import dataclass

from graphport.model_def.config import TransformerConfig

# Rows kept beyond what the next token sees: a text can be taken back by as many tokens at any time. Drafts are 16.
REWIND_ROOM = 32

# Rows are dropped by multiples of this: kernels add up scores in blocks that are multiples or divisors of it, so most
# sums stay the same to the last bit wherever the rows lie.
_LEAST_STRIDE = 64
_STRIDES_A_WINDOW = 8  # moving the rows that stay costs about as much as reading those not yet dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRows:
    """Rows of layers whose widest window is `window`: position i sees (i - window, i].

    What is kept before a step depends on the tokens cached alone, not on how they came there: a row that was copied,
    restored or computed lies at the same place, and gives the same sums.
    """

    window: int

    @property
    def needed(self) -> int:
        """Rows before a step that it reads. One at least: a step over none is a first prompt to the kernel."""
        return max(self.window - 1, 1)

    @property
    def stride(self) -> int:
        """Rows dropped at once."""
        strides = -(-self.window // (_STRIDES_A_WINDOW * _LEAST_STRIDE))
        return max(strides, 1) * _LEAST_STRIDE

    @property
    def first_drop(self) -> int:
        """Tokens cached before the first step that drops rows."""
        return self.needed + REWIND_ROOM + self.stride

    def first(self, past: int) -> int:
        """The first position kept before a step over `past` tokens."""
        return max(0, (past - self.needed - REWIND_ROOM) // self.stride * self.stride)

    def reaches(self, first: int, past: int) -> bool:
        """Whether rows from `first` on are what a step over `past` tokens needs."""
        return first == 0 or past - first >= self.needed

    def most(self, num_new: int) -> int:
        """Rows that a step of `num_new` tokens takes at most, its own among them."""
        return self.first_drop - 1 + num_new


def moving_layers(config: TransformerConfig, max_length: int) -> tuple[int, ...]:
    """Layers whose window is so much shorter than `max_length` that they would drop rows."""
    return tuple(
        layer
        for layer, block in enumerate(config.blocks)
        if block.attention.window is not None and WindowRows(window=block.attention.window).first_drop < max_length
    )


def rows_of(config: TransformerConfig, layers: tuple[int, ...]) -> WindowRows | None:
    """What `layers`, which share their place in the cache, keep: as the widest window among them needs."""
    windows = [window for layer in layers if (window := config.blocks[layer].attention.window) is not None]
    return WindowRows(window=max(windows)) if windows else None

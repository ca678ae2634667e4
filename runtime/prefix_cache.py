"""Cached rows of earlier requests, found again by the token ids that they belong to, within a budget of bytes.

In: ids and rows of a KV cache. Out: the rows of the longest beginning of a prompt that is kept. It runs nothing and
decides no scheduling; what it gives is what was put in.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.free_memory import free_memory
from graphport.runtime.cache_buffer import Rows
from graphport.runtime.limits import checked_count
from graphport.runtime.memory import require_memory

Ids = NDArray[np.int64]


def checked_prefix_budget(num_bytes: object) -> None:
    """Refuse a budget that is no whole number of bytes (TypeError, ValueError) or more than is free (MemoryError)."""
    if num_bytes != 0:
        budget = checked_count("prefix_cache_bytes", num_bytes)
        require_memory(budget, free_memory(), what="the prefix cache", advice="give fewer prefix_cache_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStatistics:
    """Counts since the model was opened: prompts looked up, those that found something, prompt tokens, those reused.

    `num_bytes` of `budget` are taken by `num_blocks` blocks; `num_evicted` had to go.
    """

    budget: int
    num_bytes: int
    num_blocks: int
    num_evicted: int
    num_prompts: int
    num_hits: int
    num_prompt_tokens: int
    num_reused_tokens: int


@dataclass(eq=False, slots=True)
class _Block:
    """Rows of `block_tokens` tokens that follow those of `parent`; the ids of children are their keys."""

    parent: "_Block | None"
    key: bytes
    rows: Rows
    children: "dict[bytes, _Block]"


class PrefixCache:
    """A tree of blocks of `block_tokens` tokens each: requests with one beginning share its blocks.

    When `budget` bytes are taken, the block that was not used for the longest time goes. Blocks are kept in the order
    of their last use, parents after their children, so the first of them never has children.
    """

    def __init__(self, *, budget: int, block_tokens: int, bytes_per_token: int) -> None:
        self.block_tokens = block_tokens
        self._budget = budget
        self._block_bytes = block_tokens * bytes_per_token
        if budget < self._block_bytes:
            raise ValueError(
                f"prefix_cache_bytes must be 0 or at least {self._block_bytes}, a block of {block_tokens} tokens; got "
                f"{budget}"
            )
        self._roots: dict[bytes, _Block] = {}
        self._by_use: OrderedDict[int, _Block] = OrderedDict()  # by id(): blocks hash by nothing else
        self._num_evicted = self._num_prompts = self._num_hits = self._num_prompt_tokens = self._num_reused_tokens = 0

    @property
    def statistics(self) -> PrefixCacheStatistics:
        """What has been kept, found and given up."""
        return PrefixCacheStatistics(
            budget=self._budget,
            num_bytes=len(self._by_use) * self._block_bytes,
            num_blocks=len(self._by_use),
            num_evicted=self._num_evicted,
            num_prompts=self._num_prompts,
            num_hits=self._num_hits,
            num_prompt_tokens=self._num_prompt_tokens,
            num_reused_tokens=self._num_reused_tokens,
        )

    def find(self, ids: Ids, *, most: int, least: int = 0) -> list[Rows]:
        """Rows of the longest beginning of a prompt `ids` [T] that is kept, at most `most` tokens, block by block.

        None, and nothing is counted as found, if they are fewer than the `least` tokens known to the caller anyway.
        """
        path = self._path(ids[:most])
        self._touch(path)
        if len(path) * self.block_tokens < least:
            path = []
        self._num_prompts += 1
        self._num_hits += bool(path)
        self._num_prompt_tokens += len(ids)
        self._num_reused_tokens += len(path) * self.block_tokens
        return [block.rows for block in path]

    def keep(self, ids: Ids, read: Callable[[int, int], Rows], *, first: int = 0) -> None:
        """Keep the whole blocks of `ids` [T]; `read(begin, end)` copies rows of those that are not kept yet.

        If the budget does not hold them all, the beginning is kept. Those before token `first` cannot be read: if one
        of them is not kept, nothing that follows it is.
        """
        path = self._path(ids)
        self._touch(path)
        held = {id(block) for block in path}
        try:
            for begin in range(len(path) * self.block_tokens, len(ids) - self.block_tokens + 1, self.block_tokens):
                if begin < first or not self._make_room(held):
                    break
                parent = path[-1] if path else None
                key = self._key(ids, begin)
                block = _Block(parent, key, read(begin, begin + self.block_tokens), {})
                (self._roots if parent is None else parent.children)[key] = block
                self._by_use[id(block)] = block
                path.append(block)
                held.add(id(block))
        finally:
            self._touch(path)  # also when rows cannot be read: a beginning must go after what follows it

    def _path(self, ids: Ids) -> list[_Block]:
        path: list[_Block] = []
        level = self._roots
        for begin in range(0, len(ids) - self.block_tokens + 1, self.block_tokens):
            block = level.get(self._key(ids, begin))
            if block is None:
                break
            path.append(block)
            level = block.children
        return path

    def _key(self, ids: Ids, begin: int) -> bytes:
        return ids[begin : begin + self.block_tokens].tobytes()

    def _touch(self, path: list[_Block]) -> None:
        for block in reversed(path):
            self._by_use.move_to_end(id(block))

    def _make_room(self, held: set[int]) -> bool:
        """Give up what was used least recently until a block fits; False when that is one of `held`, by id()."""
        while (len(self._by_use) + 1) * self._block_bytes > self._budget:
            oldest = next(iter(self._by_use.values()), None)
            if oldest is None or id(oldest) in held:
                return False
            del self._by_use[id(oldest)]
            del (self._roots if oldest.parent is None else oldest.parent.children)[oldest.key]
            self._num_evicted += 1
        return True

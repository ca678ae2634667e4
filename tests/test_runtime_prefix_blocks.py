"""The prefix cache by itself: blocks of rows found by their ids, given up within a budget."""

import numpy as np
import pytest

from graphport.runtime.prefix_cache import PrefixCache


def test_any_order_of_keeping_and_finding_gives_the_rows_of_the_ids() -> None:
    random = np.random.default_rng(0)
    cache = PrefixCache(budget=40 * 8, block_tokens=2, bytes_per_token=4)

    def rows_of(ids: np.ndarray) -> np.ndarray:
        return np.cumsum(ids * 7 + 1).astype(np.int64)  # what a row holds depends on all ids before it

    for _ in range(3000):
        ids = random.integers(0, 3, int(random.integers(0, 12)))
        if random.random() < 0.5:
            rows = rows_of(ids)
            cache.keep(ids, lambda begin, end, rows=rows: (rows[None, begin:end, None],))
        else:
            found = cache.find(ids, most=len(ids))
            got = np.concatenate([rows[0][0, :, 0] for rows in found]) if found else np.zeros(0, np.int64)
            assert got.tolist() == rows_of(ids)[: len(got)].tolist()
            assert len(got) % 2 == 0
        statistics = cache.statistics
        assert statistics.num_bytes == statistics.num_blocks * 8 <= 40 * 8
    assert statistics.num_evicted > 100
    assert statistics.num_hits > 100


def test_a_prompt_beyond_the_budget_keeps_its_beginning() -> None:
    cache = PrefixCache(budget=3 * 8, block_tokens=2, bytes_per_token=4)
    ids = np.arange(20)
    cache.keep(ids, lambda begin, end: (ids[None, begin:end, None],))
    assert [rows[0][0, :, 0].tolist() for rows in cache.find(ids, most=20)] == [[0, 1], [2, 3], [4, 5]]
    cache.keep(ids + 1, lambda begin, end: (ids[None, begin:end, None],))
    assert cache.find(ids, most=20) == []
    assert cache.statistics.num_evicted == 3


def test_rows_that_cannot_be_read_leave_beginnings_behind_what_follows_them() -> None:
    cache = PrefixCache(budget=3 * 8, block_tokens=2, bytes_per_token=4)
    ids = np.arange(8)

    def read(begin: int, end: int) -> tuple[np.ndarray, ...]:
        if begin == 4:
            raise OSError("the device is gone")
        return (ids[None, begin:end, None],)

    with pytest.raises(OSError, match="the device is gone"):
        cache.keep(ids, read)
    cache.keep(ids[:4] + 100, lambda begin, end: (ids[None, begin:end, None],))  # fits beside one of the two kept
    assert cache.find(ids, most=8)  # the beginning stayed: what followed it went first

"""Which texts run together: the cut of texts, sorted by length, that computes the least.

In: lengths in tokens. Out: batches of indices. It runs nothing.
"""

from collections.abc import Sequence

import numpy as np

# What a run costs besides its tokens, as a number of tokens: a batch is cut where the padding saved is worth more.
_RUN_COST = 64


def cut_batches(lengths: Sequence[int], *, max_rows: int) -> list[list[int]]:
    """Indices of `lengths` in batches of at most `max_rows`, each padded to its longest: least tokens and runs in sum.

    Longest first, so that what does not fit is known at once. Among texts sorted by length the best batches are runs of
    neighbours, and the best cut of the first n is that of fewer plus one batch (dynamic programming).
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    longest = np.array([lengths[index] for index in order], np.int64)
    best = np.zeros(len(order) + 1, np.int64)
    begins = np.zeros(len(order) + 1, np.int64)
    for end in range(1, len(order) + 1):
        candidates = np.arange(max(0, end - max_rows), end)
        costs = best[candidates] + _RUN_COST + (end - candidates) * longest[candidates]
        chosen = int(costs.argmin())
        best[end], begins[end] = costs[chosen], candidates[chosen]
    batches: list[list[int]] = []
    end = len(order)
    while end:
        begin = int(begins[end])
        batches.append(order[begin:end])
        end = begin
    return batches[::-1]

"""The conditioning vectors that conditioned encoders are compared on: one a text, made of its ids.

In: ids. Out: vectors [B, W], the same bits everywhere and whichever texts run together. It reads no files.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_UNIT = 64.0  # of the bytes, so that the deviation of a number is near 1


def seeded_conditions(rows: Sequence[Sequence[int]], width: int) -> NDArray[np.float32]:
    """A vector of `width` numbers W for each row of ids, float32 [B, W]."""
    vectors = [(np.random.PCG64(list(row)).random_raw(width) >> np.uint64(56)).astype(np.int64) - 128 for row in rows]
    return (np.array(vectors).reshape(len(rows), width) / _UNIT).astype(np.float32)

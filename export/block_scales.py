"""Scales of a block of weights that lose least, searched instead of taken from the largest weight.

In: the weights of a block, one column an output, and how much each of its channels matters. Out: a scale and a zero
point an output. It rounds and packs nothing for keeps (see `error_feedback.py`).

Shapes: `B` channels of a block, `N` outputs.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Shares of the scale that fits all weights: below 1 the largest are clipped.
_SHARES = tuple(np.linspace(0.6, 1.2, 13, dtype=np.float32))
_RANGE_SHARES = _SHARES[::2]  # with zero points to try as well
_SHIFTS = (np.float32(-1), np.float32(0), np.float32(1))


def search_scales(block: Floats, importance: Floats, *, bits: int, asymmetric: bool) -> tuple[Floats, Floats]:
    """Scales and zero points [N] of w = scale * (q - zero), q in 0 .. 2^bits - 1, for weights `block` [B, N].

    They minimise the sum of importance [B] * error^2 over a grid of scales, of each the best multiple: for given
    q - zero = p that is sum(i w p) / sum(i p^2), and takes sum(i w p)^2 / sum(i p^2) off the error (as in ggml's
    make_qx_quants). Zero points are 2^(bits-1) unless `asymmetric`; then they are searched, too.
    """
    top = np.float32(2**bits - 1)
    size = np.abs(block).max(axis=0)
    unit = block / divisors(size)  # squares neither overflow nor vanish
    weighted = unit * (importance / importance.max())[:, None]
    scales, zeros = np.zeros_like(size), np.full_like(size, 2 ** (bits - 1))
    gain = np.zeros_like(size)
    for scale, zero in _ranges(unit, top) if asymmetric else _symmetric(unit, bits):
        p = np.clip(np.rint(unit / divisors(scale)) + zero, 0, top) - zero
        along = (weighted * p).sum(axis=0)
        length = (importance / importance.max()) @ (p * p)
        best = np.divide(along, length, out=np.zeros_like(along), where=length > 0)
        is_better = along * best > gain
        gain = np.where(is_better, along * best, gain)
        scales, zeros = np.where(is_better, best, scales), np.where(is_better, zero, zeros)
    return scales * size, zeros


def divisors(scales: Floats) -> Floats:
    """The scales, 1 where they are 0."""
    return np.where(scales == 0, np.float32(1), scales)


def _symmetric(block: Floats, bits: int) -> Iterator[tuple[Floats, Floats]]:
    """The weight of largest magnitude at -2^(bits-1), which is one level more than the other end has."""
    half = np.float32(2 ** (bits - 1))
    peak = np.take_along_axis(block, np.abs(block).argmax(axis=0)[None], axis=0)[0]
    for share in _SHARES:
        yield peak * (share / -half), np.full_like(peak, half)


def _ranges(block: Floats, top: np.float32) -> Iterator[tuple[Floats, Floats]]:
    """From the smallest weight to the largest, 0 included, and zero points around the one that this gives."""
    low, high = np.minimum(block.min(axis=0), 0), np.maximum(block.max(axis=0), 0)
    step = (high - low) / top
    zero = np.rint(-low / divisors(step))
    for share in _RANGE_SHARES:
        for shift in _SHIFTS:
            yield step * share, np.clip(zero + shift, 0, top)

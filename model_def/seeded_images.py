"""The images that image encoders are compared, calibrated and checked for overflow on.

In: an image configuration, the most tokens, a seed. Out: pixels [B, C, h, w], the same bits everywhere, for they are
sums of whole numbers. It reads no files.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.vision_config import ImageConfig, Size

IMAGES_A_SIZE = 3

_OCTAVES = 6
_GRID = 1 << 16  # steps between two neighbours of an octave's grid
_UNIT = 64.0  # of the bytes' sums, so that the deviation of a pixel is near 1


def image_sizes(image: ImageConfig, *, max_length: int) -> list[Size]:
    """The fixed size, or several: the model's own, wide and high ones, one patch, a square as large as `max_length`."""
    if image.fixed_size is not None:
        return [image.fixed_size]
    rows, columns = image.grid
    side = math.isqrt(max_length - image.prefix_tokens)
    grids = [
        (rows, columns),
        (rows + 1, max(columns - 1, 1)),
        (max(rows // 2, 1), columns + 1),
        (max(rows // 2, 1), max(columns // 2, 1)),
        (1, 1),
        (side, side),
    ]
    patch = image.patch_size
    sizes = [(high * patch[0], wide * patch[1]) for high, wide in dict.fromkeys(grids)]
    return [size for size in sizes if image.num_tokens(*size) <= max_length]


def seeded_images(sizes: Sequence[Size], *, channels: int, seed: int) -> list[NDArray[np.float32]]:
    """A batch of images of each size: noise of several octaves, coarse ones strongest, as pictures have it."""
    random = np.random.PCG64(seed)  # its raw output is the same in every version of NumPy (NEP 19)
    return [_noise((IMAGES_A_SIZE, channels), size, random) for size in sizes]


def _noise(shape: tuple[int, int], size: Size, random: np.random.PCG64) -> NDArray[np.float32]:
    total = np.zeros((*shape, *size), np.int64)
    for octave in range(_OCTAVES):
        grid = [min(2**octave + 1, edge) for edge in size]
        values = _bytes((*shape, *grid), random)
        along_rows = _stretched(values, size[0], axis=2)
        total += _stretched(along_rows, size[1], axis=3) >> octave
    total = (total >> 8) + (_bytes((*shape, *size), random) << 4)
    pixels: NDArray[np.float32] = (total / (_GRID * _GRID / (1 << 8) * _UNIT)).astype(np.float32)
    return pixels


def _bytes(shape: tuple[int, ...], random: np.random.PCG64) -> NDArray[np.int64]:
    """Whole numbers from -128 to 127."""
    raw = np.atleast_1d(random.random_raw(math.prod(shape)))
    return (raw >> np.uint64(56)).astype(np.int64).reshape(shape) - 128


def _stretched(values: NDArray[np.int64], length: int, *, axis: int) -> NDArray[np.int64]:
    """`values` along `axis` interpolated to `length` places, times `_GRID`."""
    last = values.shape[axis] - 1
    places = np.arange(length) * (last * _GRID) // max(length - 1, 1)
    below = np.minimum(places // _GRID, max(last - 1, 0))
    weights = np.expand_dims(places - below * _GRID, tuple(range(1, values.ndim - axis)))
    upper = np.take(values, np.minimum(below + 1, last), axis)
    stretched: NDArray[np.int64] = np.take(values, below, axis) * (_GRID - weights) + upper * weights
    return stretched

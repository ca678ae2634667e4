"""The images that image encoders are compared, calibrated and checked for overflow on.

In: an image configuration, the most tokens, a seed. Out: pixels. Seeded: the same everywhere.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from graphport.model_def.vision_config import ImageConfig, Size

IMAGES_A_SIZE = 3
_OCTAVES = 6


def parity_sizes(image: ImageConfig, *, max_length: int) -> list[Size]:
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


def parity_images(image: ImageConfig, *, max_length: int, seed: int) -> list[Tensor]:
    """A batch [B, C, h, w] of each size."""
    generator = torch.Generator().manual_seed(seed)
    return [
        random_images((IMAGES_A_SIZE, image.channels, *size), generator=generator)
        for size in parity_sizes(image, max_length=max_length)
    ]


def random_images(shape: tuple[int, int, int, int], *, generator: torch.Generator) -> Tensor:
    """Noise of several octaves, coarse ones strongest, as pictures have it; each of mean 0 and deviation 1."""
    total = torch.zeros(shape)
    for octave in range(_OCTAVES):
        size = [min(2**octave + 1, edge) for edge in shape[2:]]
        noise = torch.randn((*shape[:2], *size), generator=generator)
        total += functional.interpolate(noise, size=shape[2:], mode="bilinear", align_corners=False) / 2**octave
    total += torch.randn(shape, generator=generator) * 0.05
    centred = total - total.mean(dim=(1, 2, 3), keepdim=True)
    return centred / centred.std(dim=(1, 2, 3), keepdim=True)

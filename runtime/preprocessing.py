"""Pictures to the pixels that an image encoder takes: colours, size, crop, scale, mean and deviation.

In: a picture of Pillow's or a file, a `PreprocessingConfig`. Out: float32 [C, h, w]. The steps and their rounding are
those of the slow image processors of transformers. It needs Pillow (extra `vision`) when it is called.
"""

import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.vision_config import PreprocessingConfig, Size

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.float32]

MOST_PIXELS = 64_000_000  # of a picture: 8,000 x 8,000, decoded 192 MB, and more than any model reads


class PictureError(ValueError):
    """A picture that is not read because of its size."""


def read_picture(source: "str | os.PathLike[str] | Image", name: str) -> "Image":
    """The picture in a file, or `source` itself. Raises ValueError for a file that holds none or one of more than
    MOST_PIXELS, TypeError for others.

    Without Pillow it raises ModuleNotFoundError with the command that installs it.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} is a {type(source).__name__}, and pictures need Pillow: pip install 'graphport[vision]'; pixels "
            "are given as float32 arrays [channels, height, width]"
        ) from error
    if isinstance(source, Image.Image):
        _require_size(source, name)
        _require_readable(source, name)
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"{name} is of type {type(source).__name__}; give a float32 array [channels, height, width], a file or a "
            "picture of Pillow's"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            opened = Image.open(source)
        with opened as picture:  # upright and in colours, as `load_image` of transformers gives it
            _require_size(picture, name)
            return ImageOps.exif_transpose(picture).convert("RGB")
    except PictureError:
        raise
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read as a picture: {error}") from error


def _require_size(picture: "Image", name: str) -> None:
    """Raise PictureError for a picture of too many pixels, before they are decoded."""
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise PictureError(
            f"{name} has {width} x {height} pixels, more than {MOST_PIXELS:,}; make it smaller before it is read"
        )


def _require_readable(picture: "Image", name: str) -> None:
    """Raise ValueError for an open picture whose file is torn or closed, or that has no pixel."""
    try:
        picture.load()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as a picture: {error}") from error
    if 0 in picture.size:
        raise ValueError(f"{name} has no pixel: its size is {picture.width} x {picture.height}; give another picture")


def picture_pixels(picture: "Image", config: PreprocessingConfig, *, channels: int, name: str) -> Pixels:
    """Float32 [C, h, w] of a picture. Raises ValueError for one with other channels than the model's."""
    if config.convert_rgb:
        picture = picture.convert("RGB")
    if len(picture.getbands()) != channels or picture.mode in ("P", "CMYK", "I", "F", "I;16"):
        raise ValueError(
            f"{name} has mode {picture.mode}, the model takes {channels} channels of 8 bits and its recipe converts "
            "none: convert it with .convert('RGB')"
        )
    if config.resize is not None:
        height, width = _resized(picture, config.resize)
        picture = picture.resize((width, height), resample=_resampling(config.resample))
    values = np.asarray(picture)
    values = np.moveaxis(values[..., None] if values.ndim == 2 else values, -1, 0)
    if config.crop is not None:
        values = _centre_crop(values, config.crop)
    pixels = values.astype(np.float32)
    if config.rescale is not None:
        pixels = (values.astype(np.float64) * config.rescale).astype(np.float32)
    if config.mean is not None and config.std is not None:
        mean, std = (np.array(numbers, np.float32)[:, None, None] for numbers in (config.mean, config.std))
        pixels = (pixels - mean) / std
    return np.ascontiguousarray(pixels, np.float32)


def _resampling(number: int) -> Any:  # noqa: ANN401 - an enumeration of an optional dependency
    from PIL.Image import Resampling

    return Resampling(number)


def _resized(picture: "Image", wish: Size | int) -> Size:
    """Height and width; a number is the shorter edge's, and the other keeps the ratio, rounded down."""
    if isinstance(wish, tuple):
        return wish
    width, height = picture.size
    longer = int(wish * max(width, height) / min(width, height))
    return (longer, wish) if width <= height else (wish, longer)


def _centre_crop(values: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """The middle [C, height, width]; where the picture is smaller, zeros around it."""
    for axis, wanted in zip((1, 2), size, strict=True):
        found = values.shape[axis]
        if wanted <= found:
            start = (found - wanted) // 2
            values = values.take(range(start, start + wanted), axis=axis)
        else:
            before = -((found - wanted) // 2)  # transformers rounds the zeros before up
            widths = [(0, 0)] * 3
            widths[axis] = (before, wanted - found - before)
            values = np.pad(values, widths)
    return values

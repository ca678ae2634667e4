"""An image encoder's bundle opened for use: images in, a vector or label scores an image out.

In: pixels or pictures in any number, of any sizes that the bundle takes. Out: float32, in their order. It checks every
image before any runs. Legend: C channels, h, w pixels, S tokens, W hidden size, D vector width, L labels.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.flags import require_flags
from graphport.model_def.signature import EMBEDDINGS, HIDDEN_STATES, KIND_WORDS, LOGITS
from graphport.model_def.vision_config import ImageConfig
from graphport.runtime.bundle_files import BundleFiles, open_bundle
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.device import DeviceWish
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.open_encoder import OpenEncoder, OpeningOptions, label_probabilities, normalized, require_finite
from graphport.runtime.preprocessing import Pixels, picture_pixels, read_picture
from graphport.runtime.usual_use import usual_use

if TYPE_CHECKING:
    from PIL.Image import Image

    Images = NDArray[np.float32] | Sequence[NDArray[np.float32] | str | os.PathLike[str] | Image]

IMAGE_BATCH = 8


def load_image_encoder(
    bundle: str | os.PathLike[str],
    *,
    device: DeviceWish = "auto",
    device_id: int = 0,
    provider_options: Mapping[str, OptionValue] | None = None,
    max_batch: int = IMAGE_BATCH,
    max_length: int | None = None,
    threads: int | None = None,
    stream: int | None = None,
    strict: bool = False,
) -> "ImageEncoder":
    """Open an image encoder's bundle; arguments and errors as of `load_encoder`, max_length in tokens an image."""
    return ImageEncoder(
        open_bundle(bundle),
        device=device,
        device_id=device_id,
        provider_options=provider_options,
        max_batch=max_batch,
        max_length=max_length,
        threads=threads,
        stream=stream,
        strict=strict,
    )


class ImageEncoder(OpenEncoder):
    """An open image encoder.

    Images are one float32 array [n, C, h, w], or a list of arrays [C, h, w], files and pictures of Pillow's; the last
    two go through the model's own preprocessing and need Pillow. Attributes besides those of `OpenEncoder`:
    `dimension` D or W, `image`. `max_length` is in tokens.
    """

    def __init__(self, bundle: BundleFiles, **options: Unpack[OpeningOptions]) -> None:
        image = bundle.manifest.config.image
        if image is None:
            what = KIND_WORDS[bundle.manifest.kind]
            raise ValueError(
                f"{bundle.folder} is {what}, which reads no images; use load, and {usual_use(bundle.manifest)}"
            )
        super().__init__(bundle, **options)
        self.image: ImageConfig = image
        width = self.manifest.config.hidden_size
        self.dimension = width if image.readout is None else image.readout.vector_width(width)

    @property
    def labels(self) -> tuple[str, ...]:
        """What a classifier tells apart; empty for other image encoders."""
        return self.image.readout.labels if self.image.readout else ()

    def encode_images(
        self, images: "Images", *, batch_size: int | None = None, normalize: bool = False
    ) -> NDArray[np.float32]:
        """One vector an image, float32 [n, D], in the order of `images`.

        batch_size: images of one size that run together, at most and by default `max_batch`. normalize: scale vectors
        to length 1; a vector of zeros stays. Raises TypeError and ValueError for images before any runs, and
        FloatingPointError when the model overflows.
        """
        if self.image.readout is None or self.labels:
            raise ValueError(f"this bundle gives no vector an image; use {usual_use(self.manifest)}")
        require_flags(normalize=normalize)
        vectors = self._read_out(images, EMBEDDINGS, batch_size)
        return normalized(vectors) if normalize else vectors

    def classify_images(self, images: "Images", *, batch_size: int | None = None) -> NDArray[np.float32]:
        """Probabilities of `labels` for each image, float32 [n, L]; arguments and errors as of `encode_images`.

        A row sums to 1, or its numbers lie between 0 and 1 each where labels do not exclude each other; of a single
        label the score is given as it is.
        """
        readout = self.image.readout
        if readout is None or not readout.labels:
            raise ValueError(f"this bundle has no classifier; use {usual_use(self.manifest)}")
        logits = self._read_out(images, LOGITS, batch_size)
        return label_probabilities(logits, multi_label=readout.multi_label)

    def hidden_states(self, images: "Images", *, batch_size: int | None = None) -> list[NDArray[np.float32]]:
        """The last hidden states of each image, float32 [its tokens, W]; arguments and errors as of `encode_images`."""
        pixels = self._checked(images)
        states: list[NDArray[np.float32]] = [np.empty((0, self.manifest.config.hidden_size), np.float32)] * len(pixels)
        for batch, found in self._runs(pixels, HIDDEN_STATES, batch_size):
            for index, row in zip(batch, found, strict=True):
                states[index] = row.copy()
                require_finite(states[index])
        return states

    def _read_out(self, images: "Images", output: str, batch_size: int | None) -> NDArray[np.float32]:
        pixels = self._checked(images)
        vectors = np.empty((len(pixels), self.dimension), np.float32)
        for batch, found in self._runs(pixels, output, batch_size):
            vectors[batch] = found
        require_finite(vectors)
        return vectors

    def _cut(self, items: Sequence[Pixels], size: int) -> Iterator[list[int]]:
        """Images of one size run together."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(items):
            groups.setdefault(image.shape, []).append(index)
        for group in groups.values():
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _feed(self, session: EncoderSession, items: list[Pixels], output: str) -> NDArray[np.float32]:
        return session.run_images(np.stack(items), output)

    def _checked(self, images: "Images") -> list[Pixels]:
        """Float32 [C, h, w] of each image."""
        if isinstance(images, np.ndarray) and images.ndim != 4:
            raise ValueError(
                f"images must be an array [n, channels, height, width] or a list, got an array {list(images.shape)}; "
                "give one image as [image]"
            )
        if not isinstance(images, np.ndarray) and (isinstance(images, str | bytes) or not isinstance(images, Sequence)):
            raise TypeError(f"images must be an array or a list, got {type(images).__name__}; use [image]")
        return [self._checked_image(image, f"image {index}") for index, image in enumerate(images)]

    def _checked_image(self, given: Any, name: str) -> Pixels:  # noqa: ANN401 - what a caller gives
        image: NDArray[Any] = given if isinstance(given, np.ndarray) else self._from_picture(given, name)
        if image.dtype != np.float32:
            raise TypeError(
                f"{name} is of type {image.dtype}; pixels are float32, scaled and normalised as the model was trained "
                "(pictures are given as files or as pictures of Pillow's)"
            )
        if image.ndim != 3 or image.shape[0] != self.image.channels:
            raise ValueError(
                f"{name} is an array {list(image.shape)}; needed is [{self.image.channels}, height, width]"
            )
        height, width = image.shape[1:]
        problem = self.image.size_problem(height, width)
        if problem is not None:
            raise ValueError(f"{name}: {problem}; {self._advice()}")
        tokens = self.image.num_tokens(height, width)
        if tokens > self.max_length:
            raise ValueError(
                f"{name} of {height} x {width} has {tokens} tokens, more than max_length ({self.max_length}); resize "
                "it, or export with a larger --context"
            )
        if not np.isfinite(image).all():
            raise ValueError(f"{name} holds values that are not finite")
        return image

    def _advice(self) -> str:
        if self.image.fixed_size is not None:
            return "resize it, or export without --image-size"
        return "resize or crop it to a multiple"

    def _from_picture(self, image: Any, name: str) -> Pixels:  # noqa: ANN401 - what a caller gives
        picture = read_picture(image, name)
        recipe = self.image.preprocessing
        if recipe is None:
            raise ValueError(
                f"{name} is a picture, and this bundle was exported without preprocessor_config.json; give pixels as "
                "float32 arrays [channels, height, width]"
            )
        return picture_pixels(picture, recipe, channels=self.image.channels, name=name)

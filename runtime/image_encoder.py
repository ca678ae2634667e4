"""An image encoder's bundle opened for use: images in, a vector or label scores an image out.

In: pixels or pictures in any number, of any sizes that the bundle takes. Out: float32, in their order. It checks every
image before any runs. Legend: C channels, h, w pixels, S tokens, W hidden size, D vector width, L labels.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import EMBEDDINGS, HIDDEN_STATES, LOGITS
from graphport.model_def.vision_config import ImageConfig
from graphport.runtime.bundle_files import BundleFiles, open_bundle
from graphport.runtime.certified_bundle import require_certified, require_same_surroundings
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.device import Device, DeviceWish, default_threads
from graphport.runtime.encoder import label_probabilities, require_finite
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.limits import MOST_ROWS, checked_count
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.preprocessing import Pixels, picture_pixels, read_picture
from graphport.runtime.session import checked_threads

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


class ImageEncoder:
    """An open image encoder. Methods may be called from several threads.

    Images are one float32 array [n, C, h, w], or a list of arrays [C, h, w], files and pictures of Pillow's; the last
    two go through the model's own preprocessing and need Pillow. Attributes: `device`, `device_id`, `provider_options`,
    `memory_plan`, `threads`, `max_batch`, `max_length` in tokens, `dimension` D or W, `image`, `manifest`.
    """

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        device: DeviceWish = "auto",
        device_id: int = 0,
        provider_options: Mapping[str, OptionValue] | None = None,
        max_batch: int = IMAGE_BATCH,
        max_length: int | None = None,
        threads: int | None = None,
        stream: int | None = None,
        strict: bool = False,
    ) -> None:
        self.manifest = bundle.manifest
        image = self.manifest.config.image
        if image is None:
            raise ValueError(f"{bundle.folder} is a {self.manifest.kind}, which reads text and no images; use load")
        longest = self.manifest.max_length
        wish = longest if max_length is None else max_length
        self.image: ImageConfig = image
        self.max_length = checked_count("max_length", wish, most=longest, reason=", the bundle's own")
        self.max_batch = checked_count("max_batch", max_batch, most=MOST_ROWS)
        self.threads = default_threads() if threads is None else checked_threads(threads)
        limits = RunLimits(max_batch=self.max_batch, max_length=self.max_length, prefill_chunk=self.max_length)
        certificate = require_certified(bundle) if strict else None
        session = EncoderSession(
            bundle,
            limits=limits,
            threads=self.threads,
            device=device,
            device_id=device_id,
            provider_options=provider_options,
            stream=stream,
        )
        width = self.manifest.config.hidden_size
        self.dimension = width if image.readout is None else image.readout.vector_width(width)
        if certificate is not None:
            require_same_surroundings(certificate, bundle.folder, session.device)
        self.device: Device = session.device
        self.device_id = session.device_id
        self.provider_options = session.provider_options
        self.memory_plan = session.memory_plan
        self._session: EncoderSession | None = session

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
            raise ValueError(
                f"this bundle gives no vector an image; use {'classify_images' if self.labels else 'hidden_states'}"
            )
        vectors = self._read_out(images, EMBEDDINGS, batch_size)
        if normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors /= np.where(lengths > 0, lengths, 1)
        return vectors

    def classify_images(self, images: "Images", *, batch_size: int | None = None) -> NDArray[np.float32]:
        """Probabilities of `labels` for each image, float32 [n, L]; arguments and errors as of `encode_images`.

        A row sums to 1, or its numbers lie between 0 and 1 each where labels do not exclude each other; of a single
        label the score is given as it is.
        """
        readout = self.image.readout
        if readout is None or not readout.labels:
            raise ValueError("this bundle has no classifier; use encode_images or hidden_states")
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

    def close(self) -> None:
        """Give the session back; later calls raise."""
        self._session = None

    def __enter__(self) -> "ImageEncoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_out(self, images: "Images", output: str, batch_size: int | None) -> NDArray[np.float32]:
        pixels = self._checked(images)
        vectors = np.empty((len(pixels), self.dimension), np.float32)
        for batch, found in self._runs(pixels, output, batch_size):
            vectors[batch] = found
        require_finite(vectors)
        return vectors

    def _runs(
        self, pixels: Sequence[Pixels], output: str, batch_size: int | None
    ) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
        """Indices of the images of each batch, all of one size, and what the graph gives for them."""
        session = self._session
        if session is None:
            raise RuntimeError("this ImageEncoder is closed; load the bundle again")
        size = self.max_batch if batch_size is None else batch_size
        size = checked_count("batch_size", size, most=self.max_batch, reason=", max_batch of load")
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(pixels):
            groups.setdefault(image.shape, []).append(index)
        for group in groups.values():
            for start in range(0, len(group), size):
                batch = group[start : start + size]
                yield batch, session.run_images(np.stack([pixels[index] for index in batch]), output)

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

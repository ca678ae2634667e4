"""Two encoders whose vectors lie in one space, opened for use: texts and images in, vectors and scores out.

In: a bundle of two towers. Out: vectors of either, and how well each image fits each text. It computes nothing but
that: the towers are an `Encoder` and an `ImageEncoder`. Legend: D vector width.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.readout_config import SimilarityConfig
from graphport.model_def.signature import ManifestError
from graphport.model_def.towers import IMAGES_FOLDER, TEXT_FOLDER, find_towers
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.device import DeviceWish
from graphport.runtime.encoder import ENCODER_BATCH, Encoder, Text, load_encoder
from graphport.runtime.image_encoder import IMAGE_BATCH, ImageEncoder, load_image_encoder

if TYPE_CHECKING:
    from graphport.runtime.image_encoder import Images


def load_dual_encoder(
    bundle: str | os.PathLike[str],
    *,
    device: DeviceWish = "auto",
    device_id: int = 0,
    provider_options: Mapping[str, OptionValue] | None = None,
    max_batch: int | None = None,
    threads: int | None = None,
    stream: int | None = None,
    strict: bool = False,
) -> "DualEncoder":
    """Open a bundle of two towers; arguments and errors as of `load_encoder`.

    max_batch: texts, and images, that run together; by default those of `load_encoder` and `load_image_encoder`.
    """
    folder = Path(bundle)
    towers = find_towers(folder)
    if towers is None:
        raise ManifestError(f"{folder} is no bundle of two towers, texts and images; use load")
    text = load_encoder(
        folder / TEXT_FOLDER,
        device=device,
        device_id=device_id,
        provider_options=provider_options,
        max_batch=ENCODER_BATCH if max_batch is None else max_batch,
        threads=threads,
        stream=stream,
        strict=strict,
    )
    images = load_image_encoder(
        folder / IMAGES_FOLDER,
        device=device,
        device_id=device_id,
        provider_options=provider_options,
        max_batch=IMAGE_BATCH if max_batch is None else max_batch,
        threads=threads,
        stream=stream,
        strict=strict,
    )
    return DualEncoder(text, images, towers.similarity)


class DualEncoder:
    """An open pair of encoders. Methods may be called from several threads.

    Attributes: `text` (an `Encoder`), `images` (an `ImageEncoder`), `similarity`, `dimension` D.
    """

    def __init__(self, text: Encoder, images: ImageEncoder, similarity: SimilarityConfig) -> None:
        if text.dimension != images.dimension:
            raise ValueError(
                f"vectors of texts have {text.dimension} numbers and those of images {images.dimension}: they do not "
                "lie in one space, so the towers cannot be compared; load each by itself"
            )
        self.text, self.images, self.similarity = text, images, similarity
        self.dimension = text.dimension

    def encode(
        self,
        texts: Sequence[Text],
        *,
        batch_size: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """One vector a text, float32 [len(texts), D]; see `Encoder.encode`."""
        return self.text.encode(texts, batch_size=batch_size, normalize=normalize, truncate=truncate)

    def encode_images(
        self, images: "Images", *, batch_size: int | None = None, normalize: bool = False
    ) -> NDArray[np.float32]:
        """One vector an image, float32 [n, D]; see `ImageEncoder.encode_images`."""
        return self.images.encode_images(images, batch_size=batch_size, normalize=normalize)

    def scores(self, images: "Images", texts: Sequence[Text], *, truncate: bool = False) -> NDArray[np.float32]:
        """How well each image fits each text, float32 [images, texts]: `logits_per_image` of transformers.

        scale * cosine + bias; errors as of `encode` and `encode_images`. (Radford et al. 2021, figure 3.)
        """
        seen = self.encode_images(images, normalize=True)
        read = self.encode(texts, normalize=True, truncate=truncate)
        fits: NDArray[np.float32] = seen @ read.T * np.float32(self.similarity.scale) + np.float32(self.similarity.bias)
        return fits

    def close(self) -> None:
        """Give both sessions back; later calls raise."""
        self.text.close()
        self.images.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

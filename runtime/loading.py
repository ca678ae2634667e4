"""Open a bundle of any kind.

In: a path and what to run it with. Out: a `LanguageModel`, an `Encoder`, an `ImageEncoder` or a `DualEncoder`, as the
manifest says. It opens nothing itself.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from graphport.model_def.flags import require_flags, require_optional_flags
from graphport.model_def.signature import KIND_WORDS, Kind
from graphport.model_def.towers import IMAGES_FOLDER, find_towers
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.cuda_setup import GraphWish
from graphport.runtime.device import DeviceWish, PrefillProducts
from graphport.runtime.dual_encoder import DualEncoder, load_dual_encoder
from graphport.runtime.encoder import ENCODER_BATCH, Encoder
from graphport.runtime.image_encoder import IMAGE_BATCH, ImageEncoder
from graphport.runtime.language_model import DECODER_BATCH, LanguageModel
from graphport.runtime.open_language_model import load_language_model
from graphport.runtime.recurrent_model import RecurrentModel

# what opens a bundle of a kind without a KV cache, and how many rows it runs together by default
_OTHER_KINDS: dict[Kind, tuple[type[RecurrentModel] | type[ImageEncoder] | type[Encoder], int]] = {
    "recurrent_decoder": (RecurrentModel, DECODER_BATCH),
    "image_encoder": (ImageEncoder, IMAGE_BATCH),
    "encoder": (Encoder, ENCODER_BATCH),
}


def load(
    bundle: str | os.PathLike[str],
    *,
    device: DeviceWish = "auto",
    device_id: int = 0,
    provider_options: Mapping[str, OptionValue] | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    threads: int | None = None,
    prefill_chunk: int | None = None,
    prefix_cache_bytes: int = 0,
    prompt_lookup: bool = False,
    draft: str | os.PathLike[str] | None = None,
    cuda_graphs: GraphWish = "auto",
    stream: int | None = None,
    spinning: bool | None = None,
    prepared: bool | None = None,
    prefill_products: PrefillProducts | None = None,
    tuned: bool = True,
    strict: bool = False,
) -> LanguageModel | Encoder | ImageEncoder | DualEncoder | RecurrentModel:
    """Open a bundle: with `load_language_model`, `load_encoder`, `load_image_encoder` or `load_dual_encoder`.

    A bundle of linear attention is a `RecurrentModel`, which generates as a decoder does and steps over states.

    max_batch: by default 8 prompts of a decoder, 32 texts of an encoder, 8 images of an image encoder. prefill_chunk,
    prefix_cache_bytes, prompt_lookup, draft, cuda_graphs=True, spinning, prepared=True and prefill_products are a
    decoder's.
    Raises ManifestError, DeviceError, NotEnoughMemoryError, ValueError.
    """
    require_flags(tuned=tuned, strict=strict)
    require_optional_flags(spinning=spinning, prepared=prepared)
    towers = find_towers(Path(bundle))
    files = open_bundle(Path(bundle) / IMAGES_FOLDER if towers else bundle)
    if files.manifest.kind in ("decoder", "encoder_decoder"):
        return load_language_model(
            bundle,
            device=device,
            device_id=device_id,
            provider_options=provider_options,
            max_batch=DECODER_BATCH if max_batch is None else max_batch,
            max_length=max_length,
            threads=threads,
            prefill_chunk=prefill_chunk,
            prefix_cache_bytes=prefix_cache_bytes,
            prompt_lookup=prompt_lookup,
            draft=draft,
            cuda_graphs=cuda_graphs,
            stream=stream,
            spinning=spinning,
            prepared=prepared,
            prefill_products=prefill_products,
            tuned=tuned,
            strict=strict,
        )
    kind = "an encoder of texts and images" if towers else KIND_WORDS[files.manifest.kind]
    refused = {
        "prefill_chunk": prefill_chunk is not None,
        "prefix_cache_bytes": prefix_cache_bytes != 0,
        "prompt_lookup": prompt_lookup,
        "draft": draft is not None,
        "cuda_graphs": cuda_graphs not in ("auto", False),
        "spinning": spinning is not None,
        "prepared": prepared is True,
        "prefill_products": prefill_products not in (None, "as_exported"),
        "max_length": towers is not None and max_length is not None,
    }
    if any(refused.values()):
        names = " and ".join(name for name, is_given in refused.items() if is_given)
        raise ValueError(f"{names} cannot be heeded: {Path(bundle)} is {kind}; leave it out")
    if towers is not None:
        return load_dual_encoder(
            bundle,
            device=device,
            device_id=device_id,
            provider_options=provider_options,
            max_batch=max_batch,
            threads=threads,
            stream=stream,
            strict=strict,
        )
    opened, usual_batch = _OTHER_KINDS[files.manifest.kind]
    return opened(
        files,
        device=device,
        device_id=device_id,
        provider_options=provider_options,
        max_batch=usual_batch if max_batch is None else max_batch,
        max_length=max_length,
        threads=threads,
        stream=stream,
        strict=strict,
    )

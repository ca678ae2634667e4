"""What a bundle is for: the method that a refusal of another one names.

In: a manifest. Out: words. It opens nothing.
"""

from graphport.model_def.signature import Manifest


def usual_use(manifest: Manifest) -> str:
    """The method of the open bundle, and the command where that has another name."""
    config, encoder = manifest.config, manifest.config.encoder
    if manifest.kind == "encoder":
        if config.pooling:
            return "encode, or `graphport embed`"
        return "fill_mask" if config.masked_head else "classify" if config.classifier else "hidden_states"
    if manifest.kind == "image_encoder":
        readout = None if config.image is None else config.image.readout
        return "hidden_states" if readout is None else "classify_images" if readout.labels else "encode_images"
    hears = encoder is not None and encoder.audio is not None
    return "generate, or `graphport transcribe`" if hears else "generate"

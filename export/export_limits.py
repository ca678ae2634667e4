"""What must hold of a model and of what was asked for before it is exported.

In: an opened source, a target, wishes. Out: the longest context, or one line of refusal. It compiles nothing; what
concerns weights stands in `precision_choice.py`.
"""

import dataclasses

from graphport.export.calibrate import activation_peaks, image_peaks
from graphport.export.certify import parity_ids
from graphport.export.graph_pass import name_site
from graphport.export.source import SourceModel
from graphport.export.source_examples import example_sources, source_tensor
from graphport.export.targets import CPU, CacheFormat, Precision, Target, TargetError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import ConfigError, length_switch
from graphport.model_def.seeded_images import image_sizes, seeded_images

FLOAT16_MAX = 65504.0

LOW_BITS = 4

_LARGEST_SEED = 2**63 - 1  # as in SamplingParams; torch and numpy take it


def require_numbers(*, seed: int, context: int | None) -> None:
    """Raise TypeError or ValueError; whether the model has room for `context` is checked with the model."""
    for name, value in (("seed", seed), ("context", 1 if context is None else context)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"seed must be a whole number from 0 to {_LARGEST_SEED}, got {seed}")


def require_float16_range(opened: SourceModel, config: TransformerConfig, *, max_length: int, seed: int) -> None:
    """Refuse a model whose activations on the parity text pass float16's largest number; names the first layer."""
    if config.image is not None:
        sizes = image_sizes(config.image, max_length=max_length)
        images = seeded_images(sizes, channels=config.image.channels, seed=seed)
        what, peaks = "parity images", image_peaks(opened.model, images)
    else:
        ids = parity_ids(config, opened.tokenizer_json, max_length=max_length, seed=seed)
        source = None
        if config.encoder is not None:
            given = example_sources(config.encoder, opened.tokenizer_json, lengths=(len(ids),), seed=seed)
            source = source_tensor(given[0])
        what, peaks = "parity text", activation_peaks(opened.model, ids, source=source)
    for name, peak in peaks.items():
        if not peak <= FLOAT16_MAX:
            raise TargetError(
                f"{name_site(name)} reaches {peak:.4g} on the {what}, beyond float16's {FLOAT16_MAX:.0f}: the "
                "logits would be NaN; export with --precision bf16"
            )


def require_image_size(
    config: TransformerConfig, image_size: tuple[int, int] | None, context: int | None
) -> TransformerConfig:
    """`config` with the images' size fixed, if one is given. Raises ConfigError for one that cannot be."""
    if image_size is None:
        return config
    if config.image is None:
        raise ConfigError("image_size is for image encoders, and this model reads text; leave --image-size out")
    if context is not None:
        raise ConfigError("image_size fixes the number of tokens; leave --context out")
    if len(image_size) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in image_size):
        raise ConfigError(f"image_size must be a height and a width in pixels, got {image_size!r}")
    height, width = image_size
    return dataclasses.replace(config, image=dataclasses.replace(config.image, fixed_size=(height, width)))


def note_pictures(config: TransformerConfig, max_length: int) -> tuple[str, ...]:
    """A line where the checkpoint's preprocessing makes pictures of a size that the graph does not take."""
    recipe = None if config.image is None else config.image.preprocessing
    if config.image is None or recipe is None:
        return ()
    size = recipe.crop or (recipe.resize if isinstance(recipe.resize, tuple) else None)
    if size is None:
        return ()
    problem = config.image.size_problem(*size)
    if problem is None and (tokens := config.image.num_tokens(*size)) > max_length:
        problem = f"an image of {size[0]} x {size[1]} has {tokens} tokens, more than {max_length}"
    advice = "give this bundle pixels, or choose that size"
    return () if problem is None else (f"preprocessor_config.json makes pictures of another size: {problem}; {advice}",)


def require_image_precision(target: Target, precision: Precision) -> None:
    """Refuse precisions whose weights are rounded on text."""
    if precision.chooses_bits or precision.keeps_blocks or precision.weight_bits == LOW_BITS:
        known = "fp32, int8" if target is CPU else "fp32, fp16, bf16, int8"
        raise TargetError(f"precision {precision.name} rounds weights on text, which images are not; choose {known}")


def require_source_precision(target: Target, precision: Precision, cache: CacheFormat | None) -> None:
    """Refuse what is calibrated on a text alone, which a decoder that reads a source has not, and bfloat16."""
    rounds_on_text = precision.chooses_bits or precision.keeps_blocks or precision.weight_bits == LOW_BITS
    if rounds_on_text or precision.activations == "bfloat16":  # keys and values of a source pass through NumPy
        known = "fp32, int8" if target is CPU else "fp16, int8"
        raise TargetError(f"precision {precision.name} is not made of encoder-decoders; choose {known}")
    if cache is not None:
        raise TargetError(f"KV cache type {cache.name!r} is not made of encoder-decoders; choose --kv-cache auto")


def require_cache(config: TransformerConfig, target: Target, cache: CacheFormat) -> None:
    """Refuse a quantised cache that a layer cannot read."""
    for layer, block in enumerate(config.blocks):
        limit = target.cache_limit(block.attention)
        if limit is not None:
            raise TargetError(f"KV cache type {cache.name!r}: layer {layer}: {limit}; choose --kv-cache auto")


def longest_context(
    config: TransformerConfig, context: int | None, *, text_limit: int | None = None
) -> tuple[int, tuple[str, ...]]:
    """The longest total length, and a note when what the source states or a rotary scaling limits it."""
    if context is not None:
        return context, ()
    if config.image is not None:
        return config.image.num_tokens(*(config.image.fixed_size or config.image.native_size)), ()
    if text_limit is not None and text_limit < config.max_positions:
        return text_limit, (f"texts limited to {text_limit} tokens, as the source states; --context allows more",)
    rotaries = [block.attention.rotary for block in config.blocks]
    switches = [s for rotary in rotaries if rotary is not None and (s := length_switch(rotary)) is not None]
    if not switches or min(switches) >= config.max_positions:
        return config.max_positions, ()
    limit = min(switches)
    return limit, (f"context limited to {limit} tokens, where the rotary scaling changes its frequencies",)

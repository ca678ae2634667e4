"""What must hold of a model and of what was asked for before it is exported.

In: an opened source, a target, wishes. Out: the longest context, or one line of refusal. It compiles nothing; what
concerns weights stands in `precision_choice.py`.
"""

from graphport.export.calibrate import activation_peaks
from graphport.export.certify import parity_ids
from graphport.export.graph_pass import name_site
from graphport.export.source import SourceModel
from graphport.export.targets import CacheFormat, Target, TargetError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.positions import length_switch

FLOAT16_MAX = 65504.0

_LARGEST_SEED = 2**63 - 1  # as in SamplingParams; torch and numpy take it


def require_numbers(*, seed: int, context: int | None) -> None:
    """Raise TypeError or ValueError; whether the model has room for `context` is checked with the model."""
    for name, value in (("seed", seed), ("context", 1 if context is None else context)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"seed must be a whole number from 0 to {_LARGEST_SEED}, got {seed}")


def require_float16_range(opened: SourceModel, *, max_length: int, seed: int) -> None:
    """Refuse a model whose activations on the parity text pass float16's largest number; names the first layer."""
    ids = parity_ids(opened.model.config, opened.tokenizer_json, max_length=max_length, seed=seed)
    for name, peak in activation_peaks(opened.model, ids).items():
        if not peak <= FLOAT16_MAX:
            raise TargetError(
                f"{name_site(name)} reaches {peak:.4g} on the parity text, beyond float16's {FLOAT16_MAX:.0f}: the "
                "logits would be NaN; export with --precision bf16"
            )


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
    if text_limit is not None and text_limit < config.max_positions:
        return text_limit, (f"texts limited to {text_limit} tokens, as the source states; --context allows more",)
    rotaries = [block.attention.rotary for block in config.blocks]
    switches = [s for rotary in rotaries if rotary is not None and (s := length_switch(rotary)) is not None]
    if not switches or min(switches) >= config.max_positions:
        return config.max_positions, ()
    limit = min(switches)
    return limit, (f"context limited to {limit} tokens, where the rotary scaling changes its frequencies",)

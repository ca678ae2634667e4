"""The scales of a quantised KV cache, from what attention really caches on a text.

In: keys and values as a float cache holds them, and a cache format. Out: their scales, one a tensor or a channel. It
runs no model (see `certify.py`) and changes no graph (see `quantize_cache.py`).

Shapes: `K` key/value heads, `S` tokens, `H` head size.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from graphport.export.graph_pass import CacheScales
from graphport.export.targets import CacheFormat, TargetError
from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.config import TransformerConfig

# Shares of the largest magnitude that are tried as the largest one to hold.
_SHARES = np.linspace(1.0, 0.3, 36)

# A float8 value keeps three bits whatever its size, so its scale leaves room for what the text did not show.
_FLOAT8_HEADROOM = 2.0

_LEAST_SHARE = 1e-2  # of the tensor's largest magnitude: what a channel that the text leaves at zero can still hold
_LEAST_RANGE = 1e-6  # of a tensor that the text leaves at zero


def cache_scales(
    caches: Sequence[NDArray[np.float32]], config: TransformerConfig, cache: CacheFormat
) -> tuple[CacheScales, ...]:
    """Scales a layer for `caches`, the keys (rotated) and values [1, K, S, H] of layer 0, 1, ... on a text.

    Shapes [1], or [1, K, 1, H] a channel. Raises TargetError, naming the layer, for a cache that is not finite.
    """
    scales = []
    for layer, block in enumerate(config.blocks):
        keys, values = caches[2 * layer : 2 * layer + 2]
        if not (np.isfinite(keys).all() and np.isfinite(values).all()):
            raise TargetError(
                f"layer {layer} caches values that are not finite on the calibration text; export with --kv-cache auto"
            )
        scales.append(CacheScales(search_scale(_turned(keys, block.attention), cache), search_scale(values, cache)))
    return tuple(scales)


def search_scale(rows: NDArray[np.float32], cache: CacheFormat) -> NDArray[np.float32]:
    """The scale of least squared error for `rows` [1, K, S, H]: [1], or [1, K, 1, H] a channel."""
    axes = (0, 2) if cache.per_channel else (0, 1, 2, 3)
    magnitudes = np.abs(rows)
    largest = np.maximum(magnitudes.max(axis=axes, keepdims=True), _LEAST_SHARE * max(magnitudes.max(), _LEAST_RANGE))
    highest = np.float32(cache.levels[1])
    if not cache.is_integer:
        return _shaped(largest * (_FLOAT8_HEADROOM / highest), cache)
    best = largest / highest
    least = np.full(best.shape, np.inf)
    for share in _SHARES:
        scale = largest * (share / highest)
        error = np.square(round_rows(rows, scale, cache) - rows).sum(axis=axes, keepdims=True)
        best = np.where(error < least, scale, best)
        least = np.minimum(error, least)
    return _shaped(best, cache)


def round_rows(rows: NDArray[np.float32], scale: NDArray[np.float32], cache: CacheFormat) -> NDArray[np.float32]:
    """What a cache of this format gives back for float `rows` [..., K, S, H]: half to even, clipped to its levels."""
    lowest, highest = cache.levels
    scaled = np.clip(rows / scale, np.float32(lowest), np.float32(highest))
    q = np.rint(scaled) if cache.is_integer else scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    rounded: NDArray[np.float32] = q * scale
    return rounded


def _shaped(scale: NDArray[np.floating[Any]], cache: CacheFormat) -> NDArray[np.float32]:
    return (scale if cache.per_channel else scale.reshape(1)).astype(np.float32)


def _turned(keys: NDArray[np.float32], attention: AttentionConfig) -> NDArray[np.float32]:
    """The keys, and the keys with the two channels of every rotary pair exchanged [1, K, 2S, H].

    A pair turns with the position: further on in a text either channel holds what the other holds on this one.
    """
    if attention.rotary is None:
        return keys
    width = attention.rotary.rotary_dim(attention.head_dim)
    channels = np.arange(attention.head_dim)
    pairs = channels[:width].reshape((-1, 2) if attention.rotary.interleaved else (2, -1))
    channels[:width] = (pairs[:, ::-1] if attention.rotary.interleaved else pairs[::-1]).reshape(-1)
    return np.concatenate((keys, keys[..., channels]), axis=2)

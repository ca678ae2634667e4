"""Rotary positions of a GGUF file: base, width and scaling, of layers that see everything and of window layers.

In: metadata keys and the small tensors of frequency divisors. Out: `RotaryPosition` records.
"""

import dataclasses
import math

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.gguf_architectures import Architecture
from graphport.model_def.gguf_keys import GgufKeys
from graphport.model_def.position_config import (
    FrequencyFactors,
    LinearScaling,
    LongRopeScaling,
    RotaryPosition,
    RotaryScaling,
    YarnScaling,
)

# frequency divisors, read into the configuration
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_DEFAULT_THETA = 10_000.0  # llama.cpp's


def read_rotary(
    keys: GgufKeys, architecture: Architecture, head_dim: int, max_positions: int, notes: list[str]
) -> RotaryPosition:
    """The rotation of layers that see everything.

    Raises CheckpointError for scalings that are unknown or do not go with the file's tensors.
    """
    theta = keys.number("rope.freq_base")
    if theta is None:
        theta = _DEFAULT_THETA
        notes.append(f"rope.freq_base is absent; llama.cpp's default {theta:g} was taken")
    rotary_dim = keys.per_layer("rope.dimension_count", 1, head_dim)[0]
    factor = rotary_dim / head_dim
    if int(head_dim * factor) < rotary_dim:  # the product must round down to the whole dimensions
        factor = math.nextafter(factor, math.inf)
    return RotaryPosition(
        theta=theta,
        partial_factor=factor,
        interleaved=architecture.rotary == "interleaved",
        scaling=_scaling(keys, architecture, max_positions),
    )


def read_window_rotary(keys: GgufKeys, rotary: RotaryPosition, *, default_theta: float | None) -> RotaryPosition:
    """The rotation of window layers: a base of its own and no scaling where the architecture has one, else `rotary`."""
    if default_theta is None:
        return rotary
    return dataclasses.replace(rotary, theta=keys.number("rope.freq_base_swa") or default_theta, scaling=None)


def _scaling(keys: GgufKeys, architecture: Architecture, max_positions: int) -> RotaryScaling | None:
    """Linear, YaRN and LongRoPE by metadata, Llama 3 by its tensor of divisors; at most one."""
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    original = keys.per_layer("rope.scaling.original_context_length", 1, max_positions)[0]
    attention_factor = keys.number("rope.scaling.attn_factor") or 1.0
    beta_fast = keys.number("rope.scaling.yarn_beta_fast") or 32.0
    beta_slow = keys.number("rope.scaling.yarn_beta_slow") or 1.0
    factors = {
        name: tuple(keys.file.read(name).reshape(-1).tolist()) for name in ROPE_TENSORS if name in keys.file.tensors
    }
    # llama.cpp's defaults: converters do not always say what Phi-3's two lists are for
    kind = keys.get("rope.scaling.type", "longrope" if factors.keys() == set(ROPE_TENSORS[1:]) else "linear")
    scaling: RotaryScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=factor) if factor != 1.0 else None
    elif kind == "yarn":
        # a tenth of DeepSeek's mscale_all_dim; its mscale is not stated, and the same in every model
        all_dim = 10 * (keys.number("rope.scaling.yarn_log_multiplier") or 0.0) if architecture.has_latent else 0.0
        growth = 1.0 if all_dim else 0.1 * math.log(factor) + 1.0  # as ggml's rope_yarn multiplies
        scaling = YarnScaling(
            factor=factor,
            original_max_positions=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            attention_factor=attention_factor * growth,
            mscale_all_dim=all_dim or None,
            truncate=architecture.truncates_yarn,
        )
    elif kind == "longrope":
        if missing := [name for name in ROPE_TENSORS[1:] if name not in factors]:
            raise CheckpointError(
                f"{keys.file.path}: rope.scaling.type longrope needs the tensors {', '.join(missing)}"
            )
        scaling = LongRopeScaling(
            short_factor=factors.pop("rope_factors_short.weight"),
            long_factor=factors.pop("rope_factors_long.weight"),
            original_max_positions=original,
            attention_factor=attention_factor,
        )
    elif kind != "none":
        raise CheckpointError(
            f"{keys.file.path}: rope.scaling.type {kind!r} is not known; known are none, linear, yarn, longrope"
        )
    if factors and (scaling is not None or "rope_freqs.weight" not in factors or len(factors) > 1):
        raise CheckpointError(f"{keys.file.path}: tensors {', '.join(factors)} do not go with rope.scaling.type {kind}")
    return FrequencyFactors(factors=factors["rope_freqs.weight"]) if factors else scaling

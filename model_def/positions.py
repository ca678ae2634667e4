"""Formulas of the position kinds: rotary frequencies with every scaling, rotation, sinusoidal table.

In: a position record and lengths. Out: tensors (tables [P, D/2], rotated heads). Holds no parameters.

Shapes: `P` positions, `D` rotary dimensions, `H` head size, `S` tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from graphport.model_def.position_config import (
    AlibiBias,
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RelativeBias,
    RotaryPosition,
    YarnScaling,
)


def rotary_tables(
    rotary: RotaryPosition, head_dim: int, *, num_positions: int, total_length: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_positions, D/2] float32 of angle = position * frequency.

    `total_length` is the length of the whole text, which dynamic and longrope scaling depend on.
    """
    frequencies, attention_factor = rotary_frequencies(rotary, head_dim, total_length=total_length)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rotary_frequencies(rotary: RotaryPosition, head_dim: int, *, total_length: int) -> tuple[Tensor, float]:
    """Angular frequencies [D/2] float32 and the factor that YaRN and LongRoPE put on cosines and sines."""
    dim = rotary.rotary_dim(head_dim)
    base = _frequencies(rotary.theta, dim)
    match rotary.scaling:
        case None:
            return base, 1.0
        case LinearScaling(factor=factor):
            return base / factor, 1.0
        case DynamicScaling() as scaling:
            return _dynamic(rotary.theta, dim, scaling, total_length), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(base, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(rotary.theta, dim, scaling), yarn_attention_factor(scaling)
        case LongRopeScaling() as scaling:
            beyond = total_length > scaling.original_max_positions
            factors = scaling.long_factor if beyond else scaling.short_factor
            return base / torch.tensor(factors, dtype=torch.float32), scaling.attention_factor
        case FrequencyFactors(factors=factors):
            return base / torch.tensor(factors, dtype=torch.float32), 1.0


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first D dimensions of `heads` [..., S, H] by tables that broadcast to [..., S, D/2].

    Pairs are (2i, 2i+1) when interleaved, else (i, i + D/2); the dimensions from D on pass through. Computed in the
    wider dtype of heads and tables, returned in the dtype of `heads`.
    (Su et al. 2021, equation 34.)
    """
    dim = 2 * cos.shape[-1]
    turning, passing = heads[..., :dim], heads[..., dim:]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((rotated.to(heads.dtype), passing), dim=-1)


def relative_buckets(bias: RelativeBias, length: int) -> Tensor:
    """The bucket of each distance key - query from -(length - 1) to length - 1, int64 [2 * length - 1].

    (Raffel et al. 2020, section 2.1, as T5's and MPNet's code has it, bidirectional.)
    """
    distance = torch.arange(1 - length, length)
    half, single = bias.num_buckets // 2, bias.num_buckets // 4
    size = distance.abs()
    growth = torch.log(size.clamp(min=1).float() / single) / math.log(bias.max_distance / single) * (half - single)
    far = (single + growth.to(torch.int64)).clamp(max=half - 1)
    return torch.where(size < single, size, far) + half * (distance > 0)


def alibi_table(bias: AlibiBias, num_heads: int, length: int, *, scale: float) -> Tensor:
    """What is added to scores, float32 [length, num_heads]: by distance, or by the key's position when `rounded`.

    (Press et al. 2022, section 3, with the authors' slopes for numbers of heads that are no power of two.)
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / whole) for head in range(1, whole + 1)]
    slopes += [2 ** (-4 * head / whole) for head in range(1, 2 * (num_heads - whole), 2)]
    position = torch.arange(length)[:, None]
    if bias.rounded:
        return (torch.tensor(slopes).bfloat16() * position).to(torch.float32) * scale
    return -torch.tensor(slopes) * position


def causal_buckets(bias: RelativeBias, length: int) -> Tensor:
    """The bucket of a key that stands 0 .. length - 1 positions before the query, int64 [length]; as above, causal."""
    distance = torch.arange(length)
    single = bias.num_buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / single) / math.log(bias.max_distance / single)
    far = (single + (growth * (bias.num_buckets - single)).to(torch.int64)).clamp(max=bias.num_buckets - 1)
    return torch.where(distance < single, distance, far)


def sinusoidal_table(num_positions: int, width: int, *, halves: bool = False) -> Tensor:
    """PE[p, 2i] = sin(p / 10000^(2i/width)), PE[p, 2i+1] = cos(same); [num_positions, width] float32.

    (Vaswani et al. 2017, section 3.5.) An odd `width` ends on a sine. `halves`: all sines, then all cosines.
    """
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * rates
    if halves:
        return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :width].to(torch.float32)
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return table[:, :width].to(torch.float32)


def yarn_attention_factor(scaling: YarnScaling) -> float:
    """The factor on cosines and sines (Peng et al. 2023, section 3.4; the mscale pair is DeepSeek's)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _frequencies(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return 1.0 / (theta**exponents)


def _dynamic(theta: float, dim: int, scaling: DynamicScaling, total_length: int) -> Tensor:
    original = scaling.original_max_positions
    stretch = scaling.factor * max(total_length, original) / original - (scaling.factor - 1)
    return _frequencies(theta * stretch ** (dim / (dim - 2)) if dim > 2 else theta, dim)


def _llama3(base: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / base
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = (scaling.original_max_positions / wavelength - low) / (high - low)
    blended = (1 - share) * base / scaling.factor + share * base
    scaled = torch.where(wavelength > scaling.original_max_positions / low, base / scaling.factor, blended)
    return torch.where(wavelength < scaling.original_max_positions / high, base, scaled)


def _yarn(theta: float, dim: int, scaling: YarnScaling) -> Tensor:
    def dimension_of(rotations: float) -> float:
        turns = scaling.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    keep: Callable[[float], float] = float
    low = (math.floor if scaling.truncate else keep)(dimension_of(scaling.beta_fast))
    high = (math.ceil if scaling.truncate else keep)(dimension_of(scaling.beta_slow))
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the reference implementation's guard against a zero-width ramp
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    base = _frequencies(theta, dim)
    return (base / scaling.factor) * ramp + base * (1 - ramp)

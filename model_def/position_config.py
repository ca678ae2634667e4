"""How a transformer knows order: rotary embedding and its scalings, learned and sinusoidal tables.

In: numbers. Out: frozen records, validated at construction. Torch-free; the formulas stand in `positions.py`.
"""

import math
from dataclasses import dataclass


class ConfigError(ValueError):
    """A configuration that no transformer can have; the message names the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every position is divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        require_positive("rotary scaling factor", self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK: beyond `original_max_positions` the base grows with the total length."""

    factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        require_positive("rotary scaling factor", self.factor)
        require_count("original_max_positions", self.original_max_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        require_positive("rotary scaling factor", self.factor)
        require_count("original_max_positions", self.original_max_positions)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor ({self.low_freq_factor}) must be positive and below "
                f"high_freq_factor ({self.high_freq_factor})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023). `attention_factor` None means 0.1 ln(factor) + 1, or the mscale ratio if given."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        require_positive("rotary scaling factor", self.factor)
        require_count("original_max_positions", self.original_max_positions)
        if self.attention_factor is not None:
            require_positive("attention_factor", self.attention_factor)
        if not math.inf > self.beta_fast > self.beta_slow > 0:
            raise ConfigError(
                f"beta_fast ({self.beta_fast}) must be finite and exceed beta_slow ({self.beta_slow}) > 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE: one divisor a frequency, one list up to `original_max_positions` total positions, one beyond."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float

    def __post_init__(self) -> None:
        require_count("original_max_positions", self.original_max_positions)
        require_positive("attention_factor", self.attention_factor)
        if len(self.short_factor) != len(self.long_factor):
            raise ConfigError(
                f"short_factor has {len(self.short_factor)} values, long_factor {len(self.long_factor)}; "
                "both need one a rotary frequency"
            )
        _require_divisors("short_factor", self.short_factor)
        _require_divisors("long_factor", self.long_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFactors:
    """One divisor a rotary frequency, as a GGUF `rope_freqs` tensor states them."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        _require_divisors("frequency factors", self.factors)


RotaryScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FrequencyFactors


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryPosition:
    """Rotary embedding (Su et al. 2021) of the first `partial_factor` of each head.

    `interleaved` pairs dimensions (2i, 2i+1); otherwise (i, i + rotary_dim/2).
    """

    theta: float
    partial_factor: float = 1.0
    interleaved: bool = False
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        require_positive("rotary theta", self.theta)
        if not 0 < self.partial_factor <= 1:
            raise ConfigError(f"partial_factor ({self.partial_factor}) must lie in (0, 1]")
        if isinstance(self.scaling, YarnScaling) and self.theta == 1:
            raise ConfigError("rotary theta 1 turns all dimensions alike, which YaRN cannot scale; correct it")

    def rotary_dim(self, head_dim: int) -> int:
        """Number of leading dimensions of a head that rotate."""
        return int(head_dim * self.partial_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPosition:
    """A trained table added to the embeddings; row `offset` belongs to position 0 (OPT and BART use 2)."""

    max_positions: int
    offset: int = 0

    def __post_init__(self) -> None:
        require_count("max_positions of the learned position table", self.max_positions)
        if isinstance(self.offset, bool) or not isinstance(self.offset, int) or self.offset < 0:
            raise ConfigError(f"position offset must be a whole number of at least 0, got {self.offset!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinusoidalPosition:
    """Fixed sines and cosines added to the embeddings (Vaswani et al. 2017, section 3.5).

    They alternate, or all sines come before all cosines (`halves`, as the authors' code and Marian have it).
    """

    max_positions: int
    halves: bool = False

    def __post_init__(self) -> None:
        require_count("max_positions of the sinusoidal table", self.max_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeBias:
    """A trained number a head for each bucket of distances, added to the scores of every layer (T5, MPNet).

    Half of the `num_buckets` are for keys before the query, all of them where there are none after it; the first half
    of these are single distances, the others grow with the logarithm up to `max_distance`.
    """

    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        require_count("num_buckets of the relative bias", self.num_buckets)
        require_count("max_distance of the relative bias", self.max_distance)
        if self.num_buckets % 4 or self.max_distance <= self.num_buckets // 4:
            raise ConfigError(
                f"a relative bias needs a multiple of 4 buckets and max_distance above a quarter of them; got "
                f"{self.num_buckets} and {self.max_distance}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiBias:
    """What is taken from the scores of every layer: a slope a head, fixed, times the distance (Press et al. 2022).

    `rounded`: slopes and their products with the key's position are added instead, both rounded to bfloat16, and the
    sum is scaled like the scores (Falcon).
    """

    rounded: bool = False


def require_positive(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a positive number, got {value!r}")


def require_count(name: str, value: int) -> None:
    """Raise ConfigError unless `value` is an integer above zero."""
    require_positive(name, value)
    if not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _require_divisors(name: str, values: tuple[float, ...]) -> None:
    if not values:
        raise ConfigError(f"{name} is empty; it needs one positive number a rotary frequency")
    for index, value in enumerate(values):
        require_positive(f"{name}[{index}]", value)


def trained_length(rotary: RotaryPosition) -> int | None:
    """Total length beyond which the scaling of the frequencies is for, or None where it names none."""
    scaling = rotary.scaling
    if isinstance(scaling, DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling):
        return scaling.original_max_positions
    return None


def length_switch(rotary: RotaryPosition) -> int | None:
    """Total length beyond which the frequencies change, or None for scalings that ignore the length."""
    return trained_length(rotary) if isinstance(rotary.scaling, DynamicScaling | LongRopeScaling) else None

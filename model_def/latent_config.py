"""What multi-head latent attention adds to attention: ranks and the values' head size (DeepSeek-V2, section 2.1).

In: numbers. Out: a frozen record, validated at construction. Torch-free; the module stands in `latent_projections.py`.
"""

import math
from dataclasses import dataclass

from graphport.model_def.position_config import (
    ConfigError,
    RotaryPosition,
    YarnScaling,
    require_count,
    require_positive,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Keys and values are made from one normed vector of `key_value_rank` a token, which all heads share.

    Queries come from a normed vector of `query_rank`, or from the stream itself when that is None. Of each head of
    queries and keys the first dimensions rotate, as many as the attention's rotation says; those of keys are one vector
    for all heads. Values have heads of `value_dim`. The norms of both vectors are RMSNorms with `norm_epsilon`.
    """

    key_value_rank: int
    value_dim: int
    query_rank: int | None = None
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_count("key_value_rank", self.key_value_rank)
        require_count("value_dim", self.value_dim)
        if self.query_rank is not None:
            require_count("query_rank", self.query_rank)
        require_positive("norm epsilon of the latent vectors", self.norm_epsilon)

    def check_heads(self, *, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> None:
        """Raise ConfigError unless these heads can be made from latent vectors."""
        if num_kv_heads != num_heads:
            raise ConfigError(
                f"latent attention makes keys and values for every head: num_kv_heads ({num_kv_heads}) must be "
                f"num_heads ({num_heads})"
            )
        if not 0 < rotary_dim < head_dim:
            raise ConfigError(
                f"latent attention rotates a part of each head, got {rotary_dim} of {head_dim} dimensions; it needs at "
                f"least 2 and at most {head_dim - 1}"
            )
        if self.value_dim > head_dim:
            raise ConfigError(
                f"value_dim ({self.value_dim}) is above head_dim ({head_dim}); values are kept in caches as wide as "
                "keys, so theirs may be smaller and not larger"
            )


def latent_scale(rotary: RotaryPosition, head_dim: int) -> float | None:
    """The factor on scores where YaRN states `mscale_all_dim`; None for the usual one."""
    scaling = rotary.scaling
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return None
    mscale: float = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
    scale: float = head_dim**-0.5 * mscale**2
    return scale

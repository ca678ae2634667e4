"""A representation of every pair of tokens, as structure models keep beside that of the tokens.

In: numbers. Out: a frozen record, validated at construction. Torch-free; the formula stands in `pairs.py`.
"""

from dataclasses import dataclass

from graphport.model_def.position_config import require_count, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """z[i, j] = left(x[i]) + right(x[j]) + distance[clip(j - i)], x the embedded tokens.

    `width`: channels of a pair. `max_distance`: positions further apart count as so far. `epsilon`: of the norm that
    each layer reads z with.
    """

    width: int
    max_distance: int = 32
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        require_count("pair width", self.width)
        require_count("pair max_distance", self.max_distance)
        require_positive("pair epsilon", self.epsilon)

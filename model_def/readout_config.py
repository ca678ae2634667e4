"""What an encoder gives for a text: one vector, or scores of labels.

In: numbers and kinds. Out: frozen records, validated at construction. Torch-free; the formulas stand in `ops.py` and
`classifier.py`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from graphport.model_def.position_config import ConfigError, require_choice

PoolingKind = Literal["mean", "mean_sqrt", "cls", "last", "max"]
Transform = Literal["tanh", "relu", "gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How an encoder's hidden states become one vector a text, over its real tokens alone.

    mean: sum / length; mean_sqrt: sum / sqrt(length); cls: the first; last: the last; max: the largest of each channel.
    `normalize`: whether the model's recipe scales the vector to length 1 (done by the runtime, not in the graph).
    """

    kind: PoolingKind = "mean"
    normalize: bool = False

    def __post_init__(self) -> None:
        require_choice("pooling kind", self.kind, get_args(PoolingKind))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig:
    """Scores of `labels`, of each token or (`per_token` False) of the text by its first token.

    Scores are output(x), or output(transform(dense(x))). `multi_label`: labels do not exclude each other.
    """

    labels: tuple[str, ...]
    per_token: bool = False
    transform: Transform | None = None
    multi_label: bool = False

    def __post_init__(self) -> None:
        if not self.labels or not all(isinstance(label, str) for label in self.labels):
            raise ConfigError(f"a classifier needs at least one label, all of them texts; got {self.labels!r}")
        if self.transform is not None:
            require_choice("classifier transform", self.transform, get_args(Transform))

"""What an encoder gives for a text: one vector, or scores of labels; and how vectors of two encoders compare.

In: numbers and kinds. Out: frozen records, validated at construction. Torch-free; the formulas stand in `ops.py` and
`classifier.py`.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from graphport.model_def.position_config import ConfigError, require_choice, require_count, require_positive

PoolingKind = Literal["mean", "mean_sqrt", "cls", "last", "max"]
Transform = Literal["tanh", "relu", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How an encoder's hidden states become one vector a text, over its real tokens alone.

    mean: sum / length; mean_sqrt: sum / sqrt(length); cls: the first; last: the last; max: the largest of each channel.
    `normalize`: whether the model's recipe scales the vector to length 1 (done by the runtime, not in the graph).
    `ends_at`, with kind last: the last token is the first of this id, or the first of the row's highest id, -1 (CLIP,
    whose end of text is the highest of the vocabulary); a row without it has its first token taken.
    `width`: numbers of the vector after a linear layer, `bias` with one, None: no layer. `filled_with`: the runtime
    fills every text up to the longest with this id, which is read as text (SigLIP, as it was trained).
    """

    kind: PoolingKind = "mean"
    normalize: bool = False
    ends_at: int | None = None
    width: int | None = None
    bias: bool = False
    filled_with: int | None = None

    def __post_init__(self) -> None:
        require_choice("pooling kind", self.kind, get_args(PoolingKind))
        if self.ends_at is not None and self.kind != "last":
            raise ConfigError(f"ends_at says which token is the last; pooling is {self.kind!r}")
        if self.width is not None:
            require_count("pooling width", self.width)
        elif self.bias:
            raise ConfigError("a pooling bias needs the linear layer of a pooling width")

    def vector_width(self, hidden_size: int) -> int:
        """Numbers of the vector."""
        return hidden_size if self.width is None else self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig:
    """Scores of `labels`, of each token or (`per_token` False) of the text by its first token, or by `pooling`'s mean.

    Scores are output(x), or output(norm(transform(dense(x)))), the norm where it has an `epsilon`. `multi_label`:
    labels do not exclude each other.
    """

    labels: tuple[str, ...]
    per_token: bool = False
    transform: Transform | None = None
    multi_label: bool = False
    pooling: Literal["cls", "mean"] = "cls"
    dense_bias: bool = True
    epsilon: float | None = None
    norm_bias: bool = False

    def __post_init__(self) -> None:
        if not self.labels or not all(isinstance(label, str) for label in self.labels):
            raise ConfigError(f"a classifier needs at least one label, all of them texts; got {self.labels!r}")
        if self.transform is not None:
            require_choice("classifier transform", self.transform, get_args(Transform))
        require_choice("classifier pooling", self.pooling, ("cls", "mean"))
        if self.epsilon is not None:
            require_positive("classifier epsilon", self.epsilon)
            if self.transform is None:
                raise ConfigError("a classifier's norm reads its dense layer; give transform")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedHeadConfig:
    """Scores of what stands in a text's masked places: matrix @ norm(transform(dense(x))) + bias.

    `width`: of the dense layer. `tied`: the matrix is the embeddings', else one of its own. `mask_id`: the token that
    marks a place, None where none is known.
    """

    width: int
    transform: Transform
    epsilon: float
    dense_bias: bool = True
    norm_bias: bool = True
    output_bias: bool = True
    tied: bool = True
    mask_id: int | None = None

    def __post_init__(self) -> None:
        require_count("masked head width", self.width)
        require_choice("masked head transform", self.transform, get_args(Transform))
        require_positive("masked head epsilon", self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarityConfig:
    """How two encoders' vectors a, b compare: scale * (a / |a|) . (b / |b|) + bias.

    `multi_label`: the logistic function of a score is a probability by itself (SigLIP); else softmax over texts (CLIP).
    """

    scale: float
    bias: float = 0.0
    multi_label: bool = False

    def __post_init__(self) -> None:
        require_positive("similarity scale", self.scale)
        if isinstance(self.bias, bool) or not isinstance(self.bias, int | float) or not math.isfinite(self.bias):
            raise ConfigError(f"similarity bias must be a finite number, got {self.bias!r}")
        if not isinstance(self.multi_label, bool):
            raise ConfigError(f"similarity multi_label must be true or false, got {self.multi_label!r}")

"""What a transformer is: frozen configuration records, one block record a layer, validated at construction.

In: numbers and kinds. Out: immutable records that the module, the exporter and the runtime share. Torch-free;
it does not read any checkpoint format (see `huggingface.py`, `gguf.py`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from graphport.model_def.audio_config import AudioConfig
from graphport.model_def.expert_config import ExpertsConfig, RouterConfig
from graphport.model_def.latent_config import LatentConfig
from graphport.model_def.position_config import (
    AlibiBias,
    ConfigError,
    DynamicScaling,
    FrequencyFactors,
    LearnedPosition,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RelativeBias,
    RotaryPosition,
    SinusoidalPosition,
    YarnScaling,
    require_choice,
    require_count,
    require_positive,
)
from graphport.model_def.readout_config import ClassifierConfig, PoolingConfig
from graphport.model_def.vision_config import (
    AttentionPoolConfig,
    ImageConfig,
    ImageReadoutConfig,
    PreprocessingConfig,
)

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "quick_gelu"]
NormKind = Literal["layer", "rms"]
NormOrder = Literal["pre", "post", "sandwich", "output", "parallel"]
HeadKind = Literal["tied", "separate", "none"]

_NORM_ORDERS = ("pre", "post", "sandwich", "output", "parallel")
_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """LayerNorm or RMSNorm; `unit_offset` multiplies by 1 + weight (Gemma); `bias` is LayerNorm's."""

    kind: NormKind = "rms"
    epsilon: float = 1e-6
    unit_offset: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        require_choice("norm kind", self.kind, ("layer", "rms"))
        require_positive("norm epsilon", self.epsilon)
        if self.kind == "rms" and self.bias:
            raise ConfigError("an RMSNorm has no bias; use kind='layer' or bias=False")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """softmax(scale * Q K^T) V over heads; order scale, cap, mask.

    `window` w lets position i see (i-w, i], and without causality (i-w, i+w). `qk_norm_over`: each head is normed by
    itself, with one weight for all or one each (Cohere), or all heads of a token at once (OLMo 2). With `latent` the
    projections go by way of small vectors, and values have heads of their own size (DeepSeek). `sinks`: each query head
    has a score of its own beside those of keys, which takes weight and gives nothing (GPT-OSS).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "each_head", "width"] = "head"
    softcap: float | None = None
    scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    rotary: RotaryPosition | None = None
    latent: LatentConfig | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            require_count(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({self.num_kv_heads})")
        require_choice("qk_norm_over", self.qk_norm_over, ("head", "each_head", "width"))
        for name in ("softcap", "scale"):
            if getattr(self, name) is not None:
                require_positive(f"attention {name}", getattr(self, name))
        if self.window is not None:
            require_count("attention window", self.window)
        if self.rotary is not None:
            self._check_rotary(self.rotary)
        if self.sinks and (not self.causal or self.rotary is None or self.softcap is not None or self.latent):
            raise ConfigError("attention with sinks is causal and rotary, without a cap and latent vectors")
        if self.latent is not None:
            if self.qk_norm is not None or not self.causal:
                raise ConfigError("latent attention is causal and has norms of its own, not of queries and keys")
            self.latent.check_heads(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                rotary_dim=0 if self.rotary is None else self.rotary.rotary_dim(self.head_dim),
            )

    def _check_rotary(self, rotary: RotaryPosition) -> None:
        rotary_dim = rotary.rotary_dim(self.head_dim)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ConfigError(
                f"head_dim ({self.head_dim}) x partial_factor ({rotary.partial_factor}) gives "
                f"{rotary_dim} rotary dimensions; rotation needs an even number of at least 2"
            )
        scaling = rotary.scaling
        lists: tuple[tuple[float, ...], ...] = ()
        if isinstance(scaling, LongRopeScaling):
            lists = (scaling.short_factor, scaling.long_factor)
        elif isinstance(scaling, FrequencyFactors):
            lists = (scaling.factors,)
        for values in lists:
            if len(values) != rotary_dim // 2:
                raise ConfigError(
                    f"{type(scaling).__name__} has {len(values)} factors; {rotary_dim} rotary dimensions "
                    f"need {rotary_dim // 2}"
                )

    @property
    def kind(self) -> Literal["multi-head", "grouped-query", "multi-query"]:
        """The usual name for this relation of query heads to key/value heads."""
        if self.num_kv_heads == self.num_heads:
            return "multi-head"
        return "multi-query" if self.num_kv_heads == 1 else "grouped-query"

    @property
    def value_dim(self) -> int:
        """The size of a head of values, and of what a head gives."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on Q K^T: `scale`, or 1/sqrt(head_dim)."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) when `gated`."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        require_count("feed-forward width", self.width)
        require_choice("activation", self.activation, _ACTIVATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """One layer: attention, then feed-forward, each as f in the norm order.

    pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x))); output: x + norm(f(x)) (OLMo 2);
    parallel: x + attention(norm(x)) + feed_forward(norm(x)) (GPT-NeoX). `attention_norm` False: attention reads x as it
    is, normed already (ModernBERT's first layer, pre). `feed_forward_norm` False: the feed-forward reads what attention
    reads (parallel with one norm: Cohere, Phi). `residual_scale` multiplies what is added to x (Granite).
    `cross_attention`, to the states of an encoder, stands between the two with a norm of its own (pre and post).
    """

    attention: AttentionConfig
    feed_forward: FeedForwardConfig | ExpertsConfig
    norm: NormConfig
    cross_attention: AttentionConfig | None = None
    norm_order: NormOrder = "pre"
    attention_norm: bool = True
    feed_forward_norm: bool = True
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        require_choice("norm_order", self.norm_order, _NORM_ORDERS)
        require_positive("residual_scale", self.residual_scale)
        if not self.feed_forward_norm and self.norm_order != "parallel":
            raise ConfigError(
                f"feed_forward_norm may be left out of norm_order 'parallel' alone, got {self.norm_order!r}"
            )
        if not self.attention_norm and self.norm_order != "pre":
            raise ConfigError(f"attention_norm may be left out of norm_order 'pre' alone, got {self.norm_order!r}")
        if self.cross_attention is not None:
            self._check_cross_attention(self.cross_attention)

    def _check_cross_attention(self, cross: AttentionConfig) -> None:
        if self.norm_order not in ("pre", "post"):
            raise ConfigError(f"cross_attention needs norm_order 'pre' or 'post', got {self.norm_order!r}")
        extras = (cross.window, cross.qk_norm, cross.softcap, cross.rotary)
        if cross.causal or cross.num_kv_heads != cross.num_heads or any(extras):
            raise ConfigError(
                "cross_attention sees a whole source with heads of its own: it has causal=False, as many kv heads as "
                "heads, and no window, q/k norm, cap or rotation"
            )

    @property
    def dense(self) -> FeedForwardConfig | None:
        """The feed-forward that every token runs: the block's, the one that experts share, or none."""
        if isinstance(self.feed_forward, FeedForwardConfig):
            return self.feed_forward
        shared = self.feed_forward.shared_width
        return None if shared is None else FeedForwardConfig(width=shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A stack of blocks between an embedding and (unless `head` is none) a vocabulary head.

    `max_positions` is the longest total length the model was made for. `head` tied means that the head's matrix
    is the embedding's. Logits are `logit_scale * head(x)`, then `cap * tanh(x / cap)` if `logit_softcap`.
    `token_types` is the number of rows of a table added to the embeddings (0: none), `embedding_norm` the norm of
    their sum. `embedding_width` is that of the three where a linear layer then widens them to `hidden_size` (ELECTRA).
    `id_width` is that of the ids' embeddings alone, which a linear layer without bias widens before positions are
    added; another narrows the stream for the head (OPT 350M). `pooling` and `classifier` are an encoder's; one of them
    at most. With `image` the stack reads patches of images in place of ids, with `audio` frames of sound, and there is
    no vocabulary (`vocab_size` 0). `encoder` is the stack whose states the blocks' cross-attention reads: this stack is
    the decoder of an encoder-decoder.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int
    blocks: tuple[BlockConfig, ...]
    position: LearnedPosition | SinusoidalPosition | None = None
    relative_bias: RelativeBias | AlibiBias | None = None
    token_types: int = 0
    embedding_norm: NormConfig | None = None
    embedding_width: int | None = None
    id_width: int | None = None
    embedding_scale: float = 1.0
    final_norm: NormConfig | None = None
    head: HeadKind = "tied"
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    pooling: PoolingConfig | None = None
    classifier: ClassifierConfig | None = None
    image: ImageConfig | None = None
    audio: AudioConfig | None = None
    encoder: "TransformerConfig | None" = None

    def __post_init__(self) -> None:
        has_ids = self.image is None and self.audio is None
        for name in (*(("vocab_size",) if has_ids else ()), "hidden_size", "max_positions"):
            require_count(name, getattr(self, name))
        if self.embedding_width is not None:
            require_count("embedding_width", self.embedding_width)
            if self.head == "tied":
                raise ConfigError("a tied head reads hidden_size channels, which an embedding_width of its own has not")
        if self.id_width is not None:
            require_count("id_width", self.id_width)
            if self.embedding_width is not None or self.head == "none" or not self.is_causal:
                raise ConfigError("id_width belongs to decoders with a head, and excludes embedding_width")
        for name in ("embedding_scale", "logit_scale"):
            require_positive(name, getattr(self, name))
        if not self.blocks:
            raise ConfigError("blocks is empty; a transformer needs at least one layer")
        require_choice("head", self.head, ("tied", "separate", "none"))
        if self.logit_softcap is not None:
            require_positive("logit_softcap", self.logit_softcap)
        if self.head == "none" and self.head_bias:
            raise ConfigError("head_bias needs a head; head is 'none'")
        if self.position is not None and self.position.max_positions < self.max_positions:
            raise ConfigError(
                f"the position table has {self.position.max_positions} rows, max_positions is "
                f"{self.max_positions}; lower max_positions to the table"
            )
        if len({block.attention.causal for block in self.blocks}) != 1:
            raise ConfigError("causal and bidirectional blocks in one stack; give each stack its own config")
        self._check_encoder()
        self._check_source()
        if not has_ids:
            self._check_without_ids()
        if self.image is not None:
            self._check_image(self.image)

    def _check_encoder(self) -> None:
        """What encoders alone have."""
        if self.token_types != 0:
            require_count("token_types", self.token_types)
        if isinstance(self.relative_bias, AlibiBias):
            if not self.is_causal or any(b.attention.rotary or b.attention.window for b in self.blocks):
                raise ConfigError("ALiBi belongs to decoders without rotation and windows")
            if len({b.attention.softmax_scale for b in self.blocks}) > 1:
                raise ConfigError("ALiBi is shared by layers of one scale")
        if self.relative_bias is not None and len({b.attention.num_heads for b in self.blocks}) > 1:
            raise ConfigError("a relative bias is shared by layers of one number of heads")
        if (self.pooling or self.classifier) and self.is_causal:
            raise ConfigError(
                "pooling and classifiers are for encoders, whose blocks are bidirectional; these are causal"
            )
        if self.pooling and self.classifier:
            raise ConfigError("an encoder has pooling or a classifier, not both")

    def _check_source(self) -> None:
        """A decoder that reads a source and its encoder belong together."""
        num_cross = sum(block.cross_attention is not None for block in self.blocks)
        if num_cross != (0 if self.encoder is None else len(self.blocks)):
            raise ConfigError(
                f"{num_cross} of {len(self.blocks)} blocks have cross_attention; with an encoder all need it, without "
                "one none may have it"
            )
        encoder = self.encoder
        if encoder is None:
            return
        if not self.is_causal or encoder.is_causal or encoder.head != "none" or encoder.pooling or encoder.classifier:
            raise ConfigError("an encoder-decoder is a causal stack and a bidirectional encoder that gives its states")

    def _check_without_ids(self) -> None:
        """What reads patches or frames has nothing that belongs to ids."""
        ids = (self.vocab_size, self.token_types, self.position, self.relative_bias, self.embedding_width)
        if any(ids) or self.head != "none" or self.pooling or self.classifier or self.is_causal:
            raise ConfigError(
                "an encoder of images or recordings has bidirectional blocks, vocab_size 0, head 'none', positions of "
                "its own and no token types"
            )

    def _check_image(self, image: ImageConfig) -> None:
        pool = image.readout.pool if image.readout else None
        if pool is not None and self.hidden_size % pool.num_heads:
            raise ConfigError(
                f"hidden_size ({self.hidden_size}) must be divisible by the pooling num_heads ({pool.num_heads})"
            )

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def is_causal(self) -> bool:
        """Whether positions see only earlier ones (a decoder, with a KV cache)."""
        return self.blocks[0].attention.causal

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` is its inverse."""
        return _to_plain(self)  # type: ignore[no-any-return]  # a dataclass becomes a dict

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "TransformerConfig":
        """Rebuild a configuration from `to_dict`; raises ConfigError on unknown types or fields."""
        config = _from_plain(data)
        if not isinstance(config, TransformerConfig):
            raise ConfigError(f"expected a TransformerConfig, got {type(config).__name__}")
        return config


_RECORDS = {
    record.__name__: record
    for record in (
        LinearScaling,
        DynamicScaling,
        Llama3Scaling,
        YarnScaling,
        LongRopeScaling,
        FrequencyFactors,
        RotaryPosition,
        LearnedPosition,
        SinusoidalPosition,
        RelativeBias,
        AlibiBias,
        NormConfig,
        AttentionConfig,
        FeedForwardConfig,
        LatentConfig,
        RouterConfig,
        ExpertsConfig,
        BlockConfig,
        PoolingConfig,
        ClassifierConfig,
        AttentionPoolConfig,
        ImageReadoutConfig,
        PreprocessingConfig,
        ImageConfig,
        AudioConfig,
        TransformerConfig,
    )
}


def _to_plain(value: Any) -> Any:  # noqa: ANN401 - a tree of records, tuples and scalars
    if dataclasses.is_dataclass(value):
        fields = {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return value


def _from_plain(value: Any) -> Any:  # noqa: ANN401 - the inverse of _to_plain
    if isinstance(value, list):
        return tuple(_from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("type", None)
    if name not in _RECORDS:
        raise ConfigError(f"unknown record type {name!r}; known: {', '.join(_RECORDS)}")
    try:
        return _RECORDS[name](**{key: _from_plain(item) for key, item in fields.items()})
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: {error}") from error

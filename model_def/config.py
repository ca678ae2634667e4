"""What a transformer is: frozen configuration records, one block record a layer, validated at construction.

In: numbers and kinds. Out: immutable records that the module, the exporter and the runtime share. Torch-free;
it does not read any checkpoint format (see `huggingface.py`, `gguf.py`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from graphport.model_def.audio_config import AudioConfig
from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.expert_config import ExpertsConfig, RouterConfig
from graphport.model_def.latent_config import LatentConfig
from graphport.model_def.pair_config import PairConfig
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
from graphport.model_def.readout_config import ClassifierConfig, MaskedHeadConfig, PoolingConfig
from graphport.model_def.vision_config import (
    AttentionPoolConfig,
    ImageConfig,
    ImageReadoutConfig,
    PreprocessingConfig,
)

HeadKind = Literal["tied", "separate", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A stack of blocks between an embedding and (unless `head` is none) a vocabulary head.

    `max_positions` is the longest total length the model was made for. `head` tied means that the head's matrix
    is the embedding's. Logits are `logit_scale * head(x)`, then `cap * tanh(x / cap)` if `logit_softcap`.
    `token_types` is the number of rows of a table added to the embeddings (0: none), `embedding_norm` the norm of
    their sum. `embedding_width` is that of the three where a linear layer then widens them to `hidden_size` (ELECTRA).
    `id_width` is that of the ids' embeddings alone, which a linear layer without bias widens before positions are
    added; another narrows the stream for the head (OPT 350M). `pooling`, `classifier` and `masked_head` are an
    encoder's; one of them at most. With `image` the stack reads patches of images in place of ids, with `audio` frames
    of sound, and there is no vocabulary (`vocab_size` 0). `encoder` is the stack whose states the blocks'
    cross-attention reads: this stack is the decoder of an encoder-decoder. `pair`: every layer of an encoder adds a
    projection of a representation of pairs of tokens to its scores. `conditioned`: a vector of `hidden_size` numbers a
    text sets shift, scale and gate of every sub-block, and shift and scale of the last norm (adaLN-zero).
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
    masked_head: MaskedHeadConfig | None = None
    image: ImageConfig | None = None
    audio: AudioConfig | None = None
    pair: PairConfig | None = None
    conditioned: bool = False
    encoder: "TransformerConfig | None" = None

    def __post_init__(self) -> None:
        has_ids = self.image is None and self.audio is None
        for name in (*(("vocab_size",) if has_ids else ()), "hidden_size", "max_positions"):
            require_count(name, getattr(self, name))
        self._check_widths()
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
        if self.conditioned:
            self._check_conditioned()
        self._check_linear()
        if not has_ids:
            self._check_without_ids()
        if self.image is not None:
            self._check_image(self.image)

    def _check_widths(self) -> None:
        """Embeddings of another width than the stream's."""
        if self.embedding_width is not None:
            require_count("embedding_width", self.embedding_width)
            if self.head == "tied":
                raise ConfigError("a tied head reads hidden_size channels, which an embedding_width of its own has not")
        if self.id_width is not None:
            require_count("id_width", self.id_width)
            if self.embedding_width is not None or self.head == "none" or not self.is_causal:
                raise ConfigError("id_width belongs to decoders with a head, and excludes embedding_width")

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
        if (self.classifier or self.masked_head) and self.is_causal:
            raise ConfigError(
                "classifiers and masked heads are for encoders whose blocks are bidirectional; these are causal"
            )
        if self.pooling and self.is_causal and self.head != "none":
            raise ConfigError("what pools gives one vector a text and has no vocabulary head; use head='none'")
        if sum(map(bool, (self.pooling, self.classifier, self.masked_head))) > 1:
            raise ConfigError("an encoder has pooling, a classifier or a masked head, not two of them")
        width = self.embedding_width or self.hidden_size
        if self.masked_head and self.masked_head.tied and self.masked_head.width != width:
            raise ConfigError(
                f"a tied masked head scores by the embeddings of {width} channels, its width is "
                f"{self.masked_head.width}"
            )
        if self.pair is not None and (self.is_causal or not self.vocab_size):
            raise ConfigError(
                "pairs of tokens are of bidirectional encoders of ids; these blocks are causal or read no ids"
            )

    def _check_linear(self) -> None:
        """Linear attention in all blocks or in none."""
        if len({block.attention.linear for block in self.blocks}) > 1:
            raise ConfigError("linear attention in some blocks only: a stack has a KV cache or states, not both")
        if self.is_recurrent and (self.head == "none" or self.pooling or self.relative_bias or self.encoder):
            raise ConfigError("linear attention is for decoders with a head, without relative bias and encoder")

    def _check_conditioned(self) -> None:
        """What adaptive norms act on."""
        reads_out = self.pooling or self.classifier or self.masked_head or self.head != "none"
        if self.is_causal or not self.vocab_size or reads_out or self.final_norm is None:
            raise ConfigError(
                "a conditioned stack is a bidirectional encoder of ids with a final norm that gives hidden states "
                "alone: without pooling, classifier and heads"
            )
        for block in self.blocks:
            plain = block.attention_norm and block.cross_attention is None and block.residual_scale == 1.0
            if block.norm_order != "pre" or not plain:
                raise ConfigError("conditioned blocks have norm_order 'pre', both norms, and residual_scale 1")

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
        if any(ids) or self.head != "none" or self.pooling or self.classifier or self.masked_head or self.is_causal:
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
        """Whether positions see only earlier ones."""
        return self.blocks[0].attention.causal

    @property
    def is_decoder(self) -> bool:
        """Whether it goes on with a text over a KV cache: causal blocks whose states are not pooled to one vector."""
        return self.is_causal and self.pooling is None and not self.is_recurrent

    @property
    def is_recurrent(self) -> bool:
        """Whether it goes on with a text over states of linear attention."""
        return self.blocks[0].attention.linear

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
        MaskedHeadConfig,
        AttentionPoolConfig,
        ImageReadoutConfig,
        PreprocessingConfig,
        ImageConfig,
        AudioConfig,
        PairConfig,
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

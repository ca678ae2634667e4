"""Encoders among the Hugging Face model types: their config keys and tensor names, one record a family.

In: a parsed config.json, a family. Out: a `TransformerConfig` and notes. Every key is read, on a list of keys that
change nothing, or refused by name; shared lists: `huggingface_values.py`, tensors: `encoder_tensors.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.config import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    NormConfig,
    PoolingConfig,
    TransformerConfig,
)
from graphport.model_def.huggingface_values import Values, check_keys, or_default, read_activation, read_integer
from graphport.model_def.position_config import LearnedPosition

_LAYER_KEYS = {
    "hidden_size": "hidden_size",
    "width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "activation": "hidden_act",
}
_EPSILON = 1e-12  # transformers' default, and what distilbert fixes

_COMMON_KEYS = ("model_type", "vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")

# accepted at these values alone; whatever stands there beyond them changes the computation
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
    "chunk_size_feed_forward": (None, 0),
    "auto_map": (None,),
}
_IGNORED_KEYS = (
    *("gradient_checkpointing", "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    *("directionality", "model_max_length", "tie_word_embeddings", "output_past"),
)

_BERT_BLOCKS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
_BERT_OUTER = {
    "embedding.weight": "embeddings.word_embeddings.weight",
    "position.weight": "embeddings.position_embeddings.weight",
    "token_type.weight": "embeddings.token_type_embeddings.weight",
    "embedding_norm.weight": "embeddings.LayerNorm.weight",
    "embedding_norm.bias": "embeddings.LayerNorm.bias",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """One `model_type`.

    `keys`: our name of a size to the config's key. `extra_keys` are read besides, or must be neutral. `prefix` stands
    before every tensor in a checkpoint with a head. `heads` are the prefixes of tensors that no embedding needs.
    """

    model_type: str
    prefix: str
    outer: Mapping[str, str]
    blocks: str
    modules: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=lambda: _LAYER_KEYS)
    extra_keys: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("pooler.", "cls.", "classifier.")


ENCODER_FAMILIES = (
    EncoderFamily(
        model_type="bert",
        prefix="bert.",
        outer=_BERT_OUTER,
        blocks="encoder.layer",
        modules=_BERT_BLOCKS,
        extra_keys=("type_vocab_size", "layer_norm_eps"),
    ),
)


def find_encoder_family(model_type: object) -> EncoderFamily | None:
    """The family called `model_type`, None when it is no encoder that is read."""
    return next((family for family in ENCODER_FAMILIES if family.model_type == model_type), None)


def read_encoder_config(values: Values, family: EncoderFamily) -> tuple[TransformerConfig, list[str]]:
    """The configuration that config.json describes, with the default pooling, and notes.

    Raises CheckpointError for keys and values that are not supported, ConfigError for numbers that no transformer has.
    """
    read = {*_COMMON_KEYS, *family.keys.values(), *family.extra_keys}
    notes = check_keys(values, family.model_type, read=read, ignored=_IGNORED_KEYS, neutral=_NEUTRAL_VALUES)
    size = {name: read_integer(values, key) for name, key in family.keys.items() if name != "activation"}
    if size["hidden_size"] % size["heads"]:
        raise CheckpointError(
            f"config.json: {family.keys['hidden_size']} ({size['hidden_size']}) is no multiple of "
            f"{family.keys['heads']} ({size['heads']})"
        )
    norm = NormConfig(kind="layer", epsilon=_epsilon(values, family, notes), bias=True)
    attention = AttentionConfig(
        num_heads=size["heads"],
        num_kv_heads=size["heads"],
        head_dim=size["hidden_size"] // size["heads"],
        causal=False,
        qkv_bias=True,
        output_bias=True,
    )
    feed_forward = FeedForwardConfig(
        width=size["width"],
        activation=read_activation(
            family.keys["activation"], or_default(values, family.keys["activation"], "gelu", notes)
        ),
        gated=False,
        bias=True,
    )
    block = BlockConfig(attention=attention, feed_forward=feed_forward, norm=norm, norm_order="post")
    position = _position(values, family)
    config = TransformerConfig(
        vocab_size=read_integer(values, "vocab_size"),
        hidden_size=size["hidden_size"],
        max_positions=position.max_positions,
        blocks=(block,) * size["layers"],
        position=position,
        token_types=read_integer(values, "type_vocab_size") if "type_vocab_size" in family.extra_keys else 0,
        embedding_norm=norm,
        head="none",
        pooling=PoolingConfig(),
    )
    return config, notes


def _epsilon(values: Values, family: EncoderFamily, notes: list[str]) -> float:
    if "layer_norm_eps" not in family.extra_keys:
        return _EPSILON
    value: float = or_default(values, "layer_norm_eps", _EPSILON, notes)
    return value


def _position(values: Values, family: EncoderFamily) -> LearnedPosition:  # noqa: ARG001
    return LearnedPosition(max_positions=read_integer(values, "max_position_embeddings"))

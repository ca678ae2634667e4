"""Encoders among the Hugging Face model types: their config keys and tensor names, one record a family.

In: a parsed config.json, a family. Out: a `TransformerConfig` and notes. Every key is read, on a list of keys that
change nothing, or refused by name; shared lists: `huggingface_values.py`, tensors: `encoder_tensors.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.huggingface_values import (
    ENCODER_IGNORED,
    ENCODER_NEUTRAL,
    LABEL_KEYS,
    Values,
    check_keys,
    or_default,
    read_activation,
    read_integer,
)
from graphport.model_def.modernbert_config import read_modernbert_config
from graphport.model_def.position_config import LearnedPosition, RelativeBias
from graphport.model_def.readout_config import PoolingConfig
from graphport.model_def.text_towers import TEXT_OUTER, TEXT_TOWERS
from graphport.model_def.vision_tensors import CLIP_BLOCKS

_LAYER_KEYS = {
    "hidden_size": "hidden_size",
    "width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "activation": "hidden_act",
}
_MPNET_BUCKETS = 32
_EPSILON = 1e-12  # transformers' default, and what distilbert fixes

_COMMON_KEYS = ("model_type", "vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")

_PROJECTIONS = ("query", "key", "value", "output")
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
    "relative_bias.weight": "encoder.relative_attention_bias.weight",
    "embedding_projection.weight": "embeddings_project.weight",
    "embedding_projection.bias": "embeddings_project.bias",
}
_MPNET_BLOCKS = {
    **{f"attention.{ours}": f"attention.attn.{theirs}" for ours, theirs in zip(_PROJECTIONS, "qkvo", strict=True)},
    "attention_norm": "attention.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
_MODERNBERT_OUTER = {
    "embedding.weight": "embeddings.tok_embeddings.weight",
    "embedding_norm.weight": "embeddings.norm.weight",
    "embedding_norm.bias": "embeddings.norm.bias",
    "final_norm.weight": "final_norm.weight",
    "final_norm.bias": "final_norm.bias",
}
_MODERNBERT_BLOCKS = {
    "attention.query": "attn.Wqkv",
    "attention.key": "attn.Wqkv",
    "attention.value": "attn.Wqkv",
    "attention.output": "attn.Wo",
    "attention_norm": "attn_norm",
    "feed_forward.gate": "mlp.Wi",
    "feed_forward.up": "mlp.Wi",
    "feed_forward.down": "mlp.Wo",
    "feed_forward_norm": "mlp_norm",
}
_DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "width": "hidden_dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "activation": "activation",
}
_DISTILBERT_BLOCKS = {
    "attention.query": "attention.q_lin",
    "attention.key": "attention.k_lin",
    "attention.value": "attention.v_lin",
    "attention.output": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "feed_forward.up": "ffn.lin1",
    "feed_forward.down": "ffn.lin2",
    "feed_forward_norm": "output_layer_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """One `model_type`.

    `keys`: our name of a size to the config's key. `extra_keys` are read besides, or must be neutral. `prefix` stands
    before every tensor in a checkpoint with a head. `heads` are the prefixes of tensors that no embedding needs.
    `pads_first`: the row of the position table after that of the padding id is the first position's. `fused`: modules
    of ours that are the n-th of the equal parts of the rows of the checkpoint's. `relative_bias`: scores have one.
    """

    model_type: str
    prefix: str
    outer: Mapping[str, str]
    blocks: str
    modules: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=lambda: _LAYER_KEYS)
    extra_keys: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("pooler.", "cls.", "classifier.", "qa_outputs.")
    pads_first: bool = False
    relative_bias: bool = False
    fused: Mapping[str, int] = field(default_factory=dict)


_BERT_EXTRA = ("type_vocab_size", "layer_norm_eps")
_ROBERTA_HEADS = ("pooler.", "lm_head.", "classifier.", "qa_outputs.")
_DISTILBERT_HEADS = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier.")
_ELECTRA_HEADS = ("discriminator_predictions.", "generator_predictions.", "generator_lm_head.")


def _roberta(model_type: str) -> EncoderFamily:
    return EncoderFamily(
        model_type=model_type,
        prefix="roberta.",
        outer=_BERT_OUTER,
        blocks="encoder.layer",
        modules=_BERT_BLOCKS,
        extra_keys=_BERT_EXTRA,
        heads=_ROBERTA_HEADS,
        pads_first=True,
    )


ENCODER_FAMILIES: tuple[EncoderFamily, ...] = (
    EncoderFamily(
        model_type="bert",
        prefix="bert.",
        outer=_BERT_OUTER,
        blocks="encoder.layer",
        modules=_BERT_BLOCKS,
        extra_keys=_BERT_EXTRA,
    ),
    _roberta("roberta"),
    _roberta("xlm-roberta"),
    _roberta("camembert"),
    EncoderFamily(
        model_type="distilbert",
        prefix="distilbert.",
        outer=_BERT_OUTER,
        blocks="transformer.layer",
        modules=_DISTILBERT_BLOCKS,
        keys=_DISTILBERT_KEYS,
        extra_keys=("sinusoidal_pos_embds",),  # the table is stored either way
        heads=(*_DISTILBERT_HEADS, "classifier.", "qa_outputs."),
    ),
    EncoderFamily(
        model_type="electra",
        prefix="electra.",
        outer=_BERT_OUTER,
        blocks="encoder.layer",
        modules=_BERT_BLOCKS,
        extra_keys=(*_BERT_EXTRA, "embedding_size"),
        heads=(*_ELECTRA_HEADS, "classifier.", "qa_outputs."),
    ),
    EncoderFamily(
        model_type="mpnet",
        prefix="mpnet.",
        outer=_BERT_OUTER,
        blocks="encoder.layer",
        modules=_MPNET_BLOCKS,
        extra_keys=("layer_norm_eps", "relative_attention_num_buckets"),
        heads=_ROBERTA_HEADS,
        pads_first=True,
        relative_bias=True,
    ),
    EncoderFamily(
        model_type="modernbert",
        prefix="model.",
        outer=_MODERNBERT_OUTER,
        blocks="layers",
        modules=_MODERNBERT_BLOCKS,
        fused={
            **{f"attention.{part}": i for i, part in enumerate(("query", "key", "value"))},
            "feed_forward.gate": 0,
            "feed_forward.up": 1,
        },
        heads=("head.", "decoder.", "classifier."),
    ),
    *(
        EncoderFamily(
            model_type=tower.model_type,
            prefix="text_model.",
            outer=TEXT_OUTER,
            blocks="encoder.layers",
            modules=CLIP_BLOCKS,
            heads=(),
        )
        for tower in TEXT_TOWERS
    ),
)


def find_encoder_family(model_type: object) -> EncoderFamily | None:
    """The family called `model_type`, None when it is no encoder that is read."""
    return next((family for family in ENCODER_FAMILIES if family.model_type == model_type), None)


def read_encoder_config(values: Values, family: EncoderFamily) -> tuple[TransformerConfig, list[str]]:
    """The configuration that config.json describes, with the default pooling, and notes.

    Raises CheckpointError for keys and values that are not supported, ConfigError for numbers that no transformer has.
    """
    if family.model_type == "modernbert":
        return read_modernbert_config(values)
    read = {*_COMMON_KEYS, *family.keys.values(), *family.extra_keys, *LABEL_KEYS}
    notes = check_keys(values, family.model_type, read=read, ignored=ENCODER_IGNORED, neutral=ENCODER_NEUTRAL)
    size = {name: read_integer(values, key) for name, key in family.keys.items() if name != "activation"}
    if size["hidden_size"] % size["heads"]:
        raise CheckpointError(
            f"config.json: {family.keys['hidden_size']} ({size['hidden_size']}) is no multiple of "
            f"{family.keys['heads']} ({size['heads']})"
        )
    if family.relative_bias and values.get("relative_attention_num_buckets", _MPNET_BUCKETS) != _MPNET_BUCKETS:
        raise CheckpointError(
            f"config.json: relative_attention_num_buckets must be {_MPNET_BUCKETS}, which transformers computes "
            f"whatever the config says; got {values['relative_attention_num_buckets']!r}"
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
        relative_bias=RelativeBias(num_buckets=_MPNET_BUCKETS) if family.relative_bias else None,
        token_types=read_integer(values, "type_vocab_size") if "type_vocab_size" in family.extra_keys else 0,
        embedding_norm=norm,
        embedding_width=_embedding_width(values, family, size["hidden_size"]),
        head="none",
        pooling=PoolingConfig(),
    )
    return config, notes


def _epsilon(values: Values, family: EncoderFamily, notes: list[str]) -> float:
    if "layer_norm_eps" not in family.extra_keys:
        return _EPSILON
    value: float = or_default(values, "layer_norm_eps", _EPSILON, notes)
    return value


def _position(values: Values, family: EncoderFamily) -> LearnedPosition:
    rows = read_integer(values, "max_position_embeddings")
    if not family.pads_first:
        return LearnedPosition(max_positions=rows)
    offset = read_integer({"pad_token_id": values.get("pad_token_id", 1)}, "pad_token_id", positive=False) + 1
    return LearnedPosition(max_positions=rows - offset, offset=offset)


def _embedding_width(values: Values, family: EncoderFamily, hidden_size: int) -> int | None:
    """The width of the embeddings where they are projected, None where they have the model's own."""
    if "embedding_size" not in family.extra_keys:
        return None
    width = read_integer(values, "embedding_size")
    return None if width == hidden_size else width

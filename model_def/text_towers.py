"""config.json of the text towers of CLIP and SigLIP, and what compares their vectors with those of images.

In: a parsed config.json of a tower, or of both. Out: a `TransformerConfig` with notes, `SimilarityConfig`. Tensors are
matched in `encoder_tensors.py`; the image towers stand in `huggingface_vision.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.huggingface_values import (
    ENCODER_IGNORED,
    ENCODER_NEUTRAL,
    Values,
    check_keys,
    or_default,
    read_activation,
    read_integer,
)
from graphport.model_def.position_config import LearnedPosition
from graphport.model_def.readout_config import PoolingConfig, SimilarityConfig
from graphport.model_def.safetensors_files import WeightFiles

SIMILARITY_TENSORS = ("logit_scale", "logit_bias")

_READ = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "hidden_act", "layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id"),
)
_IGNORED = (*ENCODER_IGNORED, "initializer_factor", "num_labels")
_OLD_END = 2  # in configs of CLIP's first checkpoints, whose texts end with the highest id of their vocabulary

TEXT_OUTER = {
    "embedding.weight": "embeddings.token_embedding.weight",
    "position.weight": "embeddings.position_embedding.weight",
    "final_norm.weight": "final_layer_norm.weight",
    "final_norm.bias": "final_layer_norm.bias",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTower:
    """One `model_type`, and transformers' defaults for keys that may be absent.

    `width`: the key of the projection's width. `projection`: where its tensors are, in the tower's own prefix or not.
    `is_filled`: texts are filled up with the padding id, which is read as text; else they end at the end's id.
    """

    model_type: str
    defaults: Mapping[str, int]
    activation: str
    epsilon: float
    width: str
    projection: str
    is_filled: bool


_BASE = {"intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8, "pad_token_id": 1}
TEXT_TOWERS = (
    TextTower(
        model_type="clip_text_model",
        defaults={
            **_BASE,
            "vocab_size": 49408,
            "hidden_size": 512,
            "max_position_embeddings": 77,
            "projection_dim": 512,
            "eos_token_id": 49407,
        },
        activation="quick_gelu",
        epsilon=1e-5,
        width="projection_dim",
        projection="text_projection",
        is_filled=False,
    ),
    TextTower(
        model_type="siglip_text_model",
        defaults={
            **_BASE,
            "vocab_size": 32000,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "max_position_embeddings": 64,
        },
        activation="gelu_pytorch_tanh",
        epsilon=1e-6,
        width="projection_size",
        projection="head",
        is_filled=True,
    ),
)


def find_text_tower(model_type: object) -> TextTower | None:
    """The text tower called `model_type`, None when it is none."""
    return next((tower for tower in TEXT_TOWERS if tower.model_type == model_type), None)


def read_text_tower(values: Values, tower: TextTower, *, has_projection: bool) -> tuple[TransformerConfig, list[str]]:
    """The configuration that a tower's config.json describes, and notes.

    `has_projection`: whether one is stored. Raises CheckpointError for keys and values that are not supported.
    """
    read = {*_READ, tower.width}
    notes = check_keys(values, tower.model_type, read=read, ignored=_IGNORED, neutral=ENCODER_NEUTRAL)
    size = {key: _integer(values, tower, key, notes) for key in _READ[1:7]}
    hidden, heads = size["hidden_size"], size["num_attention_heads"]
    if hidden % heads:
        raise CheckpointError(f"config.json: hidden_size ({hidden}) is no multiple of num_attention_heads ({heads})")
    norm = NormConfig(
        kind="layer", epsilon=float(or_default(values, "layer_norm_eps", tower.epsilon, notes)), bias=True
    )
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        causal=not tower.is_filled,
        qkv_bias=True,
        output_bias=True,
    )
    feed_forward = FeedForwardConfig(
        width=size["intermediate_size"],
        activation=read_activation("hidden_act", or_default(values, "hidden_act", tower.activation, notes)),
        gated=False,
        bias=True,
    )
    positions = size["max_position_embeddings"]
    config = TransformerConfig(
        vocab_size=size["vocab_size"],
        hidden_size=hidden,
        max_positions=positions,
        blocks=(BlockConfig(attention=attention, feed_forward=feed_forward, norm=norm),) * size["num_hidden_layers"],
        position=LearnedPosition(max_positions=positions),
        final_norm=norm,
        head="none",
        pooling=_pooling(values, tower, hidden, notes, has_projection=has_projection),
    )
    return config, notes


def projection_names(tower: TextTower, files: WeightFiles) -> dict[str, str]:
    """Our parameters of the projection to the stored names of those that there are."""
    stored = {f"{place}{tower.projection}.{kind}": kind for place in ("", "text_model.") for kind in ("weight", "bias")}
    return {f"pooling.projection.{kind}": name for name, kind in stored.items() if name in files.tensors}


def read_similarity(folder: Path, files: WeightFiles) -> SimilarityConfig:
    """How vectors of the two towers compare. Raises CheckpointError where the scale is not stored."""
    if "logit_scale" not in files.tensors:
        raise CheckpointError(f"{folder}: logit_scale is missing, so vectors of texts and images cannot be compared")
    has_bias = "logit_bias" in files.tensors
    bias = float(files.read("logit_bias")) if has_bias else 0.0
    return SimilarityConfig(scale=float(files.read("logit_scale").exp()), bias=bias, multi_label=has_bias)


def _pooling(values: Values, tower: TextTower, hidden: int, notes: list[str], *, has_projection: bool) -> PoolingConfig:
    width = None
    if has_projection:
        default = tower.defaults.get(tower.width, hidden)
        width = read_integer({tower.width: or_default(values, tower.width, default, notes)}, tower.width)
    if tower.is_filled:
        fill = _integer(values, tower, "pad_token_id", notes, positive=False)
        return PoolingConfig(kind="last", width=width, bias=has_projection, filled_with=fill)
    end = _integer(values, tower, "eos_token_id", notes, positive=False)
    return PoolingConfig(kind="last", ends_at=-1 if end == _OLD_END else end, width=width)


def _integer(values: Values, tower: TextTower, key: str, notes: list[str], *, positive: bool = True) -> int:
    return read_integer({key: or_default(values, key, tower.defaults[key], notes)}, key, positive=positive)

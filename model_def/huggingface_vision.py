"""config.json of the Hugging Face image encoders that are read, key by key.

In: parsed JSON. Out: a `TransformerConfig` with `image`, and notes. Every key is read, on a list of keys that change
nothing, or refused by name; the tensors stand in `vision_tensors.py`, pictures in
`huggingface_preprocessing.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.huggingface_heads import read_labels
from graphport.model_def.huggingface_preprocessing import read_preprocessing
from graphport.model_def.huggingface_values import (
    ENCODER_IGNORED,
    ENCODER_NEUTRAL,
    LABEL_KEYS,
    Values,
    check_keys,
    or_default,
    read_activation,
    read_architectures,
    read_flag,
    read_integer,
)
from graphport.model_def.readout_config import Transform
from graphport.model_def.vision_config import (
    MOST_TOKENS,
    AttentionPoolConfig,
    ImageConfig,
    ImageReadoutConfig,
    Selection,
    Size,
)

Layout = Literal["vit", "clip"]

# of transformers' configuration classes
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224, "num_channels": 3}
_SIZE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size", "num_channels")
_COMMON_KEYS = ("model_type", *_SIZE_KEYS, "hidden_act", "layer_norm_eps")
_IGNORED = (
    *ENCODER_IGNORED,
    *(
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "encoder_stride",
        "layerscale_value",
        "drop_path_rate",
        "use_mask_token",
        "initializer_factor",
    ),
    # of the backbone class, which other models take features from
    *("apply_layernorm", "reshape_hidden_states", "out_features", "out_indices", "stage_names"),
)
_POOLER_ACTIVATIONS: Mapping[str, Transform] = {"tanh": "tanh", "relu": "relu", "gelu": "gelu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """One `model_type`: its keys, transformers' defaults for those that may be absent, and how its tensors are called.

    `inner`: the key of the vision tower's own configuration, in a configuration of two towers, and `text` the
    `model_type` of the other one. `classifies`: what the
    classification head reads. `processor`: whose preprocessing a folder has that does not say so.
    """

    model_type: str
    layout: Layout
    prefix: str
    processor: str
    epsilon: float
    patch: int
    activation: str = "gelu"
    prefix_tokens: int = 1
    keys: tuple[str, ...] = ()
    inner: str | None = None
    text: str | None = None
    classifies: Selection = "class"


_VIT_KEYS = ("intermediate_size", "qkv_bias", "pooler_act", "pooler_output_size")
_CLIP_KEYS = ("intermediate_size", "projection_dim")
_SIGLIP_KEYS = ("intermediate_size", "vision_use_head")


def _clip(model_type: str, inner: str | None) -> VisionFamily:
    return VisionFamily(
        model_type=model_type,
        text="clip_text_model" if inner else None,
        layout="clip",
        prefix="vision_model.",
        processor="CLIP",
        epsilon=1e-5,
        patch=32,
        activation="quick_gelu",
        keys=_CLIP_KEYS,
        inner=inner,
        classifies="patches",
    )


def _siglip(model_type: str, inner: str | None) -> VisionFamily:
    return VisionFamily(
        model_type=model_type,
        text="siglip_text_model" if inner else None,
        layout="clip",
        prefix="vision_model.",
        processor="Siglip",
        epsilon=1e-6,
        patch=16,
        activation="gelu_pytorch_tanh",
        prefix_tokens=0,
        keys=_SIGLIP_KEYS,
        inner=inner,
        classifies="patches",
    )


VISION_FAMILIES = (
    VisionFamily(
        model_type="vit", layout="vit", prefix="vit.", processor="ViT", epsilon=1e-12, patch=16, keys=_VIT_KEYS
    ),
    VisionFamily(
        model_type="deit",
        layout="vit",
        prefix="deit.",
        processor="DeiT",
        epsilon=1e-12,
        patch=16,
        prefix_tokens=2,
        keys=_VIT_KEYS,
    ),
    VisionFamily(
        model_type="dinov2",
        layout="vit",
        prefix="dinov2.",
        processor="Bit",
        epsilon=1e-6,
        patch=14,
        keys=("mlp_ratio", "use_swiglu_ffn", "qkv_bias"),
        classifies="class_and_patches",
    ),
    _clip("clip", "vision_config"),
    _clip("clip_vision_model", None),
    _siglip("siglip", "vision_config"),
    _siglip("siglip_vision_model", None),
)


def find_vision_family(model_type: object) -> VisionFamily | None:
    """The family called `model_type`, None when it is no image encoder that is read."""
    return next((family for family in VISION_FAMILIES if family.model_type == model_type), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFacts:
    """What the stored tensors say that config.json does not: whether there are a pooler and a projection."""

    has_pooler: bool
    has_projection: bool


def read_vision_config(
    values: Values, family: VisionFamily, preprocessor: Values, facts: VisionFacts
) -> tuple[TransformerConfig, list[str]]:
    """The configuration that config.json describes, and notes.

    Raises CheckpointError for keys and values that are not supported, ConfigError for numbers that no transformer has.
    """
    tower = _checked_tower(values, family)
    notes = check_keys(
        {**tower, "model_type": family.model_type},
        family.model_type,
        read={*_COMMON_KEYS, *family.keys, *LABEL_KEYS},
        ignored=_IGNORED,
        neutral=ENCODER_NEUTRAL,
    )
    defaults = {**_BASE, "patch_size": family.patch}
    given = {key: or_default(tower, key, defaults[key], notes) for key in _SIZE_KEYS}
    hidden, heads = read_integer(given, "hidden_size"), read_integer(given, "num_attention_heads")
    if hidden % heads:
        raise CheckpointError(f"config.json: hidden_size ({hidden}) is no multiple of num_attention_heads ({heads})")
    patch, size = _pair(given, "patch_size"), _pair(given, "image_size")
    epsilon = float(or_default(tower, "layer_norm_eps", family.epsilon, notes))
    norm = NormConfig(kind="layer", epsilon=epsilon, bias=True)
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        causal=False,
        qkv_bias=read_flag(tower, "qkv_bias", default=True) if "qkv_bias" in family.keys else True,
        output_bias=True,
    )
    feed_forward = _feed_forward(tower, family, hidden, notes)
    is_clip = family.activation == "quick_gelu"
    config = TransformerConfig(
        vocab_size=0,
        hidden_size=hidden,
        max_positions=MOST_TOKENS,
        blocks=(BlockConfig(attention=attention, feed_forward=feed_forward, norm=norm),)
        * read_integer(given, "num_hidden_layers"),
        embedding_norm=norm if is_clip else None,
        final_norm=None if is_clip else norm,
        head="none",
        image=ImageConfig(
            patch_size=patch,
            grid=(size[0] // patch[0], size[1] // patch[1]),
            channels=read_integer(given, "num_channels"),
            prefix_tokens=family.prefix_tokens,
            patch_bias=not is_clip,
            readout=_readout(values, tower, family, feed_forward, epsilon, facts, notes),
            preprocessing=read_preprocessing(preprocessor, family.processor, notes),
        ),
    )
    return config, notes


def _checked_tower(values: Values, family: VisionFamily) -> Values:
    """The configuration of the vision tower."""
    if family.inner is None:
        return values
    known = (
        *("model_type", "text_config", "vision_config", "text_config_dict", "vision_config_dict", "projection_dim"),
        *("logit_scale_init_value", "initializer_factor"),
    )
    check_keys(values, family.model_type, read=known, ignored=_IGNORED, neutral=ENCODER_NEUTRAL)
    return read_tower(values, family.inner)


def read_tower(values: Values, key: str) -> Values:
    """The configuration of one tower, `key`, in that of two."""
    tower = values.get(key) or {}
    older = values.get(f"{key}_dict") or {}  # what it says goes before, as transformers reads it
    if not isinstance(tower, dict) or not isinstance(older, dict):
        raise CheckpointError(f"config.json: {key} must be an object, got {tower!r:.80}")
    return {**tower, **older}


def _pair(values: Values, key: str) -> Size:
    """Height and width, from two numbers or one."""
    value = values[key]
    pair = value if isinstance(value, list) and len(value) == 2 else [value, value]
    return read_integer({key: pair[0]}, key), read_integer({key: pair[1]}, key)


def _feed_forward(tower: Values, family: VisionFamily, hidden: int, notes: list[str]) -> FeedForwardConfig:
    name = or_default(tower, "hidden_act", family.activation, notes)
    activation = read_activation("hidden_act", name)
    if "mlp_ratio" not in family.keys:
        width = read_integer({"intermediate_size": tower.get("intermediate_size", 3072)}, "intermediate_size")
        return FeedForwardConfig(width=width, activation=activation, gated=False, bias=True)
    ratio = tower.get("mlp_ratio", 4)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio <= 0:
        raise CheckpointError(f"config.json: mlp_ratio must be a number above 0, got {ratio!r}")
    width = int(hidden * ratio)
    if not read_flag(tower, "use_swiglu_ffn"):
        return FeedForwardConfig(width=width, activation=activation, gated=False, bias=True)
    # two thirds, rounded up to a multiple of 8, as transformers computes it; SiLU whatever hidden_act says
    return FeedForwardConfig(width=(int(width * 2 / 3) + 7) // 8 * 8, activation="silu", gated=True, bias=True)


def _readout(
    values: Values,
    tower: Values,
    family: VisionFamily,
    feed_forward: FeedForwardConfig,
    epsilon: float,
    facts: VisionFacts,
    notes: list[str],
) -> ImageReadoutConfig | None:
    """What is read out: the labels of a classification head, a projection, a pooler, or the class token."""
    names = read_architectures(values)
    if any("ForImageClassification" in name for name in names):
        labels = read_labels(values)
        is_taught = any(name.endswith("WithTeacher") for name in names)
        return ImageReadoutConfig(
            select="class_and_distillation" if is_taught else family.classifies,
            width=len(labels),
            labels=labels,
            multi_label=values.get("problem_type") == "multi_label_classification",
        )
    if any(name.endswith("ForMaskedImageModeling") for name in names):
        notes.append("the head that restores masked images is left out")
    if "vision_use_head" in family.keys:
        if not read_flag(tower, "vision_use_head", default=True):
            return None
        heads = read_integer({"heads": tower.get("num_attention_heads", _BASE["num_attention_heads"])}, "heads")
        return ImageReadoutConfig(
            select="attention",
            pool=AttentionPoolConfig(
                num_heads=heads,
                feed_forward_width=feed_forward.width,
                activation=feed_forward.activation,
                epsilon=epsilon,
            ),
        )
    if "projection_dim" in family.keys:
        owner = values if family.inner else tower
        width = read_integer({"projection_dim": owner.get("projection_dim", 512)}, "projection_dim")
        return ImageReadoutConfig(norm_epsilon=epsilon, width=width if facts.has_projection else None, bias=False)
    if not facts.has_pooler:
        if "pooler_act" in family.keys:
            notes.append("no pooler is stored; an image's vector is its class token's state")
        return ImageReadoutConfig()
    name = tower.get("pooler_act") or "tanh"
    if name not in _POOLER_ACTIVATIONS:
        raise CheckpointError(f"config.json: pooler_act {name!r} is not supported; known are tanh, relu, gelu")
    width = tower.get("pooler_output_size") or tower.get("hidden_size", _BASE["hidden_size"])
    return ImageReadoutConfig(
        width=read_integer({"pooler_output_size": width}, "pooler_output_size"), activation=_POOLER_ACTIVATIONS[name]
    )

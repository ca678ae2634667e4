"""config.json of the Hugging Face decoders that are read, key by key.

In: a parsed config.json. Out: a `TransformerConfig` whose head is still undecided (tensors have a say), and notes.
Every key is read, on the list of keys that do not change the computation, or refused by name.
"""

from dataclasses import dataclass

from graphport.model_def.checkpoint_record import CheckpointError, name_known
from graphport.model_def.config import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    HeadKind,
    NormConfig,
    TransformerConfig,
)
from graphport.model_def.huggingface_encoders import ENCODER_FAMILIES
from graphport.model_def.huggingface_values import (
    Values,
    check_keys,
    or_default,
    read_activation,
    read_flag,
    read_integer,
)
from graphport.model_def.huggingface_vision import VISION_FAMILIES
from graphport.model_def.position_config import RotaryPosition
from graphport.model_def.rotary_parameters import CONFIG_KEYS as ROTARY_KEYS
from graphport.model_def.rotary_parameters import read_rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`: the keys it has beyond the common ones, and what it fixes.

    `default_head_dim` is taken when the key is absent (None: hidden_size / heads), as transformers' class does.
    """

    model_type: str
    keys: tuple[str, ...]
    always_qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    window_needs_flag: bool = False


FAMILIES = (
    Family(model_type="llama", keys=("attention_bias", "mlp_bias")),
    Family(model_type="mistral", keys=("use_sliding_window", "sliding_window", "layer_types")),
    Family(
        model_type="qwen2",
        keys=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        always_qkv_bias=True,
        window_needs_flag=True,
    ),
    Family(
        model_type="qwen3",
        keys=("attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        qk_norm=True,
        default_head_dim=128,
        window_needs_flag=True,
    ),
)

# of transformers' configuration classes
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28

_COMMON_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *ROTARY_KEYS,
)


def read_config(values: Values, *, head: HeadKind) -> tuple[TransformerConfig, list[str]]:
    """The configuration that config.json describes, with `head` as decided, and notes.

    Raises CheckpointError for an unknown model type or key and for values that are not supported, and ConfigError
    for numbers that no transformer can have.
    """
    family = _family(values.get("model_type"))
    notes = check_keys(values, family.model_type, read=(*_COMMON_KEYS, *family.keys))
    num_layers = read_integer(values, "num_hidden_layers")
    windows = _windows(values, family, num_layers, notes)
    layer_types = tuple("full_attention" if window is None else "sliding_attention" for window in windows)
    max_positions = read_integer(values, "max_position_embeddings")
    rotary, rotary_notes = read_rotary(values, layer_types=layer_types, max_positions=max_positions)
    norm = NormConfig(kind="rms", epsilon=or_default(values, "rms_norm_eps", 1e-6, notes))
    feed_forward = FeedForwardConfig(
        width=read_integer(values, "intermediate_size"),
        activation=read_activation("hidden_act", or_default(values, "hidden_act", "silu", notes)),
        bias=read_flag(values, "mlp_bias"),
    )
    blocks = tuple(
        BlockConfig(
            attention=_attention(values, family, norm=norm, rotary=rotary[layer_type], window=window),
            feed_forward=feed_forward,
            norm=norm,
        )
        for window, layer_type in zip(windows, layer_types, strict=True)
    )
    config = TransformerConfig(
        vocab_size=read_integer(values, "vocab_size"),
        hidden_size=read_integer(values, "hidden_size"),
        max_positions=max_positions,
        blocks=blocks,
        final_norm=norm,
        head=head,
    )
    return config, notes + rotary_notes


def _family(model_type: object) -> Family:
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = [family.model_type for family in (*FAMILIES, *ENCODER_FAMILIES, *VISION_FAMILIES)]
    raise CheckpointError(f"config.json: model_type {model_type!r} is not read; {name_known(model_type, known)}")


def _attention(
    values: Values, family: Family, *, norm: NormConfig, rotary: RotaryPosition, window: int | None
) -> AttentionConfig:
    num_heads = read_integer(values, "num_attention_heads")
    has_bias = read_flag(values, "attention_bias")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(values, family, num_heads),
        head_dim=_head_dim(values, family, num_heads),
        window=window,
        qk_norm=norm if family.qk_norm else None,
        qkv_bias=has_bias or family.always_qkv_bias,
        output_bias=has_bias,
        rotary=rotary,
    )


def _num_kv_heads(values: Values, family: Family, num_heads: int) -> int:
    if values.get("num_key_value_heads") is not None:
        return read_integer(values, "num_key_value_heads", positive=False)
    if "num_key_value_heads" in values or family.model_type == "llama":
        return num_heads
    raise CheckpointError(f"config.json: num_key_value_heads is missing; model_type {family.model_type} needs it")


def _head_dim(values: Values, family: Family, num_heads: int) -> int:
    if values.get("head_dim") is not None:
        return read_integer(values, "head_dim")
    if "head_dim" not in values and family.default_head_dim is not None:
        return family.default_head_dim
    hidden_size = read_integer(values, "hidden_size")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads}); "
            "give head_dim"
        )
    return hidden_size // num_heads


def _windows(values: Values, family: Family, num_layers: int, notes: list[str]) -> list[int | None]:
    """The sliding window of each layer; None sees everything."""
    if "sliding_window" not in family.keys:
        return [None] * num_layers
    window = _window(values, family, notes)
    listed = values.get("layer_types")
    if listed is None:
        first = 0
        if window is not None and family.window_needs_flag:
            stated = or_default(values, "max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, notes)
            first = read_integer({"max_window_layers": stated}, "max_window_layers", positive=False)
        return [window if layer >= first else None for layer in range(num_layers)]
    return _listed_windows(family, listed, window=window, num_layers=num_layers)


def _window(values: Values, family: Family, notes: list[str]) -> int | None:
    """The window that is switched on, if any: qwen's flag switches it, mistral has no flag."""
    flag = read_flag(values, "use_sliding_window", default=not family.window_needs_flag)
    if (family.window_needs_flag and not flag) or values.get("sliding_window", 0) is None:
        return None
    window: int = or_default(values, "sliding_window", _DEFAULT_WINDOW, notes)
    if not flag:
        raise CheckpointError(
            f"config.json: use_sliding_window is false, which model_type {family.model_type} does not read, and "
            f"sliding_window is {window}; set sliding_window to null or remove the flag"
        )
    return read_integer({"sliding_window": window}, "sliding_window")


def _listed_windows(family: Family, listed: object, *, window: int | None, num_layers: int) -> list[int | None]:
    known = ("full_attention", "sliding_attention")
    if not isinstance(listed, list) or len(listed) != num_layers or not all(item in known for item in listed):
        raise CheckpointError(
            f"config.json: layer_types must list {num_layers} of {', '.join(known)}; got {listed!r:.200}"
        )
    if window is None and "sliding_attention" in listed:
        raise CheckpointError(
            "config.json: layer_types has sliding_attention, but sliding_window is null or switched off"
        )
    if not family.window_needs_flag and window is not None and "full_attention" in listed:
        raise CheckpointError(
            f"config.json: model_type {family.model_type} uses sliding_window {window} in every layer, but layer_types "
            "lists full_attention"
        )
    return [window if item == "sliding_attention" else None for item in listed]

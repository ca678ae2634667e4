"""config.json of the Hugging Face decoders that are read, key by key.

In: a parsed config.json. Out: a `TransformerConfig` whose head is still undecided (tensors have a say), and notes.
Every key is read, on the list of keys that do not change the computation, or refused by name. The families stand in
`rms_norm_decoders.py` and `layer_norm_decoders.py`.
"""

import dataclasses

from graphport.model_def.block_config import Activation, AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.checkpoint_record import CheckpointError, name_known
from graphport.model_def.config import HeadKind, TransformerConfig
from graphport.model_def.decoder_family import DecoderFamily, is_on
from graphport.model_def.encoder_decoder_family import ENCODER_DECODER_FAMILIES
from graphport.model_def.huggingface_encoders import ENCODER_FAMILIES
from graphport.model_def.huggingface_experts import read_experts
from graphport.model_def.huggingface_latent import read_latent, read_latent_head_dim, turn_part
from graphport.model_def.huggingface_values import (
    NEUTRAL_VALUES,
    Values,
    check_keys,
    or_default,
    read_activation,
    read_integer,
    sort_keys,
)
from graphport.model_def.huggingface_vision import VISION_FAMILIES
from graphport.model_def.huggingface_windows import read_windows
from graphport.model_def.joined_models import refuse_joined
from graphport.model_def.latent_config import latent_scale
from graphport.model_def.layer_norm_decoders import LAYER_NORM_DECODERS
from graphport.model_def.position_config import LearnedPosition, RotaryPosition
from graphport.model_def.rms_norm_decoders import RMS_DECODERS
from graphport.model_def.rotary_parameters import read_rotary, read_rotary_flags

DECODER_FAMILIES = (*RMS_DECODERS, *LAYER_NORM_DECODERS)

_OBSTACLES_SHOWN = 12


def find_decoder_family(values: Values) -> DecoderFamily:
    """The family that `model_type` names, as the other keys change it.

    Raises CheckpointError for an unknown type, with the nearest family and the keys that keep it from being read so, or
    with the parts where several models are joined.
    """
    model_type = values.get("model_type")
    for family in DECODER_FAMILIES:
        if family.model_type == model_type:
            return family if family.refine is None else family.refine(family, values)
    known = [
        *(decoder.model_type for decoder in DECODER_FAMILIES),
        *(encoder.model_type for encoder in ENCODER_FAMILIES),
        *(pair.model_type for pair in ENCODER_DECODER_FAMILIES),
        *(encoder.model_type for encoder in VISION_FAMILIES),
    ]
    refuse_joined(values, known)
    raise CheckpointError(
        f"config.json: model_type {model_type!r} is not read; {name_known(model_type, known)}; {_nearest(values)}"
    )


def read_config(
    values: Values, *, head: HeadKind, family: DecoderFamily | None = None
) -> tuple[TransformerConfig, list[str]]:
    """The configuration that config.json describes, with `head` as decided, and notes.

    Raises CheckpointError for an unknown model type or key and for values that are not supported, and ConfigError
    for numbers that no transformer can have.
    """
    family = family or find_decoder_family(values)
    notes = check_keys(
        values, family.model_type, read=family.read_keys, neutral=_neutral(family), ignored=family.ignored
    )
    num_layers = read_integer(values, family.keys["layers"])
    positions = read_integer(values, family.keys["positions"])
    norm = _norm(values, family, notes)
    activation = _activation(values, family, notes)
    feed_forward = FeedForwardConfig(
        width=_width(values, family),
        activation=activation,
        gated=family.gated,
        bias=is_on(family.feed_forward_bias, values),
    )
    residual_scale = family.residual_scale.read(values, notes) if family.residual_scale else None
    blocks = tuple(
        BlockConfig(
            attention=attention,
            feed_forward=experts or feed_forward,
            norm=norm,
            norm_order=family.norm_order,
            feed_forward_norm=family.feed_forward_norm,
            residual_scale=residual_scale or 1.0,
        )
        for attention, experts in zip(
            _attentions(values, family, num_layers, positions, norm, notes),
            read_experts(values, family.experts, num_layers, activation, notes),
            strict=True,
        )
    )
    offset = family.position_offset
    embedding_scale = family.embedding_scale.read(values, notes) if family.embedding_scale else None
    logit_scale = family.logit_scale.read(values, notes) if family.logit_scale else None
    config = TransformerConfig(
        vocab_size=read_integer(values, family.keys["vocab_size"]),
        hidden_size=read_integer(values, family.keys["hidden_size"]),
        max_positions=positions,
        blocks=blocks,
        position=None if offset is None else LearnedPosition(max_positions=positions, offset=offset),
        relative_bias=family.alibi,
        embedding_norm=norm if family.embedding_norm else None,
        id_width=None if family.id_width_key is None else read_integer(values, family.id_width_key),
        embedding_scale=embedding_scale or 1.0,
        final_norm=norm if family.has_final_norm else None,
        head=head,
        head_bias=family.head_bias,
        logit_scale=logit_scale or 1.0,
        logit_softcap=family.logit_softcap.read(values, notes) if family.logit_softcap else None,
    )
    return config, list(dict.fromkeys(notes))


def _nearest(values: Values) -> str:
    """The family that fewest keys of `values` keep from being read, and those keys."""
    obstacles = {family.model_type: _obstacles(values, family) for family in DECODER_FAMILIES}
    name = min(obstacles, key=lambda name: len(obstacles[name]))
    found = obstacles[name]
    if not found:
        return f"{name} has all of its keys: set model_type to {name} if the computation is the same"
    others = len(found) - _OBSTACLES_SHOWN
    listed = ", ".join(found[:_OBSTACLES_SHOWN]) + (f" and {others} more" if others > 0 else "")
    return f"nearest by its keys is {name}, which it is kept from by {listed}"


def _obstacles(values: Values, family: DecoderFamily) -> list[str]:
    """Why `values` cannot be read as `family`: keys that it does not know, and those that it needs."""
    _, refused = sort_keys(values, read=family.read_keys, neutral=_neutral(family), ignored=family.ignored)
    missing = [key for key in family.required_keys if values.get(key) is None]
    return [*refused, *(f"{key} (missing)" for key in missing)]


def _neutral(family: DecoderFamily) -> dict[str, tuple[object, ...]]:
    accepted = NEUTRAL_VALUES | dict(family.neutral)
    return {key: allowed for key, allowed in accepted.items() if key not in family.ignored}


def _norm(values: Values, family: DecoderFamily, notes: list[str]) -> NormConfig:
    key = family.keys.get("epsilon")
    epsilon = family.epsilon if key is None else or_default(values, key, family.epsilon, notes)
    return dataclasses.replace(family.norm, epsilon=epsilon)


def _activation(values: Values, family: DecoderFamily, notes: list[str]) -> Activation:
    key = family.keys["activation"]
    return read_activation(key, or_default(values, key, family.activation, notes))


def _width(values: Values, family: DecoderFamily) -> int:
    key = family.keys["width"]
    if family.width_factor is None or values.get(key) is not None:
        return read_integer(values, key)
    return family.width_factor * read_integer(values, family.keys["hidden_size"])


def _attentions(
    values: Values, family: DecoderFamily, num_layers: int, positions: int, norm: NormConfig, notes: list[str]
) -> list[AttentionConfig]:
    """The attention of each layer."""
    num_heads = read_integer(values, family.keys["heads"])
    head_dim = _head_dim(values, family, num_heads)
    windows = read_windows(values, family.window, family.model_type, num_layers, notes)
    rotaries = _rotaries(values, family, windows, positions, notes)
    qk_norm = None if family.qk_norm_over is None else norm
    if qk_norm is not None and not family.qk_norm_bias:
        qk_norm = dataclasses.replace(norm, bias=False)
    scale = family.attention_scale.read(values, notes) if family.attention_scale else None
    scale = 1.0 if family.unscaled else scale
    latent = read_latent(values) if family.has_latent else None
    if latent is not None and rotaries[0] is not None:
        scale = latent_scale(rotaries[0], head_dim)
    by_layer = family.scale_by_layer is not None and family.scale_by_layer.read(values)
    scales = [(scale or head_dim**-0.5) / (layer + 1) if by_layer else scale for layer in range(num_layers)]
    return [
        AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(values, family, num_heads),
            head_dim=head_dim,
            window=window,
            qk_norm=qk_norm,
            qk_norm_over=family.qk_norm_over or "head",
            softcap=family.attention_softcap.read(values, notes) if family.attention_softcap else None,
            scale=layer_scale,
            qkv_bias=is_on(family.qkv_bias, values),
            output_bias=is_on(family.output_bias, values),
            rotary=rotary,
            latent=latent,
            sinks=family.sinks,
        )
        for window, rotary, layer_scale in zip(windows, rotaries, scales, strict=True)
    ]


def _rotaries(
    values: Values, family: DecoderFamily, windows: list[int | None], positions: int, notes: list[str]
) -> list[RotaryPosition | None]:
    """The rotation of each layer, None for layers without."""
    if family.rotary is None:
        return [None] * len(windows)
    layer_types = tuple("full_attention" if window is None else "sliding_attention" for window in windows)
    rotary, rotary_notes = read_rotary(values, family.rotary, layer_types=layer_types, max_positions=positions)
    notes += rotary_notes
    if family.has_latent:
        rotary = {kind: turn_part(position, values) for kind, position in rotary.items()}
    rotates = read_rotary_flags(values, family.rotary, len(windows))
    return [rotary[kind] if turns else None for kind, turns in zip(layer_types, rotates, strict=True)]


def _num_kv_heads(values: Values, family: DecoderFamily, num_heads: int) -> int:
    key = family.keys.get("kv_heads")
    if key is None:
        return num_heads if family.kv_heads is None else family.kv_heads
    if values.get(key) is not None:
        return read_integer(values, key, positive=False)
    if key in values or family.kv_heads_default:
        return num_heads
    raise CheckpointError(f"config.json: {key} is missing; model_type {family.model_type} needs it")


def _head_dim(values: Values, family: DecoderFamily, num_heads: int) -> int:
    if family.has_latent:
        return read_latent_head_dim(values)
    key = family.keys.get("head_dim")
    if key is not None and values.get(key) is not None:
        return read_integer(values, key)
    if key is not None and key not in values and family.head_dim is not None:
        return family.head_dim
    size_key, heads_key = family.keys["hidden_size"], family.keys["heads"]
    hidden_size = read_integer(values, size_key)
    if hidden_size % num_heads:
        advice = "; give head_dim" if key is not None else ""
        raise CheckpointError(
            f"config.json: {size_key} ({hidden_size}) is no multiple of {heads_key} ({num_heads}){advice}"
        )
    return hidden_size // num_heads

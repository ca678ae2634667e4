"""config.json of the Hugging Face encoder-decoders that are read, key by key.

In: a parsed config.json and what the files say of head and bias. Out: a `TransformerConfig` with its encoder, and
notes. Every key is read, on the list of keys that do not change the computation, or refused by name.
"""

import dataclasses

from graphport.model_def.audio_config import AudioConfig
from graphport.model_def.block_config import Activation, AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.config import HeadKind, TransformerConfig
from graphport.model_def.encoder_decoder_family import EncoderDecoderFamily
from graphport.model_def.huggingface_values import (
    NEUTRAL_VALUES,
    Values,
    check_keys,
    or_default,
    read_activation,
    read_flag,
    read_integer,
)
from graphport.model_def.position_config import LearnedPosition, RelativeBias, SinusoidalPosition

# read with what generation begins and ends with (see `huggingface_forced_tokens.py`)
_FORCED_KEYS = (
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
_TOKEN_KEYS = ("model_type", "vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
_NEUTRAL = {name: values for name, values in NEUTRAL_VALUES.items() if name != "is_encoder_decoder"} | {
    "is_encoder_decoder": (True,),
    "is_decoder": (None, False),
}
_IGNORED = (
    *("dropout", "dropout_rate", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std"),
    *("gradient_checkpointing", "initializer_factor", "classif_dropout", "num_hidden_layers", "output_past"),
    *("do_blenderbot_90_layernorm", "force_bos_token_to_be_generated", "save_step", "model_max_length"),
    *("mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length"),
    *("mask_feature_min_masks", "median_filter_width", "classifier_proj_size"),
)
_T5_POSITIONS = 512  # what the family was trained on; the computation has no limit
_BUCKETS, _MAX_DISTANCE = 32, 128  # transformers' defaults


def read_encoder_decoder_config(
    values: Values, family: EncoderDecoderFamily, *, head: HeadKind, has_head_bias: bool
) -> tuple[TransformerConfig, list[str]]:
    """The decoder's configuration with its encoder's; `head` and `has_head_bias` as the files have them.

    Raises CheckpointError for keys and values that are not supported, ConfigError for numbers that no transformer has.
    """
    read = {*_TOKEN_KEYS, *_FORCED_KEYS, *family.keys.values(), *family.extra_keys}
    read |= {"scale_embedding"} if _scales_embedding(family) else set()
    notes = check_keys(values, family.model_type, read=read, neutral={**_NEUTRAL, **family.neutral}, ignored=_IGNORED)
    vocab_size = read_integer(values, "vocab_size")
    encoder = _stack(values, family, "encoder", vocab_size, notes)
    decoder = _stack(values, family, "decoder", vocab_size, notes)
    if values.get("decoder_vocab_size") is not None:
        decoder = dataclasses.replace(decoder, vocab_size=read_integer(values, "decoder_vocab_size"))
    cross = dataclasses.replace(decoder.blocks[0].attention, causal=False)
    return dataclasses.replace(
        decoder,
        encoder=encoder,
        blocks=tuple(dataclasses.replace(block, cross_attention=cross) for block in decoder.blocks),
        head=head,
        head_bias=has_head_bias,
        logit_scale=decoder.hidden_size**-0.5 if scales_logits(values, family) else 1.0,
    ), list(dict.fromkeys(notes))


def scales_logits(values: Values, family: EncoderDecoderFamily) -> bool:
    """Whether hidden states are divided by the root of their width before the head: T5 where the head is tied."""
    if family.positions != "relative":
        return False
    tied = read_flag(values, "tie_word_embeddings", default=True)
    return read_flag(values, "scale_decoder_outputs", default=tied)


def _stack(
    values: Values, family: EncoderDecoderFamily, side: str, vocab_size: int, notes: list[str]
) -> TransformerConfig:
    """One of the two stacks, the decoder without its cross-attention."""
    hidden_size = read_integer(values, family.keys["hidden_size"])
    norm = _norm(values, family, notes)
    num_heads, head_dim = _heads(values, family, side, hidden_size)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        causal=side == "decoder",
        scale=1.0 if family.positions == "relative" else None,
        qkv_bias=family.bias,
        output_bias=family.bias,
    )
    activation, gated = _activation(values, family, notes)
    width = read_integer(values, family.keys[f"{side}.width"])
    block = BlockConfig(
        attention=attention,
        feed_forward=FeedForwardConfig(width=width, activation=activation, gated=gated, bias=family.bias),
        norm=norm,
        norm_order=family.norm_order,
    )
    positions = _positions(values, family, notes)
    blocks = (block,) * _layers(values, family, side)
    if family.reads_sound and side == "encoder":
        return TransformerConfig(
            vocab_size=0,
            hidden_size=hidden_size,
            max_positions=read_integer(values, "max_source_positions"),
            blocks=blocks,
            final_norm=norm,
            head="none",
            audio=AudioConfig(mel_bins=read_integer(values, "num_mel_bins")),
        )
    scales = _scales_embedding(family) and read_flag(values, "scale_embedding")
    return TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_positions=positions,
        blocks=blocks,
        position=_position(family, positions),
        relative_bias=_relative_bias(values) if family.positions == "relative" else None,
        embedding_norm=norm if family.has_embedding_norm else None,
        embedding_scale=hidden_size**0.5 if scales else 1.0,
        final_norm=norm if family.has_final_norm else None,
        head="none",
    )


def _scales_embedding(family: EncoderDecoderFamily) -> bool:
    """Whether the family has a key that scales embeddings."""
    return family.positions != "relative" and not family.reads_sound


def _layers(values: Values, family: EncoderDecoderFamily, side: str) -> int:
    key = family.keys[f"{side}.layers"]
    is_same = values.get(key) is None and family.positions == "relative"  # T5: as many as the encoder has
    return read_integer(values, family.keys["encoder.layers"] if is_same else key)


def _norm(values: Values, family: EncoderDecoderFamily, notes: list[str]) -> NormConfig:
    if "layer_norm_epsilon" not in family.extra_keys:
        return family.norm
    epsilon = or_default(values, "layer_norm_epsilon", family.norm.epsilon, notes)
    return dataclasses.replace(family.norm, epsilon=epsilon)


def _heads(values: Values, family: EncoderDecoderFamily, side: str, hidden_size: int) -> tuple[int, int]:
    """How many heads the stack has, and their size."""
    key = family.keys[f"{side}.heads"]
    heads = read_integer(values, key)
    if "d_kv" in family.extra_keys:
        head_dim = read_integer(values, "d_kv")
    elif hidden_size % heads:
        raise CheckpointError(
            f"config.json: {family.keys['hidden_size']} ({hidden_size}) is no multiple of {key} ({heads})"
        )
    else:
        head_dim = hidden_size // heads
    return heads, head_dim


def _activation(values: Values, family: EncoderDecoderFamily, notes: list[str]) -> tuple[Activation, bool]:
    """The activation, and whether it gates: T5 says both in one word, "gated-gelu"."""
    key = family.keys["activation"]
    default = "relu" if family.positions == "relative" else "gelu"
    name = or_default(values, key, default, notes)
    if family.positions != "relative" or not isinstance(name, str):
        return read_activation(key, name), False
    gated = name.startswith("gated-")
    inner = name.removeprefix("gated-")
    inner = "gelu_new" if name == "gated-gelu" else inner  # transformers' reading of that word
    for other, found in (("is_gated_act", gated), ("dense_act_fn", inner)):
        if values.get(other, found) != found:
            raise CheckpointError(
                f"config.json: {other} {values[other]!r} contradicts {key} {name!r}, of which transformers makes "
                f"{found!r}; remove it, or correct {key}"
            )
    return read_activation(key, inner), gated


def _positions(values: Values, family: EncoderDecoderFamily, notes: list[str]) -> int:
    key = family.keys["positions"]
    if family.positions == "relative" and values.get(key) is None:
        notes.append(f"{key} is absent; texts of up to {_T5_POSITIONS} tokens, which the family was trained on")
        return _T5_POSITIONS
    return read_integer(values, key)


def _position(family: EncoderDecoderFamily, positions: int) -> LearnedPosition | SinusoidalPosition | None:
    match family.positions:
        case "learned":
            return LearnedPosition(max_positions=positions, offset=family.position_offset)
        case "sinusoidal":
            return SinusoidalPosition(max_positions=positions, halves=True)
        case "relative":
            return None


def _relative_bias(values: Values) -> RelativeBias:
    def number(key: str, default: int) -> int:
        return read_integer({key: values.get(key, default)}, key)

    return RelativeBias(
        num_buckets=number("relative_attention_num_buckets", _BUCKETS),
        max_distance=number("relative_attention_max_distance", _MAX_DISTANCE),
    )

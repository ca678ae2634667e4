"""What one Hugging Face encoder-decoder family is: a record of keys, block kinds and tensor names, one row a family.

In: nothing. Out: `ENCODER_DECODER_FAMILIES`. The keys are read in `huggingface_encoder_decoders.py`, the tensors found
in `encoder_decoder_tensors.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from graphport.model_def.block_config import NormConfig

# our names of sizes to the keys; those of the stacks stand for encoder and decoder
_BART_KEYS: Mapping[str, str] = {
    "hidden_size": "d_model",
    "encoder.layers": "encoder_layers",
    "encoder.heads": "encoder_attention_heads",
    "encoder.width": "encoder_ffn_dim",
    "decoder.layers": "decoder_layers",
    "decoder.heads": "decoder_attention_heads",
    "decoder.width": "decoder_ffn_dim",
    "positions": "max_position_embeddings",
    "activation": "activation_function",
}
_T5_KEYS: Mapping[str, str] = {
    "hidden_size": "d_model",
    "encoder.layers": "num_layers",
    "encoder.heads": "num_heads",
    "encoder.width": "d_ff",
    "decoder.layers": "num_decoder_layers",
    "decoder.heads": "num_heads",
    "decoder.width": "d_ff",
    "positions": "n_positions",
    "activation": "feed_forward_proj",
}

_BART_MODULES: Mapping[str, str] = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key": "encoder_attn.k_proj",
    "cross_attention.value": "encoder_attn.v_proj",
    "cross_attention.output": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}

_WHISPER_KEYS: Mapping[str, str] = {**_BART_KEYS, "positions": "max_target_positions"}


def _t5_modules(feed_forward: int) -> dict[str, str]:
    """The modules of a T5 block whose feed-forward is its layer of that number."""
    attentions = {
        f"{ours}.{part}": f"layer.{layer}.{theirs}.{letter}"
        for layer, ours, theirs in ((0, "attention", "SelfAttention"), (1, "cross_attention", "EncDecAttention"))
        for part, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
    }
    dense = f"layer.{feed_forward}.DenseReluDense"
    return {
        **attentions,
        "attention_norm": "layer.0.layer_norm",
        "cross_attention_norm": "layer.1.layer_norm",
        "feed_forward_norm": f"layer.{feed_forward}.layer_norm",
        "feed_forward.up": f"{dense}.wi",
        "feed_forward.down": f"{dense}.wo",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTensors:
    """How one of the two stacks names its tensors; `outer` modules outside the blocks by ours."""

    blocks: str
    modules: Mapping[str, str]
    outer: Mapping[str, str]
    gated: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderFamily:
    """One `model_type`: what it fixes, and which keys say the rest.

    `positions`: a learned table whose row `position_offset` is the first, sines before cosines, or a relative bias.
    `shared` is the tensor of the embedding that both stacks may share. `head_bias` is the name of the
    bias of the logits, where files may have one. `languages`: how tokens that name a language look, a regular
    expression. `reads_sound`: the encoder reads log-mel features, through two convolutions. Without `key_bias` the
    keys' projections are stored without biases, which change no softmax: they are zeros then. `head` is the stored name
    of a head of its own.
    """

    model_type: str
    keys: Mapping[str, str]
    encoder: StackTensors
    decoder: StackTensors
    norm: NormConfig
    norm_order: Literal["pre", "post"]
    positions: Literal["learned", "sinusoidal", "relative"]
    position_offset: int = 0
    has_embedding_norm: bool = False
    has_final_norm: bool = False
    bias: bool = True
    shared: str = "model.shared"
    head_bias: str | None = None
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    extra_keys: tuple[str, ...] = ()
    languages: str | None = None
    reads_sound: bool = False
    key_bias: bool = True
    head: str = "lm_head.weight"


def _stack(name: str, *, final_norm: bool) -> StackTensors:
    outer = {
        "embedding": f"model.{name}.embed_tokens",
        "position": f"model.{name}.embed_positions",
        "embedding_norm": f"model.{name}.layernorm_embedding",
    }
    if final_norm:
        outer["final_norm"] = f"model.{name}.layer_norm"
    return StackTensors(blocks=f"model.{name}.layers", modules=_BART_MODULES, outer=outer)


def _t5_stack(name: str, feed_forward: int) -> StackTensors:
    first = f"{name}.block.0.layer.0.SelfAttention"
    dense = f"layer.{feed_forward}.DenseReluDense"
    return StackTensors(
        blocks=f"{name}.block",
        modules=_t5_modules(feed_forward),
        outer={
            "embedding": f"{name}.embed_tokens",
            "relative_bias": f"{first}.relative_attention_bias",
            "final_norm": f"{name}.final_layer_norm",
        },
        gated={"feed_forward.gate": f"{dense}.wi_0", "feed_forward.up": f"{dense}.wi_1"},
    )


def _sound_stack() -> StackTensors:
    """Whisper's encoder, whose positions are stored as they are added."""
    outer = {
        "frames.first": "model.encoder.conv1",
        "frames.second": "model.encoder.conv2",
        "frames.positions": "model.encoder.embed_positions.weight",
        "final_norm": "model.encoder.layer_norm",
    }
    return StackTensors(blocks="model.encoder.layers", modules=_BART_MODULES, outer=outer)


_LAYER_NORM = NormConfig(kind="layer", epsilon=1e-5, bias=True)
_LANGUAGE = r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}"

ENCODER_DECODER_FAMILIES: tuple[EncoderDecoderFamily, ...] = (
    EncoderDecoderFamily(
        model_type="bart",
        keys=_BART_KEYS,
        encoder=_stack("encoder", final_norm=False),
        decoder=_stack("decoder", final_norm=False),
        norm=_LAYER_NORM,
        norm_order="post",
        positions="learned",
        position_offset=2,
        has_embedding_norm=True,
        head_bias="final_logits_bias",
        # of the configurations of old checkpoints, whose model could be put together otherwise
        neutral={
            "add_bias_logits": (False,),
            "add_final_layer_norm": (False,),
            "normalize_before": (False,),
            "normalize_embedding": (True,),
            "static_position_embeddings": (False,),
            "extra_pos_embeddings": (2,),
        },
    ),
    EncoderDecoderFamily(
        model_type="mbart",
        keys=_BART_KEYS,
        encoder=_stack("encoder", final_norm=True),
        decoder=_stack("decoder", final_norm=True),
        norm=_LAYER_NORM,
        norm_order="pre",
        positions="learned",
        position_offset=2,
        has_embedding_norm=True,
        has_final_norm=True,
        head_bias="final_logits_bias",
        neutral={
            "add_bias_logits": (False,),
            "add_final_layer_norm": (True,),
            "normalize_before": (True,),
            "normalize_embedding": (True,),
            "static_position_embeddings": (False,),
            "extra_pos_embeddings": (2,),
        },
        languages=_LANGUAGE,
    ),
    EncoderDecoderFamily(
        model_type="marian",
        keys=_BART_KEYS,
        encoder=_stack("encoder", final_norm=False),
        decoder=_stack("decoder", final_norm=False),
        norm=_LAYER_NORM,
        norm_order="post",
        positions="sinusoidal",
        head_bias="final_logits_bias",
        neutral={
            "add_bias_logits": (False,),
            "add_final_layer_norm": (False,),
            "normalize_before": (False,),
            "normalize_embedding": (False,),
            "static_position_embeddings": (True,),
            "extra_pos_embeddings": (0, 1, 2),
        },
        extra_keys=("decoder_vocab_size", "share_encoder_decoder_embeddings"),
    ),
    EncoderDecoderFamily(
        model_type="t5",
        keys=_T5_KEYS,
        encoder=_t5_stack("encoder", 1),
        decoder=_t5_stack("decoder", 2),
        norm=NormConfig(kind="rms", epsilon=1e-6),
        norm_order="pre",
        positions="relative",
        has_final_norm=True,
        bias=False,
        shared="shared",
        extra_keys=(
            *("d_kv", "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon"),
            *("is_gated_act", "dense_act_fn", "scale_decoder_outputs"),
        ),
    ),
    EncoderDecoderFamily(
        model_type="whisper",
        keys=_WHISPER_KEYS,
        encoder=_sound_stack(),
        decoder=_stack("decoder", final_norm=True),
        norm=_LAYER_NORM,
        norm_order="pre",
        positions="learned",
        has_final_norm=True,
        shared="model.decoder.embed_tokens",
        # transformers reads the first and uses it nowhere; the others are of training, classifiers and alignment
        neutral={
            "scale_embedding": (False, True),
            "apply_spec_augment": (False, True),
            "use_weighted_layer_sum": (False,),
        },
        extra_keys=("num_mel_bins", "max_source_positions", "forced_decoder_ids"),
        reads_sound=True,
        key_bias=False,
        head="proj_out.weight",
    ),
)


def find_encoder_decoder_family(model_type: object) -> EncoderDecoderFamily | None:
    """The family called `model_type`, None when it is no encoder-decoder that is read."""
    return next((family for family in ENCODER_DECODER_FAMILIES if family.model_type == model_type), None)

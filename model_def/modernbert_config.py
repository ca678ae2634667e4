"""config.json of ModernBERT: gated pre-norm layers, local and global, with a rotary base for either.

In: a parsed config.json. Out: a `TransformerConfig` and notes. Tensors are matched in `encoder_tensors.py`.
"""

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
    read_flag,
    read_integer,
)
from graphport.model_def.readout_config import PoolingConfig
from graphport.model_def.rotary_parameters import RotaryRule, read_rotary

_FULL, _LOCAL = "full_attention", "sliding_attention"
_OLD_THETAS = {_FULL: "global_rope_theta", _LOCAL: "local_rope_theta"}  # before rope_parameters

_READ = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_activation", "max_position_embeddings", "norm_eps", "norm_bias", "attention_bias", "mlp_bias"),
    *("layer_types", "global_attn_every_n_layers", "local_attention", "rope_parameters", *_OLD_THETAS.values()),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
_IGNORED = (
    *ENCODER_IGNORED,
    *("initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "decoder_bias", "classifier_pooling"),
    *("classifier_bias", "classifier_activation", "deterministic_flash_attn", "sparse_prediction"),
    *("sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad"),
)


def read_modernbert_config(values: Values) -> tuple[TransformerConfig, list[str]]:
    """The configuration that config.json describes, with the default pooling, and notes.

    Raises CheckpointError for keys and values that are not supported.
    """
    notes = check_keys(values, "modernbert", read=_READ, ignored=_IGNORED, neutral=ENCODER_NEUTRAL)
    hidden_size, num_heads = read_integer(values, "hidden_size"), read_integer(values, "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})"
        )
    max_positions = read_integer(values, "max_position_embeddings")
    layer_types = _layer_types(values)
    rotary, rotary_notes = read_rotary(
        _rotary_values(values), RotaryRule(), layer_types=layer_types, max_positions=max_positions
    )
    epsilon = or_default(values, "norm_eps", 1e-5, notes)
    norm = NormConfig(kind="layer", epsilon=epsilon, bias=read_flag(values, "norm_bias"))
    has_bias = read_flag(values, "attention_bias")
    activation = or_default(values, "hidden_activation", "gelu", notes)
    feed_forward = FeedForwardConfig(
        width=read_integer(values, "intermediate_size"),
        activation=read_activation("hidden_activation", activation),
        bias=read_flag(values, "mlp_bias"),
    )
    # local_attention counts both sides: a token sees local_attention / 2 before it and as many after it
    local = {"local_attention": or_default(values, "local_attention", 128, notes)}
    window = read_integer(local, "local_attention") // 2 + 1
    blocks = tuple(
        BlockConfig(
            attention=AttentionConfig(
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=hidden_size // num_heads,
                causal=False,
                window=window if layer_type == _LOCAL else None,
                qkv_bias=has_bias,
                output_bias=has_bias,
                rotary=rotary[layer_type],
            ),
            feed_forward=feed_forward,
            norm=norm,
            attention_norm=layer > 0,
        )
        for layer, layer_type in enumerate(layer_types)
    )
    config = TransformerConfig(
        vocab_size=read_integer(values, "vocab_size"),
        hidden_size=hidden_size,
        max_positions=max_positions,
        blocks=blocks,
        embedding_norm=norm,
        final_norm=norm,
        head="none",
        pooling=PoolingConfig(),
    )
    return config, notes + rotary_notes


def _layer_types(values: Values) -> tuple[str, ...]:
    num_layers = read_integer(values, "num_hidden_layers")
    listed = values.get("layer_types")
    if listed is None:
        period = read_integer({"global_attn_every_n_layers": 3, **values}, "global_attn_every_n_layers")
        return tuple(_LOCAL if layer % period else _FULL for layer in range(num_layers))
    if not isinstance(listed, list) or len(listed) != num_layers or not set(listed) <= {_FULL, _LOCAL}:
        raise CheckpointError(
            f"config.json: layer_types must list {num_layers} of {_FULL}, {_LOCAL}; got {listed!r:.200}"
        )
    return tuple(listed)


def _rotary_values(values: Values) -> Values:
    """The rotary keys as transformers writes them now."""
    if values.get("rope_parameters") is not None:
        return {"rope_parameters": values["rope_parameters"]}
    thetas = {kind: values.get(key) for kind, key in _OLD_THETAS.items()}
    if None in thetas.values():
        raise CheckpointError(
            f"config.json: needed are rope_parameters, or {' and '.join(_OLD_THETAS.values())}; got {thetas}"
        )
    return {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}}

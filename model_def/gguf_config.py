"""GGUF metadata as a configuration, for the architectures of one table.

In: a parsed `GgufFile`. Out: a `TransformerConfig` and notes. Every key under the architecture's name is read, on a
named list, or refused. It reads no weights but the small rotary factor tensors.
"""

import dataclasses

from graphport.model_def.block_config import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    NormConfig,
    NormOrder,
)
from graphport.model_def.checkpoint_record import MOST_COUNT, CheckpointError, name_known
from graphport.model_def.config import TransformerConfig
from graphport.model_def.gguf_architectures import ARCHITECTURES, Architecture
from graphport.model_def.gguf_experts import read_experts
from graphport.model_def.gguf_file import GgufFile
from graphport.model_def.gguf_keys import GgufKeys
from graphport.model_def.gguf_latent import read_latent
from graphport.model_def.gguf_rotary import read_rotary, read_window_rotary
from graphport.model_def.latent_config import latent_scale
from graphport.model_def.position_config import LearnedPosition

# keys under the architecture's name, accepted at these values only
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth", "jploski"),
    "rope.scaling.finetuned": (True, False),  # a remark on training
}

_QKV_BIASES = (
    *("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"),
    *("attn_q_a.bias", "attn_kv_a_mqa.bias"),
)
_READ_ELSEWHERE = ("general.architecture", "general.type", "general.alignment", "split.count")


def read_gguf_config(file: GgufFile) -> tuple[TransformerConfig, list[str]]:
    """The configuration that the metadata (and the presence of tensors) describe, and notes.

    Raises CheckpointError for an unknown architecture, a split file, and keys or values that are not supported.
    """
    architecture = find_architecture(file)
    keys = GgufKeys(file=file, prefix=architecture.name)
    notes: list[str] = []
    num_layers = keys.integer("block_count")
    if num_layers > MOST_COUNT:
        raise CheckpointError(f"{file.path}: block_count must be at most {MOST_COUNT}, got {num_layers}; correct it")
    max_positions = keys.integer("context_length")
    hidden_size = keys.integer("embedding_length")
    vocab_size = _vocab_size(keys)
    norm = _norm(keys, architecture)
    widths = keys.per_layer("feed_forward_length", num_layers)
    attentions = _attentions(keys, architecture, num_layers, hidden_size, max_positions, norm, notes)
    embedding_scale, residual_scale, logit_scale = _scales(keys, architecture, hidden_size)
    logit_softcap = keys.number("final_logit_softcapping") or None
    if architecture.softcaps and (logit_softcap is None or attentions[0].softcap is None):
        raise CheckpointError(
            f"{file.path}: {architecture.name} caps scores and logits; attn_logit_softcapping and "
            "final_logit_softcapping must say at what"
        )
    norm_order, has_second_norm = _order(keys, architecture)
    has_ffn_bias = file.has_any("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
    blocks = tuple(
        BlockConfig(
            attention=attention,
            feed_forward=experts
            or FeedForwardConfig(
                width=width, activation=architecture.activation, gated=architecture.gated, bias=has_ffn_bias
            ),
            norm=norm,
            norm_order=norm_order,
            feed_forward_norm=has_second_norm,
            residual_scale=residual_scale,
        )
        for attention, experts, width in zip(attentions, read_experts(keys, architecture, widths), widths, strict=True)
    )
    config = TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_positions=max_positions,
        blocks=blocks,
        position=LearnedPosition(max_positions=max_positions) if architecture.rotary is None else None,
        embedding_scale=embedding_scale,
        final_norm=norm,
        head="separate" if "output.weight" in file.tensors else "tied",
        head_bias="output.bias" in file.tensors,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )
    notes += _check_keys(keys)
    return config, notes


def _norm(keys: GgufKeys, architecture: Architecture) -> NormConfig:
    """The norms of blocks and of the end, with a bias where that at the end has one."""
    kind = architecture.norm
    name = "attention.layer_norm_rms_epsilon" if kind == "rms" else "attention.layer_norm_epsilon"
    has_bias = kind == "layer" and "output_norm.bias" in keys.file.tensors
    return NormConfig(kind=kind, epsilon=keys.get(name, 0), bias=has_bias)


def _order(keys: GgufKeys, architecture: Architecture) -> tuple[NormOrder, bool]:
    """Where norms stand, and whether the feed-forward has one of its own."""
    match architecture.parallel:
        case None:
            return architecture.norm_order, True
        case "always":
            return "parallel", keys.file.has_any("attn_norm_2.weight")
        case "stated":
            return "parallel" if keys.get("use_parallel_residual", True) else "pre", True
        case "one_norm":  # as llama.cpp has it, whatever use_parallel_residual says
            keys.get("use_parallel_residual")
            return ("pre", True) if keys.file.has_any("ffn_norm.weight") else ("parallel", False)


def _scales(keys: GgufKeys, architecture: Architecture, hidden_size: int) -> tuple[float, float, float]:
    """What embeddings, residuals and logits are multiplied by."""
    embedding = hidden_size**0.5 if architecture.scales_embedding else 1.0
    match architecture.scales:
        case None:
            return embedding, 1.0, 1.0
        case "logits":
            return embedding, 1.0, keys.number("logit_scale") or 1.0
        case "all":
            embedding, residual, divisor = (
                keys.number(key) or 1.0 for key in ("embedding_scale", "residual_scale", "logit_scale")
            )
            return embedding, residual, 1.0 / divisor


def find_architecture(file: GgufFile) -> Architecture:
    """The row of `general.architecture`; raises CheckpointError for a part of a file, no model, and an unknown name."""
    if (parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise CheckpointError(
            f"{file.path} is one of {parts} parts; join them first: llama-gguf-split --merge FIRST_PART OUT.gguf"
        )
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path} holds a GGUF of type {kind!r}, not a model")
    name = file.metadata.get("general.architecture")
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = [architecture.name for architecture in ARCHITECTURES]
    raise CheckpointError(f"{file.path}: architecture {name!r} is not read; {name_known(name, known)}")


def _check_keys(keys: GgufKeys) -> list[str]:
    """Refuse unread keys under the architecture's name; note the ignored ones."""
    ignored, refused = [], []
    for full, value in keys.file.metadata.items():
        prefix, _, key = full.partition(".")
        if prefix != keys.prefix:
            if full not in _READ_ELSEWHERE and prefix != "tokenizer":
                ignored.append(full)
        elif key in keys.read:
            continue
        elif key in _NEUTRAL_VALUES and value in _NEUTRAL_VALUES[key]:
            ignored.append(full)
        else:
            refused.append(f"{full} = {value!r:.80}")
    if refused:
        raise CheckpointError(
            f"{keys.file.path}: metadata that is not supported and may change the computation: {'; '.join(refused)}"
        )
    return [f"ignored metadata keys: {', '.join(sorted(ignored))}"] if ignored else []


def _vocab_size(keys: GgufKeys) -> int:
    """The embedding's rows; `vocab_size` in the metadata must agree."""
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{keys.file.path}: tensor token_embd.weight is missing or no matrix")
    rows = embedding.shape[0]
    stated = keys.get("vocab_size", rows)
    if stated != rows:
        raise CheckpointError(f"{keys.file.path}: vocab_size is {stated}, token_embd.weight has {rows} rows")
    return rows


def _attentions(
    keys: GgufKeys,
    architecture: Architecture,
    num_layers: int,
    hidden_size: int,
    max_positions: int,
    norm: NormConfig,
    notes: list[str],
) -> list[AttentionConfig]:
    num_heads = keys.per_layer("attention.head_count", num_layers)
    num_kv_heads = keys.per_layer("attention.head_count_kv", num_layers, num_heads[0])
    latent = None
    if architecture.has_latent:
        latent, head_dim = read_latent(keys)
        num_kv_heads = num_heads
    else:
        head_dim = _head_dim(keys, hidden_size, num_heads[0])
    rotary = window_rotary = None
    if architecture.rotary is not None:
        rotary = read_rotary(keys, architecture, head_dim, max_positions, notes)
        window_rotary = read_window_rotary(keys, rotary, default_theta=architecture.window_theta)
    scale = keys.number("attention.scale")
    if latent is not None and rotary is not None:
        scale = latent_scale(rotary, head_dim)
    if scale is None and num_layers == architecture.wide_scale_layers:
        scale = (hidden_size / num_heads[0]) ** -0.5
    has_qkv_bias = architecture.always_qkv_bias or keys.file.has_any(*_QKV_BIASES)
    windows = _windows(keys, num_layers, period=architecture.window_period) if architecture.has_window else None
    has_qk_norm = architecture.qk_norm or (architecture.norm == "layer" and keys.file.has_any("attn_q_norm.weight"))
    qk_norm = dataclasses.replace(norm, bias=False) if has_qk_norm else None
    softcap = keys.number("attn_logit_softcapping") if architecture.softcaps else None
    period = architecture.unrotated_period
    rotates = [period is None or (layer + 1) % period != 0 for layer in range(num_layers)]
    return [
        AttentionConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
            qk_norm=qk_norm,
            qk_norm_over=architecture.qk_norm_over if architecture.norm == "rms" else "each_head",
            softcap=softcap or None,
            scale=scale,
            qkv_bias=has_qkv_bias,
            output_bias=keys.file.has_any("attn_output.bias"),
            rotary=None if not turns else rotary if window is None else window_rotary,
            latent=latent,
            sinks=architecture.has_sinks,
        )
        for heads, kv_heads, window, turns in zip(
            num_heads, num_kv_heads, windows or [None] * num_layers, rotates, strict=True
        )
    ]


def _head_dim(keys: GgufKeys, hidden_size: int, num_heads: int) -> int:
    """The size of a head, which values must share."""
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{keys.file.path}: embedding_length ({hidden_size}) is no multiple of head_count ({num_heads}) and "
            "attention.key_length is absent"
        )
    head_dim = keys.per_layer("attention.key_length", 1, hidden_size // num_heads)[0]
    value_dim = keys.per_layer("attention.value_length", 1, head_dim)[0]
    if value_dim != head_dim:
        raise CheckpointError(
            f"{keys.file.path}: key_length is {head_dim} and value_length {value_dim}; both must be equal"
        )
    return head_dim


def _windows(keys: GgufKeys, num_layers: int, *, period: int | None) -> list[int | None]:
    """The window of each layer: by a list of booleans, or by a period n (every n-th layer sees everything)."""
    window = keys.per_layer("attention.sliding_window", 1)[0] if keys.get("attention.sliding_window") else None
    pattern = keys.get("attention.sliding_window_pattern", period)
    if pattern is None:
        return [window] * num_layers
    if type(pattern) is int and pattern > 0:
        pattern = [layer % pattern < pattern - 1 for layer in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise CheckpointError(
            f"{keys.file.path}: attention.sliding_window_pattern must list {num_layers} booleans or be a period; "
            f"got {pattern!r:.200}"
        )
    return [window if is_sliding else None for is_sliding in pattern]

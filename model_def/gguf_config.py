"""GGUF metadata as a configuration, for the architectures llama, qwen2 and qwen3.

In: a parsed `GgufFile`. Out: a `TransformerConfig` and notes. Every key under the architecture's name is read, on a
named list, or refused. It reads no weights but the small rotary factor tensors.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from graphport.model_def.checkpoint_record import CheckpointError, name_known
from graphport.model_def.config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig, TransformerConfig
from graphport.model_def.gguf_file import GgufFile
from graphport.model_def.position_config import (
    FrequencyFactors,
    LinearScaling,
    LongRopeScaling,
    RotaryPosition,
    RotaryScaling,
    YarnScaling,
)

# frequency divisors, read into the configuration
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# inverse frequencies of old converters, computed from the metadata here
IGNORED_TENSORS = (".attn_rot_embd", ".attn_rot_embd.weight", ".rope_freqs.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `general.architecture`: whether q/k/v always have biases, and whether q and k are normalised."""

    name: str
    always_qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES = (
    Architecture(name="llama"),
    Architecture(name="qwen2", always_qkv_bias=True),
    Architecture(name="qwen3", qk_norm=True),
)

# keys under the architecture's name, accepted at these values only
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.finetuned": (True, False),  # a remark on training
}

_READ_ELSEWHERE = ("general.architecture", "general.type", "general.alignment", "split.count")

_DEFAULT_THETA = 10_000.0  # llama.cpp's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The metadata under the architecture's name; remembers which keys were read."""

    file: GgufFile
    prefix: str
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - the file types it
        self.read.add(key)
        return self.file.metadata.get(f"{self.prefix}.{key}", default)

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CheckpointError(f"{self.file.path}: {self.prefix}.{key} must be a number, got {value!r:.80}")
        return value

    def integer(self, key: str) -> int:
        return self.per_layer(key, 1)[0]

    def per_layer(self, key: str, num_layers: int, default: int | None = None) -> list[int]:
        """A positive integer a layer, from one number or a list."""
        value = self.get(key, default)
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or not all(type(item) is int and item > 0 for item in values):
            raise CheckpointError(
                f"{self.file.path}: {self.prefix}.{key} must be a positive integer or a list of {num_layers}; "
                f"got {value!r:.200}"
            )
        return values


def read_gguf_config(file: GgufFile) -> tuple[TransformerConfig, list[str]]:
    """The configuration that the metadata (and the presence of tensors) describe, and notes.

    Raises CheckpointError for an unknown architecture, a split file, and keys or values that are not supported.
    """
    architecture = _architecture(file)
    keys = _Keys(file=file, prefix=architecture.name)
    notes: list[str] = []
    num_layers = keys.integer("block_count")
    max_positions = keys.integer("context_length")
    hidden_size = keys.integer("embedding_length")
    vocab_size = _vocab_size(keys)
    norm = NormConfig(kind="rms", epsilon=keys.get("attention.layer_norm_rms_epsilon", 0))
    widths = keys.per_layer("feed_forward_length", num_layers)
    attentions = _attentions(keys, architecture, num_layers, hidden_size, max_positions, norm, notes)
    has_ffn_bias = _has_any(file, "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
    blocks = tuple(
        BlockConfig(attention=attention, feed_forward=FeedForwardConfig(width=width, bias=has_ffn_bias), norm=norm)
        for attention, width in zip(attentions, widths, strict=True)
    )
    config = TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_positions=max_positions,
        blocks=blocks,
        final_norm=norm,
        head="separate" if "output.weight" in file.tensors else "tied",
    )
    notes += _check_keys(keys)
    return config, notes


def _architecture(file: GgufFile) -> Architecture:
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


def _check_keys(keys: _Keys) -> list[str]:
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


def _vocab_size(keys: _Keys) -> int:
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
    keys: _Keys,
    architecture: Architecture,
    num_layers: int,
    hidden_size: int,
    max_positions: int,
    norm: NormConfig,
    notes: list[str],
) -> list[AttentionConfig]:
    num_heads = keys.per_layer("attention.head_count", num_layers)
    num_kv_heads = keys.per_layer("attention.head_count_kv", num_layers, num_heads[0])
    if "attention.key_length" not in keys.file.metadata and hidden_size % num_heads[0]:
        raise CheckpointError(
            f"{keys.file.path}: embedding_length ({hidden_size}) is no multiple of head_count ({num_heads[0]}) and "
            "attention.key_length is absent"
        )
    head_dim = keys.per_layer("attention.key_length", 1, hidden_size // num_heads[0])[0]
    value_dim = keys.per_layer("attention.value_length", 1, head_dim)[0]
    if value_dim != head_dim:
        raise CheckpointError(
            f"{keys.file.path}: key_length is {head_dim} and value_length {value_dim}; both must be equal"
        )
    rotary = _rotary(keys, head_dim, max_positions, notes)
    has_qkv_bias = architecture.always_qkv_bias or _has_any(keys.file, "attn_q.bias", "attn_k.bias", "attn_v.bias")
    return [
        AttentionConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
            qk_norm=norm if architecture.qk_norm else None,
            scale=keys.number("attention.scale"),
            qkv_bias=has_qkv_bias,
            output_bias=_has_any(keys.file, "attn_output.bias"),
            rotary=rotary,
        )
        for heads, kv_heads, window in zip(num_heads, num_kv_heads, _windows(keys, num_layers), strict=True)
    ]


def _has_any(file: GgufFile, *endings: str) -> bool:
    """Whether a block has one of the tensors; if one has, all must (the accounting sees to it)."""
    return any(name.startswith("blk.") and name.endswith(endings) for name in file.tensors)


def _windows(keys: _Keys, num_layers: int) -> list[int | None]:
    window = keys.per_layer("attention.sliding_window", 1)[0] if keys.get("attention.sliding_window") else None
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None:
        return [window] * num_layers
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise CheckpointError(
            f"{keys.file.path}: attention.sliding_window_pattern must list {num_layers} booleans; got {pattern!r:.200}"
        )
    return [window if is_sliding else None for is_sliding in pattern]


def _rotary(keys: _Keys, head_dim: int, max_positions: int, notes: list[str]) -> RotaryPosition:
    theta = keys.number("rope.freq_base")
    if theta is None:
        theta = _DEFAULT_THETA
        notes.append(f"rope.freq_base is absent; llama.cpp's default {theta:g} was taken")
    rotary_dim = keys.per_layer("rope.dimension_count", 1, head_dim)[0]
    return RotaryPosition(theta=theta, partial_factor=rotary_dim / head_dim, scaling=_scaling(keys, max_positions))


def _scaling(keys: _Keys, max_positions: int) -> RotaryScaling | None:
    """Linear, YaRN and LongRoPE by metadata, Llama 3 by its tensor of divisors; at most one."""
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    kind = keys.get("rope.scaling.type", "linear")  # llama.cpp's default
    original = keys.per_layer("rope.scaling.original_context_length", 1, max_positions)[0]
    attention_factor = keys.number("rope.scaling.attn_factor") or 1.0
    beta_fast = keys.number("rope.scaling.yarn_beta_fast") or 32.0
    beta_slow = keys.number("rope.scaling.yarn_beta_slow") or 1.0
    factors = {
        name: tuple(keys.file.read(name).reshape(-1).tolist()) for name in ROPE_TENSORS if name in keys.file.tensors
    }
    scaling: RotaryScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=factor) if factor != 1.0 else None
    elif kind == "yarn":
        scaling = YarnScaling(
            factor=factor,
            original_max_positions=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            attention_factor=attention_factor * (0.1 * math.log(factor) + 1.0),  # as ggml's rope_yarn multiplies
        )
    elif kind == "longrope":
        if missing := [name for name in ROPE_TENSORS[1:] if name not in factors]:
            raise CheckpointError(
                f"{keys.file.path}: rope.scaling.type longrope needs the tensors {', '.join(missing)}"
            )
        scaling = LongRopeScaling(
            short_factor=factors.pop("rope_factors_short.weight"),
            long_factor=factors.pop("rope_factors_long.weight"),
            original_max_positions=original,
            attention_factor=attention_factor,
        )
    elif kind != "none":
        raise CheckpointError(
            f"{keys.file.path}: rope.scaling.type {kind!r} is not known; known are none, linear, yarn, longrope"
        )
    if factors and (scaling is not None or "rope_freqs.weight" not in factors or len(factors) > 1):
        raise CheckpointError(f"{keys.file.path}: tensors {', '.join(factors)} do not go with rope.scaling.type {kind}")
    return FrequencyFactors(factors=factors["rope_freqs.weight"]) if factors else scaling

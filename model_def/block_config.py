"""One block of a transformer: frozen records of its norms, attention and feed-forward, validated at construction.

In: numbers and kinds. Out: immutable records, of which `config.py` stacks many. Torch-free.
"""

from dataclasses import dataclass
from typing import Literal

from graphport.model_def.expert_config import ExpertsConfig
from graphport.model_def.latent_config import LatentConfig
from graphport.model_def.position_config import (
    ConfigError,
    FrequencyFactors,
    LongRopeScaling,
    RotaryPosition,
    require_choice,
    require_count,
    require_positive,
)

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "quick_gelu"]
NormKind = Literal["layer", "rms"]
NormOrder = Literal["pre", "post", "sandwich", "output", "parallel"]

_NORM_ORDERS = ("pre", "post", "sandwich", "output", "parallel")
_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """LayerNorm or RMSNorm; `unit_offset` multiplies by 1 + weight (Gemma); `bias` is LayerNorm's."""

    kind: NormKind = "rms"
    epsilon: float = 1e-6
    unit_offset: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        require_choice("norm kind", self.kind, ("layer", "rms"))
        require_positive("norm epsilon", self.epsilon)
        if self.kind == "rms" and self.bias:
            raise ConfigError("an RMSNorm has no bias; use kind='layer' or bias=False")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """softmax(scale * Q K^T) V over heads; order scale, cap, mask.

    `window` w lets position i see (i-w, i], and without causality (i-w, i+w). `qk_norm_over`: each head is normed by
    itself, with one weight for all or one each (Cohere), or all heads of a token at once (OLMo 2). With `latent` the
    projections go by way of small vectors, and values have heads of their own size (DeepSeek). `sinks`: each query head
    has a score of its own beside those of keys, which takes weight and gives nothing (GPT-OSS). `gate`: heads, joined,
    are multiplied by sigmoid(gate(x)), x what attention reads, before the output projection (AlphaFold).
    `linear`: a kernel elu + 1 in place of the softmax, whose state has a fixed size (Katharopoulos et al. 2020).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "each_head", "width"] = "head"
    softcap: float | None = None
    scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    rotary: RotaryPosition | None = None
    latent: LatentConfig | None = None
    sinks: bool = False
    gate: bool = False
    linear: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            require_count(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({self.num_kv_heads})")
        require_choice("qk_norm_over", self.qk_norm_over, ("head", "each_head", "width"))
        for name in ("softcap", "scale"):
            if getattr(self, name) is not None:
                require_positive(f"attention {name}", getattr(self, name))
        if self.window is not None:
            require_count("attention window", self.window)
        if self.rotary is not None:
            self._check_rotary(self.rotary)
        if self.sinks and (not self.causal or self.rotary is None or self.softcap is not None or self.latent):
            raise ConfigError("attention with sinks is causal and rotary, without a cap and latent vectors")
        others = (self.rotary, self.window, self.qk_norm, self.softcap, self.scale, self.latent, self.sinks)
        if self.linear and (not self.causal or self.num_kv_heads != self.num_heads or any(others)):
            raise ConfigError(
                "linear attention is causal with as many kv heads as heads, and has no rotation, window, q/k norm, "
                "cap, scale, latent vectors and sinks"
            )
        if self.latent is not None:
            if self.qk_norm is not None or not self.causal:
                raise ConfigError("latent attention is causal and has norms of its own, not of queries and keys")
            self.latent.check_heads(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                rotary_dim=0 if self.rotary is None else self.rotary.rotary_dim(self.head_dim),
            )

    def _check_rotary(self, rotary: RotaryPosition) -> None:
        rotary_dim = rotary.rotary_dim(self.head_dim)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ConfigError(
                f"head_dim ({self.head_dim}) x partial_factor ({rotary.partial_factor}) gives "
                f"{rotary_dim} rotary dimensions; rotation needs an even number of at least 2"
            )
        scaling = rotary.scaling
        lists: tuple[tuple[float, ...], ...] = ()
        if isinstance(scaling, LongRopeScaling):
            lists = (scaling.short_factor, scaling.long_factor)
        elif isinstance(scaling, FrequencyFactors):
            lists = (scaling.factors,)
        for values in lists:
            if len(values) != rotary_dim // 2:
                raise ConfigError(
                    f"{type(scaling).__name__} has {len(values)} factors; {rotary_dim} rotary dimensions "
                    f"need {rotary_dim // 2}"
                )

    @property
    def kind(self) -> Literal["multi-head", "grouped-query", "multi-query"]:
        """The usual name for this relation of query heads to key/value heads."""
        if self.num_kv_heads == self.num_heads:
            return "multi-head"
        return "multi-query" if self.num_kv_heads == 1 else "grouped-query"

    @property
    def value_dim(self) -> int:
        """The size of a head of values, and of what a head gives."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on Q K^T: `scale`, or 1/sqrt(head_dim)."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) when `gated`."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        require_count("feed-forward width", self.width)
        require_choice("activation", self.activation, _ACTIVATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """One layer: attention, then feed-forward, each as f in the norm order.

    pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x))); output: x + norm(f(x)) (OLMo 2);
    parallel: x + attention(norm(x)) + feed_forward(norm(x)) (GPT-NeoX). `attention_norm` False: attention reads x as it
    is, normed already (ModernBERT's first layer, pre). `feed_forward_norm` False: the feed-forward reads what attention
    reads (parallel with one norm: Cohere, Phi). `residual_scale` multiplies what is added to x (Granite).
    `cross_attention`, to the states of an encoder, stands between the two with a norm of its own (pre and post).
    """

    attention: AttentionConfig
    feed_forward: FeedForwardConfig | ExpertsConfig
    norm: NormConfig
    cross_attention: AttentionConfig | None = None
    norm_order: NormOrder = "pre"
    attention_norm: bool = True
    feed_forward_norm: bool = True
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        require_choice("norm_order", self.norm_order, _NORM_ORDERS)
        require_positive("residual_scale", self.residual_scale)
        if not self.feed_forward_norm and self.norm_order != "parallel":
            raise ConfigError(
                f"feed_forward_norm may be left out of norm_order 'parallel' alone, got {self.norm_order!r}"
            )
        if not self.attention_norm and self.norm_order != "pre":
            raise ConfigError(f"attention_norm may be left out of norm_order 'pre' alone, got {self.norm_order!r}")
        if self.cross_attention is not None:
            self._check_cross_attention(self.cross_attention)

    def _check_cross_attention(self, cross: AttentionConfig) -> None:
        if self.norm_order not in ("pre", "post"):
            raise ConfigError(f"cross_attention needs norm_order 'pre' or 'post', got {self.norm_order!r}")
        extras = (cross.window, cross.qk_norm, cross.softcap, cross.rotary)
        if cross.causal or cross.num_kv_heads != cross.num_heads or any(extras):
            raise ConfigError(
                "cross_attention sees a whole source with heads of its own: it has causal=False, as many kv heads as "
                "heads, and no window, q/k norm, cap or rotation"
            )

    @property
    def dense(self) -> FeedForwardConfig | None:
        """The feed-forward that every token runs: the block's, the one that experts share, or none."""
        if isinstance(self.feed_forward, FeedForwardConfig):
            return self.feed_forward
        shared = self.feed_forward.shared_width
        return None if shared is None else FeedForwardConfig(width=shared)

"""The architectures of GGUF files that are read, one record each: what a name fixes beyond the metadata.

In: nothing. Out: `ARCHITECTURES`. The metadata is read in `gguf_config.py`, the tensors' names in `gguf_tensors.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from graphport.model_def.block_config import Activation, NormKind, NormOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufExperts:
    """What an architecture fixes of its mixtures of experts, see `ExpertsConfig`.

    `shared_gate`: a feed-forward that every token runs stands beside them, times what its gate says. `is_stated`: the
    metadata says how they are chosen and weighed, how many are shared, and how many layers at the beginning have none.
    """

    is_stated: bool = False
    normalized: bool = True
    shared_gate: bool = False
    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `general.architecture`: what it fixes beyond its metadata.

    `scales_embedding`: embeddings are multiplied by sqrt(hidden size). `window_period` n: where a window is stated and
    no pattern, every n-th layer sees everything and the others the window, whose rotary base is `window_theta` unless
    stated. `wide_scale_layers`: the depth of the one model whose scores are scaled by hidden size / heads.
    `is_permuted`: the converter reorders the rows of q and k for interleaved rotation. `unrotated_period` n: every n-th
    layer does not rotate. `softcaps`: scores and logits are capped, as the metadata must say. `scales`: embeddings,
    residuals and logits are scaled, as it may say, and logits divided; or logits alone are, and multiplied.
    `experts`: where the metadata counts experts, every layer has a mixture. `rotary`: which dimensions of a head turn
    together, None where positions have a table of their own. `truncates_yarn` False: YaRN's limits are no whole
    numbers. `parallel`: attention and feed-forward stand beside each other, by two norms where the tensors of a second
    are there (`always`), by two as the metadata says (`stated`), or by one where the second is not there (`one_norm`).
    `has_sinks`: each query head has a score that takes weight and gives nothing. `has_latent`: keys and values are
    made from small vectors. `names`: modules whose tensors are called otherwise than in `gguf_tensors.py`.
    """

    name: str
    norm: NormKind = "rms"
    always_qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "width"] = "head"
    is_permuted: bool = False
    rotary: Literal["halves", "interleaved"] | None = "halves"
    truncates_yarn: bool = True
    unrotated_period: int | None = None
    softcaps: bool = False
    scales: Literal["all", "logits"] | None = None
    has_window: bool = True
    has_sinks: bool = False
    has_latent: bool = False
    experts: GgufExperts | None = None
    activation: Activation = "silu"
    gated: bool = True
    norm_order: NormOrder = "pre"
    parallel: Literal["always", "stated", "one_norm"] | None = None
    scales_embedding: bool = False
    window_period: int | None = None
    window_theta: float | None = None
    wide_scale_layers: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)


# as in llama.cpp's src/llama-model.cpp; norm weights of gemmas are stored with 1 added, so they are plain here. Where
# llama.cpp computes otherwise than the model's authors (GELU by tanh, YaRN's limits), it is as they have it
ARCHITECTURES = (
    Architecture(name="llama", is_permuted=True, experts=GgufExperts()),
    Architecture(name="granite", is_permuted=True, scales="all"),
    Architecture(name="smollm3", is_permuted=True, unrotated_period=4),
    Architecture(name="olmo2", qk_norm=True, qk_norm_over="width", norm_order="output", has_window=False),
    Architecture(name="gemma", activation="gelu_tanh", scales_embedding=True),
    Architecture(
        name="gemma2",
        activation="gelu_tanh",
        norm_order="sandwich",
        scales_embedding=True,
        window_period=2,
        wide_scale_layers=46,
        softcaps=True,
    ),
    Architecture(name="phi3", names={"feed_forward.gate": "ffn_up"}),
    Architecture(name="qwen2moe", always_qkv_bias=True, experts=GgufExperts(normalized=False, shared_gate=True)),
    Architecture(
        name="gpt-oss",
        has_sinks=True,
        window_period=2,
        truncates_yarn=False,
        experts=GgufExperts(alpha=1.702, up_offset=1.0, limit=7.0),
        names={"feed_forward_norm": "post_attention_norm"},
    ),
    Architecture(name="qwen2", always_qkv_bias=True),
    Architecture(name="qwen3", qk_norm=True),
    Architecture(name="qwen3moe", qk_norm=True, experts=GgufExperts()),
    Architecture(
        name="gemma3",
        qk_norm=True,
        activation="gelu_tanh",
        norm_order="sandwich",
        scales_embedding=True,
        window_period=6,
        window_theta=10_000.0,
        wide_scale_layers=62,
    ),
    Architecture(
        name="deepseek2",
        rotary="interleaved",
        has_latent=True,
        has_window=False,
        experts=GgufExperts(is_stated=True),
    ),
    Architecture(name="gpt2", norm="layer", activation="gelu_tanh", gated=False, rotary=None, has_window=False),
    Architecture(name="starcoder2", norm="layer", activation="gelu_tanh", gated=False, has_window=False),
    Architecture(name="phi2", norm="layer", activation="gelu_tanh", gated=False, parallel="always", has_window=False),
    Architecture(name="stablelm", norm="layer", parallel="one_norm", has_window=False),
    Architecture(name="gptneox", norm="layer", activation="gelu", gated=False, parallel="stated", has_window=False),
    Architecture(name="falcon", norm="layer", activation="gelu", gated=False, parallel="always", has_window=False),
    Architecture(
        name="command-r",
        norm="layer",
        rotary="interleaved",
        parallel="always",
        scales="logits",
        has_window=False,
    ),
)

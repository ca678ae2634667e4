"""Tiny random models of every kind a TransformerConfig can describe.

In: a name of the tables below, a seed. Out: configs, and eager fp32 models whose attention is far from uniform and
whose best token is well ahead of the second. Nothing is fetched; it compares nothing (see `parity.py`).
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.norms import Norm
from graphport.model_def.pair_config import PairConfig
from graphport.model_def.position_config import (
    DynamicScaling,
    FrequencyFactors,
    LearnedPosition,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RelativeBias,
    RotaryPosition,
    SinusoidalPosition,
    YarnScaling,
    length_switch,
)
from graphport.model_def.readout_config import ClassifierConfig, PoolingConfig
from graphport.model_def.transformer import Transformer

# Sizes that cannot be taken for one another: no two equal, none a multiple of a kernel's block.
VOCAB, HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 61, 40, 44, 6, 2, 16
MAX_POSITIONS = 64
ORIGINAL_POSITIONS = 16  # where dynamic and longrope scaling switch

QK_SHARPNESS = 2.5  # times the usual weights, for q and for k: scores have a deviation of about 6
HEAD_SHARPNESS = 4.0  # deviation of the logits

ROTARY = RotaryPosition(theta=100.0)  # low, so that 64 positions turn every pair visibly
LAYER_NORM = NormConfig(kind="layer", epsilon=1e-5, bias=True)


def attention(**changes: Any) -> AttentionConfig:
    """Grouped-query, causal, rotary; `changes` are fields of AttentionConfig."""
    fields: dict[str, Any] = {
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rotary": ROTARY,
    }
    return AttentionConfig(**(fields | changes))


def block(*, of: AttentionConfig | None = None, **changes: Any) -> BlockConfig:
    """A pre-norm, gated block with RMSNorm; `changes` are fields of BlockConfig."""
    fields: dict[str, Any] = {
        "attention": of or attention(),
        "feed_forward": FeedForwardConfig(width=WIDTH),
        "norm": NormConfig(),
    }
    return BlockConfig(**(fields | changes))


def decoder(*blocks: BlockConfig, **changes: Any) -> TransformerConfig:
    """Two of the given block, or just the given blocks; `changes` are fields of TransformerConfig."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "max_positions": MAX_POSITIONS,
        "blocks": blocks * 2 if len(blocks) == 1 else blocks,
        "final_norm": NormConfig(),
        "head": "separate",
    }
    return TransformerConfig(**(fields | changes))


def tiny_configs() -> dict[str, TransformerConfig]:
    """One causal config for every kind that can be decoded with a cache, by name."""
    return _attention_kinds() | _rotary_kinds() | _position_kinds() | _norm_kinds() | _ends()


def tiny_encoder_configs() -> dict[str, TransformerConfig]:
    """Bidirectional configs without a cache, by name."""

    def encoder(of: AttentionConfig, *, norm: NormConfig = LAYER_NORM, **changes: Any) -> TransformerConfig:
        order = changes.pop("norm_order", "post")
        feed_forward = changes.pop("feed_forward", FeedForwardConfig(width=WIDTH, activation="gelu", gated=False))
        layer = block(of=of, norm=norm, norm_order=order, feed_forward=feed_forward)
        return decoder(layer, **({"head": "none", "final_norm": None} | changes))

    both_ways = attention(causal=False, num_kv_heads=HEADS, rotary=None, qkv_bias=True, output_bias=True)
    learned = LearnedPosition(max_positions=MAX_POSITIONS)
    return {
        "encoder_learned_post": encoder(both_ways, position=learned),
        "encoder_sinusoidal_pre": encoder(
            both_ways, position=SinusoidalPosition(max_positions=MAX_POSITIONS), norm_order="pre", final_norm=LAYER_NORM
        ),
        "encoder_rotary_gated": encoder(
            attention(causal=False),
            norm=NormConfig(kind="layer", epsilon=1e-5),
            norm_order="pre",
            feed_forward=FeedForwardConfig(width=WIDTH, activation="gelu_tanh"),
            final_norm=NormConfig(kind="layer", epsilon=1e-5),
        ),
        "encoder_no_positions": encoder(both_ways),
        "encoder_bert": encoder(
            both_ways, position=learned, token_types=2, embedding_norm=LAYER_NORM, pooling=PoolingConfig()
        ),
        "encoder_relative_bias": encoder(
            both_ways,
            position=learned,
            embedding_norm=LAYER_NORM,
            relative_bias=RelativeBias(num_buckets=8, max_distance=20),
        ),
        "encoder_windows": _modern_encoder(),
        "encoder_pairs": encoder(
            attention(causal=False, num_kv_heads=HEADS, rotary=None, gate=True),
            pair=PairConfig(width=10, max_distance=3),
        ),
        "encoder_classifier": encoder(
            both_ways, position=learned, classifier=ClassifierConfig(labels=("a", "b", "c"), transform="tanh")
        ),
        "encoder_token_classifier": encoder(
            both_ways, position=learned, classifier=ClassifierConfig(labels=("a", "b", "c"), per_token=True)
        ),
        "encoder_one_type": encoder(
            attention(causal=False, num_kv_heads=HEADS, rotary=None),
            position=LearnedPosition(max_positions=MAX_POSITIONS, offset=2),
            token_types=1,
            embedding_norm=LAYER_NORM,
            pooling=PoolingConfig(kind="cls", normalize=True),
        ),
        "encoder_with_head": encoder(both_ways, position=learned, head="tied", head_bias=True),
    }


def _modern_encoder() -> TransformerConfig:
    """A local and a global layer with a rotary base each, gated, the first without a norm of its own."""
    plain = NormConfig(kind="layer", epsilon=1e-5)
    local = attention(causal=False, num_kv_heads=HEADS, window=3, rotary=RotaryPosition(theta=20.0))
    options: dict[str, Any] = {"norm": plain, "feed_forward": FeedForwardConfig(width=WIDTH, activation="gelu")}
    return decoder(
        block(of=attention(causal=False, num_kv_heads=HEADS), attention_norm=False, **options),
        block(of=local, **options),
        embedding_norm=plain,
        final_norm=plain,
        head="none",
        pooling=PoolingConfig(kind="mean", normalize=True),
    )


def decode_length(config: TransformerConfig) -> int:
    """The longest text that a CachedDecoder of this config accepts."""
    rotaries = [layer.attention.rotary for layer in config.blocks]
    switches = [length_switch(rotary) for rotary in rotaries if rotary is not None]
    return min([config.max_positions, *(switch for switch in switches if switch is not None)])


def tiny_model(config: TransformerConfig, seed: int = 0) -> Transformer:
    """A model of `config` with random weights, fp32, in eval mode; equal arguments give equal weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size, deviation: float) -> Tensor:
        return torch.randn(shape, generator=generator) * deviation

    model = Transformer(config).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                is_query_or_key = name.endswith(("attention.query", "attention.key"))
                sharpness = QK_SHARPNESS if is_query_or_key else 1.0
                module.weight.copy_(normal(module.weight.shape, sharpness * module.in_features**-0.5))
            elif isinstance(module, Norm):
                # a q/k norm sets the size of q and k, so the sharpness belongs to its weight
                sharpness = QK_SHARPNESS if name.endswith(("query_norm", "key_norm")) else 1.0
                gain = sharpness * (1 + normal(module.weight.shape, 0.3))
                module.weight.copy_(gain - 1 if module.config.unit_offset else gain)
            elif isinstance(module, nn.Embedding):
                module.weight.copy_(normal(module.weight.shape, HEAD_SHARPNESS * config.hidden_size**-0.5))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(normal(parameter.shape, 0.5))
        if model.head is not None and model.head.weight is not None:
            deviation = HEAD_SHARPNESS / config.logit_scale * config.hidden_size**-0.5
            model.head.weight.copy_(normal(model.head.weight.shape, deviation))
    return model


def token_ids(*shape: int, seed: int = 1) -> Tensor:
    """Random ids int64 below VOCAB."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def _attention_kinds() -> dict[str, TransformerConfig]:
    kinds = {
        "multi_head": {"num_heads": 3, "num_kv_heads": 3},
        "grouped_query": {},
        "multi_query": {"num_kv_heads": 1},
        "own_head_dim": {"num_heads": 4, "head_dim": 32},
        "head_dim_20": {"head_dim": 20},
        "window": {"window": 4},
        "window_of_one": {"window": 1},
        "qk_norm": {"qk_norm": NormConfig()},
        "qk_norm_unit_offset": {"qk_norm": NormConfig(unit_offset=True)},
        "qk_norm_each_head": {"qk_norm": NormConfig(), "qk_norm_over": "each_head"},
        "softcap": {"softcap": 5.0},
        "softcap_window": {"softcap": 5.0, "window": 4},
        "own_scale": {"scale": 0.11},
        "gate": {"gate": True},
        "qkv_bias": {"qkv_bias": True},
        "all_biases": {"qkv_bias": True, "output_bias": True},
    }
    configs = {name: decoder(block(of=attention(**changes))) for name, changes in kinds.items()}
    # one head size of hidden / heads = 16, and the one that the config states
    configs["own_head_dim"] = dataclasses.replace(configs["own_head_dim"], hidden_size=64)
    return configs


def _rotary_kinds() -> dict[str, TransformerConfig]:
    half = HEAD_DIM // 2
    scalings = {
        "linear": LinearScaling(factor=3.0),
        "dynamic": DynamicScaling(factor=2.0, original_max_positions=ORIGINAL_POSITIONS),
        "llama3": Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=ORIGINAL_POSITIONS
        ),
        "yarn": YarnScaling(factor=4.0, original_max_positions=ORIGINAL_POSITIONS, beta_fast=2.0, beta_slow=0.25),
        "longrope": LongRopeScaling(
            short_factor=tuple(1 + 0.1 * pair for pair in range(half)),
            long_factor=tuple(2 + 0.7 * pair for pair in range(half)),
            original_max_positions=ORIGINAL_POSITIONS,
            attention_factor=1.19,
        ),
        "frequency_factors": FrequencyFactors(factors=tuple(1 + 0.5 * pair for pair in range(half))),
    }
    kinds = {
        f"rotary_{name}": dataclasses.replace(ROTARY, scaling=scaling, interleaved=interleaved)
        for (name, scaling), interleaved in zip(scalings.items(), (False, True) * 3, strict=True)
    }
    kinds["rotary_interleaved"] = dataclasses.replace(ROTARY, interleaved=True)
    for fraction in (0.25, 0.5, 0.75):  # 4, 8 and 12 of 16 dimensions turn
        partial = dataclasses.replace(ROTARY, partial_factor=fraction)
        kinds[f"rotary_partial_{fraction}"] = partial
        kinds[f"rotary_partial_{fraction}_interleaved"] = dataclasses.replace(partial, interleaved=True)
    configs = {name: decoder(block(of=attention(rotary=rotary))) for name, rotary in kinds.items()}
    local = block(of=attention(window=4, rotary=dataclasses.replace(ROTARY, theta=20.0)))
    whole = block(of=attention(rotary=dataclasses.replace(ROTARY, scaling=LinearScaling(factor=2.0))))
    configs["local_local_global"] = decoder(local, local, whole)
    configs["rotary_and_none"] = decoder(block(), block(of=attention(rotary=None)))
    return configs


def _position_kinds() -> dict[str, TransformerConfig]:
    bare = block(of=attention(rotary=None))
    return {
        "no_positions": decoder(bare),
        "sinusoidal": decoder(bare, position=SinusoidalPosition(max_positions=MAX_POSITIONS)),
        "learned": decoder(bare, position=LearnedPosition(max_positions=MAX_POSITIONS)),
        "learned_offset": decoder(bare, position=LearnedPosition(max_positions=MAX_POSITIONS + 6, offset=2)),
    }


def _norm_kinds() -> dict[str, TransformerConfig]:
    layer_plain = NormConfig(kind="layer", epsilon=1e-5)
    unit = NormConfig(unit_offset=True)
    configs = {
        "layer_norm": decoder(block(norm=LAYER_NORM), final_norm=LAYER_NORM),
        "layer_norm_no_bias": decoder(block(norm=layer_plain), final_norm=layer_plain),
        "unit_offset": decoder(block(norm=unit), final_norm=unit),
        "post_norm": decoder(block(norm_order="post"), final_norm=None),
        "post_layer_norm": decoder(block(norm=LAYER_NORM, norm_order="post"), final_norm=None),
        "sandwich": decoder(block(norm=unit, norm_order="sandwich"), final_norm=unit),
        "output_norm": decoder(block(of=attention(qk_norm=NormConfig(), qk_norm_over="width"), norm_order="output")),
        "parallel": decoder(block(norm_order="parallel", residual_scale=0.4)),
        "parallel_one_norm": decoder(
            block(norm=layer_plain, norm_order="parallel", feed_forward_norm=False), final_norm=layer_plain
        ),
    }
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        for gated in (False, True):
            feed_forward = FeedForwardConfig(width=WIDTH, activation=activation, gated=gated, bias=not gated)
            configs[f"{'gated' if gated else 'plain'}_{activation}"] = decoder(block(feed_forward=feed_forward))
    return configs


def _ends() -> dict[str, TransformerConfig]:
    return {
        "tied_head": decoder(block(), head="tied"),
        "tied_head_bias": decoder(block(), head="tied", head_bias=True),
        "head_bias": decoder(block(), head_bias=True),
        "logit_scale": decoder(block(), logit_scale=0.25),
        "logit_softcap": decoder(block(), logit_softcap=12.0),
        "embedding_scale": decoder(block(), head="tied", embedding_scale=2.5),
        "everything": _everything(),
    }


def _everything() -> TransformerConfig:
    """Options that seldom meet, in one model."""
    unit = NormConfig(unit_offset=True, epsilon=1e-5)
    options: dict[str, Any] = {"qk_norm": unit, "softcap": 8.0, "scale": 0.31, "qkv_bias": True, "output_bias": True}
    turning = RotaryPosition(theta=50.0, partial_factor=0.5, interleaved=True)
    local = attention(window=5, rotary=turning, **options)
    feed_forward = FeedForwardConfig(width=WIDTH, activation="gelu_tanh", bias=True)
    around: dict[str, Any] = {"norm": unit, "norm_order": "sandwich", "feed_forward": feed_forward}
    return decoder(
        block(of=local, **around),
        block(of=attention(num_kv_heads=3, **options), **around),
        position=LearnedPosition(max_positions=MAX_POSITIONS, offset=1),
        embedding_scale=1.5,
        final_norm=unit,
        head="tied",
        head_bias=True,
        logit_scale=0.8,
        logit_softcap=15.0,
    )

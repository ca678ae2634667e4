"""Configurations: every refusal names its numbers, every kind survives the way through JSON."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import attention, block, decoder, tiny_configs, tiny_encoder_configs

from graphport.model_def.block_config import FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import (
    ConfigError,
    DynamicScaling,
    FrequencyFactors,
    LearnedPosition,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryPosition,
    SinusoidalPosition,
    YarnScaling,
)
from graphport.model_def.readout_config import PoolingConfig, SimilarityConfig
from graphport.model_def.transformer import parameter_shapes

CONFIGS = tiny_configs() | tiny_encoder_configs()


def longrope(**changes: Any) -> LongRopeScaling:
    fields: dict[str, Any] = {
        "short_factor": (1.0,) * 8,
        "long_factor": (2.0,) * 8,
        "original_max_positions": 16,
        "attention_factor": 1.1,
    }
    return LongRopeScaling(**(fields | changes))


def llama3(low: float, high: float) -> Llama3Scaling:
    return Llama3Scaling(factor=8.0, low_freq_factor=low, high_freq_factor=high, original_max_positions=16)


def scaled(scaling: Any) -> Any:
    return attention(rotary=RotaryPosition(theta=100.0, scaling=scaling))


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "heads": (lambda: attention(num_heads=0), "num_heads must be a positive number, got 0"),
    "kv heads": (lambda: attention(num_kv_heads=-2), "num_kv_heads must be a positive number, got -2"),
    "half heads": (lambda: attention(num_heads=4.5, num_kv_heads=1.5), "num_heads must be a whole number, got 4.5"),
    "boolean heads": (lambda: attention(num_heads=True), "num_heads must be a positive number, got True"),
    "text heads": (lambda: attention(num_heads="6"), "num_heads must be a positive number, got '6'"),
    "head size": (lambda: attention(head_dim=0), "head_dim must be a positive number, got 0"),
    "window": (lambda: attention(window=0), "attention window must be a positive number, got 0"),
    "half window": (lambda: attention(window=3.5), "attention window must be a whole number, got 3.5"),
    "softcap": (lambda: attention(softcap=-5.0), "attention softcap must be a positive number, got -5.0"),
    "scale": (lambda: attention(scale=float("nan")), "attention scale must be a positive number, got nan"),
    "rotary width": (
        lambda: attention(head_dim=10, rotary=RotaryPosition(theta=100.0, partial_factor=0.5)),
        "head_dim (10) x partial_factor (0.5) gives 5 rotary dimensions; rotation needs an even number of at least 2",
    ),
    "rotary width 0": (
        lambda: attention(head_dim=4, rotary=RotaryPosition(theta=100.0, partial_factor=0.2)),
        "gives 0 rotary dimensions",
    ),
    "longrope width": (
        lambda: scaled(longrope(short_factor=(1.0,) * 7, long_factor=(2.0,) * 7)),
        "LongRopeScaling has 7 factors; 16 rotary dimensions need 8",
    ),
    "factors width": (
        lambda: scaled(FrequencyFactors(factors=(1.0,) * 16)),
        "FrequencyFactors has 16 factors; 16 rotary dimensions need 8",
    ),
    "longrope lists": (
        lambda: longrope(long_factor=(2.0,) * 9),
        "short_factor has 8 values, long_factor 9; both need one a rotary frequency",
    ),
    "longrope zero": (
        lambda: longrope(long_factor=(1.0,) * 7 + (0.0,)),
        "long_factor[7] must be a positive number, got 0.0",
    ),
    "longrope short": (
        lambda: longrope(short_factor=(-1.0,) + (1.0,) * 7),
        "short_factor[0] must be a positive number, got -1.0",
    ),
    "longrope length": (lambda: longrope(original_max_positions=0), "original_max_positions must be a positive number"),
    "longrope gain": (lambda: longrope(attention_factor=0.0), "attention_factor must be a positive number, got 0.0"),
    "no factors": (lambda: FrequencyFactors(factors=()), "frequency factors is empty"),
    "nan factor": (
        lambda: FrequencyFactors(factors=(1.0, float("nan"))),
        "frequency factors[1] must be a positive number, got nan",
    ),
    "linear": (lambda: LinearScaling(factor=0.0), "rotary scaling factor must be a positive number, got 0.0"),
    "dynamic": (
        lambda: DynamicScaling(factor=float("inf"), original_max_positions=16),
        "rotary scaling factor must be a positive number, got inf",
    ),
    "dynamic length": (
        lambda: DynamicScaling(factor=2.0, original_max_positions=16.5),  # type: ignore[arg-type]
        "original_max_positions must be a whole number, got 16.5",
    ),
    "llama3": (
        lambda: llama3(4.0, 1.0),
        "low_freq_factor (4.0) must be positive and below high_freq_factor (1.0)",
    ),
    "llama3 equal": (lambda: llama3(1.0, 1.0), "low_freq_factor (1.0) must be positive and below"),
    "llama3 negative": (lambda: llama3(-1.0, 4.0), "low_freq_factor (-1.0) must be positive"),
    "yarn": (
        lambda: YarnScaling(factor=4.0, original_max_positions=16, beta_fast=1.0, beta_slow=32.0),
        "beta_fast (1.0) must be finite and exceed beta_slow (32.0) > 0",
    ),
    "yarn gain": (
        lambda: YarnScaling(factor=4.0, original_max_positions=16, attention_factor=-0.5),
        "attention_factor must be a positive number, got -0.5",
    ),
    "theta": (lambda: RotaryPosition(theta=-1.0), "rotary theta must be a positive number, got -1.0"),
    "partial factor": (
        lambda: RotaryPosition(theta=100.0, partial_factor=1.25),
        "partial_factor (1.25) must lie in (0, 1]",
    ),
    "learned rows": (
        lambda: LearnedPosition(max_positions=0),
        "max_positions of the learned position table must be a positive number, got 0",
    ),
    "learned offset": (
        lambda: LearnedPosition(max_positions=8, offset=-1),
        "position offset must be a whole number of at least 0, got -1",
    ),
    "sinusoidal rows": (
        lambda: SinusoidalPosition(max_positions=-3),
        "max_positions of the sinusoidal table must be a positive number, got -3",
    ),
    "norm kind": (lambda: NormConfig(kind="batch"), "norm kind must be one of layer, rms; got 'batch'"),  # type: ignore[arg-type]
    "norm epsilon": (lambda: NormConfig(epsilon=0.0), "norm epsilon must be a positive number, got 0.0"),
    "rms bias": (lambda: NormConfig(kind="rms", bias=True), "an RMSNorm has no bias; use kind='layer' or bias=False"),
    "width": (lambda: FeedForwardConfig(width=0), "feed-forward width must be a positive number, got 0"),
    "activation": (
        lambda: FeedForwardConfig(width=4, activation="swish"),  # type: ignore[arg-type]
        "activation must be one of relu, gelu, gelu_tanh, silu, quick_gelu; got 'swish'",
    ),
    "norm left out": (lambda: block(feed_forward_norm=False), "left out of norm_order 'parallel' alone, got 'pre'"),
    "residual scale": (lambda: block(residual_scale=0.0), "residual_scale must be a positive number, got 0.0"),
    "q/k norm": (
        lambda: attention(qk_norm_over="heads"),
        "qk_norm_over must be one of head, each_head, width; got 'heads'",
    ),
    "norm order": (
        lambda: block(norm_order="mid"),
        "norm_order must be one of pre, post, sandwich, output, parallel; got 'mid'",
    ),
    "vocabulary": (lambda: decoder(block(), vocab_size=0), "vocab_size must be a positive number, got 0"),
    "hidden": (lambda: decoder(block(), hidden_size=40.5), "hidden_size must be a whole number, got 40.5"),
    "positions": (lambda: decoder(block(), max_positions=0), "max_positions must be a positive number, got 0"),
    "embedding scale": (lambda: decoder(block(), embedding_scale=0.0), "embedding_scale must be a positive number"),
    "logit scale": (lambda: decoder(block(), logit_scale=-1.0), "logit_scale must be a positive number, got -1.0"),
    "logit softcap": (lambda: decoder(block(), logit_softcap=0.0), "logit_softcap must be a positive number, got 0.0"),
    "no blocks": (decoder, "blocks is empty; a transformer needs at least one layer"),
    "head": (lambda: decoder(block(), head="shared"), "head must be one of tied, separate, none; got 'shared'"),
    "head bias": (lambda: decoder(block(), head="none", head_bias=True), "head_bias needs a head; head is 'none'"),
    "table too short": (
        lambda: decoder(block(), position=LearnedPosition(max_positions=63)),
        "the position table has 63 rows, max_positions is 64; lower max_positions to the table",
    ),
    "mixed directions": (
        lambda: decoder(block(), block(of=attention(causal=False))),
        "causal and bidirectional blocks in one stack",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_an_impossible_config_is_refused_with_its_numbers(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_b35_kv_heads_that_divide_query_heads_are_taken(heads: int, kv_heads: int) -> None:
    kinds = {4: "multi-head", 2: "grouped-query", 1: "multi-query"}
    assert attention(num_heads=heads, num_kv_heads=kv_heads).kind == kinds[kv_heads]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (4, 8)])
def test_b35_kv_heads_that_do_not_divide_query_heads_are_refused(heads: int, kv_heads: int) -> None:
    message = rf"num_heads \({heads}\) must be divisible by num_kv_heads \({kv_heads}\)"
    with pytest.raises(ConfigError, match=message):
        attention(num_heads=heads, num_kv_heads=kv_heads)


def test_b35_no_kv_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_kv_heads must be a positive number, got 0"):
        attention(num_heads=4, num_kv_heads=0)


def test_b31_the_stated_head_size_wins_over_hidden_over_heads() -> None:
    shapes = parameter_shapes(CONFIGS["own_head_dim"])  # hidden 64, 4 heads, 2 kv heads of 32
    sizes = {name: shapes[f"blocks.1.attention.{name}.weight"] for name in ("query", "key", "value", "output")}
    assert sizes == {"query": (128, 64), "key": (64, 64), "value": (64, 64), "output": (64, 128)}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_survives_the_way_through_json(name: str) -> None:
    config = CONFIGS[name]
    again = TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


def test_json_tells_every_two_kinds_apart() -> None:
    kinds = {name: json.dumps(config.to_dict()) for name, config in CONFIGS.items()}
    assert kinds.pop("gated_silu") == kinds["grouped_query"]  # the defaults, under both names
    assert len(set(kinds.values())) == len(kinds)


def edited(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    data = json.loads(json.dumps(CONFIGS["everything"].to_dict()))
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(num_experts=8), "TransformerConfig: .*'num_experts'"),
        (lambda data: data["blocks"][1]["attention"].update(sink_tokens=True), "AttentionConfig: .*'sink_tokens'"),
        (lambda data: data.pop("vocab_size"), "TransformerConfig: .*'vocab_size'"),
        (lambda data: data.pop("type"), "unknown record type None; known: LinearScaling, "),
        (lambda data: data["final_norm"].update(type="GroupNorm"), "unknown record type 'GroupNorm'"),
        (lambda data: data.update(blocks=[data["final_norm"]]), "TransformerConfig: 'NormConfig' .*'attention'"),
        (lambda data: data["blocks"][0]["attention"].update(num_kv_heads=4), r"\(6\) must be divisible by .* \(4\)"),
    ],
)
def test_a_damaged_config_file_is_refused_by_name(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformerConfig.from_dict(edited(change))


def test_another_record_in_place_of_a_config_is_refused() -> None:
    data = edited(lambda _: None)["final_norm"]
    with pytest.raises(ConfigError, match="expected a TransformerConfig, got NormConfig"):
        TransformerConfig.from_dict(data)


def test_reading_a_config_leaves_the_data_as_it_was() -> None:
    data = edited(lambda _: None)
    before = json.dumps(data)
    TransformerConfig.from_dict(data)
    assert json.dumps(data) == before


def test_a_config_cannot_change_after_its_checks() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'num_heads'"):
        attention().num_heads = 7  # type: ignore[misc]


def test_the_softmax_scale_is_stated_or_one_over_the_root_of_the_head_size() -> None:
    assert attention(head_dim=64, rotary=None).softmax_scale == 1 / 8
    assert attention(scale=0.11).softmax_scale == 0.11


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: PoolingConfig(kind="mean", ends_at=3), "ends_at says which token is the last; pooling is 'mean'"),
        (lambda: PoolingConfig(bias=True), "a pooling bias needs the linear layer"),
        (lambda: PoolingConfig(width=0), "pooling width must be"),
        (lambda: SimilarityConfig(scale=-1.0), "similarity scale must be a positive number"),
        (lambda: SimilarityConfig(scale=1.0, bias=None), "similarity bias must be a finite number, got None"),
        (lambda: SimilarityConfig(scale=1.0, bias=float("nan")), "similarity bias must be a finite number, got nan"),
        (lambda: SimilarityConfig(scale=1.0, multi_label="no"), "similarity multi_label must be true or false"),
    ],
)
def test_readouts_that_contradict_themselves_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()

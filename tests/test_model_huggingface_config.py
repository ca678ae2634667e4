"""config.json: windows, heads, rotary spellings; everything not understood is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import (
    LLAMA3,
    LONGROPE,
    SIZES,
    YARN,
    edit_json,
)

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.huggingface_config import read_config
from graphport.model_def.position_config import (
    ConfigError,
    DynamicScaling,
    LongRopeScaling,
    YarnScaling,
)

_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}


_RAW = {key: value for key, value in SIZES.items() if not key.endswith("_id")} | {"model_type": "llama"}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, [5, 5]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 5}, [None, None]),
        ({"model_type": "qwen3", **_WINDOWS, "max_window_layers": 0}, [5, 5]),
        ({"model_type": "qwen3", **_WINDOWS, "max_window_layers": 1}, [None, 5]),
        ({"model_type": "qwen2", **_WINDOWS, "layer_types": ["full_attention"] * 2}, [None, None]),
    ],
)
def test_b27_a_window_counts_unless_its_flag_or_list_switches_it_off(
    changes: dict[str, Any], windows: list[int | None]
) -> None:
    config, _ = read_config(_RAW | changes, head="separate")
    assert [block.attention.window for block in config.blocks] == windows


def test_b27_a_flag_that_the_model_type_does_not_read_is_refused() -> None:
    values = _RAW | {"model_type": "mistral", "sliding_window": 5, "use_sliding_window": False}
    with pytest.raises(CheckpointError, match=r"use_sliding_window is false.*mistral.*sliding_window is 5"):
        read_config(values, head="separate")


def test_a_mistral_without_the_window_key_gets_transformers_default_announced() -> None:
    config, notes = read_config(_RAW | {"model_type": "mistral"}, head="separate")
    assert config.blocks[0].attention.window == 4096
    assert any("sliding_window is absent" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "sliding_window is null or switched off"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types must list 2 of full_attention"),
        ({"model_type": "qwen2", "layer_types": ["conv", "conv"]}, "layer_types must list 2 of full_attention"),
        ({"model_type": "mistral", "sliding_window": 5, "layer_types": ["full_attention"] * 2}, "in every layer"),
    ],
)
def test_layer_lists_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(_RAW | changes, head="separate")


def test_absent_head_dim_is_hidden_over_heads() -> None:
    values = {key: value for key, value in _RAW.items() if key != "head_dim"}
    assert read_config(values, head="separate")[0].blocks[0].attention.head_dim == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 10000.0}, r"rope_theta is 10000.0 in config.json and 500000.0 in rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_type is 'linear' in rope_scaling and 'llama3'"),
        ({"rope_scaling": {"factor": 4.0}}, r"factor is 4.0 in rope_scaling and 8.0 in rope_parameters"),
        ({"original_max_position_embeddings": 8}, r"original_max_position_embeddings is 8 in config.json and 16"),
    ],
)
def test_b38_spellings_that_disagree_are_refused(change: dict[str, Any], message: str) -> None:
    values = _RAW | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}} | change
    with pytest.raises(CheckpointError, match=message):
        read_config(values, head="separate")


def test_b38_nested_parameters_give_each_layer_type_its_own() -> None:
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    changes = {"model_type": "qwen2", **_WINDOWS, "max_window_layers": 1, "rope_parameters": nested}
    config, _ = read_config(_RAW | changes, head="separate")
    rotaries = [block.attention.rotary for block in config.blocks]
    assert [rotary.theta for rotary in rotaries if rotary] == [1e6, 1e4]


def test_b38_a_sliding_entry_without_a_theta_has_the_one_of_sliding_layers() -> None:
    """As in transformers' Gemma3TextConfig; the one of the other layers moved logits by half of the largest."""
    entries = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}
    changes = {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "rope_parameters": entries,
    }
    values = {key: value for key, value in _RAW.items() if key != "hidden_act"}
    config, _ = read_config(values | changes, head="tied")
    rotaries = [block.attention.rotary for block in config.blocks]
    assert [rotary.theta for rotary in rotaries if rotary] == [1e4, 1e6]


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        ({"rope_type": "mrope"}, "rope_type 'mrope' is not known; known are default, linear"),
        ({"rope_type": "linear"}, "rope_type linear needs factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "rope_type linear does not have beta_fast"),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}, "dynamic with original"),
        ({"sliding_attention": {"rope_theta": 1.0}}, "no entry for full_attention layers"),
        ({"full_attention": {}, "rope_theta": 1.0}, "mixes layer types"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "1 factors; 16 rotary dimensions"),
        ("yarn", "must be an object, got 'yarn'"),
    ],
)
def test_rotary_values_that_are_not_understood_are_refused_by_name(rotary: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(_RAW | {"rope_parameters": rotary}, head="separate")


def _scaling(rotary: dict[str, Any], **changes: Any) -> tuple[object, float, list[str]]:
    config, notes = read_config(_RAW | {"rope_parameters": rotary} | changes, head="separate")
    read = config.blocks[0].attention.rotary
    assert read is not None
    return read.scaling, read.partial_factor, notes


def test_scalings_take_transformers_defaults() -> None:
    without_original = {key: value for key, value in LONGROPE.items() if key != "original_max_position_embeddings"}
    longrope, _, notes = _scaling(without_original)
    assert isinstance(longrope, LongRopeScaling)
    assert (longrope.original_max_positions, longrope.attention_factor) == (64, 1.0)
    assert any("original_max_position_embeddings is absent" in note for note in notes)
    yarn, _, _ = _scaling(YARN | {"factor": None})
    assert isinstance(yarn, YarnScaling)
    assert yarn.factor == 4.0
    dynamic, partial_factor, _ = _scaling({"rope_type": "dynamic", "factor": 2.0}, partial_rotary_factor=0.5)
    assert dynamic == DynamicScaling(factor=2.0, original_max_positions=64)
    assert partial_factor == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not read.*nearest: llama"),
        (
            {"model_type": None},
            "model_type None is not read; known are llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, ",
        ),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; known are silu"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"attn_logit_softcapping": 50.0, "embedding_multiplier": 2}, "attn_logit_softcapping = 50.0; embedding_mult"),
        ({"sliding_window": 5}, "sliding_window = 5"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"hidden_size": 48.5}, "hidden_size must be a positive integer, got 48.5"),
        ({"head_dim": None, "hidden_size": 50}, r"hidden_size \(50\) is no multiple of num_attention_heads \(4\)"),
        ({"rms_norm_eps": -1.0}, "norm epsilon must be a positive number, got -1.0"),
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers must be at most 1024, got 1e\+12; correct it"),
        ({"model_type": "mixtral", "num_local_experts": 10**12}, "num_local_experts must be at most 1024, got 1e"),
        (
            {"model_type": "gpt_neox", "use_parallel_residual": None},
            "use_parallel_residual must be .*, got null; state",
        ),
        ({"rope_parameters": _YARN | {"rope_theta": 1}}, "theta 1 turns all dimensions alike, which YaRN cannot"),
        ({"rope_parameters": _YARN | {"beta_fast": float("inf")}}, r"beta_fast \(inf\) must be finite and exceed"),
    ],
)
def test_config_values_that_are_not_supported_are_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    edit_json(tmp_path / "config.json", lambda config: config.update(_RAW | change))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


_WRONG: list[Any] = ["x", 1.5, True, [], ["a"], -1, 0, {}, {"factor": 2}, {"rope_type": ["x"]}, {"full_attention": 3}]


_WRONG_ROTARY: list[Any] = [
    {"rope_type": "yarn", "factor": "a"},
    {"rope_type": "yarn", "factor": 2.0, "truncate": 3},
    {"rope_type": "longrope", "short_factor": 3, "long_factor": ["a"] * 8},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": "a", "high_freq_factor": 4.0},
]


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_value_of_a_wrong_type_is_refused_and_never_crashes(model_type: str) -> None:
    base = _RAW | {"model_type": model_type} | (_WINDOWS if model_type == "qwen2" else {})
    keys = [*base, "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types"]
    num_refused = 0
    for key in [*keys, "max_window_layers", "attention_bias", "hidden_act", "rms_norm_eps"]:
        for value in _WRONG + _WRONG_ROTARY:
            try:
                read_config(base | {key: value}, head="separate")
            except (CheckpointError, ConfigError):
                num_refused += 1
    assert num_refused > 200
    for rotary in _WRONG_ROTARY:
        with pytest.raises(CheckpointError, match=r"has the wrong type"):
            read_config(base | {"rope_parameters": rotary}, head="separate")

"""Which layers of a family slide, and which rotate: by period, by list, by flag, or not at all."""

from typing import Any

import pytest

from graphport.model_def.checkpoint import CheckpointError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.huggingface_config import read_config

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 96,
    "intermediate_size": 44,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _config(model_type: str, **changes: Any) -> TransformerConfig:
    return read_config(_SIZES | {"model_type": model_type} | changes, head="tied")[0]


def _windows(model_type: str, **changes: Any) -> list[int | None]:
    return [block.attention.window for block in _config(model_type, **changes).blocks]


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("gemma2", {"sliding_window": 8}, [8, None] * 3),
        ("gemma2", {"sliding_window": None}, [None] * 6),
        ("gemma2", {"sliding_window": 8, "layer_types": [_FULL] * 6}, [None] * 6),
        ("gemma2", {}, [4096, None] * 3),
        ("gemma3_text", {"sliding_window": 8}, [8] * 5 + [None]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, [8, 8, None] * 2),
        ("gemma3_text", {"sliding_window": 8, "layer_types": [_FULL, _SLIDING] * 3}, [None, 8] * 3),
        ("olmo3", {"sliding_window": 8}, [8, 8, 8, None, 8, 8]),
        ("starcoder2", {"sliding_window": 8}, [8] * 6),
        ("starcoder2", {}, [None] * 6),
        ("phi3", {"sliding_window": 8}, [8] * 6),
        ("phi3", {"sliding_window": None}, [None] * 6),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": False}, [None] * 6),
        (
            "smollm3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": [_FULL, _SLIDING] * 3},
            [None, 8] * 3,
        ),
    ],
)
def test_b25_b27_a_window_is_in_the_layers_that_the_family_gives_it(
    model_type: str, changes: dict[str, Any], windows: list[int | None]
) -> None:
    assert _windows(model_type, **changes) == windows


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma2", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ("gemma2", {"sliding_window": -1}, "sliding_window must be a positive integer, got -1"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer, got 0"),
        ("gemma3_text", {"layer_types": [_FULL]}, "layer_types must list 6 of full_attention, sliding_attention"),
        ("gemma2", {"sliding_window": None, "layer_types": [_SLIDING] * 6}, "sliding_window is null or switched off"),
        ("phi3", {"sliding_window": 8, "use_sliding_window": False}, "use_sliding_window is false, which .* phi3"),
        ("starcoder2", {"sliding_window": 8, "layer_types": [_FULL] * 6}, "uses sliding_window 8 in every layer"),
    ],
)
def test_b25_b27_windows_that_do_not_fit_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        _config(model_type, **changes)


@pytest.mark.parametrize(
    ("changes", "turning"),
    [
        ({}, [True, True, True, False, True, True]),
        ({"no_rope_layer_interval": 2}, [True, False] * 3),
        ({"no_rope_layers": [0, 1, 1, 1, 1, 0]}, [False, True, True, True, True, False]),
    ],
)
def test_smollm3_rotates_in_the_layers_that_its_list_or_interval_says(
    changes: dict[str, Any], turning: list[bool]
) -> None:
    config = _config("smollm3", **changes)
    assert [block.attention.rotary is not None for block in config.blocks] == turning


@pytest.mark.parametrize(
    ("model_type", "changes", "thetas"),
    [
        ("gemma3_text", {}, [1e4] * 5 + [1e6]),
        ("gemma3_text", {"rope_theta": 500.0, "rope_local_base_freq": 50.0}, [50.0] * 5 + [500.0]),
        ("olmo3", {"rope_theta": 5e5}, [5e5] * 6),
        ("smollm3", {"no_rope_layers": [1] * 6}, [2e6] * 6),
        ("cohere", {}, [5e5] * 6),
    ],
)
def test_an_absent_base_is_transformers_default_of_the_family_and_kind_of_layer(
    model_type: str, changes: dict[str, Any], thetas: list[float]
) -> None:
    rotaries = [block.attention.rotary for block in _config(model_type, **changes).blocks]
    assert [rotary.theta for rotary in rotaries if rotary] == thetas


@pytest.mark.parametrize(
    ("model_type", "share"), [("phi", 0.5), ("stablelm", 0.25), ("glm", 0.5), ("glm4", 0.5), ("phi3", 1.0)]
)
def test_b39_an_absent_share_of_the_head_is_transformers_default_of_the_family(model_type: str, share: float) -> None:
    for block in _config(model_type).blocks:
        assert block.attention.rotary is not None
        assert block.attention.rotary.partial_factor == share

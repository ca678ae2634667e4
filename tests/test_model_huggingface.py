"""Hugging Face folders: every model type, scaling and spelling equals transformers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from parity import RELATIVE_TOLERANCES
from tiny_checkpoints import (
    LLAMA3,
    LONGROPE,
    YARN,
    edit_json,
    make_model,
    relative_difference,
    save_folder,
    token_ids,
)

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.position_config import (
    Llama3Scaling,
)

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]

_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}


_VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with one kv head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama with all kv heads": {"model_type": "llama", "num_key_value_heads": 4},
    "llama, head_dim = hidden / heads": {"model_type": "llama", "head_dim": None},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama with gelu": {"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 5},
    "mistral without": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 with windows": {"model_type": "qwen2", **_WINDOWS, "max_window_layers": 1},
    "qwen2 with a list": {"model_type": "qwen2", **_WINDOWS, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 with biases, tied": {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
    "linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    },
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    "yarn not truncated": {"model_type": "llama", "rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0}},
    "yarn with mscale": {"model_type": "llama", "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn with attention_factor": {"model_type": "llama", "rope_parameters": YARN | {"attention_factor": 1.4}},
    "longrope": {"model_type": "llama", "rope_parameters": LONGROPE | {"factor": 4.0}},
    "longrope by the ratio": {"model_type": "qwen3", "rope_parameters": LONGROPE},
}


def _folder(path: Path, model_type: str = "llama", **changes: Any) -> Path:
    return save_folder(path, make_model(model_type, **changes))


@pytest.mark.parametrize("variant", _VARIANTS)
def test_every_variant_equals_transformers_on_both_sides_of_its_switch(variant: str, tmp_path: Path) -> None:
    changes = dict(_VARIANTS[variant])
    model = make_model(changes.pop("model_type"), **changes)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    for length in (12, 40):  # 16 is the original length of the scaled ones
        assert relative_difference(checkpoint, model, token_ids(length)) < TOLERANCE


@pytest.mark.parametrize("variant", ["dynamic", "longrope", "yarn", "llama3", "linear"])
def test_parity_rejects_a_forgotten_scaling(variant: str, tmp_path: Path) -> None:
    changes = dict(_VARIANTS[variant])
    model = make_model(changes.pop("model_type"), **changes)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    blocks = []
    for block in checkpoint.config.blocks:
        assert block.attention.rotary is not None
        rotary = dataclasses.replace(block.attention.rotary, scaling=None)
        blocks.append(dataclasses.replace(block, attention=dataclasses.replace(block.attention, rotary=rotary)))
    config = dataclasses.replace(checkpoint.config, blocks=tuple(blocks))
    broken = dataclasses.replace(checkpoint, config=config)
    assert relative_difference(broken, model, token_ids(40)) > 100 * TOLERANCE


def test_parity_rejects_swapped_matrices_and_a_window_off_by_one(tmp_path: Path) -> None:
    model = make_model("mistral", sliding_window=5)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    weights = dict(checkpoint.weights)
    gate, up = "blocks.0.feed_forward.gate.weight", "blocks.0.feed_forward.up.weight"
    weights[gate], weights[up] = weights[up], weights[gate]
    swapped = dataclasses.replace(checkpoint, weights=weights)
    assert relative_difference(swapped, model, token_ids(12)) > 100 * TOLERANCE
    block = checkpoint.config.blocks[0]
    block = dataclasses.replace(block, attention=dataclasses.replace(block.attention, window=6))
    wider = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, blocks=(block, block)))
    assert relative_difference(wider, model, token_ids(12)) > 100 * TOLERANCE


def test_b31_an_explicit_head_dim_wins_over_hidden_over_heads(tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64, head_dim=32)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    attention = checkpoint.config.blocks[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 32)
    assert checkpoint.weights["blocks.0.attention.output.weight"].shape == (64, 128)
    assert relative_difference(checkpoint, model, token_ids(12)) < TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (4, 8), (4, 0)])
def test_b35_heads_that_kv_heads_do_not_divide_are_refused_with_both_numbers(
    heads: int, kv_heads: int, tmp_path: Path
) -> None:
    folder = _folder(tmp_path)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    edit_json(folder / "config.json", lambda config: config.update(sizes))
    message = "num_kv_heads must be a positive number, got 0" if kv_heads == 0 else rf"\({heads}\).*\({kv_heads}\)"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_b35_heads_that_kv_heads_divide_are_read(kv_heads: int, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(_folder(tmp_path, num_key_value_heads=kv_heads))
    assert checkpoint.config.blocks[0].attention.num_kv_heads == kv_heads


def test_b37_llama3_scaling_is_read_and_equals_transformers_at_every_position(tmp_path: Path) -> None:
    model = make_model("llama", max_position_embeddings=128, rope_parameters=LLAMA3)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    rotary = checkpoint.config.blocks[1].attention.rotary
    assert rotary is not None
    assert rotary.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16
    )
    assert relative_difference(checkpoint, model, token_ids(128)) < TOLERANCE


def _respell(config: dict[str, Any], form: str) -> None:
    config.pop("rope_parameters", None)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = {key.replace("rope_type", "type"): value for key, value in scaling.items()}
    theta = {"rope_theta": 500000.0}
    new = scaling | theta
    forms: dict[str, dict[str, Any]] = {
        "old": theta | {"rope_scaling": old},
        "new": {"rope_parameters": new},
        "nested": {"rope_parameters": {"full_attention": new}},
        "both, agreeing": theta | {"rope_scaling": old, "rope_parameters": new},
    }
    config.update(forms[form])


@pytest.mark.parametrize("form", ["old", "new", "nested", "both, agreeing"])
def test_b38_every_spelling_of_theta_and_scaling_equals_transformers(form: str, tmp_path: Path) -> None:
    model = make_model("llama", rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    folder = save_folder(tmp_path, model)
    edit_json(folder / "config.json", lambda config: _respell(config, form))
    assert relative_difference(load_checkpoint(folder), model, token_ids(40)) < TOLERANCE


def test_b38_a_missing_theta_is_an_announced_default(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    edit_json(folder / "config.json", lambda config: config.pop("rope_parameters"))
    checkpoint = load_checkpoint(folder)
    rotary = checkpoint.config.blocks[0].attention.rotary
    assert rotary is not None
    assert rotary.theta == 10000.0
    assert any("rope_theta is nowhere" in note for note in checkpoint.notes)


def test_ignored_keys_are_listed_by_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    edit_json(folder / "config.json", lambda config: config.update(torch_dtype="bfloat16", pretraining_tp=1))
    (note,) = [note for note in load_checkpoint(folder).notes if note.startswith("ignored config keys")]
    assert {"architectures", "torch_dtype", "pretraining_tp"} <= set(note.split(": ")[1].split(", "))

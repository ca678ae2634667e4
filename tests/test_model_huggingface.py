"""Hugging Face folders: every model type and spelling equals transformers, everything else is refused by name."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    RELATIVE_TOLERANCE,
    SIZES,
    edit_json,
    make_model,
    relative_difference,
    save_folder,
    token_ids,
)

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.huggingface_config import read_config
from graphport.model_def.position_config import (
    ConfigError,
    DynamicScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
)

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0],
    "original_max_position_embeddings": 16,
}
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
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "yarn": {"model_type": "qwen2", "rope_parameters": _YARN},
    "yarn not truncated": {"model_type": "llama", "rope_parameters": _YARN | {"truncate": False, "beta_fast": 8.0}},
    "yarn with mscale": {"model_type": "llama", "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn with attention_factor": {"model_type": "llama", "rope_parameters": _YARN | {"attention_factor": 1.4}},
    "longrope": {"model_type": "llama", "rope_parameters": _LONGROPE | {"factor": 4.0}},
    "longrope by the ratio": {"model_type": "qwen3", "rope_parameters": _LONGROPE},
}

_RAW = {key: value for key, value in SIZES.items() if not key.endswith("_id")} | {"model_type": "llama"}


def _folder(path: Path, model_type: str = "llama", **changes: Any) -> Path:
    return save_folder(path, make_model(model_type, **changes))


@pytest.mark.parametrize("variant", _VARIANTS)
def test_every_variant_equals_transformers_on_both_sides_of_its_switch(variant: str, tmp_path: Path) -> None:
    changes = dict(_VARIANTS[variant])
    model = make_model(changes.pop("model_type"), **changes)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    for length in (12, 40):  # 16 is the original length of the scaled ones
        assert relative_difference(checkpoint, model, token_ids(length)) < RELATIVE_TOLERANCE


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
    assert relative_difference(broken, model, token_ids(40)) > 100 * RELATIVE_TOLERANCE


def test_parity_rejects_swapped_matrices_and_a_window_off_by_one(tmp_path: Path) -> None:
    model = make_model("mistral", sliding_window=5)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    weights = dict(checkpoint.weights)
    gate, up = "blocks.0.feed_forward.gate.weight", "blocks.0.feed_forward.up.weight"
    weights[gate], weights[up] = weights[up], weights[gate]
    swapped = dataclasses.replace(checkpoint, weights=weights)
    assert relative_difference(swapped, model, token_ids(12)) > 100 * RELATIVE_TOLERANCE
    block = checkpoint.config.blocks[0]
    block = dataclasses.replace(block, attention=dataclasses.replace(block.attention, window=6))
    wider = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, blocks=(block, block)))
    assert relative_difference(wider, model, token_ids(12)) > 100 * RELATIVE_TOLERANCE


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


def test_b31_an_explicit_head_dim_wins_over_hidden_over_heads(tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64, head_dim=32)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    attention = checkpoint.config.blocks[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 32)
    assert checkpoint.weights["blocks.0.attention.output.weight"].shape == (64, 128)
    assert relative_difference(checkpoint, model, token_ids(12)) < RELATIVE_TOLERANCE


def test_absent_head_dim_is_hidden_over_heads() -> None:
    values = {key: value for key, value in _RAW.items() if key != "head_dim"}
    assert read_config(values, head="separate")[0].blocks[0].attention.head_dim == 12


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
    model = make_model("llama", max_position_embeddings=128, rope_parameters=_LLAMA3)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    rotary = checkpoint.config.blocks[1].attention.rotary
    assert rotary is not None
    assert rotary.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16
    )
    assert relative_difference(checkpoint, model, token_ids(128)) < RELATIVE_TOLERANCE


def _respell(config: dict[str, Any], form: str) -> None:
    config.pop("rope_parameters", None)
    scaling = {key: value for key, value in _LLAMA3.items() if key != "rope_theta"}
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
    model = make_model("llama", rope_parameters=_LLAMA3 | {"rope_theta": 500000.0})
    folder = save_folder(tmp_path, model)
    edit_json(folder / "config.json", lambda config: _respell(config, form))
    assert relative_difference(load_checkpoint(folder), model, token_ids(40)) < RELATIVE_TOLERANCE


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
    values = _RAW | {"rope_parameters": _LLAMA3 | {"rope_theta": 500000.0}} | change
    with pytest.raises(CheckpointError, match=message):
        read_config(values, head="separate")


def test_b38_a_missing_theta_is_an_announced_default(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    edit_json(folder / "config.json", lambda config: config.pop("rope_parameters"))
    checkpoint = load_checkpoint(folder)
    rotary = checkpoint.config.blocks[0].attention.rotary
    assert rotary is not None
    assert rotary.theta == 10000.0
    assert any("rope_theta is nowhere" in note for note in checkpoint.notes)


def test_b38_nested_parameters_give_each_layer_type_its_own() -> None:
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    changes = {"model_type": "qwen2", **_WINDOWS, "max_window_layers": 1, "rope_parameters": nested}
    config, _ = read_config(_RAW | changes, head="separate")
    rotaries = [block.attention.rotary for block in config.blocks]
    assert [rotary.theta for rotary in rotaries if rotary] == [1e6, 1e4]


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
    without_original = {key: value for key, value in _LONGROPE.items() if key != "original_max_position_embeddings"}
    longrope, _, notes = _scaling(without_original)
    assert isinstance(longrope, LongRopeScaling)
    assert (longrope.original_max_positions, longrope.attention_factor) == (64, 1.0)
    assert any("original_max_position_embeddings is absent" in note for note in notes)
    yarn, _, _ = _scaling(_YARN | {"factor": None})
    assert isinstance(yarn, YarnScaling)
    assert yarn.factor == 4.0
    dynamic, partial_factor, _ = _scaling({"rope_type": "dynamic", "factor": 2.0}, partial_rotary_factor=0.5)
    assert dynamic == DynamicScaling(factor=2.0, original_max_positions=64)
    assert partial_factor == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not read.*nearest: llama"),
        ({"model_type": None}, "model_type None is not read; known are llama, mistral, qwen2, qwen3$"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; known are silu"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"attn_logit_softcapping": 50.0, "embedding_multiplier": 2}, "attn_logit_softcapping = 50.0; embedding_mult"),
        ({"sliding_window": 5}, "sliding_window = 5"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"hidden_size": 48.5}, "hidden_size must be a positive integer, got 48.5"),
        ({"head_dim": None, "hidden_size": 50}, r"hidden_size \(50\) is no multiple of num_attention_heads \(4\)"),
        ({"rms_norm_eps": -1.0}, "norm epsilon must be a positive number, got -1.0"),
    ],
)
def test_config_values_that_are_not_supported_are_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    edit_json(tmp_path / "config.json", lambda config: config.update(_RAW | change))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_ignored_keys_are_listed_by_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    edit_json(folder / "config.json", lambda config: config.update(torch_dtype="bfloat16", pretraining_tp=1))
    (note,) = [note for note in load_checkpoint(folder).notes if note.startswith("ignored config keys")]
    assert {"architectures", "torch_dtype", "pretraining_tp"} <= set(note.split(": ")[1].split(", "))


def _set_flag(folder: Path, flag: str) -> None:
    def change(config: dict[str, Any]) -> None:
        config.pop("tie_word_embeddings", None)
        if flag != "absent":
            config["tie_word_embeddings"] = flag == "on"

    edit_json(folder / "config.json", change)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("flag", ["on", "off", "absent"])
def test_b71_the_head_is_tied_by_config_and_tensors_together(is_tied: bool, flag: str, tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=is_tied)
    folder = save_folder(tmp_path, model)
    _set_flag(folder, flag)
    if flag == "absent" or is_tied == (flag == "on"):
        checkpoint = load_checkpoint(folder)
        assert checkpoint.config.head == ("tied" if is_tied else "separate")
        assert relative_difference(checkpoint, model, token_ids(12)) < RELATIVE_TOLERANCE
        return
    message = "is false and lm_head.weight is missing" if is_tied else "is true, but lm_head.weight.*different tensors"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def _edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Set tensors, or drop those given as None."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors |= changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_b72_a_dropped_head_is_refused_when_untied_and_absent_when_tied(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "untied")
    _edit_tensors(folder, {_HEAD: None})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is false and lm_head\.weight is missing"):
        load_checkpoint(folder)
    assert "head.weight" not in load_checkpoint(_folder(tmp_path / "tied", tie_word_embeddings=True)).weights


def test_b72_only_the_head_of_a_tied_model_is_taken_as_its_embedding(tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    folder = save_folder(tmp_path, model)
    embedding = load_file(folder / "model.safetensors")[_EMBEDDING].clone()
    _edit_tensors(folder, {_EMBEDDING: None, _HEAD: embedding})
    checkpoint = load_checkpoint(folder)
    assert relative_difference(checkpoint, model, token_ids(12)) < RELATIVE_TOLERANCE
    assert any("the tied lm_head.weight was taken for it" in note for note in checkpoint.notes)


def test_b72_an_untied_model_without_embedding_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    _edit_tensors(folder, {_EMBEDDING: None})
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight"):
        load_checkpoint(folder)


def test_b72_both_stored_though_tied_is_accepted_once_when_equal_and_refused_when_not(tmp_path: Path) -> None:
    folder = _folder(tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")[_EMBEDDING].clone()
    _edit_tensors(folder, {_HEAD: embedding.clone()})
    checkpoint = load_checkpoint(folder)
    assert "head.weight" not in checkpoint.weights
    assert any("lm_head.weight equals model.embed_tokens.weight" in note for note in checkpoint.notes)
    embedding[3, 4] += 1e-6
    _edit_tensors(folder, {_HEAD: embedding})
    with pytest.raises(CheckpointError, match="different tensors"):
        load_checkpoint(folder)


def test_b72_missing_extra_and_misshapen_tensors_are_listed_in_one_error(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    changes = {
        "model.layers.0.mlp.up_proj.weight": None,
        "model.layers.0.mlp.router.weight": torch.ones(2, 2),
        "model.layers.1.self_attn.q_norm.weight": torch.ones(16),
        "model.norm.weight": torch.ones(47),
    }
    _edit_tensors(folder, changes)
    message = (
        r"missing: model.layers.0.mlp.up_proj.weight; not part of the model: model.layers.0.mlp.router.weight, "
        r"model.layers.1.self_attn.q_norm.weight; wrong shape: model.norm.weight is \[47\], the config needs \[48\]"
    )
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_old_rotary_buffers_are_ignored_by_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _edit_tensors(folder, {name: torch.ones(8)})
    assert f"ignored tensors: {name}" in load_checkpoint(folder).notes


@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        (torch.float16, "F16 weights were widened to float32"),
        (torch.bfloat16, "BF16 weights were widened to float32"),
        (torch.float64, "F64 weights were narrowed to float32"),
    ],
)
def test_other_float_types_become_float32(dtype: torch.dtype, note: str, tmp_path: Path) -> None:
    model = make_model("llama").to(dtype)
    checkpoint = load_checkpoint(save_folder(tmp_path, model))
    assert {weight.dtype for weight in checkpoint.weights.values()} == {torch.float32}
    expected = model.state_dict()["model.norm.weight"].to(torch.float32)
    assert torch.equal(checkpoint.weights["final_norm.weight"], expected)
    assert note in checkpoint.notes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    norm = torch.ones(48)
    norm[3] = value
    _edit_tensors(folder, {"model.norm.weight": norm})
    with pytest.raises(CheckpointError, match=r"model.safetensors: model.norm.weight has values that are not finite"):
        load_checkpoint(folder)


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    _edit_tensors(folder, {"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"model.norm.weight \(I8\); known are F16, BF16, F32, F64"):
        load_checkpoint(folder)


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

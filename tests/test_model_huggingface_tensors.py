"""The tensors of a Hugging Face folder: tied and untied heads, every tensor accounted for, float types."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import RELATIVE_TOLERANCES
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    edit_json,
    make_model,
    relative_difference,
    save_folder,
    token_ids,
)

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]


def _folder(path: Path, model_type: str = "llama", **changes: Any) -> Path:
    return save_folder(path, make_model(model_type, **changes))


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
        assert relative_difference(checkpoint, model, token_ids(12)) < TOLERANCE
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
    assert relative_difference(checkpoint, model, token_ids(12)) < TOLERANCE
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

"""Experts in MXFP4 are read as transformers widens them, and what is no such form is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in blocks, and the same with the values of transformers."""
    plain, packed = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("packed")
    GptOssForCausalLM(GptOssConfig(**SIZES)).save_pretrained(plain)
    GptOssConfig(**SIZES, quantization_config=QUANTISED).save_pretrained(packed)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    blocks: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[name].shape
        scaled = (experts, rows, columns // 32)
        blocks[f"{name}_blocks"] = torch.randint(0, 256, (*scaled, 16), generator=generator, dtype=torch.uint8)
        blocks[f"{name}_scales"] = torch.randint(100, 130, scaled, generator=generator, dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(
            blocks[f"{name}_blocks"], blocks[f"{name}_scales"], dtype=torch.float32
        ).contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if f"{n}_blocks" not in blocks} | blocks, packed / "model.safetensors")
    return plain, packed


def test_microscaled_experts_are_read_exactly(folders: tuple[Path, Path]) -> None:
    plain, packed = (load_checkpoint(folder) for folder in folders)
    assert packed.config == plain.config
    assert plain.weights.keys() == packed.weights.keys()
    assert all(torch.equal(packed.weights[name], weight) for name, weight in plain.weights.items())
    assert packed.weights["blocks.0.feed_forward.experts.gate.weight"].abs().max() > 0


def _no_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]


def _no_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 255


def _floats(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].float()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_scales, "missing: model.layers.0.mlp.experts.down_proj_scales"),
        (_no_number, "down_proj has values that are not finite"),
        (_floats, r"must be bytes \(U8\), which model.layers.0.mlp.experts.down_proj_scales are not"),
    ],
)
def test_damaged_blocks_are_refused(
    damage: Callable[[dict[str, torch.Tensor]], None], message: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folders[1] / "config.json").read_bytes())
    tensors = load_file(folders[1] / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_rows_that_are_no_whole_blocks_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folders[1] / "config.json").read_bytes())
    edit_json(tmp_path / "config.json", lambda values: values.update(intermediate_size=40))
    (tmp_path / "model.safetensors").write_bytes((folders[1] / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="down_proj has rows of 40, which are no whole blocks of 32"):
        load_checkpoint(tmp_path)

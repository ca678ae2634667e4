"""GGUF architectures beside llama, qwen and gemma3, written as llama.cpp's converter does, equal transformers."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from parity import RELATIVE_TOLERANCES
from tiny_checkpoints import relative_difference, token_ids, write_gguf
from tiny_decoders import DECODERS, make_decoder
from transformers import AutoConfig, AutoModelForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from graphport.export.model_export import export
from graphport.model_def.checkpoint import CheckpointError, load_checkpoint

_QWEN = ("model.layers.{}.mlp.experts.{}_proj.weight", ("gate", "up", "down"))
TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]
NAMES = ("gemma", "gemma2", "granite", "olmo2", "smollm3", "mixtral", "qwen3_moe")
EXPERTS = {"mixtral": ("layers.{}.feed_forward.experts.w{}.weight", "132"), "qwen3_moe": _QWEN}

Edit = Callable[[gguf.GGUFWriter], None]


def _random(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.eval()


class _Split:
    """A model whose experts have a tensor each for gate, up and down, as the converter joins them."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        name, parts = EXPERTS[self.config.model_type]
        for path, parameter in self.model.named_parameters():
            if ".experts." not in path:
                yield path, parameter
                continue
            layer = path.split(".")[2]
            matrices = parameter.chunk(2, dim=1) if "gate_up" in path else [parameter]
            for part, matrix in zip(parts[:2] if "gate_up" in path else parts[2:], matrices, strict=True):
                yield name.format(layer, part), matrix.clone()


def _model(name: str, **sizes: int) -> Any:
    if name in EXPERTS:  # in llama.cpp every layer has them, and none of these has a window
        changes = (
            {"decoder_sparse_step": 1, "attention_bias": False} if name == "qwen3_moe" else {"sliding_window": None}
        )
        config = AutoConfig.for_model(name, **DECODERS[name].values | changes | sizes)
        config._experts_implementation = "eager"
        model = _random(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    elif name != "smollm3":
        model = copy.deepcopy(make_decoder(name))
    else:  # which layers rotate is fixed in llama.cpp: all but every fourth
        values = DECODERS[name].values | {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}
        model = _random(SmolLM3ForCausalLM(SmolLM3Config(**values)))
    if name == "gemma2":
        model.config.query_pre_attn_scalar = model.config.head_dim  # of the sizes that llama.cpp scales so
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    return model


def _metadata(name: str, config: Any) -> Edit:
    def add(writer: gguf.GGUFWriter) -> None:
        if name == "gemma2":
            writer.add_sliding_window(config.sliding_window)
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        if name in EXPERTS:
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
        if name == "qwen3_moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if name == "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)

    return add


def _written(name: str, path: Path, model: Any) -> Path:
    written = _Split(model) if name in EXPERTS else model
    return write_gguf(path / "x.gguf", written, edit=_metadata(name, model.config))


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_equals_transformers_and_keeps_its_matrices(name: str, tmp_path: Path) -> None:
    model = _model(name)
    checkpoint = load_checkpoint(_written(name, tmp_path, model))
    for length in (4, 12, 40):
        found = relative_difference(checkpoint, model, token_ids(length))
        assert found < TOLERANCE, f"{length} tokens: {found}"
    assert "blocks.0.attention.query.weight" in checkpoint.stored


FAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"embedding_scale": 1.0},
    "gemma2": {"logit_softcap": None},
    "granite": {"logit_scale": 1.0},
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_architecture_read_without_what_is_its_own_is_rejected(name: str, tmp_path: Path) -> None:
    model = _model(name)
    checkpoint = load_checkpoint(_written(name, tmp_path, model))
    broken = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, **FAULTS[name]))
    assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE


def test_quantised_experts_are_read_and_exported_exactly(tmp_path: Path) -> None:
    model = _model("qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    metadata = _metadata("qwen3_moe", model.config)
    path = write_gguf(tmp_path / "x.gguf", _Split(model), kind=gguf.GGMLQuantizationType.Q8_0, edit=metadata)
    checkpoint = load_checkpoint(path)
    experts = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    gate, up = (checkpoint.weights[f"blocks.0.feed_forward.experts.{part}.weight"] for part in ("gate", "up"))
    error = float((torch.cat((gate, up), dim=1) - experts).abs().max())
    assert 0 < error < float(experts.abs().max()) / 127
    bundle = export(path, tmp_path / "bundle", precision="gguf", context=24)
    assert bundle.fusions["experts"] == 2
    assert bundle.certificate
    assert all(check.passed for check in bundle.certificate)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_change_places_are_rejected(name: str, tmp_path: Path) -> None:
    model = _model(name)
    checkpoint = load_checkpoint(_written(name, tmp_path, model))
    weights = dict(checkpoint.weights)
    gate, up = (f"blocks.0.feed_forward.experts.{part}.weight" for part in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
    broken = dataclasses.replace(checkpoint, weights=weights)
    assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE


def test_a_smollm3_whose_fourth_layer_rotates_is_rejected(tmp_path: Path) -> None:
    model = _model("smollm3")
    checkpoint = load_checkpoint(_written("smollm3", tmp_path, model))
    blocks = list(checkpoint.config.blocks)
    assert [block.attention.rotary is None for block in blocks] == [False, False, False, True, False]
    blocks[3] = blocks[0]
    broken = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, blocks=tuple(blocks)))
    assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE


def test_metadata_that_an_architecture_needs_or_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gemma2 caps scores and logits; attn_logit_softcapping and"):
        load_checkpoint(write_gguf(tmp_path / "gemma2.gguf", _model("gemma2")))
    with_experts = write_gguf(tmp_path / "gemma.gguf", _model("gemma"), edit=lambda writer: writer.add_expert_count(8))
    with pytest.raises(CheckpointError, match=r"not supported .* gemma.expert_count = 8"):
        load_checkpoint(with_experts)
    windowed = write_gguf(tmp_path / "olmo2.gguf", _model("olmo2"), edit=lambda writer: writer.add_sliding_window(5))
    with pytest.raises(CheckpointError, match=r"not supported .* olmo2.attention.sliding_window = 5"):
        load_checkpoint(windowed)

"""GGUF architectures beside llama, qwen and gemma3, written as llama.cpp's converter does, equal transformers."""

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from parity import RELATIVE_TOLERANCES
from tiny_checkpoints import Edit, relative_difference, token_ids, write_gguf
from tiny_decoders import DECODERS, make_decoder
from transformers import AutoConfig, AutoModelForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from graphport.export.model_export import export
from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.position_config import YarnScaling

_QWEN = ("model.layers.{}.mlp.experts.{}_proj.weight", ("gate", "up", "down"))
TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]
NAMES = (
    *("gemma", "gemma2", "granite", "olmo2", "smollm3", "mixtral", "qwen3_moe"),
    *("phi3", "phi3 longrope", "qwen2_moe", "gpt_oss"),
)
EXPERTS = {
    "mixtral": ("layers.{}.feed_forward.experts.w{}.weight", "132"),
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "gpt_oss": ("model.layers.{}.mlp.experts.{}_proj.weight", ("gate", "up", "down")),
}
# in llama.cpp every layer has experts, none of these but gpt-oss has a window, and its numbers are fixed
EXPERT_CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {},
    "qwen3_moe": {"decoder_sparse_step": 1, "attention_bias": False},
    "gpt_oss": {"swiglu_limit": 7.0},
}


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
                ending = ".weight" if path.endswith("sinks") else ""
                yield path + ending, parameter[0] if "shared_expert_gate" in path else parameter
                continue
            layer = path.split(".")[2]
            is_bias = path.endswith("_bias")
            matrices = [parameter]
            if self.config.model_type == "gpt_oss":  # [E, in, out], gate and up by turns
                turned = parameter if is_bias else parameter.transpose(1, 2)
                matrices = [turned[:, ::2], turned[:, 1::2]] if "gate_up" in path else [turned]
            elif "gate_up" in path:
                matrices = list(parameter.chunk(2, dim=1))
            for part, matrix in zip(parts[:2] if "gate_up" in path else parts[2:], matrices, strict=True):
                yield name.format(layer, part).replace("weight", "bias" if is_bias else "weight"), matrix.clone()


def _model(name: str, **sizes: int) -> Any:
    if name in EXPERTS:
        config = AutoConfig.for_model(name, **DECODERS[name].values | EXPERT_CHANGES[name] | sizes)
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


def _blocks_of_32(name: str) -> gguf.GGMLQuantizationType:
    is_narrow = "down_proj" in name  # rows of 44
    return gguf.GGMLQuantizationType.F32 if is_narrow else gguf.GGMLQuantizationType.Q8_0


def _metadata(name: str, config: Any) -> Edit:
    def add(writer: gguf.GGUFWriter) -> None:
        if name == "gemma2":
            writer.add_sliding_window(config.sliding_window)
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        if name in EXPERTS:
            writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
        if name in ("qwen2_moe", "qwen3_moe"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if name == "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        if name == "gpt_oss":
            writer.add_sliding_window(config.sliding_window)
            writer.add_expert_feed_forward_length(config.intermediate_size)
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(config.rope_parameters["factor"])
            writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(config.rope_parameters["beta_fast"])
        if name == "phi3":
            writer.add_sliding_window(config.sliding_window)
        if name == "phi3 longrope":
            original = config.original_max_position_embeddings
            writer.add_sliding_window(0)
            writer.add_rope_scaling_orig_ctx_len(original)
            factor = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        if name == "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)

    return add


def _written(name: str, path: Path, model: Any) -> Path:
    written = _Split(model) if name in EXPERTS else model
    extra = None
    if name == "phi3 longrope":
        lists = {kind: np.array(model.config.rope_parameters[f"{kind}_factor"]) for kind in ("long", "short")}
        extra = {f"rope_factors_{kind}.weight": values for kind, values in lists.items()}
    return write_gguf(path / "x.gguf", written, edit=_metadata(name, model.config), extra=extra)


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
# what an architecture's row fixes, of the blocks
BLOCK_FAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "phi3": {"attention": {"window": None}},
    "qwen2_moe": {"feed_forward": {"normalized": True}},
    "gpt_oss": {"feed_forward": {"up_offset": 0.0}},
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_architecture_read_without_what_is_its_own_is_rejected(name: str, tmp_path: Path) -> None:
    model = _model(name)
    checkpoint = load_checkpoint(_written(name, tmp_path, model))
    broken = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, **FAULTS[name]))
    assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", BLOCK_FAULTS)
def test_an_architecture_whose_blocks_are_read_otherwise_is_rejected(name: str, tmp_path: Path) -> None:
    model = _model(name)
    checkpoint = load_checkpoint(_written(name, tmp_path, model))
    blocks = tuple(
        dataclasses.replace(
            block, **{part: dataclasses.replace(getattr(block, part), **v) for part, v in BLOCK_FAULTS[name].items()}
        )
        for block in checkpoint.config.blocks
    )
    broken = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, blocks=blocks))
    assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE


def test_a_gpt_oss_whose_yarn_is_truncated_is_rejected(tmp_path: Path) -> None:
    model = _model("gpt_oss")
    checkpoint = load_checkpoint(_written("gpt_oss", tmp_path, model))
    blocks = []
    for block in checkpoint.config.blocks:
        rotary = block.attention.rotary
        assert rotary is not None
        assert isinstance(rotary.scaling, YarnScaling)
        rotary = dataclasses.replace(rotary, scaling=dataclasses.replace(rotary.scaling, truncate=True))
        blocks.append(dataclasses.replace(block, attention=dataclasses.replace(block.attention, rotary=rotary)))
    broken = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, blocks=tuple(blocks)))
    assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE


def test_joined_quantised_matrices_are_split_and_exported_exactly(tmp_path: Path) -> None:
    model = _model("phi3")
    path = write_gguf(tmp_path / "x.gguf", model, kind=_blocks_of_32, edit=_metadata("phi3", model.config))
    checkpoint = load_checkpoint(path)
    assert relative_difference(checkpoint, model, token_ids(12)) < TOLERANCE
    for ours in ("attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"):
        stored = checkpoint.stored[f"blocks.1.{ours}.weight"]
        assert stored.kind == gguf.GGMLQuantizationType.Q8_0
        assert np.array_equal(stored.dequantize(), checkpoint.weights[f"blocks.1.{ours}.weight"].numpy())
    bundle = export(path, tmp_path / "bundle", precision="gguf", context=24)
    assert bundle.certificate
    assert all(check.passed for check in bundle.certificate)


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


def test_gpt_oss_experts_of_mxfp4_are_read(tmp_path: Path) -> None:
    """As the published files have them: experts in 4-bit floats, their biases and the rest in floats."""
    model, mxfp4 = _model("gpt_oss", hidden_size=64, intermediate_size=32), gguf.GGMLQuantizationType.MXFP4

    def kind(name: str) -> gguf.GGMLQuantizationType:
        is_expert = ".experts." in name and name.endswith("weight")
        return mxfp4 if is_expert else gguf.GGMLQuantizationType.F32

    path = write_gguf(tmp_path / "x.gguf", _Split(model), kind=kind, edit=_metadata("gpt_oss", model.config))
    checkpoint = load_checkpoint(path)
    experts = model.model.layers[1].mlp.experts
    expected = {
        "gate": experts.gate_up_proj[..., ::2],
        "up": experts.gate_up_proj[..., 1::2],
        "down": experts.down_proj,
    }
    for part, matrix in expected.items():
        rows = matrix.detach().transpose(1, 2).contiguous().numpy()
        decoded = dequantize(quantize(rows, mxfp4), mxfp4).reshape(rows.shape)
        assert np.array_equal(checkpoint.weights[f"blocks.1.feed_forward.experts.{part}.weight"].numpy(), decoded)
        assert np.abs(decoded - rows).max() > 0
    bias = checkpoint.weights["blocks.1.feed_forward.experts.up.bias"]
    assert torch.equal(bias, experts.gate_up_proj_bias.detach()[:, 1::2])


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

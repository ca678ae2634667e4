"""DeepSeek-V2 and V3 as GGUF files, in the converter's old and new form, equal transformers."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from parity import RELATIVE_TOLERANCES
from tiny_checkpoints import Edit, relative_difference, token_ids, write_gguf
from tiny_decoder_values import DEEPSEEK, YARN, theta
from transformers import AutoConfig, AutoModelForCausalLM

from graphport.export.model_export import export
from graphport.model_def.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from graphport.model_def.expert_config import ExpertsConfig

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]
SOFTMAX, SIGMOID = 1, 2
GROWING = {**YARN, "mscale": 1.3, "mscale_all_dim": 1.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {"rope_parameters": GROWING, "topk_method": "group_limited_greedy"}),
    "v2 lite": ("deepseek_v2", {**theta(100.0), "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "v3": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "norm_topk_prob": True}),
}


def _model(name: str, **sizes: int) -> Any:
    model_type, values = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**DEEPSEEK, **values, **sizes})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    corrections = [buffer for path, buffer in model.named_buffers() if path.endswith("correction_bias")]
    with torch.no_grad():
        for parameter in [*model.parameters(), *corrections]:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


class _Converted:
    """A model as the converter stores it: gate and up apart; `is_split`: keys and values apart, keys [N, in, out]."""

    def __init__(self, model: Any, *, is_split: bool) -> None:
        self.model, self.is_split = model, is_split
        self.config = copy.copy(model.config)
        if is_split:
            self.config.num_key_value_heads = 1

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        config = self.config
        for path, parameter in self.model.named_parameters():
            if "gate_up_proj" in path:
                for part, matrix in zip(("gate", "up"), parameter.chunk(2, dim=1), strict=True):
                    yield path.replace("gate_up_proj", f"{part}_proj.weight"), matrix.clone()
            elif ".experts." in path:
                yield f"{path}.weight", parameter
            elif "kv_b_proj" in path and self.is_split:
                heads = parameter.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
                key, value = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
                yield path.replace("kv_b_proj", "k_b_proj"), key.transpose(1, 2).clone()
                yield path.replace("kv_b_proj", "v_b_proj"), value.clone()
            else:
                yield path, parameter
        for path, buffer in self.model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                yield path.replace("_correction_bias", "_correction.bias"), buffer


def _metadata(config: Any, *, is_split: bool) -> Edit:
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim

    def add(writer: gguf.GGUFWriter) -> None:
        is_sigmoid = config.model_type == "deepseek_v3"
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if is_split else head_dim)
        writer.add_value_length(config.kv_lora_rank if is_split else config.v_head_dim)
        if is_split:
            writer.add_key_length_mla(head_dim)
            writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_uint32(f"{writer.arch}.expert_gating_func", SIGMOID if is_sigmoid else SOFTMAX)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        rope = config.rope_parameters
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])

    return add


def _written(
    path: Path,
    model: Any,
    *,
    is_split: bool = False,
    kind: gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType.F32,
) -> Path:
    edit = _metadata(model.config, is_split=is_split)
    return write_gguf(path / "x.gguf", _Converted(model, is_split=is_split), edit=edit, kind=kind)


@pytest.mark.parametrize("is_split", [False, True], ids=["keys and values together", "apart"])
@pytest.mark.parametrize("name", MODELS)
def test_a_deepseek_equals_transformers(name: str, is_split: bool, tmp_path: Path) -> None:
    model = _model(name)
    checkpoint = load_checkpoint(_written(tmp_path, model, is_split=is_split))
    for length in (4, 12, 40):
        found = relative_difference(checkpoint, model, token_ids(length))
        assert found < TOLERANCE, f"{length} tokens: {found}"
    assert "blocks.0.attention.latent.query.weight" in checkpoint.stored
    up = "blocks.0.attention.latent.up.weight"
    assert np.array_equal(checkpoint.stored[up].dequantize(), checkpoint.weights[up].numpy())


def _with_router(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    first, last = checkpoint.config.blocks
    experts = last.feed_forward
    assert isinstance(experts, ExpertsConfig)
    experts = dataclasses.replace(experts, router=dataclasses.replace(experts.router, **changes))
    blocks = (first, dataclasses.replace(last, feed_forward=experts))
    return dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, blocks=blocks))


def test_a_deepseek_read_otherwise_is_rejected(tmp_path: Path) -> None:
    model = _model("v3")
    checkpoint = load_checkpoint(_written(tmp_path, model, is_split=True))
    for broken in (
        _with_router(checkpoint, scaling=1.0),
        _with_router(checkpoint, num_groups=1, num_chosen_groups=1, group_best=1),
        _with_weights(checkpoint, "attention.latent.up.weight"),
        _with_weights(checkpoint, "attention.latent.query.weight"),
    ):
        assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE


def _with_weights(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The matrix with its rows by one lower."""
    weights = dict(checkpoint.weights)
    weights[f"blocks.0.{name}"] = weights[f"blocks.0.{name}"].roll(1, dims=0)
    return dataclasses.replace(checkpoint, weights=weights)


def test_a_quantised_deepseek_is_exported_exactly(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32}
    model = _model("v3", **sizes)
    kinds = gguf.GGMLQuantizationType

    def kind(name: str) -> gguf.GGMLQuantizationType:
        is_narrow = name.endswith(("o_proj.weight", "mlp.down_proj.weight")) or "mlp.gate.weight" in name
        return kinds.F32 if is_narrow else kinds.Q8_0

    path = _written(tmp_path, model, kind=kind, is_split=True)
    checkpoint = load_checkpoint(path)
    name = "blocks.0.attention.latent.query.weight"
    assert checkpoint.stored[name].kind == kinds.Q8_0
    assert np.array_equal(checkpoint.stored[name].dequantize(), checkpoint.weights[name].numpy())
    assert checkpoint.stored["blocks.0.attention.latent.up.weight"].kind == kinds.F32
    bundle = export(path, tmp_path / "bundle", precision="gguf", context=16, require_exact=True)
    assert bundle.certificate
    assert all(check.passed for check in bundle.certificate)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda w: w.add_uint32("deepseek2.nextn_predict_layers", 1),
            r"not supported .*deepseek2\.nextn_predict_layers = 1",
        ),
        (lambda w: w.add_sliding_window(5), r"not supported .*deepseek2\.attention\.sliding_window = 5"),
    ],
)
def test_what_is_not_read_of_a_deepseek_is_refused_by_name(edit: Edit, message: str, tmp_path: Path) -> None:
    model = _model("v2 lite")
    metadata = _metadata(model.config, is_split=False)

    def both(writer: gguf.GGUFWriter) -> None:
        metadata(writer)
        edit(writer)

    path = write_gguf(tmp_path / "x.gguf", _Converted(model, is_split=False), edit=both)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 4, r"expert_gating_func 4 is not read; known are 1 \(softmax\), 2 \(sigmoid\)"),
        ("leading_dense_block_count", 3, r"leading_dense_block_count must lie in 0 \.\. 2, got 3"),
        ("attention.key_length", 7, r"key_length 7 and value_length 10 beside key_length_mla must .* 26 and 10"),
    ],
)
def test_values_that_do_not_fit_are_refused(key: str, value: int, message: str, tmp_path: Path) -> None:
    model = _model("v2")
    metadata = _metadata(model.config, is_split=True)

    def changed(writer: gguf.GGUFWriter) -> None:
        metadata(writer)
        writer.kv_data[0][f"{writer.arch}.{key}"].value = value

    path = write_gguf(tmp_path / "x.gguf", _Converted(model, is_split=True), edit=changed)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)

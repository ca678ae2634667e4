"""GGUF files: logits of the model they were made from; metadata that is not understood is refused."""

import dataclasses
import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType, RopeScalingType
from parity import RELATIVE_TOLERANCES
from tiny_checkpoints import (
    LLAMA3,
    finish,
    llama3_divisors,
    make_model,
    our_logits,
    relative_difference,
    token_ids,
    write_gguf,
)

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.gguf_file import read_gguf_file
from graphport.model_def.position_config import FrequencyFactors, LinearScaling, LongRopeScaling, YarnScaling

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]

_KIND = GGMLQuantizationType


# rows of 64: blocks of 32 fit
_QUANTISED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8, "num_attention_heads": 8}


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (8, 2)])
def test_b74_llama_rows_are_restored_exactly_for_every_heads_and_kv_heads(
    heads: int, kv_heads: int, tmp_path: Path
) -> None:
    model = make_model(
        "llama", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, attention_bias=True
    )
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    stored = _weights(model)
    for layer, (ours, theirs), kind in itertools.product(
        range(2),
        [("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")],
        ["weight", "bias"],
    ):
        expected = stored[f"model.layers.{layer}.self_attn.{theirs}.{kind}"]
        assert torch.equal(checkpoint.weights[f"blocks.{layer}.attention.{ours}.{kind}"], expected)
    assert relative_difference(checkpoint, model, token_ids(12)) < TOLERANCE


def test_b74_rows_left_permuted_are_rejected_by_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphport.model_def.gguf.restored_rows", lambda a, heads: np.arange(heads * a.head_dim))
    model = make_model("llama")
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    assert relative_difference(checkpoint, model, token_ids(12)) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_b73_logits_equal_the_source_model_for_permuted_and_unpermuted_families(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    model = make_model(model_type, **_QUANTISED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.mul_(20)
    original = _weights(model)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model, kind=_KIND[kind]))
    assert checkpoint.config.blocks[0].attention.qkv_bias == (model_type == "qwen2")
    assert relative_difference(checkpoint, model, token_ids(12)) < TOLERANCE
    changed = any(
        not torch.equal(before, after)
        for before, after in zip(original.values(), _weights(model).values(), strict=True)
    )
    assert changed == (kind != "F32")


def test_b73_forgotten_biases_are_rejected_by_parity(tmp_path: Path) -> None:
    model = make_model("qwen2")
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    bias = "blocks.1.attention.key.bias"
    for name in (bias, bias.replace("key", "value")):
        weights = checkpoint.weights | {name: torch.zeros_like(checkpoint.weights[name])}
        broken = dataclasses.replace(checkpoint, weights=weights)
        difference = relative_difference(broken, model, token_ids(12))
        # a key bias without rotation shifts every score alike; with it, it must show
        assert difference > 100 * TOLERANCE


def test_qwen3_with_norms_and_a_tied_head_equals_its_source(tmp_path: Path) -> None:
    model = make_model("qwen3", tie_word_embeddings=True)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    assert checkpoint.config.head == "tied"
    assert checkpoint.config.blocks[0].attention.qk_norm is not None
    assert relative_difference(checkpoint, model, token_ids(12)) < TOLERANCE


def test_f32_is_exact(tmp_path: Path) -> None:
    model = make_model("llama", mlp_bias=True)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    stored = _weights(model)
    assert torch.equal(checkpoint.weights["embedding.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(checkpoint.weights["head.weight"], stored["lm_head.weight"])
    up = "feed_forward.up.bias"
    assert torch.equal(checkpoint.weights[f"blocks.1.{up}"], stored["model.layers.1.mlp.up_proj.bias"])


def test_b37_a_rope_freqs_tensor_gives_llama3s_frequencies_at_every_position(tmp_path: Path) -> None:
    model = make_model("llama", max_position_embeddings=128, rope_parameters=LLAMA3)
    extra = {"rope_freqs.weight": llama3_divisors(LLAMA3, 16)}
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model, extra=extra))
    rotary = checkpoint.config.blocks[0].attention.rotary
    assert rotary is not None
    assert isinstance(rotary.scaling, FrequencyFactors)
    assert relative_difference(checkpoint, model, token_ids(128)) < TOLERANCE
    without = load_checkpoint(write_gguf(tmp_path / "without.gguf", model))
    assert relative_difference(without, model, token_ids(128)) > 100 * TOLERANCE


def _add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def _add_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(3.0)


def _add_longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_attn_factors(1.25)


_SHORT, _LONG = np.linspace(1, 1.5, 8), np.linspace(2, 6, 8)


@pytest.mark.parametrize(
    ("rotary", "edit", "extra", "kind"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            _add_yarn,
            {},
            YarnScaling,
        ),
        ({"rope_type": "linear", "factor": 3.0}, _add_linear, {}, LinearScaling),
        (
            {
                "rope_type": "longrope",
                "short_factor": _SHORT.tolist(),
                "long_factor": _LONG.tolist(),
                "original_max_position_embeddings": 16,
                "attention_factor": 1.25,
            },
            _add_longrope,
            {"rope_factors_short.weight": _SHORT, "rope_factors_long.weight": _LONG},
            LongRopeScaling,
        ),
    ],
)
def test_rope_scaling_metadata_equals_transformers_on_both_sides_of_its_switch(
    rotary: dict[str, Any],
    edit: Callable[[gguf.GGUFWriter], None],
    extra: dict[str, np.ndarray],
    kind: type,
    tmp_path: Path,
) -> None:
    model = make_model("qwen2", rope_parameters=rotary | {"rope_theta": 500.0})
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model, edit=edit, extra=extra))
    read = checkpoint.config.blocks[0].attention.rotary
    assert read is not None
    assert isinstance(read.scaling, kind)
    for length in (12, 40):
        assert relative_difference(checkpoint, model, token_ids(length)) < TOLERANCE


def test_a_sliding_window_equals_transformers(tmp_path: Path) -> None:
    model = make_model("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=0)
    path = write_gguf(tmp_path / "tiny.gguf", model, edit=lambda writer: writer.add_sliding_window(5))
    checkpoint = load_checkpoint(path)
    assert [block.attention.window for block in checkpoint.config.blocks] == [5, 5]
    assert relative_difference(checkpoint, model, token_ids(12)) < TOLERANCE


def test_a_sliding_window_pattern_is_read_per_layer(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(5)
        writer.add_sliding_window_pattern([True, False])

    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", make_model("qwen2"), edit=edit))
    assert [block.attention.window for block in checkpoint.config.blocks] == [5, None]


def test_a_partial_rotation_restores_the_rotary_rows_only(tmp_path: Path) -> None:
    """llama.cpp rotates pairs (2i, 2i + 1) of the first rope.dimension_count rows as they are stored."""
    model = make_model("llama")
    full = load_checkpoint(write_gguf(tmp_path / "full.gguf", model))
    path = tmp_path / "partial.gguf"
    data = (tmp_path / "full.gguf").read_bytes()
    key = b"llama.rope.dimension_count" + struct.pack("<I", 4)
    assert data.count(key + struct.pack("<I", 16)) == 1
    path.write_bytes(data.replace(key + struct.pack("<I", 16), key + struct.pack("<I", 8)))
    partial = load_checkpoint(path)
    name = "blocks.0.attention.query.weight"
    stored = torch.from_numpy(read_gguf_file(path).read("blk.0.attn_q.weight")).reshape(4, 16, 48)
    restored = partial.weights[name].reshape(4, 16, 48)
    assert torch.equal(restored[:, 8:], stored[:, 8:])
    assert torch.equal(restored[:, :8], stored[:, [0, 2, 4, 6, 1, 3, 5, 7]])
    assert not torch.equal(partial.weights[name], full.weights[name])
    # the same rows rotated in place, interleaved, give the same logits
    blocks = []
    weights = dict(partial.weights)
    for layer, block in enumerate(partial.config.blocks):
        assert block.attention.rotary is not None
        assert block.attention.rotary.partial_factor == 0.5
        rotary = dataclasses.replace(block.attention.rotary, interleaved=True)
        blocks.append(dataclasses.replace(block, attention=dataclasses.replace(block.attention, rotary=rotary)))
        for ours, theirs in (("query", "attn_q"), ("key", "attn_k")):
            as_stored = torch.from_numpy(read_gguf_file(path).read(f"blk.{layer}.{theirs}.weight"))
            weights[f"blocks.{layer}.attention.{ours}.weight"] = as_stored
    config = dataclasses.replace(partial.config, blocks=tuple(blocks))
    expected = our_logits(config, weights, token_ids(12))
    actual = our_logits(partial.config, partial.weights, token_ids(12))
    assert float((actual - expected).abs().max() / expected.abs().max()) < TOLERANCE


def _set_block_count(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0]["llama.block_count"].value = 5000


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda writer: writer.add_uint16("split.count", 3), "is one of 3 parts; join them first: llama-gguf-split"),
        (lambda writer: writer.add_type("adapter"), "holds a GGUF of type 'adapter', not a model"),
        (lambda writer: writer.add_expert_count(8), "llama.expert_used_count must be a positive integer"),
        (lambda writer: writer.add_logit_scale(0.5), "llama.logit_scale = 0.5"),
        (lambda writer: writer.add_causal_attention(False), "llama.attention.causal = False"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "su"), "rope.scaling.type 'su' is not known"),
        (_add_longrope, "longrope needs the tensors rope_factors_long.weight, rope_factors_short.weight"),
        (lambda writer: writer.add_rope_scaling_yarn_log_mul(0.1), "yarn_log_multiplier"),
        (_set_block_count, "block_count must be at most 1024, got 5000; correct it"),
        (lambda writer: writer.add_uint32("tokenizer.ggml.eos_token_id", 61), "end-of-text id 61 is no id"),
    ],
)
def test_metadata_that_changes_the_computation_is_refused_by_name(
    edit: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_model("llama"), edit=edit)
    with pytest.raises(CheckpointError, match=rf"x\.gguf.*{message}"):
        load_checkpoint(path)


def test_an_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2vl")
    finish(writer)
    with pytest.raises(CheckpointError, match=r"architecture 'qwen2vl' is not read; known are llama.*nearest: .*qwen2"):
        load_checkpoint(tmp_path / "x.gguf")


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"x\.gguf: output_norm\.weight has values that are not finite"):
        load_checkpoint(write_gguf(tmp_path / "x.gguf", model))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_block_whose_scale_is_not_finite_is_refused_by_its_tensors_name(scale: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_model("llama", **_QUANTISED), kind=_KIND.Q8_0)
    data = bytearray(path.read_bytes())
    offset = read_gguf_file(path).tensors["blk.1.ffn_up.weight"].offset
    data[offset : offset + 2] = np.float16(scale).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.gguf: blk\.1\.ffn_up\.weight has values that are not finite"):
        load_checkpoint(path)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_the_stored_matrices_decode_to_the_weights_in_their_row_order(kind: str, tmp_path: Path) -> None:
    model = make_model("llama", **_QUANTISED)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "x.gguf", model, kind=_KIND[kind]))
    matrices = {name for name, weight in checkpoint.weights.items() if weight.ndim == 2}
    assert set(checkpoint.stored) == matrices
    for name in matrices:
        assert checkpoint.stored[name].kind.name == kind
        assert np.array_equal(checkpoint.stored[name].dequantize(), checkpoint.weights[name].numpy())
    assert checkpoint.stored["blocks.0.attention.query.weight"].rows is not None
    assert checkpoint.stored["blocks.0.attention.value.weight"].rows is None


def test_b105_end_of_text_turn_and_message_ids_are_all_read(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 9)
        writer.add_pad_token_id(70)

    checkpoint = load_checkpoint(write_gguf(tmp_path / "x.gguf", make_model("llama"), edit=edit))
    assert checkpoint.generation.eos_token_ids == (2, 7, 9)
    assert checkpoint.generation.bos_token_id == 1
    assert checkpoint.generation.pad_token_id is None
    assert "padding_token_id 70 is no id of a vocabulary of 61; left out" in checkpoint.notes


def test_ignored_keys_are_listed_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_model("llama"), edit=lambda writer: writer.add_name("tiny"))
    checkpoint = load_checkpoint(path)
    assert checkpoint.source["format"] == "gguf"
    assert checkpoint.source["name"] == "x.gguf"
    assert any("ignored metadata keys: general.name" in note for note in checkpoint.notes)
    assert any("no vocabulary" in note for note in checkpoint.notes)

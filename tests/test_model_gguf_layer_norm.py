"""GGUF architectures whose norms are LayerNorm, written as llama.cpp's converter does, equal transformers."""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from parity import RELATIVE_TOLERANCES
from tiny_checkpoints import Edit, relative_difference, token_ids, write_gguf
from tiny_decoders import make_decoder

from graphport.export.model_export import export
from graphport.model_def.checkpoint import Checkpoint, CheckpointError, load_checkpoint

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]
NAMES = (
    *("gpt2", "starcoder2", "phi", "stablelm", "stablelm parallel", "stablelm with q/k norms"),
    *("gpt_neox", "gpt_neox serial", "falcon", "falcon new", "falcon new, one norm"),
    *("cohere", "cohere with q/k norms"),
)


class _Converted:
    """A model whose tensors are as the converter stores them: [out, in], q before k before v, head norms in one."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        norms: dict[str, list[torch.Tensor]] = {}
        for path, parameter in self.model.named_parameters():
            if ".norms." in path:
                norms.setdefault(path.partition(".norms.")[0] + ".weight", []).append(parameter)
            elif self.config.model_type == "gpt2" and (".attn.c_" in path or ".mlp.c_" in path):
                yield path, parameter.t() if parameter.ndim == 2 else parameter
            elif "query_key_value" in path:
                yield path, self._stacked(parameter)
            else:
                yield path, parameter
        for path, parts in norms.items():
            yield path, torch.stack(parts)

    def _stacked(self, parameter: torch.Tensor) -> torch.Tensor:
        """Rows of groups of query heads with their key and value, as all queries, all keys, all values."""
        config = self.config
        num_kv_heads = _kv_heads(config)
        head_dim = config.hidden_size // config.num_attention_heads
        groups = parameter.reshape(num_kv_heads, -1, head_dim, *parameter.shape[1:])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return torch.cat([part.reshape(-1, *parameter.shape[1:]) for part in parts])


def _kv_heads(config: Any) -> int:
    if config.model_type != "falcon":
        return int(config.num_attention_heads)
    return config.num_kv_heads if config.new_decoder_architecture else 1


def _model(name: str) -> Any:
    model = copy.deepcopy(make_decoder(name))
    if name == "starcoder2":  # whose window the converter does not write
        model.config.sliding_window = None
    if name == "falcon":
        model.config.num_kv_heads = 1
    return model


def _metadata(config: Any) -> Edit:
    def add(writer: gguf.GGUFWriter) -> None:
        if config.model_type in ("stablelm", "gpt_neox"):
            writer.add_parallel_residual(config.use_parallel_residual)
        if config.model_type == "falcon":
            writer.add_tensor_data_layout("jploski")
        if config.model_type == "cohere":
            writer.add_logit_scale(config.logit_scale)
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    return add


def _written(path: Path, model: Any) -> Path:
    return write_gguf(path / "x.gguf", _Converted(model), edit=_metadata(model.config))


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_with_layer_norms_equals_transformers(name: str, tmp_path: Path) -> None:
    model = _model(name)
    checkpoint = load_checkpoint(_written(tmp_path, model))
    for length in (4, 12, 40):
        found = relative_difference(checkpoint, model, token_ids(length))
        assert found < TOLERANCE, f"{length} tokens: {found}"
    assert "blocks.0.attention.query.weight" in checkpoint.stored


def _with_blocks(checkpoint: Checkpoint, part: str, **changes: Any) -> Checkpoint:
    blocks = tuple(
        dataclasses.replace(block, **{part: dataclasses.replace(getattr(block, part), **changes)})
        for block in checkpoint.config.blocks
    )
    return dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, blocks=blocks))


@pytest.mark.parametrize(
    ("name", "activation"),
    [("gpt2", "gelu"), ("gpt_neox", "gelu_tanh"), ("falcon", "gelu_tanh"), ("phi", "gelu"), ("starcoder2", "gelu")],
)
def test_the_other_gelu_is_rejected(name: str, activation: str, tmp_path: Path) -> None:
    model = _model(name)
    checkpoint = load_checkpoint(_written(tmp_path, model))
    broken = _with_blocks(checkpoint, "feed_forward", activation=activation)
    assert relative_difference(broken, model, token_ids(12)) > 5 * TOLERANCE


def test_command_r_rotated_by_halves_or_without_its_scale_is_rejected(tmp_path: Path) -> None:
    model = _model("cohere")
    checkpoint = load_checkpoint(_written(tmp_path, model))
    rotary = checkpoint.config.blocks[0].attention.rotary
    assert rotary is not None
    broken = _with_blocks(checkpoint, "attention", rotary=dataclasses.replace(rotary, interleaved=False))
    assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE
    unscaled = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, logit_scale=1.0))
    assert relative_difference(unscaled, model, token_ids(12)) > 100 * TOLERANCE


def test_falcons_norms_that_change_places_are_rejected(tmp_path: Path) -> None:
    model = _model("falcon new")
    checkpoint = load_checkpoint(_written(tmp_path, model))
    weights = dict(checkpoint.weights)
    for kind in ("weight", "bias"):
        first, second = (f"blocks.0.{norm}.{kind}" for norm in ("attention_norm", "feed_forward_norm"))
        weights[first], weights[second] = weights[second], weights[first]
    broken = dataclasses.replace(checkpoint, weights=weights)
    assert relative_difference(broken, model, token_ids(12)) > 100 * TOLERANCE


def test_a_quantised_gptneox_is_exported_exactly(tmp_path: Path) -> None:
    converted = _Converted(_model("gpt_neox"))
    path = write_gguf(tmp_path / "x.gguf", converted, kind=_kind, edit=_metadata(converted.config))
    bundle = export(path, tmp_path / "bundle", precision="gguf", context=24)
    assert bundle.certificate
    assert all(check.passed for check in bundle.certificate)


def _kind(name: str) -> gguf.GGMLQuantizationType:
    is_narrow = "dense_4h_to_h" in name  # rows of 44
    return gguf.GGMLQuantizationType.F32 if is_narrow else gguf.GGMLQuantizationType.Q8_0


@pytest.mark.parametrize(
    ("name", "edit", "refused"),
    [
        ("gpt2", lambda writer: writer.add_rope_dimension_count(16), r"gpt2\.rope\.dimension_count = 16"),
        ("falcon", lambda writer: writer.add_max_alibi_bias(8.0), r"falcon\.attention\.max_alibi_bias = 8\.0"),
        ("starcoder2", lambda writer: writer.add_sliding_window(5), r"starcoder2\.attention\.sliding_window = 5"),
        ("phi", lambda writer: writer.add_logit_scale(2.0), r"phi2\.logit_scale = 2\.0"),
    ],
)
def test_keys_that_an_architecture_does_not_have_are_refused(
    name: str, edit: Edit, refused: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "x.gguf", _Converted(_model(name)), edit=edit)
    with pytest.raises(CheckpointError, match=rf"not supported .* {refused}"):
        load_checkpoint(path)


def test_a_gptneox_read_with_the_other_residual_is_rejected(tmp_path: Path) -> None:
    model = _model("gpt_neox serial")
    path = write_gguf(tmp_path / "x.gguf", _Converted(model), edit=_metadata(_model("gpt_neox").config))
    checkpoint = load_checkpoint(path)
    assert checkpoint.config.blocks[0].norm_order == "parallel"
    assert relative_difference(checkpoint, model, token_ids(12)) > 100 * TOLERANCE

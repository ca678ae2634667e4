"""Image encoders in PyTorch: every family against transformers, sizes, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import RELATIVE_TOLERANCES
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json
from tiny_vision import KINDS, make_pixels, make_vision, reference_outputs, save_vision_folder

from graphport.export.source import open_source
from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import ConfigError
from graphport.model_def.transformer import Transformer
from graphport.model_def.vision import ImageEncoder
from graphport.model_def.vision_config import ImageConfig, ImageReadoutConfig, PreprocessingConfig

SIZES = ((32, 32), (40, 24), (16, 16), (16, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_folder(tmp_path_factory.mktemp("vit"), make_vision("vit"))


def _outputs(model: Transformer, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    with torch.inference_mode():
        states = model(pixels)
        return states, None if model.image_readout is None else model.image_readout(states)


def _relative(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    if wanted is None or found is None:
        assert found is wanted
        return 0.0
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_b132_a_folder_equals_transformers_at_every_size(kind: str, tmp_path: Path) -> None:
    reference = make_vision(kind)
    opened = open_source(save_vision_folder(tmp_path, reference), seed=0)
    assert TransformerConfig.from_dict(json.loads(json.dumps(opened.model.config.to_dict()))) == opened.model.config
    tolerance = RELATIVE_TOLERANCES["checkpoint", "float32"]
    encoder = ImageEncoder(opened.model, max_length=64)
    for size in SIZES:
        for count in (1, 5):
            pixels = make_pixels(count, *size)
            wanted = reference_outputs(kind, reference, pixels)
            found = _outputs(opened.model, pixels)
            assert _relative(found[0], wanted[0]) < tolerance
            assert _relative(found[1], wanted[1]) < tolerance
            with torch.inference_mode():
                states, *vector = encoder(pixels)
            assert _relative(states, wanted[0]) < tolerance
            assert _relative(vector[0] if vector else None, wanted[1]) < tolerance


def test_b132_other_images_and_wrong_readings_are_told_apart() -> None:
    """The tolerance would notice patches cut column by column, positions one off, and a missing class token."""
    reference = make_vision("vit")
    pixels = make_pixels(2, 32, 32)
    wanted, _ = reference_outputs("vit", reference, pixels)
    for broken in (
        reference_outputs("vit", reference, pixels.transpose(2, 3))[0],
        reference_outputs("vit", reference, pixels.roll(1, 0))[0],
        wanted.roll(1, 1),
    ):
        assert _relative(broken, wanted) > 1e-2


def test_weights_of_a_folder_that_do_not_fit_are_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.position_embeddings"] = tensors["embeddings.position_embeddings"][:, :-1].contiguous()
    tensors["layernorm.extra"] = torch.zeros(3)
    del tensors["encoder.layer.1.output.dense.bias"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing: encoder\.layer\.1\.output\.dense\.bias; not part .*extra; wrong"
    ):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        (
            "config.json",
            {"swin_window": 7},
            "keys or values that are not supported for model_type vit .*swin_window = 7",
        ),
        ("config.json", {"num_attention_heads": 5}, r"hidden_size \(48\) is no multiple of num_attention_heads \(5\)"),
        ("config.json", {"pooler_act": "sin"}, "pooler_act 'sin' is not supported"),
        ("config.json", {"image_size": 0}, "image_size must be a positive integer, got 0"),
        ("preprocessor_config.json", {"do_pad": True}, r"preprocessor_config\.json: .*do_pad = True"),
        ("preprocessor_config.json", {"image_processor_type": "SamImageProcessor"}, "'SamImageProcessor' is not read"),
        (
            "preprocessor_config.json",
            {"size": {"longest_edge": 3}},
            "size must have height and width, or shortest_edge",
        ),
        (
            "preprocessor_config.json",
            {"image_std": [0.0, 1.0, 1.0]},
            r"^preprocessor_config\.json: std must be a positive number, got 0.0",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    file: str, changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "preprocessor_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    edit_json(tmp_path / file, lambda values: values.update(changes))
    with pytest.raises(CheckpointError, match=reason):
        load_checkpoint(tmp_path)


def _image(**changes: Any) -> ImageConfig:
    return ImageConfig(**{"patch_size": (8, 8), "grid": (4, 4), **changes})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _image(fixed_size=(40, 20)), "40 x 20 is no whole number of patches of 8 x 8"),
        (lambda: _image(prefix_tokens=0, readout=ImageReadoutConfig()), "needs 1 tokens before the patches, got 0"),
        (lambda: ImageReadoutConfig(select="attention"), "'attention' needs pool"),
        (lambda: ImageReadoutConfig(labels=("a", "b"), width=3), "2 labels need a linear layer of that width, got 3"),
        (lambda: PreprocessingConfig(mean=(0.5,)), "mean and std go together"),
        (lambda: PreprocessingConfig(resample=9), "resample must be one of Pillow's filters"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()

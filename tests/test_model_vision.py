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

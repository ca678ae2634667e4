"""Tiny Hugging Face image encoders for tests: random transformers models, their folders, what they give for images.

In: a kind and changes to its config. Out: models of image 32, patch 8, whose attention is far from uniform. Nothing is
fetched; everything is seeded.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

_TOWER: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
_SIZES: dict[str, Any] = {**_TOWER, "intermediate_size": 40}
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,  # of `tiny_encoders.word_piece`, whose texts end with 3
    "max_position_embeddings": 40,
    "eos_token_id": 3,
    "bos_token_id": 2,
    "pad_token_id": 1,
}
_SIGLIP_TEXT = {**_TEXT, "projection_size": 48}
_LABELS = {"id2label": {0: "cat", 1: "dog", 2: "a bird", 3: "none", 4: "Größe"}}
_CLIP = {"vision_config": _SIZES, "text_config": _TEXT, "projection_dim": 20}

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "vit": (ViTModel, ViTConfig, {**_SIZES, "pooler_output_size": 20}),
    "vit classifier": (ViTForImageClassification, ViTConfig, {**_SIZES, **_LABELS, "qkv_bias": False}),
    "deit": (DeiTModel, DeiTConfig, _SIZES),
    "deit classifier": (DeiTForImageClassification, DeiTConfig, {**_SIZES, **_LABELS}),
    "deit with teacher": (DeiTForImageClassificationWithTeacher, DeiTConfig, {**_SIZES, **_LABELS}),
    "dinov2": (Dinov2Model, Dinov2Config, {**_TOWER, "mlp_ratio": 2}),
    "dinov2 swiglu": (Dinov2Model, Dinov2Config, {**_TOWER, "mlp_ratio": 2, "use_swiglu_ffn": True}),
    "dinov2 classifier": (Dinov2ForImageClassification, Dinov2Config, {**_TOWER, **_LABELS, "mlp_ratio": 2}),
    "clip": (CLIPModel, CLIPConfig, _CLIP),
    "clip old": (CLIPModel, CLIPConfig, {**_CLIP, "text_config": {**_TEXT, "eos_token_id": 2}}),
    "clip vision": (CLIPVisionModel, CLIPVisionConfig, _SIZES),
    "clip vision projection": (CLIPVisionModelWithProjection, CLIPVisionConfig, {**_SIZES, "projection_dim": 20}),
    "clip classifier": (CLIPForImageClassification, CLIPConfig, {**_CLIP, **_LABELS}),
    "siglip": (SiglipModel, SiglipConfig, {"vision_config": _SIZES, "text_config": _SIGLIP_TEXT}),
    "siglip vision": (SiglipVisionModel, SiglipVisionConfig, _SIZES),
    "siglip no head": (SiglipVisionModel, SiglipVisionConfig, {**_SIZES, "vision_use_head": False}),
    "siglip classifier": (
        SiglipForImageClassification,
        SiglipConfig,
        {"vision_config": _SIZES, "text_config": _TEXT, **_LABELS},
    ),
}
TWO_TOWERS = ("clip", "clip old", "siglip")
CLASSIFIERS = [kind for kind in KINDS if "classifier" in kind or "teacher" in kind]

PREPROCESSING: dict[str, Any] = {
    "do_resize": True,
    "size": {"shortest_edge": 36},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48, 0.45, 0.4],
    "image_std": [0.27, 0.26, 0.28],
    "do_convert_rgb": True,
}


def make_vision(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 model in eval mode: sharp attention, norms away from 1, biases and tokens not zero."""
    model_class, config_class, fixed = KINDS[kind]
    config = config_class(**{**fixed, **changes})
    model = model_class(config).eval()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, torch.randn(parameter.shape, generator=generator)))
    return model


def _random(name: str, noise: torch.Tensor) -> torch.Tensor:
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.3 * noise
    if name.startswith("logit_"):
        return noise + (2.0 if name == "logit_scale" else -3.0)
    if "lambda1" in name:
        return 0.6 + 0.4 * noise
    if noise.ndim < 2 or any(part in name for part in ("token", "position", "probe")):
        return 0.5 * noise
    is_sharp = any(part in name for part in ("q_proj", "k_proj", "in_proj"))
    return noise * (2.5 if is_sharp else 1.0) * noise[0].numel() ** -0.5


def save_vision_folder(folder: Path, model: Any, **preprocessing: Any) -> Path:
    """`model` and a preprocessor_config.json."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSING, **preprocessing}))
    return folder


def make_pixels(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random pixels float32 [B, 3, height, width]."""
    return torch.randn((shape[0], 3, *shape[1:]), generator=torch.Generator().manual_seed(seed))


def reference_outputs(kind: str, model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Last hidden states [B, S, W] of the transformers model, and its vectors or logits [B, D], where it has any."""
    options = {} if "dinov2" in kind else {"interpolate_pos_encoding": True}
    with torch.inference_mode():
        tower = model
        for name in ("vit", "deit", "dinov2", "vision_model"):
            tower = getattr(tower, name, tower)
        found = tower(pixels, **options)
        states = found.last_hidden_state
        if kind in TWO_TOWERS:
            return states, model.get_image_features(pixels, **options).pooler_output
        if kind == "clip vision projection":
            return states, model(pixels, **options).image_embeds
        if kind in CLASSIFIERS:
            return states, model(pixels, **options).logits
        return states, found.pooler_output

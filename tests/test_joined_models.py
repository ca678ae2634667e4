"""Folders that are not one model: what is said of joined models and adapters, and that their parts are read alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import RELATIVE_TOLERANCES
from tiny_joined import make_llava
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.checkpoint_config import read_checkpoint_config
from graphport.model_def.transformer import Transformer


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined") / "llava"
    make_llava().save_pretrained(folder)
    return folder


def test_the_parts_of_a_joined_model_are_named_with_those_that_are_read(llava: Path) -> None:
    message = (
        "config.json: model_type 'llava' joins several models, which are not read together: text_config is llama, "
        "vision_config is clip_vision_model; text_config (llama) and vision_config (clip_vision_model) can be "
        "exported, each saved to a folder of its own: see 'A part of a larger model' in docs/export.md"
    )
    for read in (load_checkpoint, read_checkpoint_config):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read(llava)
    page = Path(__file__).resolve().parent.parent / "docs/export.md"
    assert "## A part of a larger model" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model_type", "parts", "readable"),
    [
        ("paligemma", {"text_config": "gemma", "vision_config": "siglip_vision_model"}, 2),
        ("blip", {"text_config": "blip_text_model", "vision_config": "blip_vision_model"}, 0),
        (
            "blip-2",
            {"text_config": "opt", "vision_config": "blip_2_vision_model", "qformer_config": "blip_2_qformer"},
            1,
        ),
        ("gemma3", {"text_config": "gemma3_text", "vision_config": "siglip_vision_model"}, 2),
        ("qwen2_vl", {"text_config": "qwen2_vl_text", "vision_config": "qwen2_vl"}, 0),
        ("smolvlm", {"text_config": "llama", "vision_config": "smolvlm_vision"}, 1),
    ],
)
def test_joined_configurations_of_transformers_are_told_apart(
    model_type: str, parts: dict[str, str], readable: int, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"model_type '{model_type}' joins several models") as caught:
        load_checkpoint(tmp_path)
    text = str(caught.value)
    assert all(f"{key} is {part}" in text for key, part in parts.items())
    assert text.count("(") == readable
    assert ("none of them is a model that is read" in text) == (readable == 0)


def test_an_encoder_and_a_decoder_of_two_kinds_are_named(tmp_path: Path) -> None:
    values = {"model_type": "encoder-decoder", "encoder": {"model_type": "bert"}, "decoder": {"model_type": "gpt2"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        CheckpointError, match=r"encoder is bert, decoder is gpt2; encoder \(bert\) and decoder \(gpt2\) can"
    ):
        load_checkpoint(tmp_path)


def test_the_text_part_saved_as_the_page_says_computes_the_same(llava: Path, tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(llava, attn_implementation="eager")
    text: Any = AutoModelForCausalLM.from_config(whole.config.text_config)
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    text.save_pretrained(tmp_path / "text")
    whole.model.vision_tower.save_pretrained(tmp_path / "images")
    checkpoint = load_checkpoint(tmp_path / "text")
    model = Transformer(checkpoint.config).eval()
    model.load_state_dict(checkpoint.weights, strict=True)
    ids = torch.arange(1, 30)[None]
    with torch.inference_mode():
        wanted, found = whole(input_ids=ids).logits, model(ids)
    assert (wanted - found).abs().max() / wanted.abs().max() < RELATIVE_TOLERANCES["checkpoint", "float32"]
    assert load_checkpoint(tmp_path / "images").config.image is not None


@pytest.mark.parametrize(
    ("values", "opener"),
    [
        ({"task_type": "CAUSAL_LM"}, "AutoPeftModelForCausalLM"),
        ({"task_type": "SEQ_CLS"}, "AutoPeftModelForSequenceClassification"),
        ({"task_type": "SEQ_2_SEQ_LM", "base_model_name_or_path": "google/t5"}, "AutoPeftModelForSeq2SeqLM"),
    ],
)
def test_adapters_are_refused_with_their_base_and_what_merges_them(
    values: dict[str, str], opener: str, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    base = values.get("base_model_name_or_path")
    of = f" of {base}" if base else ""
    message = rf"is an adapter \(adapter_config\.json\){of}, not a model; merge it .*: {opener}\.from_pretrained"
    for read in (load_checkpoint, read_checkpoint_config):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)

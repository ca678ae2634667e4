"""What DeepSeek and GPT-OSS have that no other family has: read without it, a model is rejected."""

import dataclasses
from pathlib import Path

import pytest
import torch
from parity import RELATIVE_TOLERANCES
from tiny_checkpoints import relative_difference, token_ids
from tiny_decoders import make_decoder

from graphport.model_def.checkpoint import load_checkpoint
from graphport.model_def.config import BlockConfig

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]


def test_attention_read_without_its_sinks_is_rejected(tmp_path: Path) -> None:
    make_decoder("gpt_oss").save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    weights = {name: torch.full_like(w, -1e4) if "sinks" in name else w for name, w in checkpoint.weights.items()}
    broken = dataclasses.replace(checkpoint, weights=weights)
    assert relative_difference(broken, make_decoder("gpt_oss"), token_ids(12)) > 100 * TOLERANCE


@pytest.mark.parametrize("scores", ["scale", "interleaved"])
def test_latent_attention_without_its_scale_or_its_pairs_is_rejected(scores: str, tmp_path: Path) -> None:
    make_decoder("deepseek_v2").save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)

    def change(block: BlockConfig) -> BlockConfig:
        attention = block.attention
        assert attention.rotary is not None
        if scores == "scale":
            return dataclasses.replace(block, attention=dataclasses.replace(attention, scale=None))
        rotary = dataclasses.replace(attention.rotary, interleaved=False)
        return dataclasses.replace(block, attention=dataclasses.replace(attention, rotary=rotary))

    config = dataclasses.replace(checkpoint.config, blocks=tuple(map(change, checkpoint.config.blocks)))
    broken = dataclasses.replace(checkpoint, config=config)
    assert relative_difference(broken, make_decoder("deepseek_v2"), token_ids(12)) > 100 * TOLERANCE

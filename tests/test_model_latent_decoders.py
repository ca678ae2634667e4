"""What DeepSeek and GPT-OSS have that no other family has: read without it, a model is rejected."""

import dataclasses
from pathlib import Path

import pytest
import torch
from parity import RELATIVE_TOLERANCES, assert_parity
from tiny_checkpoints import relative_difference, token_ids
from tiny_decoders import make_decoder

from graphport.model_def.block_config import BlockConfig
from graphport.model_def.checkpoint import load_checkpoint
from graphport.model_def.ops import cached_attention
from graphport.model_def.sink_ops import sink_cached_attention

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


def test_attention_with_sinks_passes_opcheck_and_is_plain_attention_where_they_are_lowest() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 3, heads * 8, generator=generator) for heads in (4, 2, 2))
    past = [torch.randn(1, 2, 8, 8, generator=generator) for _ in range(2)]
    lengths = torch.tensor([4], dtype=torch.int32), torch.tensor(5, dtype=torch.int32)
    tables = torch.ones(8, 4), torch.zeros(8, 4)
    inputs = (query, key, value, *past, *lengths, *tables)
    torch.library.opcheck(sink_cached_attention, (*inputs, torch.randn(4, generator=generator), 4, 2, 0.3, 3, False))
    plain = cached_attention(*inputs, 4, 2, 0.3, 0.0, 3, False)
    lowest = sink_cached_attention(*inputs, torch.full((4,), -1e9), 4, 2, 0.3, 3, False)
    assert_parity(lowest[0], plain[0], "attention")
    taken = sink_cached_attention(*inputs, torch.full((4,), 1e9), 4, 2, 0.3, 3, False)
    assert taken[0].abs().max() == 0

"""Latent attention and routers of groups once weights and cache are rounded, and what the cache holds of them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import block, decoder, tiny_model, token_ids

from graphport.export.model_export import export
from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.config import TransformerConfig
from graphport.model_def.expert_choice import choose_experts
from graphport.model_def.expert_config import ExpertsConfig, RouterConfig
from graphport.model_def.latent_config import LatentConfig
from graphport.model_def.position_config import ConfigError, RotaryPosition
from graphport.runtime import SamplingParams, load

LENGTH = 24
ROTARY = RotaryPosition(theta=100.0, partial_factor=0.5, interleaved=True)
ATTENTION = AttentionConfig(
    num_heads=3,
    num_kv_heads=3,
    head_dim=32,
    rotary=ROTARY,
    latent=LatentConfig(key_value_rank=64, value_dim=20, query_rank=32),
)
ROUTER = RouterConfig(scores="sigmoid", correction=True, num_groups=3, num_chosen_groups=2, group_best=2, scaling=0.5)
EXPERTS = ExpertsConfig(num_experts=6, num_chosen=2, width=32, router=ROUTER, shared_width=64)


def _config() -> TransformerConfig:
    return decoder(block(attention=ATTENTION, feed_forward=EXPERTS), hidden_size=64)


def _choose(logits: torch.Tensor, correction: torch.Tensor) -> list[tuple[set[int], dict[int, float]]]:
    """The experts of each row and their weights, written out (DeepSeek-V3, equations 12 to 16)."""
    rows = []
    for row in logits.double():
        weights = 1 / (1 + torch.exp(-row))
        ranks = weights + correction
        groups = [sorted(range(2 * g, 2 * g + 2), key=lambda e: -float(ranks[e])) for g in range(3)]
        best = sorted(groups, key=lambda group: -sum(float(ranks[e]) for e in group[: ROUTER.group_best]))
        allowed = [expert for group in best[: ROUTER.num_chosen_groups] for expert in group]
        chosen = sorted(allowed, key=lambda e: -float(ranks[e]))[: EXPERTS.num_chosen]
        total = sum(float(weights[e]) for e in chosen)
        rows.append((set(chosen), {e: float(weights[e]) / total for e in chosen}))
    return rows


def test_the_scores_given_to_kernels_choose_and_weigh_what_the_formula_does() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(50, 6, generator=generator)
    logits[0] -= 200  # sigmoids that no float holds
    correction = torch.randn(6, generator=generator)
    scores, factor = choose_experts(logits, correction, EXPERTS)
    shares = torch.softmax(scores, dim=-1)
    assert factor == ROUTER.scaling
    assert torch.isfinite(shares).all()
    expected = _choose(logits[1:], correction)
    for row, (chosen, weights) in zip(shares[1:], expected, strict=True):
        assert set(row.topk(2).indices.tolist()) == chosen
        assert all(abs(float(row[expert]) - weight) < 1e-5 for expert, weight in weights.items())
    for fault in ({"group_best": 1}, {"num_chosen_groups": 3}, {"num_groups": 1, "num_chosen_groups": 1}):
        broken = dataclasses.replace(EXPERTS, router=dataclasses.replace(ROUTER, **fault))
        places = choose_experts(logits[1:], correction, broken)[0].topk(2).indices
        assert any(set(ids.tolist()) != chosen for ids, (chosen, _) in zip(places, expected, strict=True)), fault


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_a_rounded_bundle_of_latent_attention_passes_its_certificate(cache: str, tmp_path: Path) -> None:
    model = tiny_model(_config())
    bundle = export(model, tmp_path / "bundle", precision="int8", kv_cache=cache, context=LENGTH, verify=True)
    assert (bundle.fusions["attention"], bundle.fusions["experts"]) == (2, 2)
    assert bundle.certificate
    assert all(check.passed for check in bundle.certificate)
    with load(bundle.path, threads=1) as lm:
        prompts = [token_ids(length).tolist() for length in (3, 5)]
        params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
        together = lm.generate(prompts, params)
        assert [lm.generate([prompt], params)[0] for prompt in prompts] == together


def test_the_cache_holds_keys_and_values_of_every_head_with_zeros_behind_the_values() -> None:
    model = tiny_model(_config())
    past = [torch.full((1, 3, LENGTH, 32), 7.0) for _ in range(4)]
    lengths = torch.tensor([4], dtype=torch.int32), torch.tensor(5, dtype=torch.int32)
    with torch.no_grad():
        _, key, value, *_ = CachedDecoder(model, max_length=LENGTH)(token_ids(1, 5), *lengths, torch.arange(5), *past)
    written = value[0, :, :5].numpy()
    assert np.abs(written[..., :20]).min() > 0
    assert np.abs(written[..., 20:]).max() == 0
    turning = key[0, :, :5, :16]
    assert torch.equal(turning[0], turning[1])  # one vector for all heads
    assert not torch.equal(key[0, 0, :5, 16:], key[0, 1, :5, 16:])


def test_latent_attention_that_no_head_can_have_is_refused() -> None:
    config = _config()
    assert TransformerConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="rotates a part of each head, got 0 of 32 dimensions"):
        AttentionConfig(num_heads=3, num_kv_heads=3, head_dim=32, latent=ATTENTION.latent)
    with pytest.raises(ConfigError, match="latent attention is causal"):
        AttentionConfig(num_heads=3, num_kv_heads=3, head_dim=32, latent=ATTENTION.latent, rotary=ROTARY, causal=False)
    with pytest.raises(ConfigError, match="groups of 2 experts have no best 3"):
        ExpertsConfig(num_experts=6, num_chosen=2, width=8, router=RouterConfig(num_groups=3, group_best=3))

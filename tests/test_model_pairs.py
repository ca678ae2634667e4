"""Gated attention with a bias from pairs, as structure models use it: against ESMFold's own, and as a user's file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import assert_parity
from transformers.models.esm.modeling_esmfold import EsmFoldPairToSequence, EsmFoldSelfAttention

from graphport.cli import main
from graphport.model_def.attention import Attention
from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.pair_config import PairConfig
from graphport.model_def.pairs import PairBias, PairEmbedding
from graphport.model_def.position_config import ConfigError
from graphport.runtime import Encoder, load

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/structure_trunk.py"
B, S, WIDTH, PAIR, HEADS = 2, 7, 24, 10, 3


def _esmfold() -> tuple[EsmFoldSelfAttention, EsmFoldPairToSequence]:
    torch.manual_seed(0)
    theirs, to_bias = EsmFoldSelfAttention(WIDTH, HEADS, WIDTH // HEADS, gated=True), EsmFoldPairToSequence(PAIR, HEADS)
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *to_bias.parameters()):
            parameter.copy_(torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5 * 2))
    return theirs, to_bias


def _ours(theirs: EsmFoldSelfAttention, to_bias: EsmFoldPairToSequence) -> tuple[Attention, PairBias]:
    config = AttentionConfig(
        num_heads=HEADS, num_kv_heads=HEADS, head_dim=WIDTH // HEADS, causal=False, output_bias=True, gate=True
    )
    attention, bias = Attention(config, WIDTH), PairBias(PairConfig(width=PAIR), HEADS)
    packed = theirs.proj.weight.reshape(HEADS, 3, WIDTH // HEADS, WIDTH).transpose(0, 1).reshape(3, WIDTH, WIDTH)
    state = dict(zip(("query.weight", "key.weight", "value.weight"), packed, strict=True))
    state |= {"output.weight": theirs.o_proj.weight, "output.bias": theirs.o_proj.bias}
    attention.load_state_dict(state | {"gate.weight": theirs.g_proj.weight, "gate.bias": theirs.g_proj.bias})
    norm = {"norm.weight": to_bias.layernorm.weight, "norm.bias": to_bias.layernorm.bias}
    bias.load_state_dict(norm | {"projection.weight": to_bias.linear.weight})
    return attention, bias


def test_gated_attention_over_pairs_equals_esmfold() -> None:
    theirs, to_bias = _esmfold()
    attention, pair_bias = _ours(theirs, to_bias)
    x, pairs = torch.randn(B, S, WIDTH), torch.randn(B, S, S, PAIR)
    padding = torch.tensor([[True] * S, [True] * 4 + [False] * 3])
    with torch.inference_mode():
        wanted, _ = theirs(x, mask=padding, bias=to_bias(pairs))
        whole = attention(x, padding=padding, bias=pair_bias(pairs))
        padded = attention.encode(x, torch.tensor([S, 4], dtype=torch.int32), None, pair_bias(pairs))
        for found in (whole, padded):
            assert_parity(found[0], wanted[0], "equal models")
            assert_parity(found[1, :4], wanted[1, :4], "equal models")
        wrong = (
            attention(x, padding=padding),
            attention(x, padding=padding, bias=pair_bias(pairs.transpose(1, 2))),
            attention(x, padding=padding, bias=pair_bias(pairs).roll(1, 1)),
        )
        for found in wrong:
            with pytest.raises(AssertionError):
                assert_parity(found[0], wanted[0], "equal models")
        attention.gate = None
        with pytest.raises(AssertionError):
            assert_parity(attention(x, padding=padding, bias=pair_bias(pairs))[0], wanted[0], "equal models")


def test_pairs_are_the_sum_of_their_tokens_and_their_distance() -> None:
    embedding = PairEmbedding(PairConfig(width=PAIR, max_distance=2), WIDTH)
    x = torch.randn(B, S, WIDTH)
    with torch.inference_mode():
        found = embedding(x)
        for i in range(S):
            for j in range(S):
                row = embedding.distance.weight[min(max(j - i, -2), 2) + 2]
                assert_parity(found[:, i, j], embedding.left(x[:, i]) + embedding.right(x[:, j]) + row, "equal models")


def test_an_example_file_goes_through_the_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "trunk")
    assert main(["export", f"{EXAMPLE}:trunk", out, "--precision", "fp32", "--require-fused", "attention=all"]) == 0
    capsys.readouterr()
    assert main(["verify", out, "--against", f"{EXAMPLE}:trunk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    with load(out) as model:
        assert isinstance(model, Encoder)
        rows = [[5, 3, 9, 1], [2, 7]]
        together = model.hidden_states(rows)
        assert_parity(together[1], model.hidden_states(rows[1:])[0], "reused cache")
        assert np.abs(together[0] - model.hidden_states([rows[0][::-1]])[0][::-1]).max() > 1e-3  # order counts


def test_what_pairs_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="pair width must be"):
        PairConfig(width=0)
    with pytest.raises(ConfigError, match="pair max_distance must be"):
        PairConfig(width=8, max_distance=0)
    from tiny_models import block, decoder

    with pytest.raises(ConfigError, match="pairs of tokens are of bidirectional encoders of ids"):
        decoder(block(), pair=PairConfig(width=8))
    assert TransformerConfig.from_dict(decoder(block()).to_dict()).pair is None

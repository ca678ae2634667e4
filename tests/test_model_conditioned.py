"""Blocks conditioned on a vector (adaLN-zero): against the diffusion transformer of Qwen2.5-Omni, and exported."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import assert_parity
from tiny_models import attention, block, decoder, tiny_model, token_ids
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import DiTDecoderLayer, Qwen2_5_OmniAdaLayerNormZero_Final

from graphport.cli import main
from graphport.export import export
from graphport.model_def.block import Block
from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder import Encoder as PaddedEncoder
from graphport.model_def.modulation import AdaptiveFinalNorm, AdaptiveNorms
from graphport.model_def.norms import Norm
from graphport.model_def.position_config import ConfigError
from graphport.model_def.readout_config import PoolingConfig
from graphport.model_def.seeded_conditions import seeded_conditions
from graphport.runtime import Encoder, load

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/conditioned_blocks.py"
B, S, WIDTH, HEADS = 2, 7, 24, 3
_DIT = {"query": "to_q", "key": "to_k", "value": "to_v", "output": "to_out.0"}


def _randomised(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (2 * parameter.shape[-1] ** -0.5))
    return module.eval()


def _ours(theirs: DiTDecoderLayer) -> tuple[Block, AdaptiveNorms]:
    heads = AttentionConfig(
        num_heads=HEADS, num_kv_heads=HEADS, head_dim=WIDTH // HEADS, causal=False, qkv_bias=True, output_bias=True
    )
    feed_forward = FeedForwardConfig(width=2 * WIDTH, activation="gelu_tanh", gated=False, bias=True)
    ours = Block(BlockConfig(attention=heads, feed_forward=feed_forward, norm=NormConfig(kind="layer")), WIDTH)
    state = theirs.state_dict()
    found = {name: tensor for name, tensor in ours.state_dict().items() if "norm" in name}  # theirs has no weights
    for part in ("weight", "bias"):
        found |= {f"attention.{own}.{part}": state[f"attn.{other}.{part}"] for own, other in _DIT.items()}
        found |= {
            f"feed_forward.up.{part}": state[f"ff.ff.0.{part}"],
            f"feed_forward.down.{part}": state[f"ff.ff.3.{part}"],
        }
    ours.load_state_dict(found)
    norms = AdaptiveNorms(WIDTH)
    norms.load_state_dict({f"projection.{part}": state[f"attn_norm.linear.{part}"] for part in ("weight", "bias")})
    return ours, norms


def test_a_conditioned_block_equals_that_of_a_diffusion_transformer() -> None:
    torch.manual_seed(0)
    config = Qwen2_5OmniDiTConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, head_dim=WIDTH // HEADS, ff_mult=2, dropout=0.0
    )
    config._attn_implementation = "sdpa"
    theirs = _randomised(DiTDecoderLayer(config))
    ours, norms = _ours(theirs)
    x, conditioning = torch.randn(B, S, WIDTH), torch.randn(B, WIDTH)
    unturned = torch.ones(1, S, WIDTH // HEADS), torch.zeros(1, S, WIDTH // HEADS)
    with torch.inference_mode():
        wanted = theirs(x, conditioning, position_embeddings=unturned, block_diff=torch.zeros(B, HEADS, S, S))
        assert_parity(ours(x, modulation=norms(conditioning)), wanted, "equal models")
        made = norms(conditioning)
        swapped = made._replace(attention=made.feed_forward, feed_forward=made.attention)
        shifted = made._replace(attention=made.attention._replace(shift=made.attention.gate))
        for wrong in (norms(conditioning.roll(1, 0)), swapped, shifted, None):
            with pytest.raises(AssertionError):
                assert_parity(ours(x, modulation=wrong), wanted, "equal models")


def test_the_last_norm_is_shifted_and_scaled_like_theirs() -> None:
    torch.manual_seed(1)
    theirs = _randomised(Qwen2_5_OmniAdaLayerNormZero_Final(WIDTH))
    ours, norm = AdaptiveFinalNorm(WIDTH), Norm(NormConfig(kind="layer"), WIDTH)
    order = torch.cat([torch.arange(WIDTH, 2 * WIDTH), torch.arange(WIDTH)])  # theirs gives the scale first
    state = {f"projection.{part}": getattr(theirs.linear, part)[order] for part in ("weight", "bias")}
    ours.load_state_dict(state)
    x, conditioning = torch.randn(B, S, WIDTH), torch.randn(B, WIDTH)
    with torch.inference_mode():
        wanted = theirs(x, conditioning)
        assert_parity(ours(norm(x), conditioning), wanted, "equal models")
        ours.load_state_dict({name: tensor[order] for name, tensor in state.items()})
        with pytest.raises(AssertionError):
            assert_parity(ours(norm(x), conditioning), wanted, "equal models")


def _tiny() -> TransformerConfig:
    both_ways = attention(causal=False, num_kv_heads=6)
    return decoder(block(of=both_ways, norm=NormConfig(kind="layer")), head="none", conditioned=True)


def test_a_padded_batch_equals_each_text_alone_and_gates_of_zero_leave_x_as_it_is() -> None:
    config = _tiny()
    model, ids = tiny_model(config), token_ids(3, 7)
    lengths, conditioning = torch.tensor([7, 1, 4], dtype=torch.int32), torch.randn(3, config.hidden_size)
    with torch.inference_mode():
        (found,) = PaddedEncoder(model, max_length=16)(ids, lengths, conditioning)
        for row, length in enumerate(lengths.tolist()):
            one = slice(row, row + 1)
            alone = model(ids[one, :length], conditioning=conditioning[one])
            assert_parity(found[row, :length], alone[0], "equal models")
            other = model(ids[one, :length], conditioning=conditioning.roll(1, 0)[one])
            with pytest.raises(AssertionError):
                assert_parity(found[row, :length], other[0], "equal models")
        for norms in model.modulations:  # as training begins (Peebles and Xie 2023, 3.2): each block is the identity
            norms.projection.weight.zero_()
            norms.projection.bias.zero_()
        states = model.run_blocks(ids, conditioning=conditioning)
        assert torch.equal(states, model.embed(ids, torch.arange(7)))
        with pytest.raises(ValueError, match="a conditioned stack reads a vector a text"):
            model(ids)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("conditioned") / "bundle")
    assert main(["export", f"{EXAMPLE}:blocks", out, "--precision", "fp32", "--require-fused", "attention=all"]) == 0
    return out


def test_an_example_file_goes_through_the_certificate(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", bundle, "--against", f"{EXAMPLE}:blocks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    assert main(["verify", bundle, "--invariance", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_the_certificate_rejects_a_bundle_that_is_conditioned_otherwise(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "graphport.runtime.certified_model.seeded_conditions", lambda rows, width: -seeded_conditions(rows, width)
    )
    assert main(["verify", bundle, "--json"]) != 0
    assert not json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_blocks_pass_their_certificate(precision: str, tmp_path: Path) -> None:
    export(f"{EXAMPLE}:blocks", tmp_path / "out", precision=precision)
    with load(tmp_path / "out") as model:
        assert model.manifest.precision == precision


def test_states_follow_the_conditioning_of_their_own_text(bundle: str) -> None:
    rows = [[5, 3, 9, 1], [2, 7], [8]]
    vectors = np.random.default_rng(0).standard_normal((3, 64))
    with load(bundle) as model:
        assert isinstance(model, Encoder)
        together = model.hidden_states(rows, conditioning=vectors)
        for index, row in enumerate(rows):
            alone = model.hidden_states([row], conditioning=vectors[index : index + 1].astype(np.float32))
            assert_parity(together[index], alone[0], "equal models")
            other = model.hidden_states([row], conditioning=-vectors[index : index + 1])
            assert np.abs(other[0] - alone[0]).max() > 0.1
        one_at_a_time = model.hidden_states(rows, conditioning=vectors, batch_size=1)
        assert_parity(np.concatenate(one_at_a_time), np.concatenate(together), "equal models")


def test_conditioning_that_does_not_fit_is_refused(bundle: str) -> None:
    rows = [[5, 3], [2]]
    with load(bundle) as model:
        assert isinstance(model, Encoder)
        with pytest.raises(ValueError, match=r"conditioned on a vector a text; give conditioning, float \[2, 64\]"):
            model.hidden_states(rows)
        for wrong in (np.zeros((1, 64)), np.zeros((2, 63)), np.zeros((2, 64), np.int64)):
            with pytest.raises(ValueError, match=r"conditioning must be float \[2, 64\], got"):
                model.hidden_states(rows, conditioning=wrong)
        with pytest.raises(ValueError, match="conditioning has numbers that are not finite"):
            model.hidden_states(rows, conditioning=np.full((2, 64), np.nan))
        with pytest.raises(ValueError, match="conditioning has numbers that are not finite"):  # as float32
            model.hidden_states(rows, conditioning=np.full((2, 64), 1e300))
        with pytest.raises(ValueError, match=r"must be float \[2, 64\], got vectors of several widths"):
            model.hidden_states(rows, conditioning=[[1.0] * 64, [1.0]])  # type: ignore[arg-type]  # as a caller may
        with pytest.raises(ValueError, match="no pooling, so no vector a text; use hidden_states"):
            model.encode(rows)


def test_what_cannot_be_conditioned_is_refused() -> None:
    layer = block(of=attention(causal=False, num_kv_heads=6))
    for changes in ({"pooling": PoolingConfig()}, {"final_norm": None}, {"head": "tied"}):
        with pytest.raises(ConfigError, match="a conditioned stack is a bidirectional encoder of ids"):
            decoder(layer, **({"head": "none", "conditioned": True} | changes))
    with pytest.raises(ConfigError, match="a conditioned stack is a bidirectional encoder of ids"):
        decoder(block(), head="none", conditioned=True)
    with pytest.raises(ConfigError, match="conditioned blocks have norm_order 'pre'"):
        decoder(block(of=attention(causal=False), norm_order="post"), head="none", conditioned=True)
    config = _tiny()
    assert TransformerConfig.from_dict(config.to_dict()) == config


def test_seeded_conditions_are_those_of_their_ids_alone() -> None:
    together = seeded_conditions([[1, 2], [3]], 5)
    assert together.dtype == np.float32
    assert np.array_equal(together[1:], seeded_conditions([[3]], 5))
    assert not np.array_equal(together[0], together[1])
    assert np.array_equal(seeded_conditions([[3]], 3) * 64, np.round(seeded_conditions([[3]], 3) * 64))

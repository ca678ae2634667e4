"""Attention against torch's own layers, and the properties that its definition promises."""

import dataclasses
from typing import Any

import pytest
import torch
from parity import assert_parity
from tiny_models import HIDDEN, attention, block, decoder, tiny_model, token_ids
from torch import Tensor, nn

from graphport.model_def.attention import Attention
from graphport.model_def.block_config import BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.transformer import Transformer

MINUS_INFINITY = float("-inf")


def attention_layer(config: TransformerConfig, seed: int = 0) -> Attention:
    """The first attention of a random model."""
    return tiny_model(config, seed).layers[0].attention


def both_ways(**changes: Any) -> TransformerConfig:
    fields: dict[str, Any] = {
        "causal": False,
        "rotary": None,
        "num_heads": 5,
        "num_kv_heads": 5,
        "head_dim": 8,
        "qkv_bias": True,
        "output_bias": True,
    }
    of = attention(**(fields | changes))
    return decoder(block(of=of), head="none")


def activations(rows: int, length: int, *, seed: int = 2) -> Tensor:
    return torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def padding_mask() -> Tensor:
    """True at real tokens: row 0 is whole, row 1 padded right, row 2 left."""
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 5:] = False
    mask[2, :3] = False
    return mask


def additive_bias(num_heads: int) -> Tensor:
    """Floats of both signs and some minus infinity, different a row and a head."""
    bias = torch.randn(3, num_heads, 9, 9, generator=torch.Generator().manual_seed(3)) * 2
    bias[:, 1, :, 4] = MINUS_INFINITY
    return bias


def torch_attention(ours: Attention) -> nn.MultiheadAttention:
    config = ours.config
    theirs = nn.MultiheadAttention(HIDDEN, config.num_heads, bias=config.qkv_bias, batch_first=True).eval()
    projections = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        if config.qkv_bias:
            theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
            theirs.out_proj.bias.copy_(ours.output.bias)
    return theirs


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("masks", ["none", "padding", "additive", "both"])
@torch.no_grad()
def test_attention_equals_torch_multihead_attention(masks: str, *, has_bias: bool) -> None:
    ours = attention_layer(both_ways(qkv_bias=has_bias, output_bias=has_bias))
    theirs = torch_attention(ours)
    x = activations(3, 9)
    padding = padding_mask() if masks in ("padding", "both") else None
    bias = additive_bias(5) if masks in ("additive", "both") else None
    key_padding = None if padding is None else torch.zeros(padding.shape).masked_fill(~padding, MINUS_INFINITY)
    expected, _ = theirs(
        x,
        x,
        x,
        key_padding_mask=key_padding,
        attn_mask=None if bias is None else bias.flatten(0, 1),
        need_weights=False,
    )
    assert_parity(ours(x, padding=padding, bias=bias), expected, "torch layers")
    broken = {
        "zeros": torch.zeros_like(expected),
        "shifted": ours(x.roll(1, dims=1), padding=padding, bias=bias),
        "mask off": ours(x) if masks != "none" else ours(x, padding=padding_mask()),
    }
    for what, wrong in broken.items():
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(wrong, expected, "torch layers", what=what)


@torch.no_grad()
def test_causal_attention_equals_torch_multihead_attention_with_a_causal_mask() -> None:
    ours = attention_layer(both_ways(causal=True))
    x = activations(3, 9)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    expected, _ = torch_attention(ours)(x, x, x, attn_mask=future, need_weights=False)
    assert_parity(ours(x), expected, "torch layers")


@torch.no_grad()
def test_swapped_heads_are_told_from_the_right_ones() -> None:
    ours = attention_layer(both_ways())
    x = activations(3, 9)
    expected, _ = torch_attention(ours)(x, x, x, need_weights=False)
    columns = torch.arange(40).unflatten(0, (5, 8)).roll(1, dims=0).flatten()
    ours.output.weight.copy_(ours.output.weight[:, columns])
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(ours(x), expected, "torch layers")


def torch_encoder_layer(config: BlockConfig, model: Transformer) -> nn.TransformerEncoderLayer:
    activation = config.feed_forward.activation
    assert activation in ("relu", "gelu")
    theirs = nn.TransformerEncoderLayer(
        HIDDEN,
        config.attention.num_heads,
        dim_feedforward=config.feed_forward.width,
        dropout=0.0,
        activation=activation,
        layer_norm_eps=config.norm.epsilon,
        batch_first=True,
        norm_first=config.norm_order == "pre",
        bias=config.feed_forward.bias,
    ).eval()
    layer = model.layers[0]
    theirs.self_attn = torch_attention(layer.attention)
    copies = {
        "linear1": layer.feed_forward.up,
        "linear2": layer.feed_forward.down,
        "norm1": layer.attention_norm,
        "norm2": layer.feed_forward_norm,
    }
    for name, ours in copies.items():
        getattr(theirs, name).load_state_dict(ours.state_dict())
    return theirs


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
@torch.no_grad()
def test_a_block_equals_torch_transformer_encoder_layer(norm_order: str, activation: Any, *, has_bias: bool) -> None:
    of = both_ways(qkv_bias=has_bias, output_bias=has_bias).blocks[0].attention
    config = block(
        of=of,
        norm=NormConfig(kind="layer", epsilon=1e-5, bias=has_bias),
        norm_order=norm_order,
        feed_forward=FeedForwardConfig(width=44, activation=activation, gated=False, bias=has_bias),
    )
    model = tiny_model(decoder(config, head="none"))
    theirs, layer = torch_encoder_layer(config, model), model.layers[0]
    x, padding, bias = activations(3, 9), padding_mask(), additive_bias(5)
    key_padding = torch.zeros(3, 9).masked_fill(~padding, MINUS_INFINITY)
    expected = theirs(x, src_mask=bias.flatten(0, 1), src_key_padding_mask=key_padding)

    def run(**masks: Tensor) -> Tensor:
        return layer.after_attention(x, layer.attention(layer.before_attention(x), **masks))

    assert_parity(run(padding=padding, bias=bias), expected, "torch layers")
    layer.norm_order = "post" if norm_order == "pre" else "pre"
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(run(padding=padding, bias=bias), expected, "torch layers", what="norm order")


@pytest.mark.parametrize("head_dim", [8, 64, 512])
def test_scores_keep_a_variance_of_one_whatever_the_head_size(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    queries, keys = torch.randn(2, 256, head_dim, generator=generator)
    scores = queries @ keys.T
    scale = attention(head_dim=head_dim).softmax_scale
    one = torch.ones(())
    assert_parity((scores * scale).var(), one, "score variance")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(scores.var(), one, "score variance")


@torch.no_grad()
def test_without_positions_a_shuffled_text_gives_the_shuffled_output() -> None:
    model = tiny_model(both_ways())
    ids, order = token_ids(2, 9), torch.randperm(9, generator=torch.Generator().manual_seed(4))
    assert_parity(model(ids[:, order]), model(ids)[:, order], "equal models")
    with_positions = tiny_model(both_ways(rotary=attention().rotary))
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(with_positions(ids[:, order]), with_positions(ids)[:, order], "equal models")


@torch.no_grad()
def test_with_rotary_a_text_further_on_attends_as_at_the_start() -> None:
    layer = attention_layer(decoder(block()))
    x = activations(1, 9)
    model = Transformer(decoder(block()))
    tables = model.rotary_tables(40, 40)[0]
    assert tables is not None
    here, later, slower = (
        type(tables)(tables.cos[rows], tables.sin[rows]) for rows in (slice(9), slice(31, 40), slice(0, 18, 2))
    )
    assert_parity(layer(x, tables=later), layer(x, tables=here), "rotary distance")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(layer(x, tables=slower), layer(x, tables=here), "rotary distance")


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@torch.no_grad()
def test_grouped_query_equals_multi_head_with_repeated_key_and_value_heads(kv_heads: int) -> None:
    grouped = attention_layer(decoder(block(of=attention(num_kv_heads=kv_heads, rotary=None))))
    whole = Attention(dataclasses.replace(grouped.config, num_kv_heads=6), HIDDEN)

    def spread(weight: Tensor, *, interleave: bool) -> Tensor:
        per_head = weight.unflatten(0, (kv_heads, -1))
        if interleave:
            return per_head.repeat_interleave(6 // kv_heads, dim=0).flatten(0, 1)
        return per_head.repeat(6 // kv_heads, 1, 1).flatten(0, 1)

    x = activations(2, 7)
    for interleave in (True, False):
        weights = grouped.state_dict()
        for name in ("key.weight", "value.weight"):
            weights[name] = spread(weights[name], interleave=interleave)
        whole.load_state_dict(weights)
        if interleave or kv_heads == 1:
            assert_parity(whole(x), grouped(x), "attention")
        else:  # query head i belongs to kv head i // group, not i % kv_heads
            with pytest.raises(AssertionError, match="max difference"):
                assert_parity(whole(x), grouped(x), "attention")


@pytest.mark.parametrize("length", [4, 5, 6, 12])
@torch.no_grad()
def test_b24_the_window_of_the_whole_text_path_sees_exactly_the_last_w(length: int) -> None:
    window = 4
    layer = attention_layer(decoder(block(of=attention(window=window, rotary=None))))
    x = activations(1, length)
    before = layer(x)
    for changed in range(length):
        moved = x.clone()
        moved[0, changed] += 1.0
        is_seen = (layer(moved) != before)[0].any(dim=-1)
        expected = [0 <= position - changed < window for position in range(length)]
        assert is_seen.tolist() == expected, f"token {changed}"


@pytest.mark.parametrize(("attention_cap", "logit_cap"), [(5.0, 3.0)])
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_b44_a_huge_value_at_a_padded_key_moves_nothing(
    attention_cap: float, logit_cap: float, window: int | None
) -> None:
    config = decoder(block(of=attention(softcap=attention_cap, window=window)), logit_softcap=logit_cap)
    model = tiny_model(config)
    ids, padding = token_ids(2, 11), torch.ones(2, 11, dtype=torch.bool)
    padding[:, [1, 6]] = False
    expected = model(ids, padding=padding)
    assert float(expected.abs().max()) <= logit_cap
    huge = 3  # a token whose embedding is huge; the pads alone are this token
    other = ids.clone().masked_fill(ids == huge, huge + 1)
    expected = model(other, padding=padding)
    model.embedding.weight[huge] = 1e6
    poisoned = other.masked_fill(~padding, huge)
    actual = model(poisoned, padding=padding)
    real = padding[0]
    assert_parity(actual[:, real], expected[:, real], "equal models")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(model(poisoned)[:, real], expected[:, real], "equal models", what="mask off")


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_b45_left_pads_and_a_row_of_pads_give_no_nan_and_leave_real_rows_alone(*, causal: bool) -> None:
    model = tiny_model(decoder(block(of=attention(causal=causal, rotary=None)), head="none" if not causal else "tied"))
    text = token_ids(1, 5)
    ids = torch.cat((torch.zeros(1, 10, dtype=torch.int64), text), dim=1).repeat(2, 1)  # 10 pads on the left
    padding = torch.ones(2, 15, dtype=torch.bool)
    padding[0, :10] = False
    padding[1] = False
    hidden = model(ids, padding=padding)
    assert torch.isfinite(hidden).all()
    assert_parity(hidden[0, 10:], model(text)[0], "equal models")
    bias = torch.zeros(2, 1, 15, 15).masked_fill(~padding[:, None, None], MINUS_INFINITY)
    assert_parity(model(ids, bias=bias), hidden, "equal models")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(model(ids)[0, 10:], model(text)[0], "equal models", what="mask off")


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_b46_pads_have_no_weight_when_scores_reach_1e5(*, causal: bool) -> None:
    config = decoder(block(of=attention(causal=causal, rotary=None)), head="none")
    model = tiny_model(config)
    for layer in model.layers:
        layer.attention.query.weight.mul_(100)
        layer.attention.key.weight.mul_(100)
    x = model.layers[0].before_attention(model.embedding(token_ids(2, 9)))
    layer = model.layers[0].attention
    scores = layer.query(x)[0, :, :16] @ layer.key(x)[0, :, :16].T * layer.config.softmax_scale
    assert float(scores.abs().max()) > 1e5
    ids, padding = token_ids(2, 9), torch.ones(2, 9, dtype=torch.bool)
    padding[:, 6:] = False
    padded = model(ids, padding=padding)[:, :6]
    assert_parity(padded, model(ids[:, :6]), "equal models")
    with_other_pads = model(torch.cat((ids[:, :6], token_ids(2, 3, seed=9)), dim=1), padding=padding)[:, :6]
    assert torch.equal(with_other_pads, padded)

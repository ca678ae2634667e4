"""The model's parts against their formulas; encoders; variants that must be told from the right model."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import assert_parity, assert_same_choice
from tiny_models import HIDDEN, VOCAB, WIDTH, tiny_configs, tiny_encoder_configs, tiny_model, token_ids
from torch import Tensor, nn

from graphport.model_def.block_config import FeedForwardConfig, NormConfig
from graphport.model_def.norms import Norm
from graphport.model_def.transformer import Transformer, parameter_shapes

CONFIGS = tiny_configs()
ENCODERS = tiny_encoder_configs()
LENGTH = 13


def whole(model: Transformer, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids)
    return logits


@pytest.mark.parametrize("name", ["learned", "learned_offset", "sinusoidal", "grouped_query", "window", "everything"])
@torch.no_grad()
def test_b07_b08_left_pads_change_no_row_whatever_they_are(name: str) -> None:
    model, text = tiny_model(CONFIGS[name]), token_ids(1, 5)
    expected = model(text)[0]
    for length in (5, 6, 9, 16, 31):
        for pad in (0, int(text[0, 2])):
            ids = torch.cat((torch.full((1, length - 5), pad), text), dim=1)
            batch = torch.cat((ids, token_ids(1, length, seed=9)))
            padding = torch.ones(2, length, dtype=torch.bool)
            padding[0, : length - 5] = False
            found = model(batch, padding=padding)
            assert_parity(found[0, length - 5 :], expected, "equal models", what=f"{length - 5} pads")
            assert_parity(found[1], model(batch[1:])[0], "equal models", what="the row without pads")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(model(batch)[0, length - 5 :], expected, "equal models", what="mask off")


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in double precision."""
    product = x @ layer.weight.double().T
    return product if layer.bias is None else product + layer.bias.double()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
@torch.no_grad()
def test_a_feed_forward_equals_its_formula(activation: str, *, gated: bool) -> None:
    layer = tiny_model(CONFIGS[f"{'gated' if gated else 'plain'}_{activation}"]).layers[0].feed_forward
    x = normal(2, 5, HIDDEN)
    up = linear(layer.up, x.double())
    gate = up if layer.gate is None else linear(layer.gate, x.double())
    for name, formula in FORMULAS.items():
        expected = linear(layer.down, formula(gate) * up if gated else formula(up))
        if name == activation:
            assert_parity(layer(x), expected, "layer")
            continue
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(layer(x), expected, "layer", what=name)
    if gated:
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(layer(x), linear(layer.down, gate * FORMULAS[activation](up)), "layer", what="exchanged")


def normalised(norm: Norm, x: Tensor, *, epsilon: float | None = None) -> Tensor:
    """The norm's formula in double precision."""
    weight = norm.weight.double() + (1 if norm.config.unit_offset else 0)
    epsilon = norm.config.epsilon if epsilon is None else epsilon
    if norm.config.kind == "layer":
        x = x - x.mean(dim=-1, keepdim=True)
    normal_form = x / (x.pow(2).mean(dim=-1, keepdim=True) + epsilon).sqrt() * weight
    return normal_form if norm.bias is None else normal_form + norm.bias.double()


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("unit_offset", [False, True])
@torch.no_grad()
def test_a_norm_equals_its_formula_with_its_own_epsilon(kind: Any, *, unit_offset: bool) -> None:
    config = NormConfig(kind=kind, epsilon=0.1, unit_offset=unit_offset, bias=kind == "layer")
    norm = Norm(config, HIDDEN)
    for parameter in norm.parameters():
        parameter.add_(0.3 * normal(HIDDEN))
    x = normal(2, 5, HIDDEN, seed=1)
    assert_parity(norm(x), normalised(norm, x.double()), "layer")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(norm(x), normalised(norm, x.double(), epsilon=1e-6), "layer")


@pytest.mark.parametrize("name", ["qk_norm", "qk_norm_unit_offset"])
@torch.no_grad()
def test_q_and_k_have_norms_of_their_own_over_each_head(name: str) -> None:
    layer = tiny_model(CONFIGS[name]).layers[0].attention
    x = normal(2, 5, HIDDEN)
    query, key, value = layer._project(x)
    query_heads = linear(layer.query, x.double()).unflatten(-1, (6, 16))
    key_heads = linear(layer.key, x.double()).unflatten(-1, (2, 16))
    assert layer.query_norm is not None
    assert layer.key_norm is not None
    assert_parity(query, normalised(layer.query_norm, query_heads).flatten(-2), "layer")
    assert_parity(key, normalised(layer.key_norm, key_heads).flatten(-2), "layer")
    assert_parity(value, linear(layer.value, x.double()), "layer")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(key, normalised(layer.query_norm, key_heads).flatten(-2), "layer")


@pytest.mark.parametrize("name", ["grouped_query", "post_norm", "sandwich"])
@torch.no_grad()
def test_a_block_has_its_norms_where_its_order_says(name: str) -> None:
    layer = tiny_model(CONFIGS[name]).layers[0]
    x, attended = normal(2, 5, HIDDEN), normal(2, 5, HIDDEN, seed=1)
    if layer.norm_order == "post":
        assert layer.before_attention(x) is x
        middle = layer.attention_norm(x + attended)
        expected = layer.feed_forward_norm(middle + layer.feed_forward(middle))
    else:
        assert torch.equal(layer.before_attention(x), layer.attention_norm(x))
        around = (layer.attention_output_norm, layer.feed_forward_output_norm)
        after_attention, after_feed_forward = around if layer.norm_order == "sandwich" else (nn.Identity(),) * 2
        middle = x + after_attention(attended)
        expected = middle + after_feed_forward(layer.feed_forward(layer.feed_forward_norm(middle)))
    assert torch.equal(layer.after_attention(x, attended), expected)


@torch.no_grad()
def test_embeddings_are_scaled_before_the_row_of_their_position_is_added() -> None:
    model = tiny_model(CONFIGS["everything"])  # scale 1.5, row 1 belongs to position 0
    ids = token_ids(2, 5)
    assert model.position is not None
    expected = model.embedding.weight[ids] * 1.5 + model.position.weight[1:6]
    assert torch.equal(model.embed(ids, torch.arange(5)), expected)
    model = tiny_model(CONFIGS["learned_offset"])
    assert model.position is not None
    assert torch.equal(model.embed(ids, torch.arange(5)), model.embedding.weight[ids] + model.position.weight[2:7])


@torch.no_grad()
def test_logits_are_scaled_and_then_capped() -> None:
    model = tiny_model(CONFIGS["everything"])  # tied head with a bias, scale 0.8, cap 15
    assert model.final_norm is not None
    assert model.head is not None
    assert model.head.bias is not None
    x = normal(2, 5, HIDDEN)
    hidden = normalised(model.final_norm, x.double())
    logits = 0.8 * (hidden @ model.embedding.weight.double().T + model.head.bias.double())
    assert_parity(model.read_out(x), 15 * torch.tanh(logits / 15), "layer")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(model.read_out(x), 0.8 * 15 * torch.tanh(logits / 0.8 / 15), "layer", what="cap first")


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_sees_both_ways_and_ignores_its_pads(name: str) -> None:
    model, ids = tiny_model(ENCODERS[name]), token_ids(2, 9)
    padded = torch.cat((ids, token_ids(2, 4, seed=5)), dim=1)
    padding = torch.arange(13)[None].expand(2, -1) < 9
    with torch.no_grad():
        assert_parity(model(padded, padding=padding)[:, :9], model(ids), "equal models")
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(model(padded)[:, :9], model(ids), "equal models", what="mask off")
        other = ids.clone()
        other[:, -1] = (other[:, -1] + 1) % VOCAB
        assert not torch.equal(model(other)[:, 0], model(ids)[:, 0])


def with_config(model: Transformer, **changes: Any) -> Transformer:
    """The same weights under a changed config."""
    other = Transformer(dataclasses.replace(model.config, **changes)).eval()
    other.load_state_dict(model.state_dict())
    return other


def with_attention(**changes: Any) -> Callable[[Transformer], Transformer]:
    def change(model: Transformer) -> Transformer:
        blocks = [
            dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, **changes))
            for layer in model.config.blocks
        ]
        return with_config(model, blocks=tuple(blocks))

    return change


def with_rotary(**changes: Any) -> Callable[[Transformer], Transformer]:
    def change(model: Transformer) -> Transformer:
        rotary = model.config.blocks[0].attention.rotary
        assert rotary is not None
        return with_attention(rotary=dataclasses.replace(rotary, **changes))(model)

    return change


def with_blocks(**changes: Any) -> Callable[[Transformer], Transformer]:
    return lambda model: with_config(
        model, blocks=tuple(dataclasses.replace(layer, **changes) for layer in model.config.blocks)
    )


def with_swapped_heads(model: Transformer) -> Transformer:
    other = with_config(model)
    columns = torch.arange(6 * 16).unflatten(0, (6, 16)).roll(1, dims=0).flatten()
    with torch.no_grad():
        other.layers[0].attention.output.weight.copy_(model.layers[0].attention.output.weight[:, columns])
    return other


BROKEN: dict[str, tuple[str, Callable[[Transformer], Transformer]]] = {
    "mask off": ("grouped_query", with_attention(causal=False)),
    "window one less": ("window", with_attention(window=3)),
    "window one more": ("window", with_attention(window=5)),
    "window dropped": ("softcap_window", with_attention(window=None)),
    "heads swapped": ("grouped_query", with_swapped_heads),
    "softcap dropped": ("softcap", with_attention(softcap=None)),
    "scale dropped": ("own_scale", with_attention(scale=None)),
    "rotary dropped": ("grouped_query", with_attention(rotary=None)),
    "layout changed": ("rotary_interleaved", with_rotary(interleaved=False)),
    "all turned": ("rotary_partial_0.5", with_rotary(partial_factor=1.0)),
    "linear dropped": ("rotary_linear", with_rotary(scaling=None)),
    "llama3 dropped": ("rotary_llama3", with_rotary(scaling=None)),
    "yarn dropped": ("rotary_yarn", with_rotary(scaling=None)),
    "longrope dropped": ("rotary_longrope", with_rotary(scaling=None)),
    "factors dropped": ("rotary_frequency_factors", with_rotary(scaling=None)),
    "last layer's rotary everywhere": (
        "local_local_global",
        lambda model: with_attention(rotary=model.config.blocks[-1].attention.rotary)(model),
    ),
    "positions dropped": ("sinusoidal", lambda model: with_config(model, position=None)),
    "tanh gelu for exact": (
        "plain_gelu",
        with_blocks(feed_forward=FeedForwardConfig(width=WIDTH, activation="gelu_tanh", gated=False, bias=True)),
    ),
    "post for pre": ("grouped_query", with_blocks(norm_order="post")),
    "logit scale dropped": ("logit_scale", lambda model: with_config(model, logit_scale=1.0)),
    "logit softcap dropped": ("logit_softcap", lambda model: with_config(model, logit_softcap=None)),
    "embedding scale dropped": ("embedding_scale", lambda model: with_config(model, embedding_scale=1.0)),
}


@pytest.mark.parametrize(("name", "change"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_model_is_told_from_the_right_one(name: str, change: Callable[[Transformer], Transformer]) -> None:
    model, ids = tiny_model(CONFIGS[name]), token_ids(2, LENGTH)
    expected = whole(model, ids)
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(whole(change(model), ids), expected, "cached")


@pytest.mark.parametrize("name", CONFIGS)
def test_zeros_and_shifted_logits_are_rejected(name: str) -> None:
    expected = whole(tiny_model(CONFIGS[name]), token_ids(2, LENGTH))
    for wrong in (torch.zeros_like(expected), expected.roll(1, dims=1), expected.roll(1, dims=2)):
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(wrong, expected, "cached")
        with pytest.raises(AssertionError, match="best token differs"):
            assert_same_choice(wrong, expected, "cached")


def test_layers_with_equal_rotary_settings_share_their_tables() -> None:
    local, also_local, whole_text = Transformer(CONFIGS["local_local_global"]).rotary_tables(8, 8)
    assert local is also_local
    assert local is not whole_text
    assert Transformer(CONFIGS["rotary_and_none"]).rotary_tables(8, 8)[1] is None


@pytest.mark.parametrize("name", CONFIGS | ENCODERS)
def test_parameter_shapes_are_those_of_the_model(name: str) -> None:
    config = (CONFIGS | ENCODERS)[name]
    model = Transformer(config)
    assert parameter_shapes(config) == {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert ("head.weight" in parameter_shapes(config)) == (config.head == "separate")

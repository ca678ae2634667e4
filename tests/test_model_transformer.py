"""The whole-text model: encoders, shapes, tables, and variants that must be told from the right model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import assert_parity, assert_same_choice
from tiny_models import VOCAB, WIDTH, tiny_configs, tiny_encoder_configs, tiny_model, token_ids
from torch import Tensor

from graphport.model_def.config import FeedForwardConfig
from graphport.model_def.transformer import Transformer, parameter_shapes

CONFIGS = tiny_configs()
ENCODERS = tiny_encoder_configs()
LENGTH = 13


def whole(model: Transformer, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids)
    return logits


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
    "all turned": ("rotary_partial_50", with_rotary(partial_factor=1.0)),
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

"""Position formulas against transformers, against complex numbers and against their own definitions."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from parity import assert_parity
from tiny_models import HEAD_DIM, ROTARY, attention, block, decoder, tiny_configs, tiny_model, token_ids
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rotation
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rotation

from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.position_config import (
    ConfigError,
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryPosition,
    RotaryScaling,
    YarnScaling,
)
from graphport.model_def.positions import rotary_frequencies, rotary_tables, rotate, sinusoidal_table
from graphport.model_def.transformer import Transformer

SWITCH = 16  # original positions of every scaling here
LENGTHS = (1, SWITCH - 1, SWITCH, SWITCH + 1, 40, 128)
SHORT = tuple(1 + 0.1 * pair for pair in range(HEAD_DIM // 2))
LONG = tuple(2 + 0.7 * pair for pair in range(HEAD_DIM // 2))

# name: our record, transformers' rope_parameters
SCALINGS: dict[str, tuple[RotaryScaling, dict[str, Any]]] = {
    "linear": (LinearScaling(factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (
        DynamicScaling(factor=2.0, original_max_positions=SWITCH),
        {"rope_type": "dynamic", "factor": 2.0},
    ),
    "llama3": (
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=SWITCH),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": (YarnScaling(factor=4.0, original_max_positions=SWITCH), {"rope_type": "yarn", "factor": 4.0}),
    "yarn_betas": (
        YarnScaling(factor=4.0, original_max_positions=SWITCH, beta_fast=2.0, beta_slow=0.25),
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.25},
    ),
    "yarn_untruncated": (
        YarnScaling(factor=4.0, original_max_positions=SWITCH, beta_fast=2.0, beta_slow=0.25, truncate=False),
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.25, "truncate": False},
    ),
    "yarn_slow": (  # the ramp ends beyond the last pair
        YarnScaling(factor=4.0, original_max_positions=SWITCH, beta_fast=2.0, beta_slow=0.01),
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.01},
    ),
    "yarn_flat": (  # the ramp has no width
        YarnScaling(factor=4.0, original_max_positions=SWITCH, beta_fast=32.0, beta_slow=3.0),
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 3.0},
    ),
    "yarn_factor": (
        YarnScaling(factor=4.0, original_max_positions=SWITCH, attention_factor=1.3),
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    ),
    "yarn_mscale": (
        YarnScaling(factor=40.0, original_max_positions=SWITCH, mscale=1.0, mscale_all_dim=0.5),
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    ),
    "yarn_below_one": (
        YarnScaling(factor=0.5, original_max_positions=SWITCH),
        {"rope_type": "yarn", "factor": 0.5},
    ),
    "longrope": (
        LongRopeScaling(
            short_factor=SHORT, long_factor=LONG, original_max_positions=SWITCH, attention_factor=math.sqrt(1.5)
        ),
        {"rope_type": "longrope", "factor": 4.0, "short_factor": list(SHORT), "long_factor": list(LONG)},
    ),
}


def reference_tables(parameters: dict[str, Any], *, theta: float, partial: float, length: int) -> tuple[Tensor, Tensor]:
    """What transformers multiplies by at positions 0 .. length - 1 of a text of that length."""
    parameters = {"rope_theta": theta, "partial_rotary_factor": partial} | parameters
    if parameters["rope_type"] not in ("linear", "dynamic"):
        parameters["original_max_position_embeddings"] = SWITCH
    config = LlamaConfig(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=SWITCH,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    angles = torch.arange(length).float()[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


@pytest.mark.parametrize("theta", [100.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotary_scaling_equals_transformers_on_both_sides_of_its_switch(name: str, theta: float) -> None:
    scaling, parameters = SCALINGS[name]
    partials = (1.0,) if name == "longrope" else (0.5, 1.0)
    for length in LENGTHS:
        for partial in partials:
            rotary = RotaryPosition(theta=theta, partial_factor=partial, scaling=scaling)
            ours = rotary_tables(rotary, HEAD_DIM, num_positions=length, total_length=length)
            theirs = reference_tables(parameters, theta=theta, partial=partial, length=length)
            for mine, reference in zip(ours, theirs, strict=True):
                assert_parity(mine, reference, "rotary tables", what=f"{name} at length {length}")


@pytest.mark.parametrize("name", SCALINGS)
def test_every_rotary_scaling_is_told_from_the_plain_rotation(name: str) -> None:
    scaling, _ = SCALINGS[name]
    ours, _ = rotary_tables(RotaryPosition(theta=100.0, scaling=scaling), HEAD_DIM, num_positions=40, total_length=40)
    plain, _ = rotary_tables(RotaryPosition(theta=100.0), HEAD_DIM, num_positions=40, total_length=40)
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(ours, plain, "rotary tables")


def test_tables_at_the_position_after_are_told_from_tables_at_the_position() -> None:
    cos, sin = rotary_tables(ROTARY, HEAD_DIM, num_positions=9, total_length=9)
    for table in (cos, sin):
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(table[1:], table[:-1], "rotary tables")


def test_b37_llama3_equals_its_frequency_factors_at_positions_0_to_127() -> None:
    scaling, parameters = SCALINGS["llama3"]
    for theta in (100.0, 500_000.0):
        base, _ = rotary_frequencies(RotaryPosition(theta=theta), HEAD_DIM, total_length=128)
        scaled, _ = rotary_frequencies(RotaryPosition(theta=theta, scaling=scaling), HEAD_DIM, total_length=128)
        factors = FrequencyFactors(factors=tuple((base.double() / scaled.double()).tolist()))
        by_factors = rotary_tables(
            RotaryPosition(theta=theta, scaling=factors), HEAD_DIM, num_positions=128, total_length=128
        )
        by_formula = reference_tables(parameters, theta=theta, partial=1.0, length=128)
        for mine, reference in zip(by_factors, by_formula, strict=True):
            assert_parity(mine, reference, "rotary tables")


def complex_rotation(heads: Tensor, frequencies: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Each pair as a complex number times exp(i * position * frequency), in double precision."""
    pairs = len(frequencies)
    wide = heads.double().clone()
    first = torch.arange(pairs) * 2 if interleaved else torch.arange(pairs)
    second = first + 1 if interleaved else first + pairs
    angles = positions.double()[:, None] * frequencies.double()
    turned = torch.complex(wide[..., first], wide[..., second]) * torch.polar(torch.ones_like(angles), angles)
    wide[..., first], wide[..., second] = turned.real, turned.imag
    return wide


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [0.25, 0.5, 0.75, 1.0])
def test_b39_partial_rotary_turns_q_and_k_as_transformers_and_complex_numbers_do(
    partial: float, *, interleaved: bool
) -> None:
    positions = torch.tensor([0, 1, 50])
    generator = torch.Generator().manual_seed(5)
    queries, keys = (torch.randn(1, heads, 3, HEAD_DIM, generator=generator) for heads in (6, 2))
    rotary = dataclasses.replace(ROTARY, partial_factor=partial)
    cos, sin = (table[positions] for table in rotary_tables(rotary, HEAD_DIM, num_positions=51, total_length=51))
    frequencies = ROTARY.theta ** (-torch.arange(0, partial * HEAD_DIM, 2) / (partial * HEAD_DIM))

    reference = glm_rotation if interleaved else neox_rotation
    theirs = reference(queries, keys, torch.cat((cos, cos), dim=-1)[None], torch.cat((sin, sin), dim=-1)[None])
    for heads, their in zip((queries, keys), theirs, strict=True):
        ours = rotate(heads, cos, sin, interleaved=interleaved)
        assert_parity(ours, their, "rotation", what="transformers")
        by_definition = complex_rotation(heads, frequencies, positions, interleaved=interleaved)
        assert_parity(ours, by_definition, "rotation", what="complex numbers")
        assert torch.equal(ours[..., int(partial * HEAD_DIM) :], heads[..., int(partial * HEAD_DIM) :])
        assert torch.equal(ours[:, :, 0], heads[:, :, 0])


def test_b39_the_wrong_partner_and_the_wrong_width_are_rejected_beyond_position_0() -> None:
    positions = torch.tensor([0, 1, 50])
    heads = torch.randn(1, 6, 3, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    rotary = dataclasses.replace(ROTARY, partial_factor=0.5)
    cos, sin = (table[positions] for table in rotary_tables(rotary, HEAD_DIM, num_positions=51, total_length=51))
    ours = rotate(heads, cos, sin, interleaved=False)
    over_the_head = ROTARY.theta ** (-torch.arange(0, 8, 2) / HEAD_DIM)  # the exponent over 16 instead of 8
    broken = {
        "interleaved": rotate(heads, cos, sin, interleaved=True),
        "wrong width": complex_rotation(heads, over_the_head, positions, interleaved=False),
        "backwards": rotate(heads, cos, -sin, interleaved=False),
    }
    for what, wrong in broken.items():
        assert_parity(wrong[:, :, 0], ours[:, :, 0], "rotation")
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(wrong, ours, "rotation", what=what)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_the_distance_only(*, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    query, key = torch.randn(2, HEAD_DIM, generator=generator)
    cos, sin = rotary_tables(ROTARY, HEAD_DIM, num_positions=64, total_length=64)
    queries = rotate(query.expand(64, -1), cos, sin, interleaved=interleaved)
    keys = rotate(key.expand(64, -1), cos, sin, interleaved=interleaved)
    scores = queries @ keys.T
    for distance in range(-40, 41, 8):
        along = scores.diagonal(distance)
        assert_parity(along, along[:1].expand(len(along)), "rotary distance")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(scores.diagonal(1)[:40], scores.diagonal(2)[:40], "rotary distance")


def test_the_sinusoidal_table_equals_its_formula() -> None:
    width = 41  # odd: it ends on a sine
    table = sinusoidal_table(64, width)
    expected = np.empty((64, width))
    for position in range(64):
        for column in range(width):
            angle = position / 10000 ** (column // 2 * 2 / width)
            expected[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    assert_parity(table, expected, "sinusoidal table")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(table[1:], expected[:-1], "sinusoidal table")


@pytest.mark.parametrize("shift", [1, 7])
def test_the_sinusoidal_table_shifts_by_a_fixed_rotation(shift: int) -> None:
    width = 40
    table = sinusoidal_table(64, width).double()
    rotation = torch.zeros(width, width, dtype=torch.float64)
    for column in range(0, width, 2):
        angle = shift / 10000 ** (column / width)
        turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        rotation[column : column + 2, column : column + 2] = turn
    assert_parity(table[:-shift] @ rotation.T, table[shift:], "sinusoidal table")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(table[:-shift] @ rotation, table[shift:], "sinusoidal table")


def equivalent(model: Transformer, rotary: RotaryPosition, *, scale: float | None = None) -> Transformer:
    """The same weights behind a rotation that ignores the length."""
    other = Transformer(decoder(block(of=attention(rotary=rotary, scale=scale)))).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("length", [8, 16, 17, 40])
def test_b43_the_eager_dynamic_model_is_right_on_both_sides_of_its_switch(length: int) -> None:
    model = tiny_model(tiny_configs()["rotary_dynamic"])
    stretch = 2.0 * max(length, SWITCH) / SWITCH - 1.0
    theta = ROTARY.theta * stretch ** (HEAD_DIM / (HEAD_DIM - 2))
    interleaved = model.config.blocks[0].attention.rotary.interleaved  # type: ignore[union-attr]
    same = equivalent(model, RotaryPosition(theta=theta, interleaved=interleaved))
    ids = token_ids(2, length)
    with torch.no_grad():
        assert_parity(model(ids), same(ids), "equal models")
        if length > SWITCH:
            plain = equivalent(model, RotaryPosition(theta=ROTARY.theta, interleaved=interleaved))
            with pytest.raises(AssertionError, match="max difference"):
                assert_parity(model(ids), plain(ids), "equal models")


@pytest.mark.parametrize("length", [10, 15, 16, 17, 30])
def test_b40_the_eager_longrope_model_changes_its_factors_beyond_the_original_length(length: int) -> None:
    model = tiny_model(tiny_configs()["rotary_longrope"])
    scaling = model.config.blocks[0].attention.rotary.scaling  # type: ignore[union-attr]
    assert isinstance(scaling, LongRopeScaling)
    right, wrong = scaling.short_factor, scaling.long_factor
    if length > SWITCH:
        right, wrong = wrong, right
    scale = scaling.attention_factor**2 * HEAD_DIM**-0.5  # it stands on both sides of the product
    models = [
        equivalent(model, dataclasses.replace(ROTARY, scaling=FrequencyFactors(factors=factors)), scale=scale)
        for factors in (right, wrong)
    ]
    ids = token_ids(3, length)
    with torch.no_grad():
        assert_parity(model(ids), models[0](ids), "equal models")
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(model(ids), models[1](ids), "equal models")


@pytest.mark.parametrize(
    ("name", "kind"), [("rotary_longrope", "LongRopeScaling"), ("rotary_dynamic", "DynamicScaling")]
)
def test_b40_b43_a_cache_that_would_cross_the_switch_is_refused(name: str, kind: str) -> None:
    model = tiny_model(tiny_configs()[name])
    CachedDecoder(model, max_length=16)
    message = (
        f"{kind} changes its frequencies beyond 16 positions, and keys cached before would keep the old ones; "
        "max_length is 17: export with --context 16 or less"
    )
    with pytest.raises(ConfigError, match=message):
        CachedDecoder(model, max_length=17)

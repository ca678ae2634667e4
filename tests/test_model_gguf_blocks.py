"""GGUF blocks as integers, scales and minima: the values of the gguf package, to the last bit, for every type."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_blocks import BY_NAME, random_codes, random_matrix, stored, values_of, with_scales

from graphport.model_def.gguf_blocks import BLOCK_TYPES, BlockType, StoredMatrix

HALF_MAX, HALF_MIN = 65504.0, 2.0**-24  # the largest half-precision number, the smallest subnormal one

_KINDS = pytest.mark.parametrize("block_type", BLOCK_TYPES, ids=lambda row: row.kind.name)
_WIDTH = 512

halves = st.floats(width=16, allow_nan=False, allow_infinity=False)
extremes = st.sampled_from([0.0, -0.0, HALF_MAX, -HALF_MAX, HALF_MIN, -HALF_MIN, 2.0**-14, 1.0])
scales = st.lists(halves | extremes, min_size=1, max_size=8)


def _check(block_type: BlockType, data: np.ndarray) -> StoredMatrix:
    matrix = stored(block_type.kind, data)
    blocks = matrix.integers()
    assert blocks.codes.shape == matrix.shape
    assert blocks.codes.max() < 2**blocks.bits
    assert np.array_equal(values_of(blocks), dequantize(data, block_type.kind))
    return matrix


@_KINDS
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scales=scales, minima=scales)
def test_random_blocks_keep_every_value(
    block_type: BlockType, seed: int, scales: list[float], minima: list[float]
) -> None:
    codes = random_codes(block_type.kind, 3, _WIDTH, np.random.default_rng(seed))
    _check(block_type, with_scales(codes, block_type, np.array(scales), np.array(minima)))


@_KINDS
@pytest.mark.parametrize("byte", [0, 255, 0x77, 0x88])
@pytest.mark.parametrize("scale", [HALF_MAX, -HALF_MAX, HALF_MIN, -HALF_MIN, 0.0])
@pytest.mark.parametrize("minimum", [HALF_MAX, HALF_MIN, 0.0])
def test_extreme_scales_and_codes_keep_every_value(
    block_type: BlockType, byte: int, scale: float, minimum: float
) -> None:
    codes = np.full_like(random_codes(block_type.kind, 2, _WIDTH, np.random.default_rng(0)), byte)
    _check(block_type, with_scales(codes, block_type, np.array([scale]), np.array([minimum])))


@_KINDS
def test_blocks_of_zeros_are_zeros(block_type: BlockType) -> None:
    values, size = GGML_QUANT_SIZES[block_type.kind]
    data = np.zeros((2, _WIDTH // values * size), np.uint8)
    assert not values_of(_check(block_type, data).integers()).any()


@_KINDS
def test_ordinary_blocks_need_no_zero_points(block_type: BlockType) -> None:
    """Zero points are for minima that cannot be moved; they cost the kernels time."""
    blocks = _check(block_type, random_matrix(block_type.kind, 5, _WIDTH, seed=1)).integers()
    assert blocks.zero_points is None
    assert (blocks.minima is not None) == (block_type.minimum_at is not None)


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K"])
def test_minima_that_cannot_be_moved_exactly_keep_a_zero_point_of_their_own(name: str) -> None:
    """60000 + 8 * 2^-24 has more bits than a float32."""
    block_type = BY_NAME[name]
    codes = random_codes(block_type.kind, 2, _WIDTH, np.random.default_rng(3))
    matrix = _check(block_type, with_scales(codes, block_type, np.array([HALF_MIN, 1.0]), np.array([60000.0, 1.0])))
    zero_points = matrix.integers().zero_points
    assert zero_points is not None
    assert set(np.unique(zero_points)) == {0, 8}


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q6_K"])
def test_rows_are_read_in_the_order_asked_for(name: str) -> None:
    kind = BY_NAME[name].kind
    data = random_matrix(kind, 7, _WIDTH, seed=2)
    rows = np.array([3, 0, 6, 1, 2, 5, 4])
    moved, plain = stored(kind, data, rows), stored(kind, data)
    assert np.array_equal(moved.dequantize(), plain.dequantize()[rows])
    assert np.array_equal(values_of(moved.integers()), plain.dequantize()[rows])


def test_many_rows_are_decoded_in_parts_and_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = BY_NAME["Q4_K"].kind
    matrix = stored(kind, random_matrix(kind, 11, _WIDTH, seed=4), np.arange(11)[::-1].copy())
    whole = matrix.integers()
    monkeypatch.setattr("graphport.model_def.gguf_blocks._VALUES_AT_A_TIME", 3 * _WIDTH)
    assert [(part.start, part.stop) for part in matrix.parts()] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    in_parts = matrix.integers()
    assert np.array_equal(whole.codes, in_parts.codes)
    assert np.array_equal(values_of(whole), values_of(in_parts))


@_KINDS
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_refused_by_block(block_type: BlockType, scale: float) -> None:
    codes = random_codes(block_type.kind, 2, _WIDTH, np.random.default_rng(0))
    data = with_scales(codes, block_type, np.array([1.0, scale]), np.array([1.0]))
    with pytest.raises(ValueError, match=rf"block 1 of type {block_type.kind.name} has the scale {scale}"):
        stored(block_type.kind, data).integers()


@pytest.mark.parametrize("name", ["IQ1_M", "MXFP4", "NVFP4", "F16"])
def test_a_type_without_an_integer_form_says_so(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values, size = GGML_QUANT_SIZES[kind]
    matrix = stored(kind, np.zeros((2, _WIDTH // values * size), np.uint8))
    assert matrix.block_type is None
    with pytest.raises(ValueError, match=f"blocks of type {name} have no integer form"):
        matrix.integers()

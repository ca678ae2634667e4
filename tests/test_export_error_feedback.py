"""Searched scales and error feedback: what they lose against rounding to nearest, and that kernels agree with them."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_graphs import TinyGraph, run_graph

from graphport.export.block_kernels import add_operands, lower_product
from graphport.export.block_scales import search_scales
from graphport.export.error_feedback import factor_moments, round_with_feedback
from graphport.export.quantize import BlockQuantized, quantize_blocks, quantized_bytes
from graphport.export.targets import WEIGHT_BLOCK

ROUNDING = 1e-5  # float32 sums of a row, as a share of sum |x| |w|
# odd N; K that is no multiple of 32; odd and even numbers of blocks a column
SHAPES = ((7, 48), (13, 65), (5, 32), (1, 31), (64, 160))


def weights(rows: int, width: int, *, mean: float = 0.0, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, width)) + mean).astype(np.float32)


def correlated(tokens: int, width: int, seed: int = 1) -> NDArray[np.float32]:
    """Inputs of which a few directions hold most, as activations have."""
    random = np.random.default_rng(seed)
    few = random.standard_normal((tokens, 6)) @ random.standard_normal((6, width))
    return (few + 0.3 * random.standard_normal((tokens, width))).astype(np.float32)


def rounded(weight: NDArray[np.float32], x: NDArray[np.float32], *, asymmetric: bool) -> BlockQuantized:
    upper = factor_moments(x.T @ x / len(x))
    return round_with_feedback(weight, upper, bits=4, asymmetric=asymmetric)


def loss(weight: NDArray[np.float32], blocks: BlockQuantized, x: NDArray[np.float32]) -> float:
    return float(np.square(x @ (blocks.dequantize() - weight).T).mean())


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("level", [0, 4])
def test_b55_matmul_nbits_multiplies_by_what_numpy_dequantises(
    rows: int, width: int, level: int, asymmetric: bool
) -> None:
    """Weights three standard deviations off zero, as in the report of garbage from zero points."""
    x = weights(5, width, seed=1)
    blocks = rounded(weights(rows, width, mean=3.0), correlated(90, width), asymmetric=asymmetric)
    assert (blocks.zero_points is not None) == asymmetric
    found = product(blocks, x, level=level)
    wanted, size = x @ blocks.dequantize().T, np.abs(x) @ np.abs(blocks.dequantize()).T
    # level 4 rounds activations to 8 bits in blocks: half a step each
    half_steps = np.abs(in_blocks(x)).max(axis=-1) / 254
    allowed = ROUNDING * size if level == 0 else half_steps @ in_blocks(np.abs(blocks.dequantize())).sum(axis=-1).T
    assert (np.abs(found - wanted) <= allowed).all()
    assert (np.abs(product(shifted(blocks), x, level=level) - wanted) > allowed).any()


def in_blocks(values: NDArray[Any]) -> NDArray[Any]:
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % WEIGHT_BLOCK)))
    return padded.reshape(len(values), -1, WEIGHT_BLOCK)


def product(blocks: BlockQuantized, x: NDArray[np.float32], *, level: int) -> NDArray[Any]:
    """X times the matrix, by the node that the compiler emits."""
    graph = TinyGraph()
    name = "matrix"
    weight = graph.weight(name, len(blocks.packed), blocks.width)
    model = graph.build(y=graph.linear(graph.input("x", "S", blocks.width), weight))
    (node,) = model.graph
    lower_product(model.graph, node, add_operands(model.graph, name, blocks, np.float32), accuracy_level=level)
    return run_graph(model, {"x": x})["y"]


def shifted(blocks: BlockQuantized) -> BlockQuantized:
    """The same codes with every zero point one off, as a kernel that reads them wrongly has."""
    zeros = np.full(blocks.scales.shape, 8, np.uint8) if blocks.zero_points is None else blocks.zero_points
    return BlockQuantized(
        packed=blocks.packed,
        scales=blocks.scales,
        bits=4,
        width=blocks.width,
        zero_points=np.where(zeros > 7, zeros - 1, zeros + 1).astype(np.uint8),
    )


def test_feedback_loses_less_than_searched_scales_and_these_less_than_nearest() -> None:
    weight, x = weights(64, 160), correlated(400, 160)
    nearest = loss(weight, quantize_blocks(weight, 4), x)
    alone = np.diag(np.diag(x.T @ x / len(x))).astype(np.float32)  # no correlations: nothing is fed on
    searched = loss(weight, round_with_feedback(weight, factor_moments(alone), bits=4, asymmetric=False), x)
    fed = loss(weight, rounded(weight, x, asymmetric=False), x)
    assert searched < 0.95 * nearest
    assert fed < 0.5 * searched


def test_feedback_helps_on_inputs_that_were_not_seen() -> None:
    random = np.random.default_rng(4)
    directions = random.standard_normal((6, 160)).astype(np.float32)
    seen, new = (
        (random.standard_normal((n, 6)) @ directions + 0.3 * random.standard_normal((n, 160))).astype(np.float32)
        for n in (400, 200)
    )
    weight = weights(64, 160)
    assert loss(weight, rounded(weight, seen, asymmetric=False), new) < 0.6 * loss(
        weight, quantize_blocks(weight, 4), new
    )


def test_zero_points_pay_where_weights_are_off_zero() -> None:
    weight, x = weights(32, 96, mean=3.0), correlated(300, 96)
    assert loss(weight, rounded(weight, x, asymmetric=True), x) < 0.6 * loss(
        weight, rounded(weight, x, asymmetric=False), x
    )


@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_searched_scale_beats_its_neighbours_and_those_that_fit_all_weights(asymmetric: bool) -> None:
    block, importance = weights(32, 400), np.linspace(0.1, 3, 32, dtype=np.float32)

    def error(scales: NDArray[Any], zeros: NDArray[Any]) -> float:
        p = np.clip(np.rint(block / scales) + zeros, 0, 15) - zeros
        return float((importance @ np.square(block - scales * p)).sum())

    scales, zeros = search_scales(block, importance, bits=4, asymmetric=asymmetric)
    found = error(scales, zeros)
    assert found < min(error(factor * scales, zeros) for factor in (0.9, 1.1))
    low, high = block.min(axis=0), block.max(axis=0)
    step = (high - low) / 15 if asymmetric else np.abs(block).max(axis=0) / 7
    assert found < 0.9 * error(step, np.rint(-low / step) if asymmetric else zeros)
    assert found < error(scales, np.clip(zeros + 1, 0, 15))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
def test_zeros_dead_channels_and_extreme_weights_stay_what_they_are(scale: float, asymmetric: bool) -> None:
    weight, x = weights(5, 70) * np.float32(scale), correlated(100, 70)
    weight[2], weight[:, 32:64] = 0, 0
    x[:, :40] = 0  # channels that no token used
    blocks = rounded(weight, x, asymmetric=asymmetric)
    found = blocks.dequantize()
    assert not found[2].any()
    assert np.abs(found - weight).max() <= 0.3 * np.abs(weight).max()
    assert np.abs(found[:, :32] - weight[:, :32]).max() > 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight, moments = weights(3, 33), np.eye(33, dtype=np.float32)
    weight[1, 32] = value
    with pytest.raises(ValueError, match="1 of 99 weights are not finite"):
        round_with_feedback(weight, factor_moments(moments), bits=4, asymmetric=False)
    moments[0, 0] = value
    with pytest.raises(ValueError, match="its inputs are not finite on the calibration text"):
        factor_moments(moments)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("width", [31, 64, 65])
def test_bytes_are_those_of_the_arrays(width: int, asymmetric: bool) -> None:
    blocks = rounded(weights(6, width), correlated(80, width), asymmetric=asymmetric)
    num_blocks = -(-width // WEIGHT_BLOCK)
    assert blocks.num_bytes == quantized_bytes(6, width, bits=4) + asymmetric * 6 * -(-num_blocks // 2)
    assert quantize_blocks(weights(6, width), 8).num_bytes == quantized_bytes(6, width, bits=8)

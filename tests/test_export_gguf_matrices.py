"""Matrices of a GGUF file as kernel operands: exact where they say so, and kernels that compute with what they hold."""

import dataclasses

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tiny_blocks import BY_NAME, random_codes, random_matrix, stored, with_scales
from tiny_graphs import TinyGraph, run_graph

from graphport.export.block_kernels import add_operands, lower_lookup, lower_product
from graphport.export.gguf_matrices import (
    KeptMatrix,
    keep_matrices,
    matrix_account,
    require_exact,
    require_half_scales,
    stack_matrices,
)
from graphport.export.quantize import BlockQuantized
from graphport.export.targets import CUDA, TargetError

ROUNDING = 1e-5  # float32 sums of a row, as a share of sum |x| |w|
_KIND = GGMLQuantizationType
_WIDTH = 768  # an odd number of super-blocks; 24 or 48 blocks

_FORMS = {
    **dict.fromkeys(("Q4_0", "TQ1_0", "TQ2_0"), "4-bit/32"),
    **dict.fromkeys(("Q4_1", "Q4_K"), "4-bit/32 + minima"),
    **dict.fromkeys(("Q3_K",), "4-bit/16"),
    **dict.fromkeys(("Q2_K",), "4-bit/16 + minima"),
    **dict.fromkeys(("Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S"), "8-bit/32"),
    **dict.fromkeys(("Q6_K", "IQ2_S", "IQ2_XS"), "8-bit/16"),
    **dict.fromkeys(("Q5_1", "Q5_K"), "8-bit/32 + minima"),
}


def keep(kind: GGMLQuantizationType, data: np.ndarray) -> KeptMatrix:
    return keep_matrices({"w": stored(kind, data)})["w"]


def blocks_of(kept: KeptMatrix) -> BlockQuantized:
    assert kept.blocks is not None
    return kept.blocks


def with_zero_points(rows: int) -> KeptMatrix:
    """Blocks some of whose minima cannot be moved: 600 + 8 * 2^-24 is no float32."""
    block_type = BY_NAME["Q4_1"]
    codes = random_codes(block_type.kind, rows, _WIDTH, np.random.default_rng(5))
    kept = keep(block_type.kind, with_scales(codes, block_type, np.array([2.0**-24, 0.5, 2.0]), np.array([600.0, 1.0])))
    assert blocks_of(kept).zero_points is not None
    return kept


def with_any_zero_points(rows: int, *, minima: bool) -> BlockQuantized:
    """Zero points of every size, three blocks a row: an odd number."""
    kind = BY_NAME["Q4_1" if minima else "Q4_0"].kind
    blocks = blocks_of(keep(kind, random_matrix(kind, rows, 96, seed=7)))
    zero_points = np.random.default_rng(8).integers(0, 16, blocks.scales.shape, dtype=np.uint8)
    return dataclasses.replace(blocks, zero_points=zero_points)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_type_with_an_integer_form_is_held_exactly_in_its_form(name: str) -> None:
    kind = BY_NAME[name].kind
    data = random_matrix(kind, 5, _WIDTH, seed=1)
    kept = keep(kind, data)
    assert kept.is_exact
    assert (kept.source, kept.form) == (name, _FORMS[name])
    assert np.array_equal(blocks_of(kept).dequantize(), dequantize(data, kind))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_stay_floats(name: str) -> None:
    kept = keep(_KIND[name], np.zeros((3, 64 * GGML_QUANT_SIZES[_KIND[name]][1]), np.uint8))
    assert (kept.source, kept.form, kept.blocks, kept.is_exact) == (name, "float32", None, True)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4", "IQ1_M"])
def test_a_type_without_an_integer_form_is_encoded_anew_and_says_by_how_much(name: str) -> None:
    values, size = GGML_QUANT_SIZES[_KIND[name]]
    generator = np.random.default_rng(0)
    data = generator.integers(1, 120, (4, _WIDTH // values * size), dtype=np.uint8)  # exponents and halves in range
    kept = keep(_KIND[name], data)
    error = np.abs(blocks_of(kept).dequantize() - dequantize(data, _KIND[name])).max()
    assert kept.form == "8-bit/32"
    assert not kept.is_exact
    assert kept.max_error == error > 0
    with pytest.raises(TargetError, match=rf"1 of 1 matrices would be encoded anew: w \({name}\); exact are Q4_0, .*"):
        require_exact({"w": kept})
    assert matrix_account({"w": kept}) == [
        {"name": "w", "source": name, "form": "8-bit/32", "exact": False, "max_error": kept.max_error}
    ]


def test_the_error_is_measured_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One code that is off by one shows, in the row and by the scale that it has."""
    kind = BY_NAME["Q4_0"].kind
    data = random_matrix(kind, 5, _WIDTH, seed=1)
    exact = blocks_of(keep(kind, data))
    packed = exact.packed.copy()
    packed[3, 2, 7] ^= 1
    monkeypatch.setattr("graphport.export.gguf_matrices._exact", lambda _: dataclasses.replace(exact, packed=packed))
    wrong = keep(kind, data)
    assert not wrong.is_exact
    assert wrong.max_error == pytest.approx(abs(float(exact.scales[3, 2])), rel=1e-6)


def test_exact_matrices_satisfy_require_exact_and_a_long_list_of_others_is_cut() -> None:
    kind = BY_NAME["Q8_0"].kind
    exact = keep(kind, random_matrix(kind, 2, _WIDTH, seed=0))
    require_exact({"w": exact})
    changed = dataclasses.replace(exact, max_error=0.5)
    with pytest.raises(TargetError, match=r"7 of 8 matrices .*: w0 \(Q8_0\), .* w4 \(Q8_0\) and 2 more; exact are"):
        require_exact({**{f"w{i}": changed for i in range(7)}, "w7": exact})


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q5_0", "IQ4_NL"])
def test_half_precision_kernels_hold_types_whose_scales_are_halves(name: str) -> None:
    kind = BY_NAME[name].kind
    require_half_scales({"w": keep(kind, random_matrix(kind, 3, _WIDTH, seed=0))}, CUDA)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Q4_1", "has minima, which need float32 sums"),
        ("Q4_K", "has minima, which need float32 sums"),
        ("Q6_K", "has scales of more bits than float16 holds"),
        ("IQ4_XS", "has scales of more bits than float16 holds"),
    ],
)
def test_half_precision_kernels_refuse_what_they_cannot_hold_and_say_why(name: str, reason: str) -> None:
    kind = BY_NAME[name].kind
    matrices = {"w": keep(kind, random_matrix(kind, 3, _WIDTH, seed=0))}
    with pytest.raises(TargetError, match=rf"precision gguf on target cuda: w of type {name} {reason}.*--target cpu"):
        require_half_scales(matrices, CUDA)


def test_matrices_of_one_form_are_stacked_with_zero_points_where_one_has_them() -> None:
    kind = BY_NAME["Q4_1"].kind
    plain, pointed = keep(kind, random_matrix(kind, 3, _WIDTH, seed=0)), with_zero_points(4)
    stacked = stack_matrices([plain, pointed])
    assert stacked is not None
    assert stacked.zero_points is not None
    wanted = np.concatenate([blocks_of(plain).dequantize(), blocks_of(pointed).dequantize()])
    assert np.array_equal(stacked.dequantize(), wanted)
    same = stack_matrices([plain, plain])
    assert same is not None
    assert same.zero_points is None


def product(blocks: BlockQuantized, x: np.ndarray, *, level: int) -> np.ndarray:
    graph = TinyGraph()
    lead = tuple("BS"[: x.ndim - 1])
    rows = len(blocks.packed)
    y = graph.linear(graph.input("x", *lead, blocks.width), graph.weight("w", rows, blocks.width))
    model = graph.build(y=y)
    node = next(iter(model.graph))
    operands = add_operands(model.graph, "w", blocks, np.float32)
    lower_product(model.graph, node, operands, accuracy_level=level)
    return run_graph(model, {"x": x})["y"]


_POINTED = ["zero points", "zero points and minima"]
_PRODUCTS = [
    *sorted(set(BY_NAME) - {"IQ3_S", "IQ3_XXS", "IQ2_S", "IQ1_S", "TQ2_0"}),
    *_POINTED,
]


@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("shape", [(2, 3), (5,), (0,)], ids=str)
@pytest.mark.parametrize("name", _PRODUCTS)
def test_b55_products_are_those_of_the_decoded_matrix(name: str, shape: tuple[int, ...], level: int) -> None:
    """Symmetric and with zero points, with and without minima, for texts and for rows, of none as well."""
    if name in BY_NAME:
        blocks = blocks_of(keep(BY_NAME[name].kind, random_matrix(BY_NAME[name].kind, 7, _WIDTH, seed=3)))
    else:
        blocks = with_any_zero_points(7, minima="minima" in name)
    x = np.random.default_rng(1).standard_normal((*shape, blocks.width)).astype(np.float32)
    wanted = x.astype(np.float64) @ blocks.dequantize().T.astype(np.float64)
    found = product(blocks, x, level=level)
    assert found.shape == wanted.shape
    if not found.size:
        return
    error = np.abs(found - wanted)
    plain = dataclasses.replace(blocks, minima=None)
    magnitude = np.abs(x) @ (np.abs(plain.dequantize()) + np.abs(blocks.dequantize())).T
    limit = ROUNDING * magnitude
    if level == 4:  # activations are rounded to half of 1/127 of their block's largest; the minima's sums are not
        halves = np.abs(x.reshape(*shape, -1, blocks.block_size)).max(axis=-1) / 254
        weights = np.abs(plain.dequantize()).reshape(len(blocks.packed), -1, blocks.block_size).sum(axis=-1)
        limit = limit + 1.001 * halves @ weights.T
    assert (error <= limit).all()
    assert level == 0 or error.max() > ROUNDING


def test_b55_forgotten_minima_and_zero_points_are_rejected() -> None:
    blocks = with_any_zero_points(7, minima=True)
    x = np.random.default_rng(1).standard_normal((5, blocks.width)).astype(np.float32)
    wanted = x @ blocks.dequantize().T
    for broken in ({"minima": None}, {"zero_points": None}):
        found = product(dataclasses.replace(blocks, **broken), x, level=0)
        assert np.abs(found - wanted).max() > 0.1


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q6_K", "Q4_K", "Q2_K", *_POINTED])
def test_looked_up_rows_are_those_of_the_decoded_matrix(name: str) -> None:
    if name in BY_NAME:
        blocks = blocks_of(keep(BY_NAME[name].kind, random_matrix(BY_NAME[name].kind, 9, _WIDTH, seed=3)))
    else:
        blocks = with_any_zero_points(9, minima="minima" in name)
    graph = TinyGraph()
    ids = np.array([[8, 0, 3], [1, 1, 7]], np.int64)
    table, places = graph.weight("w", 9, blocks.width), graph.weight("ids", values=ids)
    model = graph.build(y=graph.node("Gather", table, places, shape=(2, 3, blocks.width)))
    lower_lookup(model.graph, next(iter(model.graph)), add_operands(model.graph, "w", blocks, np.float32))
    assert np.array_equal(run_graph(model, {})["y"], blocks.dequantize()[ids])

"""Block quantisation: error within half a step, kernels that compute what `dequantize` says, tables stored once."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tiny_graphs import (
    TinyGraph,
    decoder_feed,
    eager_step,
    export_decoder,
    make_config,
    make_model,
    make_plan,
    open_graph,
    run_graph,
    run_session,
    save_and_open,
)

from graphport.export.bundle import write_graph
from graphport.export.pipeline import compile_graph
from graphport.export.quantize import BlockQuantized, quantize_blocks
from graphport.export.targets import CUDA, WEIGHT_BLOCK
from graphport.model_def.signature import GRAPH_FILE, WEIGHTS_FILE
from graphport.model_def.transformer import Transformer

ROUNDING = 1e-5  # float32 sums of a row, as a share of sum |x| |w|
SHAPES = ((7, 48), (13, 65), (5, 32), (1, 31), (64, 512))  # odd N, K that is no multiple of 32


def matrix(rows: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def in_blocks(values: NDArray[Any]) -> NDArray[Any]:
    padded = np.zeros((len(values), -(-values.shape[1] // WEIGHT_BLOCK) * WEIGHT_BLOCK), values.dtype)
    padded[:, : values.shape[1]] = values
    return padded.reshape(len(values), -1, WEIGHT_BLOCK)


def assert_within_half_a_step(weight: NDArray[np.float32], quantized: BlockQuantized) -> None:
    """Half a step; a 4-bit value beyond 7.5 steps on the side that ends at 7 is clipped, by at most one step."""
    wide = in_blocks(weight.astype(np.float64))
    error = np.abs(in_blocks(quantized.dequantize().astype(np.float64)) - wide)
    step = quantized.scales[:, :, None].astype(np.float64)
    ratio = np.divide(wide, step, out=np.zeros_like(wide), where=step != 0)
    allowed = np.where(ratio > 2 ** (quantized.bits - 1) - 0.5, 1.0, 0.5) * np.abs(step)
    assert (error <= allowed * (1 + 1e-4) + np.finfo(np.float32).tiny).all()


weights = st.tuples(st.integers(1, 5), st.integers(1, 70)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-(2.0**99), 2.0**99, width=32))
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weight=weights, bits=st.sampled_from([4, 8]))
def test_the_error_is_at_most_half_a_step_of_its_block(weight: NDArray[np.float32], bits: int) -> None:
    quantized = quantize_blocks(weight, bits)
    blocks = -(-weight.shape[1] // WEIGHT_BLOCK)
    assert quantized.packed.shape == (len(weight), blocks, WEIGHT_BLOCK * bits // 8)
    assert quantized.scales.shape == (len(weight), blocks)
    assert quantized.dequantize().shape == weight.shape
    assert_within_half_a_step(weight, quantized)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e-30, 1.0, 1e30, 1e37])
def test_extreme_scales_round_like_others(scale: float, bits: int) -> None:
    weight = (matrix(3, 40) * scale).astype(np.float32)
    assert_within_half_a_step(weight, quantize_blocks(weight, bits))


def test_the_bound_can_fail() -> None:
    weight = matrix(3, 40)
    quantized = quantize_blocks(weight, 8)
    shifted = dataclasses.replace(quantized, packed=quantized.packed + np.uint8(1))
    with pytest.raises(AssertionError):
        assert_within_half_a_step(weight, shifted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_block_stays_zero(bits: int) -> None:
    weight = matrix(4, 96)
    weight[1], weight[2, 32:64] = 0, 0
    quantized = quantize_blocks(weight, bits)
    assert not quantized.dequantize()[1].any()
    assert not quantized.dequantize()[2, 32:64].any()
    assert (quantized.scales[1] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = matrix(3, 33)
    weight[1, 32] = value
    with pytest.raises(ValueError, match="1 of 99 weights are not finite"):
        quantize_blocks(weight, 8)


def test_other_widths_than_4_and_8_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="weight bits must be 4 or 8, got 3"):
        quantize_blocks(matrix(2, 32), 3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_matmul_nbits_multiplies_by_the_dequantised_matrix(rows: int, width: int, bits: int, level: int) -> None:
    quantized, x = quantize_blocks(matrix(rows, width), bits), matrix(5, width, seed=1)
    graph = TinyGraph()
    inputs = (graph.weight("packed", values=quantized.packed), graph.weight("scales", values=quantized.scales))
    sizes = {"K": width, "N": rows, "bits": bits, "block_size": WEIGHT_BLOCK, "accuracy_level": level}
    y = graph.node(
        "MatMulNBits", graph.input("x", "S", width), *inputs, domain="com.microsoft", shape=("S", rows), **sizes
    )
    error = np.abs(run_graph(graph.build(y=y), {"x": x})["y"] - x @ quantized.dequantize().T)
    magnitude = np.abs(quantized.dequantize())
    if level == 0:
        assert (error <= ROUNDING * (np.abs(x) @ magnitude.T)).all()
    else:  # activations are rounded to int8 by blocks: half a step each
        half_steps = np.abs(in_blocks(x)).max(axis=-1) / 254
        assert (error <= half_steps @ in_blocks(magnitude).sum(axis=-1).T).all()
        assert error.max() > 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [48, 64])
def test_gather_block_quantized_looks_up_dequantised_rows(width: int, bits: int) -> None:
    quantized = quantize_blocks(matrix(9, width), bits)
    graph = TinyGraph()
    table = graph.weight("table", values=quantized.packed.reshape(9, -1))
    ids = graph.weight("ids", values=np.array([[8, 0, 3]], np.int64))
    options = {"bits": bits, "block_size": WEIGHT_BLOCK, "gather_axis": 0, "quantize_axis": 1}
    scales = graph.weight("scales", values=quantized.scales)
    y = graph.node("GatherBlockQuantized", table, ids, scales, domain="com.microsoft", shape=("A", "B", "C"), **options)
    found = run_graph(graph.build(y=y), {})["y"]
    assert np.array_equal(found[..., :width], quantized.dequantize()[[[8, 0, 3]]])


@pytest.fixture(scope="module", params=["tied", "separate"])
def wide_table(request: pytest.FixtureRequest) -> Transformer:
    """A model whose bytes are its tables: vocabulary 8192, width 64."""
    return make_model(make_config(vocab_size=8192, hidden_size=64, head=request.param))


def bytes_of(model: Transformer, precision: str) -> float:
    """What the parameters need: 4 bytes, or bits and a float32 scale a block of 32; matrices only."""
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
    total = 4.0 * sum(p.numel() for p in model.parameters())
    if precision == "fp32":
        return total
    for name, size in matrices.items():
        bits = 8 if precision == "int8" or name in ("embedding.weight", "head.weight") else 4
        total += size * (bits / 8 + 4 / WEIGHT_BLOCK - 4)
    return total


def test_b85_every_table_is_stored_once_and_b58_the_saved_file_is_the_quantised_one(
    wide_table: Transformer, tmp_path: Path
) -> None:
    config = wide_table.config
    exported = export_decoder(wide_table, max_length=16)
    feed = decoder_feed(config, (0,), 5)
    sizes: dict[str, int] = {}
    for precision in ("fp32", "int8", "int4"):
        model = exported.clone()
        compile_graph(model, make_plan(config, precision))
        in_memory = run_session(open_graph(model), feed)["logits"]
        session = save_and_open(model, tmp_path / precision)
        del model  # nothing but the files is left
        assert np.array_equal(run_session(session, feed)["logits"], in_memory)
        sizes[precision] = sum(path.stat().st_size for path in (tmp_path / precision).iterdir())
        tables = 2 * 16 * 8 * 4  # rotary
        limit = 1.05 * (bytes_of(wide_table, precision) + tables) + 16_000  # and the graph
        assert (tmp_path / precision / WEIGHTS_FILE).stat().st_size <= sizes[precision] <= limit, precision
    half = exported.clone()
    compile_graph(half, make_plan(config, "fp16", target=CUDA))
    write_graph(half, tmp_path)
    assert (tmp_path / WEIGHTS_FILE).stat().st_size <= 0.525 * (bytes_of(wide_table, "fp32") + tables) + 16_000
    assert sizes["int8"] < 0.35 * sizes["fp32"]
    assert sizes["int4"] < sizes["int8"]
    ops = [node.op_type for node in onnx.load(tmp_path / "int4" / GRAPH_FILE, load_external_data=False).graph.node]
    assert ops.count("MatMulNBits") == 4 * config.num_layers + 1
    assert ops.count("GatherBlockQuantized") == 1
    assert not {"MatMul", "Gemm"} & set(ops)


def test_the_quantised_graph_computes_with_the_dequantised_weights() -> None:
    """Against eager over rounded weights only the int8 activations are left; over other weights the gap is larger."""
    config = make_config(hidden_size=40)  # 40 is no multiple of 32: padded blocks, a sliced lookup
    model = make_model(config)
    exported, feed = export_decoder(model), decoder_feed(config, (0,), 12)
    for precision in ("int8", "int4"):
        compiled = exported.clone()
        compile_graph(compiled, make_plan(config, precision))
        found = run_graph(compiled, feed)["logits"]
        rounded = make_model(config)
        for name, parameter in rounded.named_parameters():
            if parameter.dim() == 2:
                bits = 4 if precision == "int4" and name != "embedding.weight" else 8
                values = quantize_blocks(parameter.detach().numpy(), bits).dequantize()
                parameter.data.copy_(parameter.data.new_tensor(values))
        near, far = (np.abs(found - eager_step(m, feed)["logits"]).mean() for m in (rounded, model))
        assert near < 0.75 * far

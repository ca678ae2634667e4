"""Products with block-quantised matrices: the prototype's arithmetic, the graph it stands in, the table of a prompt.

In: random matrices, and tiny bundles with blocks of 4 bits with minima. The arithmetic needs AVX-512 VNNI to be run.
"""

import ctypes
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import block_products
import numpy as np
import onnx
import prefill_step
import pytest
from block_product_graph import DOMAIN, OP, with_block_products
from block_products import TOLERANCE, Blocks, Floats, opened, require_exact
from gguf.constants import GGMLQuantizationType
from onnx import numpy_helper
from peer_process import PeerError
from step_runs import decoding, prompt
from step_times import Variant, compiled, report
from tiny_checkpoints import make_model, write_gguf

from graphport.export import export
from graphport.model_def.processor import describe_processor
from graphport.model_def.signature import BARE_GRAPH_FILE, GRAPH_FILE

HAS_VNNI = "avx512_vnni" in describe_processor().split()

# Rows of one group, of two, and more than are unpacked once for all; a whole tile of columns, and one of few.
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 33)
SIZES = ((64, 32), (17 * 32, 75), (32, 5))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A bundle of two layers of Q4_1 blocks, exact, and the model that holds what these decode to."""
    folder = tmp_path_factory.mktemp("products")
    model = make_model("llama", hidden_size=64, intermediate_size=96, max_position_embeddings=128)
    write_gguf(folder / "tiny.gguf", model, kind=GGMLQuantizationType.Q4_1)
    return export(folder / "tiny.gguf", folder / "tiny", verify=False).path, model


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not HAS_VNNI:
        pytest.skip("the prototype's arithmetic needs a processor with AVX-512 VNNI")
    return ctypes.CDLL(str(compiled(["block_product.c"], (), tmp_path_factory.mktemp("library"))))


def _multiply(library: ctypes.CDLL, blocks: Blocks, x: Floats) -> Floats:
    columns, count = blocks.scales.shape
    out = np.full((len(x), columns), np.nan, np.float32)
    arrays = [blocks.packed, blocks.scales, blocks.sums, out]
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
    sizes = [ctypes.c_int64(size) for size in (len(x), columns, count, blocks.bits)]
    assert library.block_product(x.ctypes.data_as(ctypes.c_void_p), *sizes, *pointers) == 1
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("width", "columns"), SIZES)
def test_the_prototype_computes_what_numpy_does(library: ctypes.CDLL, bits: int, width: int, columns: int) -> None:
    blocks = Blocks.random(columns, width, bits)
    for rows in ROWS:
        require_exact("prototype", partial(_multiply, library, blocks), blocks, rows)


def test_numpy_computes_what_the_kernel_of_onnx_runtime_does() -> None:
    blocks = Blocks.random(75, 96, 4)
    session = opened(blocks, None, 1)
    for rows in (1, 7):
        require_exact("MatMulNBits", lambda x: session.run(None, {"x": x})[0], blocks, rows)


@pytest.mark.parametrize("fault", ["zero points", "scales", "rows"])
def test_a_wrong_product_is_refused(fault: str) -> None:
    blocks = Blocks.random(40, 64, 4)
    other = blocks
    if fault == "zero points":
        other = dataclasses.replace(blocks, zero_points=blocks.zero_points ^ 1)
    elif fault == "scales":
        other = dataclasses.replace(blocks, scales=np.roll(blocks.scales, 1, axis=1))
    session = opened(other, None, 1)
    turn = slice(None, None, -1) if fault == "rows" else slice(None)
    with pytest.raises(PeerError, match=r"^wrong, 3 rows: off by .*, 1e-05 is allowed$"):
        require_exact("wrong", lambda x: session.run(None, {"x": x[turn]})[0], blocks, 3)


def test_every_product_of_a_bare_graph_becomes_the_prototype_with_its_minima(exported: tuple[Path, Any]) -> None:
    bundle, torch_model = exported
    model = onnx.load(bundle / BARE_GRAPH_FILE, load_external_data=False)
    products = [node.output[0] for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert with_block_products(model, bundle) == len(products) == 2 * 4 + 1
    assert [node.output[0] for node in model.graph.node if (node.domain, node.op_type) == (DOMAIN, OP)] == products
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    (down,) = [
        node for node in model.graph.node if node.op_type == OP and "blocks.1.feed_forward.down" in node.input[1]
    ]
    codes, scales, sums = (numpy_helper.to_array(tensors[name], str(bundle)) for name in down.input[1:])
    values = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:2], 32)
    found = values * scales.reshape(sums.shape)[..., None] + sums[..., None]
    wanted = torch_model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    assert np.abs(found.reshape(wanted.shape) - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def test_products_of_other_blocks_keep_their_kernel(exported: tuple[Path, Any]) -> None:
    bundle, _ = exported
    model = onnx.load(bundle / GRAPH_FILE, load_external_data=False)
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    (level,) = [attribute for attribute in products[-1].attribute if attribute.name == "accuracy_level"]
    level.i = 0
    before = model.SerializeToString()
    assert with_block_products(model, bundle) == 0
    assert model.SerializeToString() == before


def test_minima_that_nodes_add_are_not_added_twice(exported: tuple[Path, Any]) -> None:
    bundle, _ = exported
    model = onnx.load(bundle / GRAPH_FILE, load_external_data=False)
    with_block_products(model, bundle)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in [node for node in model.graph.node if node.op_type == OP]:
        scales, sums = (numpy_helper.to_array(tensors[name], str(bundle)) for name in node.input[2:])
        np.testing.assert_array_equal(sums, -8 * scales.reshape(sums.shape))


def test_the_table_names_prompts_rows_and_shares(
    exported: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = exported
    table = tmp_path / "steps.md"
    options = ["--prompts", "5,70", "--rows", "1,3", "--rounds", "1", "--max-others", "1", "--threads", "1"]
    monkeypatch.setattr(prefill_step, "CACHED", 9)
    monkeypatch.setattr(sys, "argv", ["prefill_step.py", str(bundle), *options, "--out", str(table)])
    assert prefill_step.main() == 0
    text = table.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text + "\n"
    assert "| | prompt of 5, ms | prompt of 70, ms | 1 row, ms | 3 rows, ms |" in text
    assert "* tiny, 3 rows: " in text
    assert "MatMulNBits" in text


def test_what_the_compiler_says_is_told_in_one_line(
    exported: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = exported
    options = ["--max-others", "1", "--threads", "1", "--include", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["prefill_step.py", str(bundle), *options])
    assert prefill_step.main() == 1
    assert "prefill_step: error: cc " in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["block_products.py", *options])
    assert block_products.main() == 1
    assert "onnxruntime_c_api.h" in capsys.readouterr().err


def test_a_prompt_is_cut_as_the_engine_cuts_it() -> None:
    work = prompt(150, chunk=64)
    assert [(step.cached, step.new, step.has_logits) for step in work.steps] == [
        (0, 64, False), (64, 64, False), (128, 22, True),
    ]  # fmt: skip
    assert work.capacity == 150


def test_a_variant_with_a_custom_op_is_compared_with_the_graph_that_serves() -> None:
    graph, work = Path("model.onnx"), decoding(3)
    variants = [Variant(name="stock", graph=graph), Variant(name="other", graph=graph, like="stock")]
    times = {("stock", "after 3"): [2.0, 4.0, 3.0], ("other", "after 3"): [1.0, 1.5, 9.0]}
    shares = {("stock", "after 3"): {"MatMulNBits": 0.75}, ("other", "after 3"): {OP: 0.5}}
    text = report("Steps", times, shares, variants, (work,))
    assert "| stock | 3.00 |\n| other | 1.50 |\n| other: times as fast | 2.00 |" in text
    assert f"* other, after 3: {OP} 50%" in text

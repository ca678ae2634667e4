"""Minima inside the packed matrices of the CPU's kernels: equal to numpy, or refused with nothing changed."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from graphport.export.quantize import pack_pairs
from graphport.model_def.processor import describe_processor
from graphport.runtime.graph_file import read_graph_header
from graphport.runtime.opening import cpu_session
from graphport.runtime.packed_file import ALIGNMENT, lay_out
from graphport.runtime.packed_weights import GraphFiles, PackingError, add_minima
from graphport.runtime.preparation import SAVING

HAS_VNNI = any(name.endswith("_vnni") for name in describe_processor().split())

BLOCK, BLOCKS, ROWS = 32, 3, 83  # an odd number of blocks, no whole tile of 16 rows

Floats = NDArray[np.float32]


def _write_bare(folder: Path, *, bits: int, transposed: bool) -> Floats:
    """A graph of one product, with minima that nothing reads; returns the matrix [N, K] that it stands for."""
    random = np.random.default_rng(bits)
    codes = random.integers(2**bits, size=(ROWS, BLOCKS * BLOCK)).astype(np.uint8)
    scales = random.uniform(0.5, 1.5, (ROWS, BLOCKS)).astype(np.float32)
    zeros = random.integers(2**bits, size=(ROWS, BLOCKS)).astype(np.uint8)
    minima = random.normal(scale=3.0, size=(ROWS, BLOCKS)).astype(np.float32)
    packed = pack_pairs(codes) if bits == 4 else codes
    tensors = {
        f"w_q{bits}": packed.reshape(ROWS, BLOCKS, -1),
        "w_scales": scales,
        "w_zero_points": pack_pairs(zeros) if bits == 4 else zeros,
        "w_minima_transposed" if transposed else "w_minima": np.ascontiguousarray(minima.T) if transposed else minima,
    }
    attributes = {"K": BLOCKS * BLOCK, "N": ROWS, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
    node = helper.make_node(
        "MatMulNBits", ["x", *list(tensors)[:3]], ["y"], domain="com.microsoft", name="product", **attributes
    )
    graph = helper.make_graph(
        [node],
        "bare",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", BLOCKS * BLOCK])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", ROWS])],
        [numpy_helper.from_array(values, name) for name, values in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(model, folder / "bare.onnx", save_as_external_data=True, location="bare.data", size_threshold=256)
    wide = np.repeat(scales, BLOCK, axis=1) * (codes - np.repeat(zeros.astype(np.float32), BLOCK, axis=1))
    return (wide + np.repeat(minima, BLOCK, axis=1)).astype(np.float32)


def _pack(folder: Path) -> tuple[GraphFiles, GraphFiles]:
    """The graph as ONNX Runtime packs it, and the bare one."""
    (folder / "written").mkdir()
    (folder / "packed").mkdir()
    bare, written = folder / "bare.onnx", folder / "written" / "model.onnx"
    cpu_session(bare, entries=SAVING, save_to=written)
    header = lay_out(written, written.with_name("model.onnx.data"), folder / "packed")
    files = GraphFiles(path=folder / "packed" / "model.onnx", header=header)
    return files, GraphFiles(path=bare, header=read_graph_header(bare))


def _exact_activations(rows: int) -> Floats:
    """Whole numbers whose blocks reach 127: the kernel's rounding to 8 bits keeps them."""
    x = np.random.default_rng(1).integers(-127, 128, size=(rows, BLOCKS, BLOCK)).astype(np.float32)
    x[..., 0] = 127
    return x.reshape(rows, -1)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("bits", "transposed"), [(4, False), (4, True), (8, False)])
def test_a_packed_product_with_minima_equals_the_dequantised_one(
    bits: int, transposed: bool, rows: int, tmp_path: Path
) -> None:
    matrix = _write_bare(tmp_path, bits=bits, transposed=transposed)
    packed, bare = _pack(tmp_path)
    x = _exact_activations(rows)
    without = cpu_session(packed.path).run(None, {"x": x})[0]
    assert add_minima(packed, bare) == 1
    found = cpu_session(packed.path).run(None, {"x": x})[0]
    scale = np.abs(x) @ np.abs(matrix).T
    worst = (np.abs(found - x @ matrix.T) / scale).max()
    if bits == 4 and rows == 1 and not HAS_VNNI:  # its kernel reads zero points: `prepare` keeps the minima as nodes
        assert worst > 1e-3
    else:
        assert worst < 1e-6
    assert (np.abs(without - x @ matrix.T) / scale).max() > 1e-3  # and would be wrong without the minima


def test_matrices_that_do_not_lie_as_foretold_are_refused_unchanged(tmp_path: Path) -> None:
    _write_bare(tmp_path, bits=4, transposed=False)
    packed, bare = _pack(tmp_path)
    data = packed.path.with_name("model.onnx.data")
    place = packed.header.tensors["w_q4"].packed[0]
    codes = -(-ROWS * BLOCKS * BLOCK // 2 // ALIGNMENT) * ALIGNMENT
    bytes_ = bytearray(data.read_bytes())
    bytes_[place.offset + codes + 5] ^= 1  # within the first sum
    data.write_bytes(bytes_)
    with pytest.raises(PackingError, match="w_q4 is not packed with its sums of blocks where they were looked for"):
        add_minima(packed, bare)
    assert data.read_bytes() == bytes(bytes_)


def test_everything_packed_begins_at_an_aligned_byte_and_nothing_overlaps(tmp_path: Path) -> None:
    _write_bare(tmp_path, bits=8, transposed=False)
    packed, _ = _pack(tmp_path)
    places = sorted(packed.header.external, key=lambda place: place.offset)
    assert len(places) >= 3
    assert all(place.offset % ALIGNMENT == 0 for place in places)
    ends = [place.offset + (place.length or 0) for place in places]
    assert all(end <= following.offset for end, following in zip(ends, places[1:], strict=False))
    assert ends[-1] == packed.path.with_name("model.onnx.data").stat().st_size


def test_a_graph_that_was_moved_is_otherwise_the_same(tmp_path: Path) -> None:
    _write_bare(tmp_path, bits=4, transposed=False)
    packed, _ = _pack(tmp_path)
    before, after = (
        onnx.load(path, load_external_data=False) for path in (tmp_path / "written" / "model.onnx", packed.path)
    )
    for model in (before, after):
        for tensor in model.graph.initializer:
            del tensor.external_data[:]
    assert before == after

"""A graph whose products with block-quantised matrices are a custom op: see `prefill_step.py` and `block_products.py`.

In: an ONNX model without its weights, and the folder where they lie. Out: the same, changed in place: the custom op
adds up what blocks' zero points and minima come to as well. It writes nothing.
"""

from pathlib import Path

import numpy as np
import onnx
from decode_step_graph import DOMAIN
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from graphport.model_def.signature import MINIMA, MINIMA_TRANSPOSED

OP = "BlockProduct"
BLOCK = 32

_CODES, _SCALES, _ZERO_POINTS, _OTHERS = 1, 2, 3, 4  # inputs of MatMulNBits; others are a bias or an order of rows
_ROUNDED_ACTIVATIONS = 4  # accuracy_level

Floats = NDArray[np.float32]


def with_block_products(model: onnx.ModelProto, folder: Path) -> int:
    """Let every MatMulNBits be the custom op; returns how many: 0, with nothing changed, where one cannot be."""
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    if not all(map(_fits, nodes)):
        return 0
    held = _Constants(model, folder)
    sums: dict[str, onnx.TensorProto] = {}
    for node in nodes:
        codes, bits = node.input[_CODES], _integer(node, "bits")
        if codes not in sums:
            sums[codes] = numpy_helper.from_array(_sums(node, held), f"{codes}_sums")
        inputs = [*node.input[: _SCALES + 1], sums[codes].name]
        node.CopyFrom(helper.make_node(OP, inputs, node.output, name=node.name, domain=DOMAIN, bits=bits))
    model.graph.initializer.extend(sums.values())
    if nodes:
        del model.graph.value_info[:]
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return len(nodes)


def block_sums(scales: Floats, zero_points: NDArray[np.uint8], minima: Floats | None) -> Floats:
    """What each block [N, J] adds a unit of its activations' sum: minimum - scale * zero_point."""
    sums = -scales.astype(np.float64) * zero_points
    return (sums if minima is None else sums + minima).astype(np.float32)


class _Constants:
    """The constants of a graph, and which of them nodes read."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._folder = str(folder)
        self._read = {name for node in model.graph.node for name in node.input}

    def values(self, name: str) -> NDArray[np.generic]:
        return numpy_helper.to_array(self._tensors[name], self._folder)

    def minima(self, codes: str, bits: int) -> Floats | None:
        """Minima [N, J] that no node adds: those of a bare graph."""
        name = codes.removesuffix(f"_q{bits}")
        for suffix in (MINIMA, MINIMA_TRANSPOSED):
            if name + suffix in self._tensors and name + suffix not in self._read:
                values = self.values(name + suffix).astype(np.float32)
                return values if suffix == MINIMA else values.T
        return None


def _fits(node: onnx.NodeProto) -> bool:
    has_others = any(node.input[_OTHERS:])
    whole = _integer(node, "K") % BLOCK == 0 and _integer(node, "block_size") == BLOCK
    return whole and not has_others and _integer(node, "accuracy_level") == _ROUNDED_ACTIVATIONS


def _integer(node: onnx.NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)


def _sums(node: onnx.NodeProto, held: _Constants) -> Floats:
    bits, shape = _integer(node, "bits"), (_integer(node, "N"), _integer(node, "K") // BLOCK)
    scales = held.values(node.input[_SCALES]).astype(np.float32).reshape(shape)
    zero_points = np.full(shape, 1 << bits - 1, np.uint8)
    if len(node.input) > _ZERO_POINTS and node.input[_ZERO_POINTS]:
        zero_points = _unpacked(held.values(node.input[_ZERO_POINTS]).astype(np.uint8), shape, bits)
    return block_sums(scales, zero_points, held.minima(node.input[_CODES], bits))


def _unpacked(zero_points: NDArray[np.uint8], shape: tuple[int, int], bits: int) -> NDArray[np.uint8]:
    """[N, J], of which 4-bit ones lie two a byte."""
    rows = zero_points.reshape(shape[0], -1)
    if bits == 4:
        rows = np.stack((rows & 15, rows >> 4), axis=-1).reshape(shape[0], -1)
    return rows[:, : shape[1]]

"""Nodes that compute with block-quantised matrices: the product, the lookup, and what minima of blocks add to them.

Before: Linear(x, W), Gather(W, ids)                  W = (codes - zero points) * scales + minima
After:  MatMulNBits(x, codes, scales[, zero points])  [+ MatMul(sums of x over each block, minima)]
        GatherBlockQuantized(codes, ids, scales[, zero points])  [+ Gather(minima, ids) on every value of its block]

A minimum is the same for a whole block, so its part of the product needs the sums of x over the blocks alone.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.graph_pass import CONTRIB, add_constant, new_node, remove_nodes, replace_value
from graphport.export.quantize import BlockQuantized, pack_pairs
from graphport.model_def.signature import MINIMA, MINIMA_TRANSPOSED, SCALES, ZERO_POINTS

Attributes = dict[str, int | float | str | list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOperands:
    """A block-quantised matrix [N, K] as constants of a graph; `zero_points` holds one or none."""

    name: str
    blocks: BlockQuantized
    packed: ir.Value
    scales: ir.Value
    zero_points: tuple[ir.Value, ...]

    @property
    def rows(self) -> int:
        """Number of outputs N."""
        return int(self.blocks.packed.shape[0])


def add_operands(graph: ir.Graph, name: str, blocks: BlockQuantized, dtype: type[np.floating]) -> BlockOperands:
    """Store the matrix called `name` as constants, scales in the activations' type."""
    zero_points: tuple[ir.Value, ...] = ()
    if blocks.zero_points is not None:
        values = pack_pairs(blocks.zero_points) if blocks.bits == 4 else blocks.zero_points
        zero_points = (_constant(graph, f"{name}{ZERO_POINTS}", values),)
    return BlockOperands(
        name=name,
        blocks=blocks,
        packed=_constant(graph, f"{name}_q{blocks.bits}", blocks.packed),
        scales=_constant(graph, f"{name}{SCALES}", blocks.scales.astype(dtype)),
        zero_points=zero_points,
    )


def lower_product(graph: ir.Graph, node: ir.Node, operands: BlockOperands, *, accuracy_level: int | None) -> None:
    """Replace a linear layer by the product with a block-quantised matrix."""
    blocks = operands.blocks
    attributes: Attributes = {
        "K": blocks.width,
        "N": operands.rows,
        "bits": blocks.bits,
        "block_size": blocks.block_size,
    }
    if accuracy_level is not None:
        attributes["accuracy_level"] = accuracy_level
    inputs = [node.inputs[0], operands.packed, operands.scales, *operands.zero_points]
    kernel = new_node(node, "MatMulNBits", inputs, attributes, domain=CONTRIB, name=node.name or "matmul")
    result = kernel.outputs[0]
    if blocks.minima is not None:
        result = _add_minima(graph, node, result, operands)
    replace_value(node.outputs[0], result)
    remove_nodes(node)


def lower_lookup(graph: ir.Graph, node: ir.Node, operands: BlockOperands) -> None:
    """Replace a Gather of rows by the lookup of rows of a block-quantised matrix."""
    blocks = operands.blocks
    shape = _constant(graph, "embedding_table_shape", np.array([operands.rows, -1], np.int64))
    table = new_node(node, "Reshape", [operands.packed, shape], name="embedding_table")
    attributes: Attributes = {
        "bits": blocks.bits,
        "block_size": blocks.block_size,
        "gather_axis": 0,
        "quantize_axis": 1,
    }
    inputs = [table.outputs[0], node.inputs[1], operands.scales, *operands.zero_points]
    name = node.name or "embedding"
    kernel = new_node(node, "GatherBlockQuantized", inputs, attributes, domain=CONTRIB, name=name)
    result = kernel.outputs[0]
    if blocks.minima is not None:
        result = _add_minima_of_rows(graph, node, result, operands)
    if blocks.width % blocks.block_size:
        bounds = {"start": 0, "end": blocks.width, "axis": -1}
        ends = [_constant(graph, f"embedding_slice_{key}", np.array([value])) for key, value in bounds.items()]
        result = new_node(node, "Slice", [result, *ends], name="embedding_slice").outputs[0]
    replace_value(node.outputs[0], result)
    remove_nodes(node)


def _add_minima(graph: ir.Graph, node: ir.Node, product: ir.Value, operands: BlockOperands) -> ir.Value:
    """The product plus the sums of x over each block times the blocks' minima."""
    x, blocks = node.inputs[0], operands.blocks
    assert x is not None
    assert x.shape is not None
    assert blocks.minima is not None
    parts = _in_blocks(graph, node, x, blocks, name=f"{node.name}_in_blocks")
    last = _constant(graph, "last_axis", np.array([-1]))
    sums = new_node(node, "ReduceSum", [parts, last], {"keepdims": 0}, name=f"{node.name}_block_sums").outputs[0]
    name = f"{node.name}_minima"
    if len(x.shape) == 2:
        # of no rows ONNX Runtime 1.31 sums nothing and keeps the last axis
        shape = _constant(graph, f"block_sums_{blocks.scales.shape[1]}", np.array([0, blocks.scales.shape[1]]))
        sums = new_node(node, "Reshape", [sums, shape], name=f"{node.name}_row_sums").outputs[0]
        return new_node(node, "Gemm", [sums, _minima(graph, operands), product], {"transB": 1}, name=name).outputs[0]
    turned = _constant(graph, f"{operands.name}{MINIMA_TRANSPOSED}", np.ascontiguousarray(blocks.minima.T))
    added = new_node(node, "MatMul", [sums, turned], name=name).outputs[0]
    return new_node(node, "Add", [product, added], name=f"{name}_added").outputs[0]


def _add_minima_of_rows(graph: ir.Graph, node: ir.Node, values: ir.Value, operands: BlockOperands) -> ir.Value:
    """Looked-up rows [B, S, K] plus the minimum of each block on each of its values."""
    last = _constant(graph, "last_axis", np.array([-1]))
    minima = new_node(node, "Gather", [_minima(graph, operands), node.inputs[1]], name="embedding_minima").outputs[0]
    minima = new_node(node, "Unsqueeze", [minima, last], name="embedding_minima_unsqueezed").outputs[0]
    values.shape = node.outputs[0].shape
    parts = _in_blocks(graph, node, values, operands.blocks, name="embedding_in_blocks")
    added = new_node(node, "Add", [parts, minima], name="embedding_with_minima").outputs[0]
    joined = _constant(graph, "embedding_joined", np.array([0, 0, operands.blocks.width]))
    return new_node(node, "Reshape", [added, joined], name="embedding_rows").outputs[0]


def _in_blocks(graph: ir.Graph, node: ir.Node, x: ir.Value, blocks: BlockQuantized, *, name: str) -> ir.Value:
    """X [..., K] as [..., K / block_size, block_size]."""
    assert x.shape is not None
    kept = len(x.shape) - 1  # 0 keeps a dimension, of no rows as well, which -1 could not
    counts = [blocks.width // blocks.block_size, blocks.block_size]
    shape = _constant(graph, "_".join(map(str, ("in_blocks", kept, *counts))), np.array([0] * kept + counts))
    return new_node(node, "Reshape", [x, shape], name=name).outputs[0]


def _minima(graph: ir.Graph, operands: BlockOperands) -> ir.Value:
    assert operands.blocks.minima is not None
    return _constant(graph, f"{operands.name}{MINIMA}", operands.blocks.minima)


def _constant(graph: ir.Graph, name: str, values: NDArray[np.generic]) -> ir.Value:
    return add_constant(graph, name, ir.tensor(values, name=name))

"""The graph that a machine packs for its own processor: products alone, without the minima of their blocks.

Before: Reshape, ReduceSum -> MatMul(minima) -> Add(MatMulNBits(x, codes, scales), ...)
After:  MatMulNBits(x, codes, scales, zero points)

In: the graph of a bundle on disk. Out: a second graph over the same weights file. It computes something else: the
runtime writes the minima into the sums that ONNX Runtime packs (`runtime/packed_weights.py`). They stay in the graph as
constants that nothing reads. Zero points are written out, because without any a kernel may leave its sums out.
"""

from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphport.export.graph_pass import CONTRIB, add_constant, remove_nodes, replace_value, static_dims
from graphport.export.quantize import pack_pairs
from graphport.model_def.signature import BARE_GRAPH_FILE, GRAPH_FILE, MINIMA, MINIMA_TRANSPOSED

ROUNDED_ACTIVATIONS = 4  # the accuracy_level whose kernels keep sums of blocks


def write_bare_graph(folder: Path) -> bool:
    """Write `bare_graph.onnx` beside the graph in `folder` if that adds minima to products; returns whether it does."""
    model = ir.load(folder / GRAPH_FILE)
    sums = [(node, total) for node in model.graph if (total := _sum_with_minima(node)) is not None]
    for product, total in sums:
        replace_value(total.outputs[0], product.outputs[0])
        _add_zero_points(model.graph, product)
        _remove_with_inputs(total)
    if sums:
        ir.save(model, folder / BARE_GRAPH_FILE)
    return bool(sums)


def _sum_with_minima(product: ir.Node) -> ir.Node | None:
    """The node that adds minima to what `product` computes, if it is such a product."""
    level = product.attributes.get("accuracy_level")
    if (product.domain, product.op_type) != (CONTRIB, "MatMulNBits") or level is None:
        return None
    if level.as_int() != ROUNDED_ACTIVATIONS:
        return None
    for use in product.outputs[0].uses():
        if use.node.op_type == "Gemm" and _is_minima(use.node.inputs[1], MINIMA):
            return use.node
        if use.node.op_type == "Add":
            added = [value.producer() for value in use.node.inputs if value is not None]
            if any(node is not None and _is_minima(node.inputs[-1], MINIMA_TRANSPOSED) for node in added):
                return use.node
    return None


def _is_minima(value: ir.Value | None, suffix: str) -> bool:
    return value is not None and value.is_initializer() and (value.name or "").endswith(suffix)


def _add_zero_points(graph: ir.Graph, product: ir.Node) -> None:
    """Zero points in the middle of the range, unless there are others."""
    if len(product.inputs) > 3:
        return
    scales = product.inputs[2]
    assert scales is not None
    bits = product.attributes["bits"].as_int()
    middle = np.full(static_dims(scales), 1 << bits - 1, np.uint8)
    values = pack_pairs(middle) if bits == 4 else middle
    name = f"zero_points_{bits}_{'x'.join(map(str, static_dims(scales)))}"
    product.resize_inputs(4)
    product.replace_input_with(3, add_constant(graph, name, ir.tensor(values, name=name)))


def _remove_with_inputs(node: ir.Node) -> None:
    """Remove a node that nothing reads, then those that only it read."""
    before = [value.producer() for value in node.inputs if value is not None]
    remove_nodes(node)
    for producer in before:
        if producer is not None and not any(output.uses() for output in producer.outputs):
            _remove_with_inputs(producer)

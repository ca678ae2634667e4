"""Linear layers and the embedding become the kernels of the precision.

Before: graphport::Linear(x, W), Gather(E, ids)
After, float:     MatMul(x, W^T); Gemm(x, E, transB) where a tied head shares the embedding; Gather stays
After, quantised: MatMulNBits(x, blocks, scales); GatherBlockQuantized(blocks, ids, scales)

Each matrix is stored once: a tied head and its embedding read the same blocks.
"""

import numpy as np
import onnx_ir as ir

from graphport.export.graph_pass import (
    CONTRIB,
    CompilePlan,
    Miss,
    PassReport,
    add_constant,
    name_site,
    new_node,
    remove_nodes,
    replace_value,
    static_dims,
)
from graphport.export.portable_ops import DOMAIN
from graphport.export.quantize import BlockQuantized, quantize_blocks
from graphport.export.targets import WEIGHT_BLOCK

EMBEDDING = "embedding.weight"
TABLES = (EMBEDDING, "head.weight")


def lower_linear(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Lower every linear layer, and in quantised precisions the embedding."""
    blocks: dict[str, tuple[ir.Value, ir.Value, BlockQuantized]] = {}
    fused, missed = [], []
    for node in list(model.graph):
        is_linear = (node.domain, node.op_type) == (DOMAIN, "Linear")
        if not is_linear and not _is_embedding(node):
            continue
        weight = node.inputs[1] if is_linear else node.inputs[0]
        assert weight is not None
        site = name_site(weight.name or "")
        if plan.precision.weight_bits is None:
            if is_linear:
                _lower_float(model, node, weight)
                fused.append(site)
            continue
        if not weight.is_initializer():
            missed.append(Miss(site=site, check="the weight is a constant", found=f"{weight.name} is computed"))
            _lower_float(model, node, weight)
            continue
        bits = plan.precision.table_bits if weight.name in TABLES else plan.precision.weight_bits
        assert bits is not None
        assert weight.name is not None
        if weight.name not in blocks:
            blocks[weight.name] = _register_blocks(model, weight, bits, plan)
        if is_linear:
            _lower_quantized(node, *blocks[weight.name], accuracy_level=plan.target.accuracy_level)
            fused.append(site)
        else:
            _lower_embedding(model.graph, node, *blocks[weight.name])
            fused.append(f"{site} lookup")
    return PassReport(rule="linear", fused=tuple(fused), missed=tuple(missed))


def _is_embedding(node: ir.Node) -> bool:
    table = node.inputs[0] if node.op_type == "Gather" else None
    return table is not None and table.name == EMBEDDING


def _lower_float(model: ir.Model, node: ir.Node, weight: ir.Value) -> None:
    is_flat = node.inputs[0] is not None and node.inputs[0].shape is not None and len(node.inputs[0].shape) == 2
    if len(weight.uses()) > 1 and is_flat:
        # the matrix is read elsewhere as it is (tied embedding): a transposed copy would double it
        kernel = new_node(node, "Gemm", list(node.inputs), {"transB": 1}, name=node.name or "gemm")
    elif weight.is_initializer() and len(weight.uses()) == 1:
        transposed = _transposed(model, weight)
        kernel = new_node(node, "MatMul", [node.inputs[0], transposed], name=node.name or "matmul")
    else:
        turn = new_node(node, "Transpose", [weight], {"perm": [1, 0]}, name=f"{node.name}_transpose")
        kernel = new_node(node, "MatMul", [node.inputs[0], turn.outputs[0]], name=node.name or "matmul")
    replace_value(node.outputs[0], kernel.outputs[0])
    remove_nodes(node)


def _transposed(model: ir.Model, weight: ir.Value) -> ir.Value:
    tensor = weight.const_value
    assert tensor is not None
    name = f"{weight.name}_transposed"
    shape = ir.Shape(static_dims(tensor)[::-1])

    def turn() -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(tensor.numpy().T), name=name)

    return add_constant(model.graph, name, ir.LazyTensor(turn, tensor.dtype, shape, name=name))


def _register_blocks(
    model: ir.Model, weight: ir.Value, bits: int, plan: CompilePlan
) -> tuple[ir.Value, ir.Value, BlockQuantized]:
    assert weight.const_value is not None
    quantized = quantize_blocks(weight.const_value.numpy().astype(np.float32, copy=False), bits)
    packed = add_constant(
        model.graph, f"{weight.name}_q{bits}", ir.tensor(quantized.packed, name=f"{weight.name}_q{bits}")
    )
    dtype = np.float16 if plan.precision.activations == "float16" else np.float32
    name = f"{weight.name}_scales"
    scales = add_constant(model.graph, name, ir.tensor(quantized.scales.astype(dtype), name=name))
    return packed, scales, quantized


def _lower_quantized(
    node: ir.Node, packed: ir.Value, scales: ir.Value, quantized: BlockQuantized, *, accuracy_level: int | None
) -> None:
    attributes: dict[str, int | float | str | list[int]] = {
        "K": quantized.width,
        "N": int(quantized.packed.shape[0]),
        "bits": quantized.bits,
        "block_size": WEIGHT_BLOCK,
    }
    if accuracy_level is not None:
        attributes["accuracy_level"] = accuracy_level
    name = node.name or "matmul"
    kernel = new_node(node, "MatMulNBits", [node.inputs[0], packed, scales], attributes, domain=CONTRIB, name=name)
    replace_value(node.outputs[0], kernel.outputs[0])
    remove_nodes(node)


def _lower_embedding(
    graph: ir.Graph, node: ir.Node, packed: ir.Value, scales: ir.Value, quantized: BlockQuantized
) -> None:
    rows = int(quantized.packed.shape[0])
    shape = add_constant(graph, "embedding_table_shape", ir.tensor(np.array([rows, -1], np.int64)))
    table = new_node(node, "Reshape", [packed, shape], name="embedding_table")
    attributes: dict[str, int | float | str | list[int]] = {
        "bits": quantized.bits,
        "block_size": WEIGHT_BLOCK,
        "gather_axis": 0,
        "quantize_axis": 1,
    }
    kernel = new_node(
        node,
        "GatherBlockQuantized",
        [table.outputs[0], node.inputs[1], scales],
        attributes,
        domain=CONTRIB,
        name=node.name or "embedding",
    )
    result = kernel.outputs[0]
    if quantized.width % WEIGHT_BLOCK:
        starts, ends, axes = (
            add_constant(graph, f"embedding_slice_{key}", ir.tensor(np.array([value], np.int64)))
            for key, value in (("start", 0), ("end", quantized.width), ("axis", -1))
        )
        result = new_node(node, "Slice", [result, starts, ends, axes], name="embedding_slice").outputs[0]
    replace_value(node.outputs[0], result)
    remove_nodes(node)

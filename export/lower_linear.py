"""Linear layers and the embedding become the kernels of the precision.

Before: graphport::Linear(x, W), Gather(E, ids)
After, float:     MatMul(x, W^T); Gemm(x, E, transB) where a tied head shares the embedding; Gather stays
After, quantised: MatMulNBits(x, blocks, scales); GatherBlockQuantized(blocks, ids, scales); see `block_kernels.py`

Each matrix is stored once: a tied head and its embedding read the same blocks. Blocks are rounded here, or in precision
gguf the file's own.
"""

import numpy as np
import onnx_ir as ir

from graphport.export.block_kernels import BlockOperands, add_operands, lower_lookup, lower_product
from graphport.export.gguf_matrices import stack_matrices
from graphport.export.graph_pass import (
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
from graphport.export.pack_projections import packed_from
from graphport.export.portable_ops import DOMAIN
from graphport.export.quantize import BlockQuantized, quantize_blocks
from graphport.model_def.experts import is_deciding

EMBEDDING = "embedding.weight"
TABLES = (EMBEDDING, "head.weight", "masked_head.weight")


def lower_linear(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Lower every linear layer, and the embedding where it is quantised."""
    operands: dict[str, BlockOperands | None] = {}
    fused, missed = [], []
    for node in list(model.graph):
        is_linear = (node.domain, node.op_type) == (DOMAIN, "Linear")
        if not is_linear and not _is_embedding(node):
            continue
        weight = node.inputs[1] if is_linear else node.inputs[0]
        assert weight is not None
        name, site = weight.name or "", name_site(weight.name or "")
        is_computed = plan.precision.weight_bits is not None and not weight.is_initializer()
        if name not in operands:
            operands[name] = None if is_computed else _add_operands(model.graph, weight, plan)
        _lower(model, node, weight, operands[name], plan)
        if is_computed:
            missed.append(Miss(site=site, check="the weight is a constant", found=f"{name} is computed"))
        elif is_linear:
            fused.append(site)
        elif operands[name] is not None:
            fused.append(f"{site} lookup")
    return PassReport(rule="linear", fused=tuple(fused), missed=tuple(missed))


def _lower(model: ir.Model, node: ir.Node, weight: ir.Value, operands: BlockOperands | None, plan: CompilePlan) -> None:
    if operands is None:
        if not _is_embedding(node):
            _lower_float(model, node, weight)
    elif _is_embedding(node):
        lower_lookup(model.graph, node, operands)
    else:
        lower_product(model.graph, node, operands, accuracy_level=plan.kernel_accuracy)


def _add_operands(graph: ir.Graph, weight: ir.Value, plan: CompilePlan) -> BlockOperands | None:
    """The weight as constants of the quantised kernels; None where it stays in the activations' type."""
    blocks = _blocks(weight, plan)
    if blocks is None:
        return None
    dtype = np.float16 if plan.precision.activations == "float16" else np.float32
    return add_operands(graph, weight.name or "", blocks, dtype)


def _blocks(weight: ir.Value, plan: CompilePlan) -> BlockQuantized | None:
    held = [plan.matrices[name] for name in packed_from(weight) if name in plan.matrices]
    if held:
        return stack_matrices(held)
    bits = plan.precision.table_bits if weight.name in TABLES else plan.precision.weight_bits
    if bits is None or is_deciding(weight.name or ""):
        return None
    assert weight.const_value is not None
    return quantize_blocks(weight.const_value.numpy().astype(np.float32, copy=False), bits)


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

"""Mixtures of experts become the kernels that both providers have.

Before: Experts(x, router_logits, gate, up, down); BiasedExperts(..., gate_bias, up_bias, down_bias)
After, float:     MoE(x, router_logits, gate_up[, bias], down[, bias])
After, quantised: QMoE(x, router_logits, gate_up blocks, scales[, bias], down blocks, scales[, bias])

gate_up holds the rows of gate and up by turns, which is the one layout of SwiGLU that the CPU's kernel takes; blocks
are raw (`weights_prepacked` 0), which both providers take. Experts whose widths are no whole blocks stay in floats, and
so do those of a GGUF file whose values are kept.
Where the weights of the chosen do not add up to 1, their sum multiplies what the kernel gives for weights that do.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

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
from graphport.export.quantize import quantize_blocks
from graphport.export.targets import WEIGHT_BLOCK
from graphport.model_def.signature import SCALES

EXPERT_OPS = ("Experts", "BiasedExperts")

_TYPES = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}

Attributes = dict[str, int | float | str | list[int]]


def lower_experts(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Lower every mixture of experts, with its matrices in the plan's bits."""
    fused, missed = [], []
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type in EXPERT_OPS]:
        gate, up, down = node.inputs[2:5]
        assert gate is not None
        assert up is not None
        assert down is not None
        owner = (gate.name or "").removesuffix(".gate.weight")
        site = name_site(owner)
        bits = plan.precision.weight_bits
        limit = None if bits is None else block_limit(static_dims(down)[1], static_dims(down)[2])
        if limit is not None:
            missed.append(Miss(site=site, check="the widths of the experts are whole blocks", found=limit))
            bits = None
        elif plan.precision.keeps_blocks:
            found = "experts of a GGUF file, whose blocks it does not take as they are: their weights stay floats"
            missed.append(Miss(site=site, check="the kernel takes the blocks as they are", found=found))
            bits = None
        gate_up = _interleaved(model.graph, gate, up, f"{owner}.gate_up.weight")
        matrices = [_operands(model.graph, value, plan, bits) for value in (gate_up, down)]
        _lower(node, owner, matrices, plan, bits)
        fused.append(site)
    return PassReport(rule="experts", fused=tuple(fused), missed=tuple(missed))


def block_limit(hidden_size: int, width: int) -> str | None:
    """Why the matrices of experts of these widths cannot be cut into blocks, or None when they can."""
    for name, size in (("the hidden size", hidden_size), ("the width of the experts", width)):
        if size % WEIGHT_BLOCK:
            return f"{name} {size} is no multiple of {WEIGHT_BLOCK}, so their weights stay floats"
    return None


def _lower(
    node: ir.Node, owner: str, matrices: Sequence[list[ir.Value | None]], plan: CompilePlan, bits: int | None
) -> None:
    attributes: Attributes = {
        "k": node.attributes["num_chosen"].as_int(),
        "normalize_routing_weights": 1,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": node.attributes["alpha"].as_float(),
        "activation_beta": node.attributes["up_offset"].as_float(),
    }
    if (limit := node.attributes["limit"].as_float()) > 0:
        attributes["swiglu_limit"] = limit
    if bits is not None:
        attributes |= {"expert_weight_bits": bits, "block_size": WEIGHT_BLOCK, "weights_prepacked": 0}
        if plan.kernel_accuracy is not None:
            attributes["accuracy_level"] = plan.kernel_accuracy
    biases: list[ir.Value | None] = [None, None]
    graph = node.graph
    assert graph is not None
    if node.op_type == "BiasedExperts":
        gate, up, biases[1] = node.inputs[5:8]
        assert gate is not None
        assert up is not None
        biases[0] = _interleaved(graph, gate, up, f"{owner}.gate_up.bias")
    operands = [value for matrix, bias in zip(matrices, biases, strict=True) for value in (*matrix, bias)]
    kernel = new_node(
        node,
        "MoE" if bits is None else "QMoE",
        [node.inputs[0], _flat_scores(node, graph), *operands],
        attributes,
        domain=CONTRIB,
        name=owner,
    )
    result = kernel.outputs[0]
    if not node.attributes["normalized"].as_int():
        chosen = _chosen_share(node, graph, plan)
        result = new_node(node, "Mul", [result, chosen], name=f"{owner}.weighed").outputs[0]
    replace_value(node.outputs[0], result)
    remove_nodes(node)


def _chosen_share(node: ir.Node, graph: ir.Graph, plan: CompilePlan) -> ir.Value:
    """The part of the softmax [..., 1] that the chosen experts have.

    The kernel's own weights without normalising are wrong on the CPU of ONNX Runtime 1.31: MoE loses its input where
    nothing else reads that, and QMoE normalises all the same. A product, as sums over no tokens go wrong there too.
    """
    count, dtype = node.attributes["num_chosen"].as_int(), plan.precision.activations
    shares = new_node(node, "Softmax", [node.inputs[1]], {"axis": -1}, name=f"{node.name}_softmax").outputs[0]
    largest = _constant(graph, f"num_chosen_{count}", np.array([count], np.int64))
    top = new_node(node, "TopK", [shares, largest], {"axis": -1}, num_outputs=2, name=f"{node.name}_top").outputs[0]
    ones = ir.Tensor(np.ones((count, 1), ir.DataType[_TYPES[dtype]].numpy()), name=f"sum_of_{count}")
    total = add_constant(graph, f"sum_of_{count}", ones)
    return new_node(node, "MatMul", [top, total], name=f"{node.name}_share").outputs[0]


def _flat_scores(node: ir.Node, graph: ir.Graph) -> ir.Value:
    """The router's scores [T, E], the one shape that the kernels take."""
    scores = node.inputs[1]
    assert scores is not None
    assert scores.shape is not None
    if len(scores.shape) == 2:
        return scores
    num_experts = scores.shape[-1]
    assert isinstance(num_experts, int)
    name = f"rows_of_{num_experts}_scores"
    shape = add_constant(graph, name, ir.tensor(np.array([-1, num_experts], np.int64), name=name))
    return new_node(node, "Reshape", [scores, shape], name=f"{node.name}_scores").outputs[0]


def _operands(graph: ir.Graph, matrix: ir.Value, plan: CompilePlan, bits: int | None) -> list[ir.Value | None]:
    """The matrices [E, N, K] of one product as inputs of the kernel: themselves, or blocks and scales."""
    if bits is None:
        return [matrix]
    tensor = matrix.const_value
    assert tensor is not None
    packed, scales = [], []
    for expert in tensor.numpy():
        blocks = quantize_blocks(np.ascontiguousarray(expert, np.float32), bits)
        packed.append(blocks.packed.reshape(len(expert), -1))
        scales.append(blocks.scales)
    dtype = np.float16 if plan.precision.activations == "float16" else np.float32
    return [
        _constant(graph, f"{matrix.name}_q{bits}", np.stack(packed)),
        _constant(graph, f"{matrix.name}{SCALES}", np.stack(scales).astype(dtype)),
    ]


def _interleaved(graph: ir.Graph, gate: ir.Value, up: ir.Value, name: str) -> ir.Value:
    """Constants [E, F, ...] of gate and up as one [E, 2F, ...], rows by turns, made when it is written."""
    first, second = gate.const_value, up.const_value
    assert first is not None
    assert second is not None
    experts, rows, *rest = static_dims(first)

    def join() -> ir.TensorProtocol:
        turns = np.stack((first.numpy(), second.numpy()), axis=2).reshape(experts, 2 * rows, *rest)
        return ir.Tensor(turns, dtype=first.dtype, name=name)

    shape = ir.Shape((experts, 2 * rows, *rest))
    return add_constant(graph, name, ir.LazyTensor(join, first.dtype, shape, name=name))


def _constant(graph: ir.Graph, name: str, values: NDArray[np.generic]) -> ir.Value:
    return add_constant(graph, name, ir.tensor(values, name=name))

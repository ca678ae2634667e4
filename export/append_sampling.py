"""Reduce each row of logits where it lies, so that a step copies a few candidates to the host, not the vocabulary.

Before: logits [R, V]
After:  logits, and beside it (names in `model_def/signature.py`)
        top_logits, top_ids = TopK(logits, K)
        log_total = Log(ReduceSum(Exp(logits - top_logits[:, :1])))
        greedy_ids = ArgMax(logits)
        next_seqlens_k = seqlens_k + Min(seqlens_k, 1)

Each op was chosen by its kernel in ONNX Runtime 1.31's CUDA provider. None needs cuDNN, as ReduceMax and
ReduceLogSumExp would. TopK of the largest along the last axis splits a row over many blocks, and is deterministic;
batches too large for one cooperative launch fall back to a block a row, with equal logits in any order. ArgMax splits
rows as well, and returns the lowest id of equal maxima in every case. ReduceSum is a tree in float32.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphport.export.graph_pass import CompilePlan, PassReport, add_constant
from graphport.model_def.signature import (
    GREEDY_IDS,
    LOG_TOTAL,
    LOGITS,
    NEXT_SEQLENS_K,
    SEQLENS_K,
    TOP_IDS,
    TOP_LOGITS,
    DType,
    sample_outputs,
)

_TYPES: dict[DType, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "int64": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
}


def append_sampling(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Append the reductions and their outputs, for decoders on targets whose logits lie on a device."""
    if not plan.target.samples_on_device or not plan.config.is_decoder:
        return PassReport(rule="sampling")
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == LOGITS)
    seqlens = next(value for value in graph.inputs if value.name == SEQLENS_K)
    specs = {spec.name: spec for spec in sample_outputs(plan.config)}
    count = specs[TOP_LOGITS].shape[1]
    made = {GREEDY_IDS: _node(graph, "ArgMax", [logits], {"axis": -1, "keepdims": 1})}
    made[TOP_LOGITS], made[TOP_IDS] = _top(graph, logits, count)
    made[LOG_TOTAL] = _log_total(graph, logits, made[TOP_LOGITS])
    made[NEXT_SEQLENS_K] = _next_lengths(graph, seqlens)
    for name, spec in specs.items():
        value = made[name]
        value.name, value.shape, value.type = name, ir.Shape(spec.shape), ir.TensorType(_TYPES[spec.dtype])
        graph.outputs.append(value)
    return PassReport(rule="sampling", fused=(LOGITS,))


def _top(graph: ir.Graph, logits: ir.Value, count: int | str) -> tuple[ir.Value, ir.Value]:
    node = ir.node("TopK", [logits, _constant(graph, "count", [count])], {"axis": -1}, num_outputs=2, name="sample_top")
    graph.append(node)
    return node.outputs[0], node.outputs[1]


def _log_total(graph: ir.Graph, logits: ir.Value, top_logits: ir.Value) -> ir.Value:
    """Log of the sum of exp(logit - highest) [R]: no finite logit overflows it, and one that is not makes it NaN."""
    zero, one, last = (_constant(graph, name, [number]) for name, number in (("zero", 0), ("one", 1), ("last", -1)))
    highest = _node(graph, "Slice", [top_logits, zero, one, last])
    shares = _node(graph, "Exp", [_node(graph, "Sub", [logits, highest])])
    return _node(graph, "Log", [_node(graph, "ReduceSum", [shares, last], {"keepdims": 0})])


def _next_lengths(graph: ir.Graph, seqlens: ir.Value) -> ir.Value:
    """What `seqlens_k` is one token later; a row of a single token stays as it is (see `sample_outputs`)."""
    one = add_constant(graph, "sample_one_int32", ir.tensor(np.array([1], np.int32), name="sample_one_int32"))
    return _node(graph, "Add", [seqlens, _node(graph, "Min", [seqlens, one])])


def _node(
    graph: ir.Graph, op_type: str, inputs: Sequence[ir.Value], attributes: dict[str, int] | None = None
) -> ir.Value:
    node = ir.node(op_type, inputs, attributes or {}, name=f"sample_{op_type.lower()}")
    graph.append(node)
    return node.outputs[0]


def _constant(graph: ir.Graph, name: str, numbers: list[int | str]) -> ir.Value:
    full = f"sample_{name}"
    return add_constant(graph, full, ir.tensor(np.array(numbers, np.int64), name=full))

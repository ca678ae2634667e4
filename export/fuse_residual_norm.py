"""Residual add and norm in one node.

Before: Add(a, b) -> sum; RMSNorm(sum, weight) | LayerNormalization(sum, weight, bias)
After:  SkipSimplifiedLayerNormalization | SkipLayerNormalization(a, b, weight[, bias]) -> normal, sum

The sum stays available where something else reads it (every pre-norm block does). Of two norms that read one sum (a
parallel block with two) the first fuses, the other reads its sum. Does not fuse across a broadcast.
"""

import onnx_ir as ir

from graphport.export.graph_pass import (
    CONTRIB,
    CompilePlan,
    Miss,
    PassReport,
    new_node,
    only_node,
    remove_nodes,
    replace_value,
    site_of,
)
from graphport.export.portable_ops import DOMAIN

RULE = "residual_norm"
_FUSED_OP = {
    (DOMAIN, "RMSNorm"): "SkipSimplifiedLayerNormalization",
    ("", "LayerNormalization"): "SkipLayerNormalization",
}


def fuse_residual_norm(model: ir.Model, plan: CompilePlan) -> PassReport:  # noqa: ARG001 - the shape of a pass
    """Fuse every Add whose sum a norm reads."""
    fused, missed = [], []
    for node in list(model.graph):
        if (node.domain, node.op_type) not in _FUSED_OP:
            continue
        site = site_of(node.inputs[1])
        if "query_norm" in site or "key_norm" in site or only_node(node.inputs[0], "Reshape") is not None:
            continue  # norms of heads stand inside attention, where no residual is
        miss = _find_obstacle(node)
        if miss is not None:
            missed.append(Miss(site=site, check=miss[0], found=miss[1]))
            continue
        _fuse(node)
        fused.append(site)
    model.graph.sort()  # a reader of the sum may have stood before the norm that now makes it
    return PassReport(rule=RULE, fused=tuple(fused), missed=tuple(missed))


def _find_obstacle(norm: ir.Node) -> tuple[str, str] | None:
    add = only_node(norm.inputs[0], "Add")
    if add is None:
        producer = None if norm.inputs[0] is None else norm.inputs[0].producer()
        return "the norm's input is an Add", producer.op_type if producer else "a graph input"
    shapes = [None if value is None else value.shape for value in add.inputs]
    if (
        shapes[0] is None
        or shapes[0] != shapes[1]
        or any(isinstance(d, ir.SymbolicDim) and d.value is None for d in shapes[0])
    ):
        return "both addends have one shape", f"{shapes[0]} and {shapes[1]}"
    dtypes = {None if value is None else value.dtype for value in (*add.inputs, *norm.inputs[1:])}
    if len(dtypes) != 1:
        return "addends and weights have one type", " and ".join(sorted(map(str, dtypes)))
    axis = norm.attributes.get_int("axis", -1)
    if axis not in (-1, len(shapes[0]) - 1):
        return "the norm is over the last axis", f"axis {axis}"
    return None


def _fuse(norm: ir.Node) -> None:
    add = only_node(norm.inputs[0], "Add")
    assert add is not None
    op_type = _FUSED_OP[norm.domain, norm.op_type]
    total = add.outputs[0]
    is_read_elsewhere = total.is_graph_output() or len(total.uses()) > 1
    skip = new_node(
        norm,
        op_type,
        [*add.inputs, *norm.inputs[1:]],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        domain=CONTRIB,
        num_outputs=4 if is_read_elsewhere else 1,
        name=f"{norm.name}_with_residual",
    )
    for unused in skip.outputs[1:3]:
        unused.name = ""
    replace_value(norm.outputs[0], skip.outputs[0])
    remove_nodes(norm)
    if is_read_elsewhere:
        replace_value(total, skip.outputs[3])
    remove_nodes(add)

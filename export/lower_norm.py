"""RMSNorm becomes the kernel that both providers have.

Before: graphport::RMSNorm(x, weight)
After:  SimplifiedLayerNormalization(x, weight), statistics in float32
"""

import onnx_ir as ir

from graphport.export.graph_pass import CompilePlan, PassReport, new_node, remove_nodes, replace_value, site_of
from graphport.export.portable_ops import DOMAIN


def lower_norm(model: ir.Model, plan: CompilePlan) -> PassReport:  # noqa: ARG001 - the shape of a pass
    """Lower every RMSNorm that no residual was fused into."""
    fused = []
    for node in list(model.graph):
        if (node.domain, node.op_type) != (DOMAIN, "RMSNorm"):
            continue
        attributes: dict[str, int | float | str | list[int]] = {
            "axis": -1,
            "epsilon": node.attributes["epsilon"].as_float(),
            "stash_type": int(ir.DataType.FLOAT),
        }
        name = f"{node.name}_lowered"
        kernel = new_node(node, "SimplifiedLayerNormalization", list(node.inputs), attributes, name=name)
        replace_value(node.outputs[0], kernel.outputs[0])
        fused.append(site_of(node.inputs[1]))
        remove_nodes(node)
    return PassReport(rule="norm", fused=tuple(fused))

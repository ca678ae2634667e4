"""SiLU in one node.

Before: Mul(x, Sigmoid(x))
After:  QuickGelu(x, alpha=1)

ONNX Runtime has this kernel on both providers; the standard Swish has none.
"""

import onnx_ir as ir

from graphport.export.graph_pass import (
    CONTRIB,
    CompilePlan,
    Miss,
    PassReport,
    new_node,
    remove_nodes,
    replace_value,
    site_of,
)


def fuse_silu(model: ir.Model, plan: CompilePlan) -> PassReport:  # noqa: ARG001 - the shape of a pass
    """Fuse every product of a value with its own sigmoid."""
    fused, missed = [], []
    for node in list(model.graph):
        if node.op_type != "Sigmoid":
            continue
        site = site_of(node.inputs[0]).removesuffix(".gate_up").removesuffix(".gate")
        readers = [use.node for use in node.outputs[0].uses()]
        if len(readers) != 1 or readers[0].op_type != "Mul" or node.inputs[0] not in readers[0].inputs:
            found = ", ".join(reader.op_type for reader in readers) or "nothing"
            missed.append(Miss(site=site, check="the sigmoid multiplies its own input", found=found))
            continue
        product = readers[0]
        name = f"{product.name}_silu"
        silu = new_node(product, "QuickGelu", [node.inputs[0]], {"alpha": 1.0}, domain=CONTRIB, name=name)
        replace_value(product.outputs[0], silu.outputs[0])
        remove_nodes(product, node)
        fused.append(site)
    return PassReport(rule="silu", fused=tuple(fused), missed=tuple(missed))

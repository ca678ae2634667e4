"""SiLU and quick GELU in one node.

Before: Mul(x, Sigmoid(x)); Mul(x, Sigmoid(Mul(x, a)))
After:  QuickGelu(x, alpha=1); QuickGelu(x, alpha=a)

ONNX Runtime has this kernel on both providers; the standard Swish has none.
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


def fuse_silu(model: ir.Model, plan: CompilePlan) -> PassReport:  # noqa: ARG001 - the shape of a pass
    """Fuse every product of a value with its own sigmoid."""
    fused, missed = [], []
    for node in list(model.graph):
        if node.op_type != "Sigmoid":
            continue
        x, alpha = _scaled(node.inputs[0])
        site = site_of(x).removesuffix(".gate_up").removesuffix(".gate")
        if site.endswith(".shared_gate"):
            continue  # a gate of its own (see `Experts`), no activation
        readers = [use.node for use in node.outputs[0].uses()]
        if len(readers) != 1 or readers[0].op_type != "Mul" or x not in readers[0].inputs:
            found = ", ".join(reader.op_type for reader in readers) or "nothing"
            missed.append(Miss(site=site, check="the sigmoid multiplies its own input", found=found))
            continue
        product = readers[0]
        name = f"{product.name}_silu"
        silu = new_node(product, "QuickGelu", [x], {"alpha": alpha}, domain=CONTRIB, name=name)
        replace_value(product.outputs[0], silu.outputs[0])
        scale = None if node.inputs[0] is None else node.inputs[0].producer()
        remove_nodes(product, node)
        if x is not node.inputs[0] and scale is not None:
            remove_nodes(scale)
        fused.append(site)
    return PassReport(rule="silu", fused=tuple(fused), missed=tuple(missed))


def _scaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """The value that a constant number multiplies, and the number; the value itself and 1 without one."""
    node = only_node(value, "Mul")
    for index in (0, 1) if node is not None else ():
        assert node is not None
        number = ir.convenience.get_const_tensor(node.inputs[1 - index])  # type: ignore[arg-type]  # None has none
        if number is not None and number.size == 1:
            return node.inputs[index], float(number.numpy().item())
    return value, 1.0

"""Attention to a source becomes the kernel that reads keys and values as they were computed once.

Before: CrossAttention(q, source.key, source.value, source_lengths)
After:  MultiHeadAttention(q, source.key, source.value, , source_lengths)

Keys and values stay [B, N, T, H], which the kernel takes as they are, with any number of new tokens and rows of any
lengths. GroupQueryAttention reads such a source too, but gives it back as a present cache, which would be copied.
"""

import numpy as np
import onnx_ir as ir

from graphport.export.graph_pass import CONTRIB, CompilePlan, PassReport, new_node, remove_nodes, replace_value
from graphport.export.portable_ops import DOMAIN

# see `lower_padded_attention.py`
_MASKED = float(np.finfo(np.float32).min)


def lower_cross_attention(model: ir.Model, plan: CompilePlan) -> PassReport:  # noqa: ARG001 - the shape of a pass
    """Lower every attention to a source to MultiHeadAttention."""
    fused = []
    for node in [n for n in model.graph if (n.domain, n.op_type) == (DOMAIN, "CrossAttention")]:
        key = node.inputs[1]
        layer = (key.name or "").split(".")[1] if key is not None else ""
        site = f"layer {layer} cross_attention"
        attributes: dict[str, int | float | str | list[int]] = {
            "num_heads": node.attributes["num_heads"].as_int(),
            "scale": node.attributes["scale"].as_float(),
            "mask_filter_value": _MASKED,
        }
        inputs = [*node.inputs[:3], None, node.inputs[3]]
        name = site.replace(" ", "_")
        kernel = new_node(node, "MultiHeadAttention", inputs, attributes, domain=CONTRIB, name=name)
        replace_value(node.outputs[0], kernel.outputs[0])
        remove_nodes(node)
        fused.append(site)
    return PassReport(rule="attention", fused=tuple(fused))

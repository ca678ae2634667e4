"""Bidirectional attention over padded rows becomes the target's kernel for it.

Before: RotaryPaddedAttention(q, k, v, lengths, cos, sin), q, k, v = Split(qkv)
After, cpu:  GroupQueryAttention(qkv, , , , , max(lengths, 1) - 1, sequence, cos, sin, , bias), causal=0
After, cuda: MultiHeadAttention(q, k, v, , lengths, bias)

On CUDA, RotaryEmbedding nodes stand before it, for the kernel rotates nothing; lengths keep it on the fused kernels. A
bias (relative positions, windows) leaves it the memory-efficient kernel, or the unfused one where that cannot take the
length. Images and recordings are whole rows, so nothing masks them. Where no kernel takes the head size, the groups or
a cap, the node stays and runs as its portable body.
"""

import numpy as np
import onnx_ir as ir

from graphport.export.graph_pass import (
    CONTRIB,
    CompilePlan,
    Miss,
    PassReport,
    add_constant,
    new_node,
    remove_nodes,
    replace_value,
)
from graphport.export.lower_attention import packed_split
from graphport.export.pack_projections import BIASED_OPS, PADDED_OPS, attention_site
from graphport.export.portable_ops import DOMAIN
from graphport.export.rotary_nodes import Rotation, find_rotation, rotate_before

# Added to the scores of masked keys. Finite, so that a row without a token has a softmax; MultiHeadAttention's own
# default of -10000 would leave weight to masked keys beside large scores.
_MASKED = float(np.finfo(np.float32).min)


def lower_padded_attention(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Lower every padded attention to the kernel that the target's record names."""
    fused, missed = [], []
    are_whole = plan.config.image is not None or plan.config.audio is not None
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type in PADDED_OPS]:
        site = attention_site(node)
        layer = int(site.split()[1])
        config = plan.config.blocks[layer].attention
        limit = plan.target.padded_limit(config)
        if limit is not None:
            missed.append(Miss(site=site, check=f"{plan.target.padded_kernel} takes the attention", found=limit))
            continue
        rotation = find_rotation(node, first=4)
        if plan.target.padded_kernel == "GroupQueryAttention":
            reason = None if rotation is None else plan.target.rotary_limit(config.head_dim, rotation.width)
            if rotation is not None and reason is not None:
                check = "GroupQueryAttention rotates inside"
                missed.append(Miss(site=f"{site} rotary", check=check, found=reason))
                rotate_before(node, rotation, _positions(model.graph))
                rotation = None
            _lower_to_grouped(model.graph, node, rotation, site=site, are_whole=are_whole)
        else:
            if rotation is not None:
                rotate_before(node, rotation, _positions(model.graph))
            _lower_to_multi_head(node, site=site, are_whole=are_whole)
        fused.append(site)
    return PassReport(rule="attention", fused=tuple(fused), missed=tuple(missed))


def _lower_to_multi_head(node: ir.Node, *, site: str, are_whole: bool) -> None:
    attributes: dict[str, int | float | str | list[int]] = {
        "num_heads": node.attributes["num_heads"].as_int(),
        "scale": node.attributes["scale"].as_float(),
        "mask_filter_value": _MASKED,
    }
    mask = [] if are_whole else [None, node.inputs[3]]
    inputs = [*node.inputs[:3], *mask, *_bias(node)]
    _replace(node, new_node(node, "MultiHeadAttention", inputs, attributes, domain=CONTRIB, name=_name(site)))


def _lower_to_grouped(graph: ir.Graph, node: ir.Node, rotation: Rotation | None, *, site: str, are_whole: bool) -> None:
    attributes: dict[str, int | float | str | list[int]] = {
        "num_heads": node.attributes["num_heads"].as_int(),
        "kv_num_heads": node.attributes["kv_num_heads"].as_int(),
        "scale": node.attributes["scale"].as_float(),
        "softcap": node.attributes["softcap"].as_float(),
        "causal": 0,
    }
    tables: list[ir.Value | None] = [None, None]
    if rotation is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": rotation.is_interleaved}
        tables = [rotation.cos, rotation.sin]
    bias = [None, *_bias(node)] if _bias(node) else []
    if rotation is None and not bias:
        tables = []
    split = packed_split(node)
    projections = list(node.inputs[:3]) if split is None else [split.inputs[0], None, None]
    inputs = [*projections, None, None, *_sizes(graph, node, _name(site), are_whole=are_whole), *tables, *bias]
    kernel = new_node(node, "GroupQueryAttention", inputs, attributes, domain=CONTRIB, num_outputs=3, name=_name(site))
    _replace(node, kernel)
    if split is not None:
        remove_nodes(split)


def _bias(node: ir.Node) -> list[ir.Value | None]:
    """What the node adds to its scores, if anything."""
    return [node.inputs[-1]] if node.op_type in BIASED_OPS else []


def _replace(node: ir.Node, kernel: ir.Node) -> None:
    replace_value(node.outputs[0], kernel.outputs[0])
    remove_nodes(node)


def _name(site: str) -> str:
    return site.replace(" ", "_")


def _sizes(graph: ir.Graph, node: ir.Node, name: str, *, are_whole: bool) -> tuple[ir.Value, ir.Value]:
    """Index of each row's last token [B] int32 (0 for a row without one), and the padded length, int32 scalar.

    Made where they are first needed, for all layers; repeats are merged when the graph is tidied.
    """
    lengths = node.inputs[3]
    one = add_constant(graph, "one_token", ir.tensor(np.array(1, np.int32), name="one_token"))
    if are_whole:  # all lengths are the padded one
        last = new_node(node, "Sub", [lengths, one], name=f"{name}_last")
        total = new_node(node, "ReduceMax", [lengths], {"keepdims": 0}, name=f"{name}_total")
        return last.outputs[0], total.outputs[0]
    at_least_one = new_node(node, "Max", [lengths, one], name=f"{name}_lengths")
    last = new_node(node, "Sub", [at_least_one.outputs[0], one], name=f"{name}_last")
    shape = new_node(node, "Shape", [graph.inputs[0]], {"start": 1, "end": 2}, name=f"{name}_shape")
    length = new_node(node, "Squeeze", [shape.outputs[0]], name=f"{name}_length")
    total = new_node(node, "Cast", [length.outputs[0]], {"to": int(ir.DataType.INT32)}, name=f"{name}_total")
    return last.outputs[0], total.outputs[0]


def _positions(graph: ir.Graph) -> ir.Value:
    """Where RotaryEmbedding starts to count, int64 [1]: at 0 in every row."""
    return add_constant(graph, "first_position", ir.tensor(np.zeros(1, np.int64), name="first_position"))

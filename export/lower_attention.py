"""Cached attention becomes the kernel that both providers have.

Before: RotaryCachedAttention(q, k, v, past_k, past_v, seqlens, total, cos, sin), q, k, v = Split(qkv)
After:  GroupQueryAttention(qkv, , , past_k, past_v, seqlens, total, cos, sin)

Before: BiasedCachedAttention(q, k, v, past_k, past_v, seqlens, total, table)
After:  GroupQueryAttention(q, k, v, past_k, past_v, seqlens, total, , , , DistanceBias(table, positions, total))

Before: SinkCachedAttention(q, k, v, past_k, past_v, seqlens, total, cos, sin, sinks)
After:  GroupQueryAttention(q, k, v, past_k, past_v, seqlens, total, cos, sin, , , sinks)

Where the kernel cannot rotate (sizes), RotaryEmbedding nodes stand before it. Where it cannot take the head size, the
node stays and runs as its portable body. Windows, caps and scales become attributes.
"""

import onnx_ir as ir

from graphport.export.function_bodies import attach_function
from graphport.export.graph_pass import (
    CONTRIB,
    CompilePlan,
    Miss,
    PassReport,
    new_node,
    only_node,
    remove_nodes,
    replace_value,
)
from graphport.export.pack_projections import CACHED_OPS, attention_site
from graphport.export.portable_ops import DOMAIN
from graphport.export.rotary_nodes import Rotation, find_rotation, rotate_before


def lower_attention(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Lower every cached attention to GroupQueryAttention."""
    fused, missed = [], []
    for layer, node in enumerate([n for n in model.graph if n.domain == DOMAIN and n.op_type in CACHED_OPS]):
        site = attention_site(node)
        if layer >= plan.config.num_layers:
            found = f"attention {layer + 1} of {plan.config.num_layers}"
            missed.append(Miss(site=site, check="the config has a layer for it", found=found))
            continue
        config = plan.config.blocks[layer].attention
        limit = plan.target.attention_limit(config)
        if limit is not None:
            missed.append(Miss(site=site, check="GroupQueryAttention takes the head size", found=limit))
            continue
        in_graph = (node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int(), _head_dim(node))
        in_config = (config.num_heads, config.num_kv_heads, config.head_dim)
        if in_graph != in_config:
            found = f"{_heads(*in_graph)} in the graph, {_heads(*in_config)} in the config"
            missed.append(Miss(site=site, check="head counts and size of graph and config agree", found=found))
            continue
        rotation = find_rotation(node, first=7)
        inside = rotation is None or plan.target.rotary_limit(config.head_dim, rotation.width) is None
        if rotation is not None and not inside:
            reason = plan.target.rotary_limit(config.head_dim, rotation.width) or ""
            missed.append(Miss(site=f"{site} rotary", check="GroupQueryAttention rotates inside", found=reason))
            _rotate_before(model, node, rotation)
            rotation = None
        _lower(node, rotation, _distance_bias(model, node), _sinks(node))
        fused.append(site)
    return PassReport(rule="attention", fused=tuple(fused), missed=tuple(missed))


def _head_dim(node: ir.Node) -> int:
    past = node.inputs[3]
    size = None if past is None or past.shape is None else past.shape[3]
    return size if isinstance(size, int) else -1


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> str:
    return f"{num_heads} query and {num_kv_heads} kv heads of {head_dim}"


def _lower(node: ir.Node, rotation: Rotation | None, bias: ir.Value | None, sinks: ir.Value | None) -> None:
    attributes: dict[str, int | float | str | list[int]] = {
        "num_heads": node.attributes["num_heads"].as_int(),
        "kv_num_heads": node.attributes["kv_num_heads"].as_int(),
        "scale": node.attributes["scale"].as_float(),
        "softcap": node.attributes.get_float("softcap", 0.0),
        "local_window_size": node.attributes.get_int("local_window_size", -1),
    }
    tables: list[ir.Value | None] = [None, None]
    if rotation is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": rotation.is_interleaved}
        tables = [rotation.cos, rotation.sin]
    tables += [None, bias, sinks]  # positions are those of the lengths
    while tables and tables[-1] is None:
        tables.pop()
    split = packed_split(node)
    projections = list(node.inputs[:3]) if split is None else [split.inputs[0], None, None]
    kernel = new_node(
        node,
        "GroupQueryAttention",
        [*projections, *node.inputs[3:7], *tables],
        attributes,
        domain=CONTRIB,
        num_outputs=3,
        name=attention_site(node).replace(" ", "_"),
    )
    for old, new in zip(node.outputs, kernel.outputs, strict=True):
        replace_value(old, new)
    remove_nodes(node)
    if split is not None:
        remove_nodes(split)


def _sinks(node: ir.Node) -> ir.Value | None:
    """The scores of a node's heads that take weight and give nothing."""
    return node.inputs[9] if node.op_type == "SinkCachedAttention" else None


def _distance_bias(model: ir.Model, node: ir.Node) -> ir.Value | None:
    """What a biased node adds to its scores [B, N, S, total], by nodes in front of it; repeats are merged later."""
    if node.op_type != "BiasedCachedAttention":
        return None
    for name in ("Positions", "DistanceBias"):
        attach_function(model, name)
    total, table = node.inputs[6], node.inputs[7]
    inputs = [node.inputs[0], node.inputs[5]]
    positions = new_node(node, "Positions", inputs, domain=DOMAIN, name=f"{node.name}_positions").outputs[0]
    columns = new_node(node, "Cast", [total], {"to": int(ir.DataType.INT64)}, name=f"{node.name}_columns").outputs[0]
    by_key = node.attributes["by_key"].as_int()
    operands = [table, positions, columns]
    bias = new_node(node, "DistanceBias", operands, {"by_key": by_key}, domain=DOMAIN, name=f"{node.name}_bias")
    return bias.outputs[0]


def packed_split(node: ir.Node) -> ir.Node | None:
    """The Split that makes exactly this node's query, key and value, in that order."""
    split = only_node(node.inputs[0], "Split")
    return split if split is not None and list(split.outputs) == list(node.inputs[:3]) else None


def _rotate_before(model: ir.Model, node: ir.Node, rotation: Rotation) -> None:
    """Rotate query and key in front of the node; it goes on as an attention without rotation."""
    attach_function(model, "Positions")
    inputs = [node.inputs[0], node.inputs[5]]
    positions = new_node(node, "Positions", inputs, domain=DOMAIN, name=f"{node.name}_positions")
    rotate_before(node, rotation, positions.outputs[0])

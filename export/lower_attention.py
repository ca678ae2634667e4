"""Cached attention becomes the kernel that both providers have.

Before: RotaryCachedAttention(q, k, v, past_k, past_v, seqlens, total, cos, sin), q, k, v = Split(qkv)
After:  GroupQueryAttention(qkv, , , past_k, past_v, seqlens, total, cos, sin)

Where the kernel cannot rotate (sizes), RotaryEmbedding nodes stand before it. Where it cannot take the head size, the
node stays and runs as its portable body. Windows, caps and scales become attributes.
"""

from typing import NamedTuple

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
    static_dims,
)
from graphport.export.pack_projections import ATTENTION_OPS, attention_site
from graphport.export.portable_ops import DOMAIN, attach_function


class _Rotation(NamedTuple):
    cos: ir.Value
    sin: ir.Value
    is_interleaved: int

    @property
    def width(self) -> int:
        """Rotary dimensions: twice the tables' columns."""
        return 2 * static_dims(self.cos)[1]


def lower_attention(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Lower every cached attention to GroupQueryAttention."""
    fused, missed = [], []
    for layer, node in enumerate([n for n in model.graph if n.domain == DOMAIN and n.op_type in ATTENTION_OPS]):
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
        rotation = _rotation(node)
        inside = rotation is None or plan.target.rotary_limit(config.head_dim, rotation.width) is None
        if rotation is not None and not inside:
            reason = plan.target.rotary_limit(config.head_dim, rotation.width) or ""
            missed.append(Miss(site=f"{site} rotary", check="GroupQueryAttention rotates inside", found=reason))
            _rotate_before(model, node, rotation)
            rotation = None
        _lower(node, rotation)
        fused.append(site)
    return PassReport(rule="attention", fused=tuple(fused), missed=tuple(missed))


def _head_dim(node: ir.Node) -> int:
    past = node.inputs[3]
    size = None if past is None or past.shape is None else past.shape[3]
    return size if isinstance(size, int) else -1


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> str:
    return f"{num_heads} query and {num_kv_heads} kv heads of {head_dim}"


def _rotation(node: ir.Node) -> _Rotation | None:
    if node.op_type == "CachedAttention":
        return None
    cos, sin = node.inputs[7:9]
    assert cos is not None
    assert sin is not None
    return _Rotation(cos, sin, node.attributes["rotary_interleaved"].as_int())


def _lower(node: ir.Node, rotation: _Rotation | None) -> None:
    attributes: dict[str, int | float | str | list[int]] = {
        "num_heads": node.attributes["num_heads"].as_int(),
        "kv_num_heads": node.attributes["kv_num_heads"].as_int(),
        "scale": node.attributes["scale"].as_float(),
        "softcap": node.attributes["softcap"].as_float(),
        "local_window_size": node.attributes["local_window_size"].as_int(),
    }
    tables: list[ir.Value | None] = []
    if rotation is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": rotation.is_interleaved}
        tables = [rotation.cos, rotation.sin]
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


def packed_split(node: ir.Node) -> ir.Node | None:
    """The Split that makes exactly this node's query, key and value, in that order."""
    split = only_node(node.inputs[0], "Split")
    return split if split is not None and list(split.outputs) == list(node.inputs[:3]) else None


def _rotate_before(model: ir.Model, node: ir.Node, rotation: _Rotation) -> None:
    """Rotate query and key in front of the node; it goes on as an attention without rotation."""
    query = node.inputs[0]
    assert query is not None
    attach_function(model, "Positions")
    positions = new_node(node, "Positions", [query, node.inputs[5]], domain=DOMAIN, name=f"{node.name}_positions")
    for index, heads in ((0, "num_heads"), (1, "kv_num_heads")):
        rotated = new_node(
            node,
            "RotaryEmbedding",
            [node.inputs[index], positions.outputs[0], rotation.cos, rotation.sin],
            {
                "num_heads": node.attributes[heads].as_int(),
                "rotary_embedding_dim": rotation.width,
                "interleaved": rotation.is_interleaved,
            },
            domain=CONTRIB,
            name=f"{node.name}_rotary_{index}",
        )
        if query.dtype is not None:
            rotated.outputs[0].dtype = query.dtype
        node.replace_input_with(index, rotated.outputs[0])

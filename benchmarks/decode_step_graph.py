"""A graph with an int8 KV cache whose attention of single tokens is a custom op: see `decode_step.py`.

In: an ONNX model without its weights. Out: the same, changed in place, for steps of one token alone: what long steps do
otherwise is left out. It writes nothing.
"""

from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

DOMAIN = "graphport.prototype"

_KEPT = ("num_heads", "kv_num_heads", "scale")
_QKV, _KEY, _PAST_KEY, _PAST_VALUE, _SEQLENS, _COS, _SIN, _KEY_SCALE, _VALUE_SCALE = 0, 1, 3, 4, 5, 7, 8, 12, 13
_INPUTS = (_QKV, _PAST_KEY, _PAST_VALUE, _SEQLENS, _COS, _SIN, _KEY_SCALE, _VALUE_SCALE)
# Attributes that the prototype does not have, and what they are where it may stand in.
_NEUTRAL = {"softcap": 0.0, "local_window_size": -1, "rotary_interleaved": 0, "do_rotary": 1, "kv_cache_bit_width": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Query heads a key/value head, and channels a head."""

    group: int
    size: int


def with_prototype(model: onnx.ModelProto) -> HeadShape | None:
    """Let every GroupQueryAttention be the custom op. Returns None, with nothing changed, where one cannot be."""
    nodes = [short for node in model.graph.node for short in _short_way(node)]
    attentions = [node for node in nodes if node.op_type == "GroupQueryAttention"]
    caches = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    scales = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    if not attentions or not all(_fits(node, scales) for node in attentions):
        return None
    shapes = {_head_shape(node, caches[node.input[_PAST_KEY]][3].dim_value) for node in attentions}
    if len(shapes) != 1:
        return None
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(_prototype(node) if node in attentions else node for node in nodes)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return shapes.pop()


def _short_way(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes of an If's else branch under the names of the If's outputs; other nodes as they are."""
    if node.op_type != "If":
        return [node]
    (branch,) = (attribute.g for attribute in node.attribute if attribute.name == "else_branch")
    outside = dict(zip((value.name for value in branch.output), node.output, strict=True))
    for inner in branch.node:
        inner.output[:] = [outside.get(name, name) for name in inner.output]
    return list(branch.node)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _fits(node: onnx.NodeProto, scales: dict[str, tuple[int, ...]]) -> bool:
    found = _attributes(node)
    is_packed = not node.input[_KEY]
    has_scales = len(node.input) > _VALUE_SCALE and all(
        scales.get(node.input[i]) == (1,) for i in (_KEY_SCALE, _VALUE_SCALE)
    )
    return is_packed and has_scales and all(found.get(name, value) == value for name, value in _NEUTRAL.items())


def _head_shape(node: onnx.NodeProto, size: int) -> HeadShape:
    found = {attribute.name: attribute.i for attribute in node.attribute}
    return HeadShape(group=found["num_heads"] // found["kv_num_heads"], size=size)


def _prototype(node: onnx.NodeProto) -> onnx.NodeProto:
    kept = {name: value for name, value in _attributes(node).items() if name in _KEPT}
    inputs = [node.input[index] for index in _INPUTS]
    return helper.make_node("DecodeAttention", inputs, node.output, name=node.name, domain=DOMAIN, **kept)

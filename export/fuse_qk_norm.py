"""The norms of query and key heads inside the attention kernel, where the target's kernel has them.

Before: GroupQueryAttention(Reshape(RMSNorm(Reshape(q))), Reshape(RMSNorm(Reshape(k))), v, ...), q, k, v = Split(qkv)
After:  GroupQueryAttention(qkv, , , ..., q_norm_weight, k_norm_weight), qk_norm_epsilon

The kernel norms before it rotates, as the module does; a rotation that stands before the kernel keeps the norm outside.
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
)
from graphport.export.lower_attention import packed_split
from graphport.export.portable_ops import DOMAIN

RULE = "qk_norm"
_NUM_INPUTS_BEFORE_NORMS = 14  # query, key, value, past x2, lengths x2, cos, sin, positions, bias, sink, scales x2


class _HeadNorm(NamedTuple):
    source: ir.Value
    weight: ir.Value
    epsilon: float


def fuse_qk_norm(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Move the q/k norms of every GroupQueryAttention into it, if the target's kernel takes them."""
    if not plan.target.qk_norm_inside:
        return PassReport(rule=RULE)
    fused, missed = [], []
    kernels = [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, "GroupQueryAttention")]
    for node in kernels:
        site = (node.name or "attention").replace("_", " ")
        query, key = _head_norm(node.inputs[0]), _head_norm(node.inputs[1])
        if plan.cache is not None:  # ONNX Runtime 1.31: the fast decode kernel takes one or the other
            if query is not None:
                missed.append(Miss(site=site, check="the KV cache is not quantised", found=plan.cache.name))
            continue
        if query is None or key is None:
            producer = None if node.inputs[0] is None else node.inputs[0].producer()
            if producer is not None and producer.op_type == "RotaryEmbedding":
                missed.append(Miss(site=site, check="the kernel reads normed heads", found="RotaryEmbedding"))
            continue
        if query.epsilon != key.epsilon:
            found = f"{query.epsilon} and {key.epsilon}"
            missed.append(Miss(site=site, check="query and key norm have one epsilon", found=found))
            continue
        _fuse(node, query, key)
        fused.append(site)
    return PassReport(rule=RULE, fused=tuple(fused), missed=tuple(missed))


def _head_norm(value: ir.Value | None) -> _HeadNorm | None:
    outer = only_node(value, "Reshape")
    norm = None if outer is None else only_node(outer.inputs[0], "RMSNorm", DOMAIN)
    inner = None if norm is None else only_node(norm.inputs[0], "Reshape")
    if norm is None or inner is None or inner.inputs[0] is None or norm.inputs[1] is None:
        return None
    return _HeadNorm(inner.inputs[0], norm.inputs[1], norm.attributes["epsilon"].as_float())


def _fuse(node: ir.Node, query: _HeadNorm, key: _HeadNorm) -> None:
    outside = [value.producer() for value in node.inputs[:2] if value is not None]
    node.replace_input_with(0, query.source)
    node.replace_input_with(1, key.source)
    split = packed_split(node)
    projections = list(node.inputs[:3]) if split is None else [split.inputs[0], None, None]
    others = list(node.inputs[3:])
    padding = [None] * (_NUM_INPUTS_BEFORE_NORMS - 3 - len(others))
    attributes: dict[str, int | float | str | list[int]] = {
        name: attribute.value for name, attribute in node.attributes.items()
    }
    kernel = new_node(
        node,
        "GroupQueryAttention",
        [*projections, *others, *padding, query.weight, key.weight],
        {**attributes, "qk_norm_epsilon": query.epsilon},
        domain=CONTRIB,
        num_outputs=3,
        name=node.name or "attention",
    )
    for old, new in zip(node.outputs, kernel.outputs, strict=True):
        replace_value(old, new)
    remove_nodes(node)
    for reshape in outside:  # each reshape, then the norm and the reshape that it read
        chain = [reshape]
        while chain[-1] is not None and len(chain) < 3:
            before = chain[-1].inputs[0]
            chain.append(None if before is None else before.producer())
        remove_nodes(*[n for n in chain if n is not None])
    if split is not None:
        remove_nodes(split)

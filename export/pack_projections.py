"""Linear layers that read one input become one larger linear layer.

Before: q = Linear(x, Wq) [+ bq]; k = Linear(x, Wk) [+ bk]; v = Linear(x, Wv) [+ bv]
After:  q, k, v = Split(Linear(x, [Wq; Wk; Wv]) [+ [bq; bk; bv]])

Before: activation(Linear(x, Wg)) * Linear(x, Wu)
After:  g, u = Split(Linear(x, [Wg; Wu])); activation(g) * u

Widths are read from each weight. The packed weights are made when they are written, so nothing is held twice. Where the
matrices of a GGUF file keep forms that no one kernel takes, those of one form are packed and the others stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphport.export.graph_pass import (
    CompilePlan,
    Miss,
    PassReport,
    add_constant,
    new_node,
    only_node,
    remove_nodes,
    replace_value,
    site_of,
    static_dims,
)
from graphport.export.portable_ops import DOMAIN

CACHED_OPS = ("CachedAttention", "RotaryCachedAttention", "BiasedCachedAttention", "SinkCachedAttention")
BIASED_OPS = ("BiasedPaddedAttention", "BiasedRotaryPaddedAttention")
PADDED_OPS = ("PaddedAttention", "RotaryPaddedAttention", *BIASED_OPS)
ATTENTION_OPS = (*CACHED_OPS, *PADDED_OPS)

_PARTS = "packed_from"  # in the metadata of a packed weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer in the graph: its node and, where it has one, the node that adds its bias."""

    linear: ir.Node
    bias_add: ir.Node | None

    @property
    def output(self) -> ir.Value:
        """What the layer as a whole computes."""
        return (self.bias_add or self.linear).outputs[0]

    @property
    def weight(self) -> ir.Value:
        """The matrix [out, in]."""
        weight = self.linear.inputs[1]
        assert weight is not None
        return weight

    @property
    def bias(self) -> ir.Value | None:
        """The bias [out], if any."""
        if self.bias_add is None:
            return None
        return next(value for value in self.bias_add.inputs if value is not None and value.is_initializer())

    @property
    def width(self) -> int:
        """Number of outputs."""
        return static_dims(self.weight)[0]


def pack_qkv(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Pack the query, key and value projections of every attention, through q/k norms where there are any."""
    fused, missed = [], []
    for node in list(model.graph):
        if node.domain != DOMAIN or node.op_type not in ATTENTION_OPS:
            continue
        projections = [_find_projection(value) for value in node.inputs[:3]]
        packed, miss = _pack_alike(projections, plan, site=attention_site(node), name="query_key_value")
        fused += packed
        missed += miss
    return PassReport(rule="packed_qkv", fused=tuple(fused), missed=tuple(missed))


def pack_gate_up(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Pack the gate and up projections of every gated feed-forward."""
    fused, missed = [], []
    for node in list(model.graph):
        if (node.domain, node.op_type) != ("", "Mul"):
            continue
        gate, up = _find_gate(node.inputs[0]), as_projection(node.inputs[1])
        if gate is None or up is None:  # the product commutes
            gate, up = _find_gate(node.inputs[1]), as_projection(node.inputs[0])
        if gate is None or up is None:
            continue
        packed, miss = _pack_alike([gate, up], plan, site=site_of(gate.output).removesuffix(".gate"), name="gate_up")
        fused += packed
        missed += miss
    return PassReport(rule="packed_gate_up", fused=tuple(fused), missed=tuple(missed))


def can_pack(plan: CompilePlan, names: Sequence[str]) -> bool:
    """Whether two or more of the matrices called `names` can share a kernel."""
    return len(_largest_group([form_of(plan, name) for name in names])) > 1


def form_of(plan: CompilePlan, name: str) -> str:
    """What kind of operands the matrix called `name` becomes: only matrices of one form fit one kernel."""
    held = plan.matrices.get(name)
    return plan.precision.name if held is None else held.form


def packed_from(weight: ir.Value) -> tuple[str, ...]:
    """The names of the matrices that `weight` was packed from, in order; its own when it was not."""
    names: tuple[str, ...] = weight.meta.get(_PARTS, (weight.name or "",))
    return names


def _pack_alike(
    projections: Sequence[Projection | None], plan: CompilePlan, *, site: str, name: str
) -> tuple[list[str], list[Miss]]:
    """Pack the projections of one form; the sites that were packed, and the miss when some were left."""
    obstacle = _find_obstacle(projections)
    if obstacle is not None:
        return [], [Miss(site=site, check=obstacle[0], found=obstacle[1])]
    known = [p for p in projections if p is not None]
    forms = [form_of(plan, p.weight.name or "") for p in known]
    group = _largest_group(forms)
    parts = [known[index] for index in group]
    missed = []
    if len(parts) < len(known):
        found = "; ".join(f"{_module(p)}: {form}" for p, form in zip(known, forms, strict=True))
        missed = [Miss(site=site, check="the matrices are stored in one form", found=found)]
        site = f"{site}, {' and '.join(map(_module, parts))}"
    if len(parts) < 2:
        return [], missed
    _pack(parts, name if not missed else "_".join(map(_module, parts)))
    return [site], missed


def _largest_group(forms: Sequence[str]) -> list[int]:
    """Positions of the most frequent form, of the first one when there are several."""
    return max(([i for i, other in enumerate(forms) if other == form] for form in forms), key=len)


def _module(projection: Projection) -> str:
    """query, key, gate, ..."""
    return (projection.weight.name or "").split(".")[-2]


def attention_site(attention: ir.Node) -> str:
    """The site of an attention node, from the name of its cache input, or of its projections where it has none."""
    if attention.op_type in PADDED_OPS:
        return site_of(attention.inputs[0]).partition(".")[0]
    past = attention.inputs[3]
    name = "" if past is None or past.name is None else past.name
    return f"layer {name.split('.')[1]} attention" if name.count(".") >= 2 else f"attention {attention.name}"


def as_projection(value: ir.Value | None) -> Projection | None:
    """The linear layer, bias included, that computes `value`; None when something else does."""
    linear = only_node(value, "Linear", DOMAIN)
    if linear is not None:
        return Projection(linear=linear, bias_add=None)
    add = only_node(value, "Add")
    if add is None or not any(v is not None and v.is_initializer() for v in add.inputs):
        return None
    linear = next((n for v in add.inputs if (n := only_node(v, "Linear", DOMAIN)) is not None), None)
    return None if linear is None else Projection(linear=linear, bias_add=add)


def _find_projection(value: ir.Value | None) -> Projection | None:
    """The projection behind a value, looking through the reshapes and the norm of a q/k norm.

    What a norm with weights for each head multiplies and adds afterwards are constants.
    """
    found = as_projection(value)
    while found is None and value is not None:
        node = value.producer()
        if node is None or node.op_type not in ("Reshape", "RMSNorm", "LayerNormalization", "Mul", "Add"):
            return None
        if node.op_type in ("Mul", "Add") and not (node.inputs[1] is not None and node.inputs[1].is_initializer()):
            return None
        value = node.inputs[0]
        found = as_projection(value)
    return found


def _find_gate(value: ir.Value | None) -> Projection | None:
    """The projection behind an activation: Relu, Gelu, or Mul(x, Sigmoid(x))."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    if node.op_type in ("Relu", "Gelu"):
        return as_projection(node.inputs[0])
    if node.op_type == "Mul" and (sigmoid := only_node(node.inputs[1], "Sigmoid")) is not None:
        return as_projection(node.inputs[0]) if sigmoid.inputs[0] is node.inputs[0] else None
    return None


def _find_obstacle(projections: Sequence[Projection | None]) -> tuple[str, str] | None:
    if any(p is None for p in projections):
        return "every input is a linear layer", f"number {[p is None for p in projections].index(True)} is not"
    known = [p for p in projections if p is not None]
    if len({id(p.linear) for p in known}) != len(known):
        return "the linear layers are distinct", "one is used twice"
    if len({id(p.linear.inputs[0]) for p in known}) != 1:
        return "the linear layers read one input", ", ".join(str(p.linear.inputs[0]) for p in known)
    if len({p.bias is None for p in known}) != 1:
        return "all or none have a bias", str([p.bias is not None for p in known])
    for p in known:
        if not p.weight.is_initializer() or len(p.weight.uses()) != 1:
            return "every weight is a constant used once", f"{p.weight.name} has {len(p.weight.uses())} uses"
        product = p.linear.outputs[0]
        if p.bias_add is not None and (len(product.uses()) != 1 or product.is_graph_output()):
            return "a product is read by its bias alone", f"{p.linear.name} has other readers"
        if p.bias is not None and static_dims(p.bias) != (p.width,):
            return "a bias has one value an output", f"{p.bias.name} is {list(static_dims(p.bias))} for {p.width}"
    return None


def _pack(projections: list[Projection], packed_name: str) -> None:
    owner = (projections[0].weight.name or "").rsplit(".", 2)[0]  # blocks.3.attention
    name = f"{owner}.{packed_name}"
    first = min((p.linear for p in projections), key=_position)
    graph = first.graph
    assert graph is not None
    weight = _concatenated(graph, [p.weight for p in projections], f"{name}.weight")
    weight.meta[_PARTS] = tuple(p.weight.name or "" for p in projections)
    packed = new_node(first, "Linear", [first.inputs[0], weight], domain=DOMAIN, name=name)
    result = packed.outputs[0]
    biases = [p.bias for p in projections if p.bias is not None]
    if biases:
        bias = _concatenated(graph, biases, f"{name}.bias")
        result = new_node(first, "Add", [result, bias], name=f"{name}_bias").outputs[0]
    widths = ir.tensor(np.array([p.width for p in projections], np.int64), name=f"{name}.widths")
    sizes = add_constant(graph, f"{name}.widths", widths)
    split = new_node(first, "Split", [result, sizes], {"axis": -1}, num_outputs=len(projections), name=f"{name}_split")
    dtype, shape = projections[0].output.dtype, projections[0].output.shape
    if dtype is not None and shape is not None:
        result.dtype, result.shape = dtype, ir.Shape([*shape[:-1], sum(p.width for p in projections)])
    for projection, part in zip(projections, split.outputs, strict=True):
        replace_value(projection.output, part)
        if projection.bias_add is not None:
            remove_nodes(projection.bias_add)
        remove_nodes(projection.linear)


def _position(node: ir.Node) -> int:
    assert node.graph is not None
    return next(index for index, other in enumerate(node.graph) if other is node)


def _concatenated(graph: ir.Graph, parts: list[ir.Value], name: str) -> ir.Value:
    """An initialiser that concatenates others along axis 0 when it is read."""
    tensors = [part.const_value for part in parts if part.const_value is not None]
    assert len(tensors) == len(parts)
    rows = sum(static_dims(tensor)[0] for tensor in tensors)

    def join() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([tensor.numpy() for tensor in tensors]), name=name)

    shape = ir.Shape((rows, *static_dims(tensors[0])[1:]))
    return add_constant(graph, name, ir.LazyTensor(join, tensors[0].dtype, shape, name=name))

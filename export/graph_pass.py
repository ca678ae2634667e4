"""What a graph pass is given and what it says it did.

In: an onnx_ir model and a plan. Out: a report that names every site that fused and, for every other candidate, the
check that failed and the value to blame. A pass keeps no state, leaves the graph valid and keeps its inputs and
outputs.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.gguf_matrices import KeptMatrix
from graphport.export.targets import CacheFormat, Precision, Target
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import DType

CONTRIB = "com.microsoft"


class CacheScales(NamedTuple):
    """What a quantised cache multiplies by, float32: [1], or [1, kv_heads, 1, head_dim] a channel."""

    key: NDArray[np.float32]
    value: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """What is compiled and for what.

    `activation_ranges`: largest magnitude a channel of each linear layer's input, by weight name; empty: no smoothing.
    `cache` None keeps the KV cache in the activations' type; else `cache_scales` has its scales, one pair a layer.
    `matrices`: what matrices are held as, by weight name: a GGUF file's own, or rounded on a calibration text; those
    that are not named are rounded to the precision's bits where they are lowered.
    `accuracy_level`: MatMulNBits' arithmetic, None: the target's own. `disabled`: rules whose passes do not run.
    """

    config: TransformerConfig
    target: Target
    precision: Precision
    max_length: int
    activation_ranges: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    cache: CacheFormat | None = None
    cache_scales: tuple[CacheScales, ...] = ()
    matrices: Mapping[str, KeptMatrix] = field(default_factory=dict)
    accuracy_level: int | None = None
    disabled: tuple[str, ...] = ()

    @property
    def cache_dtype(self) -> DType:
        """Element type of the cache tensors."""
        return self.precision.activations if self.cache is None else self.cache.dtype

    @property
    def kernel_accuracy(self) -> int | None:
        """MatMulNBits' accuracy_level, None for the kernel's own choice and where no matrix is quantised."""
        if self.precision.weight_bits is None:
            return None
        return self.target.accuracy_level if self.accuracy_level is None else self.accuracy_level


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A candidate site that a rule left alone: the check that failed and the value it found."""

    site: str
    check: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did: the rule's name, the sites it changed, the candidates it left."""

    rule: str
    fused: tuple[str, ...] = ()
    missed: tuple[Miss, ...] = ()


GraphPass = Callable[[ir.Model, CompilePlan], PassReport]


def site_of(value: ir.Value | None) -> str:
    """Where in the model a value is made, for reports: "layer 3 attention.query", "final_norm", ..."""
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop(0)
        if current is None or current in seen:
            continue
        seen.add(current)
        name = current.name or ""
        if current.is_initializer():
            return name_site(name)
        node = current.producer()
        if node is not None:
            # a node's own weights say more than where its input came from
            waiting = [v for v in node.inputs if v is not None and v.is_initializer()] + waiting + list(node.inputs)
    return "graph"


def name_site(initializer: str) -> str:
    """The site that an initialiser's name belongs to."""
    match = re.search(r"blocks\.(\d+)\.(.+?)(\.weight|\.bias|\.widths)?$", initializer)
    if match:
        return f"layer {match[1]} {match[2]}"
    return re.sub(r"\.(weight|bias)$", "", initializer)


def only_node(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that makes `value`, if it is of this type."""
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == (domain, op_type) else None


def new_node(
    before: ir.Node,
    op_type: str,
    inputs: list[ir.Value | None],
    attributes: dict[str, int | float | str | list[int]] | None = None,
    *,
    domain: str = "",
    num_outputs: int = 1,
    name: str,
) -> ir.Node:
    """A node inserted before another one."""
    node = ir.node(op_type, inputs, attributes or {}, domain=domain, num_outputs=num_outputs, name=name)
    graph = before.graph
    assert graph is not None
    graph.opset_imports.setdefault(domain, 1)
    graph.insert_before(before, node)
    return node


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of `old`, graph outputs included, read `new`, which takes over name, dtype and shape."""
    if new.dtype is None and old.dtype is not None:
        new.dtype = old.dtype
    if new.shape is None and old.dtype is not None:
        new.shape = old.shape
    if old.is_graph_output():
        name, old.name = old.name, None
        new.name = name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def static_dims(tensor: ir.TensorProtocol | ir.Value) -> tuple[int, ...]:
    """The shape of a tensor whose every dimension is a number."""
    return tuple(dim for dim in tensor.shape or () if isinstance(dim, int))


def add_constant(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """The initialiser called `name`, made from `tensor` unless the graph has it already."""
    known = graph.initializers.get(name)
    if known is not None:
        return known
    shape = ir.Shape(static_dims(tensor))
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=shape)
    graph.register_initializer(value)
    return value


def remove_nodes(*nodes: ir.Node) -> None:
    """Remove nodes that nothing reads any more; the others stay."""
    for node in nodes:
        if node.graph is not None and not any(out.uses() or out.is_graph_output() for out in node.outputs):
            node.graph.remove(node, safe=True)

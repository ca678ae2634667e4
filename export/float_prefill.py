"""Long steps over a quantised cache in float: what is cached is widened once, the new rows are rounded once.

Before: GroupQueryAttention(qkv, past int8, ..., scales)
After:  If(num_new > SHORT_STEP)
        then: GroupQueryAttention(qkv, Mul(Cast(past[:cached]), scale), ...) in float;
              TensorScatter(past, Cast(Round(present[cached:] / scale)), cached)
        else: GroupQueryAttention(qkv, past int8, ..., scales)

The CPU kernel widens a quantised cache again for every query, which makes prefill two to four times slower. Both ways
leave the same rows in the cache, in place when past and present are one buffer. One layer's rows are wide at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphport.export.graph_pass import CONTRIB, add_constant, new_node, remove_nodes, replace_value, static_dims
from graphport.export.targets import CacheFormat
from graphport.model_def.signature import INPUT_IDS

# New tokens a row up to which the kernel's own way is the faster one: measured for heads of 64 over 64 to 2,048 tokens.
SHORT_STEP = 8

OPSET = 24  # TensorScatter's first
IR_VERSION = 11

_PAST_KEY, _PAST_VALUE, _SEQLENS, _TOTAL = 3, 4, 5, 6  # inputs of GroupQueryAttention
_KEY_SCALE, _VALUE_SCALE = 12, 13
_CACHES = ((_PAST_KEY, _KEY_SCALE), (_PAST_VALUE, _VALUE_SCALE))
_QUANTISED_ONLY = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")
_NIBBLE_BASE = 8  # a nibble is q + 8


class _Step(NamedTuple):
    """What a long step says to every layer: whether it is long, tokens cached a row [B], in the first row [1], the
    total after it [1] and as the int32 scalar that the kernel reads.
    """

    is_long: ir.Value
    past: ir.Value
    cached: ir.Value
    total: ir.Value
    total_sequence_length: ir.Value


def add_float_prefill(model: ir.Model, kernels: Sequence[ir.Node], cache: CacheFormat) -> None:
    """Give every GroupQueryAttention in `kernels`, in graph order, the second way. Changes opset and IR version."""
    graph = model.graph
    steps: dict[ir.Value, _Step] = {}  # layers with a window may count their cached tokens apart
    for kernel in kernels:
        name = kernel.name or "attention"
        seqlens = kernel.inputs[_SEQLENS]
        assert seqlens is not None
        if seqlens not in steps:
            steps[seqlens] = _add_step(graph, kernel, seqlens)
        step = steps[seqlens]
        ways = {
            "then_branch": _FloatWay(graph, step, cache, _Branch(f"{name}.long")).attend(kernel),
            "else_branch": _own_way(kernel, _Branch(f"{name}.short")),
        }
        node = ir.node("If", [step.is_long], ways, num_outputs=3, name=f"{name}.any_step")
        graph.insert_before(kernel, node)
        for old, new in zip(kernel.outputs, node.outputs, strict=True):
            replace_value(old, new)
        remove_nodes(kernel)
    graph.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION


def _add_step(graph: ir.Graph, before: ir.Node, seqlens: ir.Value) -> _Step:
    inputs = {value.name: value for value in graph.inputs}

    def add(name: str, op_type: str, *values: ir.Value, **attributes: int) -> ir.Value:
        node = new_node(before, op_type, list(values), {**attributes}, name=f"step.{seqlens.name}.{name}")
        return node.outputs[0]

    zero, one, short = (_integers(graph, number) for number in (0, 1, SHORT_STEP))
    num_new = add("num_new", "Shape", inputs[INPUT_IDS], start=1, end=2)
    is_long = add("longer", "Greater", num_new, short)
    last = add("last", "Cast", seqlens, to=ir.DataType.INT64)
    length = add("length", "Add", last, one)
    past = add("past", "Max", add("before", "Sub", length, num_new), zero)  # 0 in a row that is padded to num_new
    cached = add("cached", "Slice", past, zero, one)
    total = add("total", "Add", cached, num_new)
    narrow = add("narrow", "Cast", total, to=ir.DataType.INT32)
    return _Step(
        is_long=add("is_long", "Squeeze", is_long),
        past=past,
        cached=cached,
        total=total,
        total_sequence_length=add("total_sequence_length", "Squeeze", narrow),
    )


class _Branch:
    """The nodes of one branch of an If, with names of their own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[ir.Node] = []

    def add(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
        num_outputs: int = 1,
    ) -> Sequence[ir.Value]:
        name = f"{self.name}.{op_type}_{len(self.nodes)}"
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=num_outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}.{index}"
        self.nodes.append(node)
        return node.outputs

    def graph(self, outputs: Sequence[ir.Value], like: Sequence[ir.Value]) -> ir.Graph:
        for value, model in zip(outputs, like, strict=True):
            value.type, value.shape = model.type, model.shape
        return ir.Graph((), outputs, nodes=self.nodes, name=self.name)


def _own_way(kernel: ir.Node, branch: _Branch) -> ir.Graph:
    attributes = {key: attribute.value for key, attribute in kernel.attributes.items()}
    outputs = branch.add(kernel.op_type, *kernel.inputs, attributes=attributes, domain=CONTRIB, num_outputs=3)
    return branch.graph(outputs, kernel.outputs)


@dataclass(frozen=True, slots=True)
class _FloatWay:
    """The branch for long steps of one kernel."""

    main: ir.Graph
    step: _Step
    cache: CacheFormat
    branch: _Branch

    def attend(self, kernel: ir.Node) -> ir.Graph:
        inputs = list(kernel.inputs[:_KEY_SCALE])
        inputs[_TOTAL] = self.step.total_sequence_length
        caches = [(kernel.inputs[past], kernel.inputs[scale]) for past, scale in _CACHES]
        inputs[_PAST_KEY : _PAST_VALUE + 1] = [self._widen(past, scale) for past, scale in caches]
        attributes = {key: a.value for key, a in kernel.attributes.items() if key not in _QUANTISED_ONLY}
        attended, *present = self.branch.add(
            kernel.op_type, *inputs, attributes=attributes, domain=CONTRIB, num_outputs=3
        )
        written = [self._append(past, scale, rows) for (past, scale), rows in zip(caches, present, strict=True)]
        return self.branch.graph([attended, *written], kernel.outputs)

    def _widen(self, past: ir.Value | None, scale: ir.Value | None) -> ir.Value:
        """The rows in the cache [B, K, cached, H] as float: q * scale."""
        assert past is not None
        rows = self._op("Slice", past, self._integers(0), self.step.cached, self._integers(2))
        if self.cache.bits == 4:
            index = self._op("Cast", rows, to=ir.DataType.INT32)
            pairs = self._op("Gather", _nibble_table(self.main), index)  # [B, K, cached, H/2, 2]
            q = self._op("Reshape", pairs, self._integers(0, 0, 0, 2 * static_dims(past)[-1]))
        else:
            q = self._op("Cast", rows, to=ir.DataType.FLOAT)
        return self._op("Mul", q, scale)

    def _append(self, past: ir.Value | None, scale: ir.Value | None, present: ir.Value) -> ir.Value:
        """The cache with the new rows of the float `present` [B, K, total, H], rounded, behind the old ones."""
        assert past is not None
        rows = self._op("Slice", present, self.step.cached, self.step.total, self._integers(2))
        rounded = self._op("Round", self._op("Div", rows, scale))
        q = self._op("Clip", rounded, *(_number(self.main, level) for level in self.cache.levels))
        if self.cache.bits == 4:
            pairs = self._op("Reshape", q, self._integers(0, 0, 0, static_dims(past)[-1], 2))
            joined = self._op("MatMul", pairs, _nibble_places(self.main))  # [B, K, S, H/2, 1]
            signed = self._op("Squeeze", joined, self._integers(-1))
            packed = self._op("Add", signed, _number(self.main, _NIBBLE_BASE + 16 * _NIBBLE_BASE))
            new = self._op("Cast", packed, to=ir.DataType.UINT8)
        else:
            new = self._op("Cast", q, to=ir.DataType.INT8)
        return self._op("TensorScatter", past, new, self.step.past, axis=2)

    def _op(self, op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        return self.branch.add(op_type, *inputs, attributes=attributes)[0]

    def _integers(self, *numbers: int) -> ir.Value:
        return _integers(self.main, *numbers)


def _integers(graph: ir.Graph, *numbers: int) -> ir.Value:
    name = "cache.int_" + "_".join(map(str, numbers))
    return add_constant(graph, name, ir.tensor(np.array(numbers, np.int64), name=name))


def _number(graph: ir.Graph, number: float) -> ir.Value:
    name = f"cache.float_{number:g}"
    return add_constant(graph, name, ir.tensor(np.array(number, np.float32), name=name))


def _nibble_table(graph: ir.Graph) -> ir.Value:
    """The two q of every byte, float32 [256, 2]: the even element in the low nibble."""
    byte = np.arange(256)
    table = np.stack((byte % 16, byte // 16), axis=1).astype(np.float32) - _NIBBLE_BASE
    return add_constant(graph, "cache.nibbles", ir.tensor(table, name="cache.nibbles"))


def _nibble_places(graph: ir.Graph) -> ir.Value:
    """What the two q of a byte count for in it, float32 [2, 1]."""
    places = np.array([[1], [16]], np.float32)
    return add_constant(graph, "cache.nibble_places", ir.tensor(places, name="cache.nibble_places"))

"""What an ONNX file says of itself, read without the onnx package: versions, nodes, and where its tensors lie.

In: a path. Out: a `GraphHeader`. It reads no weights and judges nothing (see `bundle_files.py`, `kernel_limits.py`).
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from graphport.model_def.signature import DType, ManifestError

# Field numbers of onnx.proto3 by message: which fields hold which message. Only what leads to a tensor or a node.
MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 9: "opset", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "training": {1: "graph", 2: "graph"},
    "tensor": {},
}
_IR_VERSION, _OPSET_DOMAIN, _OPSET_VERSION = 1, 1, 2
_NODE_INPUT, _NODE_OP_TYPE, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER = 1, 3
_TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW, TENSOR_ENTRY = 2, 8, 9, 13
ENTRY_KEY, ENTRY_VALUE = 1, 2
PACKED = "prepacked_"  # begins the keys of entries about packed weights

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MORE = 0x80  # the bit of a varint's byte that says another follows

# Float element types of onnx.proto3 (TensorProto.DataType), the one that says most about a graph first: half-precision
# graphs hold float32 tensors too.
_FLOAT_TYPES: tuple[tuple[int, DType], ...] = ((16, "bfloat16"), (10, "float16"), (1, "float32"))

_Field = tuple[int, int | tuple[int, int]]
_Fields = dict[int, int | tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHeader:
    """One node: its operator, the names of its inputs ("" where an optional one is absent), its integer attributes."""

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    integers: dict[str, int]

    def has_input(self, index: int) -> bool:
        """Whether the input at `index` is given."""
        return index < len(self.inputs) and self.inputs[index] != ""


class Place(NamedTuple):
    """Where bytes lie: the file beside the graph (None: in the graph), and `length` None where none is stated."""

    location: str | None
    offset: int
    length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Element type (number of onnx.proto3) and bytes of a stored tensor; small ones in typed fields count as 0.

    `place` is where its bytes lie (None in typed fields), `packed` where what ONNX Runtime packed of it lies.
    """

    element_type: int
    num_bytes: int
    place: Place | None = None
    packed: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphHeader:
    """What a graph file says about itself: versions, nodes, tensors, and where its external tensors lie.

    `opsets` maps a domain ("" is ai.onnx) to its version; `external` lists (location, offset, length) with length
    None where the file states none. `nodes` are those of functions and subgraphs too; `tensors` are by name.
    """

    ir_version: int
    opsets: dict[str, int]
    external: tuple[Place, ...]
    nodes: tuple[NodeHeader, ...]
    tensors: dict[str, TensorHeader]

    @property
    def float_type(self) -> DType:
        """The type that the graph computes in: bfloat16 or float16 if any tensor is, else float32."""
        held = {tensor.element_type for tensor in self.tensors.values()}
        return next((name for number, name in _FLOAT_TYPES if number in held), "float32")

    def nodes_of(self, op_type: str) -> list[NodeHeader]:
        """All nodes of one operator."""
        return [node for node in self.nodes if node.op_type == op_type]


def read_graph_header(path: Path) -> GraphHeader:
    """Read the header of the ONNX file at `path`. Raises ManifestError when the file is no ONNX model."""
    if path.stat().st_size == 0:
        raise ManifestError(f"{path} is empty; export the bundle again")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(data)
    except (ValueError, IndexError, UnicodeDecodeError, KeyError) as error:
        raise ManifestError(f"{path} is no ONNX model ({error}); export the bundle again") from error


def _header(data: mmap.mmap) -> GraphHeader:
    opsets: dict[str, int] = {}
    external: list[Place] = []
    nodes: list[NodeHeader] = []
    tensors: dict[str, TensorHeader] = {}
    ir_version = 0
    pending = [("model", 0, len(data))]
    while pending:
        message, start, end = pending.pop()
        fields = list(_fields(data, start, end))
        if message == "node":
            nodes.append(_node(data, fields))
        elif message == "tensor":
            name, tensor = _tensor(data, fields)
            tensors |= {name: tensor} if name else {}
            places = (tensor.place, *tensor.packed)
            external += [place for place in places if place is not None and place.location is not None]
        for number, value in fields:
            if message == "model" and number == _IR_VERSION and isinstance(value, int):
                ir_version = value
            kind = MESSAGES[message].get(number)
            if kind is None or isinstance(value, int):
                continue
            if kind == "opset":
                domain, version = _opset(data, value)
                opsets[domain] = max(opsets.get(domain, 0), version)
            else:
                pending.append((kind, *value))
    if not ir_version:
        raise ValueError("it states no IR version")
    return GraphHeader(
        ir_version=ir_version, opsets=opsets, external=tuple(external), nodes=tuple(nodes), tensors=tensors
    )


def _opset(data: mmap.mmap, span: tuple[int, int]) -> tuple[str, int]:
    pair: _Fields = dict(_fields(data, *span))
    version = pair.get(_OPSET_VERSION, 0)
    return _text(data, pair.get(_OPSET_DOMAIN)), version if isinstance(version, int) else 0


def _node(data: mmap.mmap, fields: list[_Field]) -> NodeHeader:
    inputs: list[str] = []
    integers: dict[str, int] = {}
    single: _Fields = {}
    for number, value in fields:
        if number == _NODE_INPUT:
            inputs.append(_text(data, value))
        elif number == _NODE_ATTRIBUTE and isinstance(value, tuple):
            attribute: _Fields = dict(_fields(data, *value))
            integer = attribute.get(_ATTRIBUTE_INTEGER)
            if isinstance(integer, int):
                signed = integer - (1 << 64) if integer >> 63 else integer  # varints of int64 are two's complement
                integers[_text(data, attribute.get(_ATTRIBUTE_NAME))] = signed
        else:
            single[number] = value
    return NodeHeader(
        op_type=_text(data, single.get(_NODE_OP_TYPE)),
        domain=_text(data, single.get(_NODE_DOMAIN)),
        inputs=tuple(inputs),
        integers=integers,
    )


def _tensor(data: mmap.mmap, fields: list[_Field]) -> tuple[str, TensorHeader]:
    """Name of a tensor, and its type, size and places."""
    entries: dict[str, str] = {}
    single: _Fields = {}
    for number, value in fields:
        if number == TENSOR_ENTRY and isinstance(value, tuple):
            pair: _Fields = dict(_fields(data, *value))
            entries[_text(data, pair[ENTRY_KEY])] = _text(data, pair[ENTRY_VALUE])
        else:
            single[number] = value
    element_type, raw = single.get(_TENSOR_TYPE, 0), single.get(_TENSOR_RAW)
    length = int(entries["length"]) if "length" in entries else None
    stored = raw[1] - raw[0] if isinstance(raw, tuple) else 0
    location = entries.get("location", "")
    place = Place(location, int(entries.get("offset", "0")), length) if entries else None
    if isinstance(raw, tuple):
        place = Place(None, raw[0], stored)
    packed = [text for key, text in entries.items() if key.startswith(PACKED)]
    header = TensorHeader(
        element_type=element_type if isinstance(element_type, int) else 0,
        num_bytes=stored if length is None else length,
        place=place,
        packed=tuple(place for text in packed for place in _packed(location, text)),
    )
    return _text(data, single.get(_TENSOR_NAME)), header


def _packed(location: str, entry: str) -> Iterator[Place]:
    """Places in an entry "key|offset;length;checksum|offset;..." that ONNX Runtime writes for packed weights."""
    for part in entry.split("|")[1:]:
        offset, length, *_ = part.split(";")
        yield Place(location, int(offset), int(length))


class RawField(NamedTuple):
    """One field of a protobuf message: its number, all its bytes, and those within if it is length-delimited."""

    number: int
    raw: bytes
    payload: bytes | None


def raw_fields(data: bytes) -> Iterator[RawField]:
    """Fields of one protobuf message, in order. Raises ValueError, IndexError when it is none."""
    for number, value, start, end in _spans(data, 0, len(data)):
        payload = data[value[0] : value[1]] if isinstance(value, tuple) else None
        yield RawField(number, data[start:end], payload)


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    """Fields of one protobuf message: (number, varint) or (number, (start, end)) of a length-delimited one."""
    for number, value, _, _ in _spans(data, start, end):
        if value is not None:
            yield number, value


def _spans(
    data: mmap.mmap | bytes, start: int, end: int
) -> Iterator[tuple[int, int | tuple[int, int] | None, int, int]]:
    """Number, value (None of fixed width), start and end of every field of one protobuf message."""
    position = start
    while position < end:
        begin = position
        tag = data[position]
        position += 1
        if tag >= _MORE:
            tag, position = _varint(data, begin)
        wire = tag & 7
        value: int | tuple[int, int] | None = None
        if wire == _VARINT:
            value, position = _varint(data, position)
        elif wire == _BYTES:
            length = data[position]  # nearly all are short, and a graph has tens of thousands
            position += 1
            if length >= _MORE:
                length, position = _varint(data, position - 1)
            if position + length > end:
                raise ValueError("a field runs past the end")
            value = (position, position + length)
            position += length
        elif wire in (_FIXED64, _FIXED32):
            position += 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        yield tag >> 3, value, begin, position


def _varint(data: mmap.mmap | bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, position
        shift += 7


def _text(data: mmap.mmap, span: int | tuple[int, int] | None) -> str:
    """A string field; an absent one is empty, as protobuf has it."""
    if isinstance(span, int):
        raise ValueError("a string field holds a number")
    return "" if span is None else data[span[0] : span[1]].decode("utf-8")

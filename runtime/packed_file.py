"""Lay out the weights of a packed graph where the kernels can read them.

In: a graph and weights file as ONNX Runtime writes them with packed weights. Out: the same, aligned. ONNX Runtime 1.31
writes packed matrices one after the other, but its kernels find the parts of a matrix by aligned addresses: off a
multiple of 64 bytes they read the wrong ones. The unpacked matrices stay: ONNX Runtime packs them again when it opens
the graph, and takes what lies on disk where that is what was packed of these bytes, by a hash.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from graphport.runtime.graph_file import (
    ENTRY_KEY,
    ENTRY_VALUE,
    MESSAGES,
    PACKED,
    TENSOR_ENTRY,
    GraphHeader,
    Place,
    raw_fields,
    read_graph_header,
)
from graphport.runtime.protobuf_fields import bytes_field

ALIGNMENT = 64  # bytes: MLAS aligns what it packs to 64 at most


def lay_out(graph: Path, weights: Path, folder: Path) -> GraphHeader:
    """Write graph and weights, under their names, into `folder`; returns the header of what was written."""
    header = read_graph_header(graph)
    moved = _write_weights(header, weights, folder / weights.name) if header.external else {}
    data = graph.read_bytes()
    (folder / graph.name).write_bytes(_moved(data, "model", moved))
    return read_graph_header(folder / graph.name)


def _write_weights(header: GraphHeader, source: Path, target: Path) -> dict[int, int]:
    """Copy all of it; returns where the tensors and packed matrices lie now, by where they lay."""
    moved: dict[int, int] = {}
    with source.open("rb") as read, target.open("wb") as write:
        for place in _places(header):
            write.write(b"\0" * (-write.tell() % ALIGNMENT))
            moved[place.offset] = write.tell()
            read.seek(place.offset)
            write.write(read.read(place.length or 0))
    return moved


def _places(header: GraphHeader) -> Iterator[Place]:
    """Everything in the weights file, what was packed of a tensor beside it."""
    for tensor in header.tensors.values():
        if tensor.place is not None and tensor.place.location is not None:
            yield tensor.place
        yield from tensor.packed


def _moved(data: bytes, kind: str, moved: Mapping[int, int]) -> bytes:
    """A protobuf message of onnx.proto3 with the offsets of its tensors changed."""
    out = bytearray()
    for field in raw_fields(data):
        child = MESSAGES[kind].get(field.number)
        if field.payload is None:
            out += field.raw
        elif kind == "tensor" and field.number == TENSOR_ENTRY:
            out += bytes_field(field.number, _moved_entry(field.payload, moved))
        elif child in MESSAGES:
            out += bytes_field(field.number, _moved(field.payload, child, moved))
        else:
            out += field.raw
    return bytes(out)


def _moved_entry(entry: bytes, moved: Mapping[int, int]) -> bytes:
    """A key and a value of a tensor's `external_data`."""
    pair = {field.number: (field.payload or b"").decode() for field in raw_fields(entry)}
    key, value = pair[ENTRY_KEY], pair[ENTRY_VALUE]
    if key == "offset":
        value = str(moved[int(value)])
    elif key.startswith(PACKED):
        name, *parts = value.split("|")
        value = "|".join([name, *(_moved_part(part, moved) for part in parts)])
    return bytes_field(ENTRY_KEY, key.encode()) + bytes_field(ENTRY_VALUE, value.encode())


def _moved_part(part: str, moved: Mapping[int, int]) -> str:
    offset, rest = part.split(";", maxsplit=1)
    return f"{moved[int(offset)]};{rest}"

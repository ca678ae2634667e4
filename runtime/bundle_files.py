"""Open a bundle folder safely: everything that ONNX Runtime will read is checked before it reads it.

In: a path. Out: `BundleFiles` with absolute paths, the manifest and the graph's versions. It opens no session, hashes
nothing (`graphport verify` does) and does not guard against files that change between the check and the reading.
"""

import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphport.model_def.signature import (
    GRAPH_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Manifest,
    ManifestError,
    read_manifest,
)

# Field numbers of onnx.proto3 by message: which fields hold which message. Only what leads to a TensorProto.
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 9: "opset", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "training": {1: "graph", 2: "graph"},
    "tensor": {13: "entry"},
}
_IR_VERSION, _ENTRY_KEY, _ENTRY_VALUE, _OPSET_DOMAIN, _OPSET_VERSION = 1, 1, 2, 1, 2

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphHeader:
    """What a graph file says about itself: versions, and where its external tensors lie.

    `opsets` maps a domain ("" is ai.onnx) to its version; `external` lists (location, offset, length) with length
    None where the file states none.
    """

    ir_version: int
    opsets: dict[str, int]
    external: tuple[tuple[str, int, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFiles:
    """A checked bundle: absolute folder and graph path, its manifest, its graph's header."""

    folder: Path
    graph: Path
    manifest: Manifest
    header: GraphHeader

    @property
    def weights_bytes(self) -> int:
        """Size of the graph and weights files together."""
        return sum(self.manifest.files[name].size for name in (GRAPH_FILE, WEIGHTS_FILE) if name in self.manifest.files)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the bundle can turn text into ids."""
        return TOKENIZER_FILE in self.manifest.files


def open_bundle(path: str | os.PathLike[str]) -> BundleFiles:
    """Check the bundle at `path` and return its files.

    Refused before anything reads them: files missing or of another size than the manifest states, files that are not
    regular (FIFO, device), links that leave the folder, and weights with a second hard link (the same rule as the onnx
    package's own loader: a hard link made by an archive points anywhere and cannot be told from a copy), and
    external tensors anywhere but inside the bundle's own weights file. The folder itself may be a link.

    Raises ManifestError when it is no bundle or a file is missing or changed, ValueError for what it must not read.
    """
    folder = Path(path).resolve()
    manifest = read_manifest(folder)
    if GRAPH_FILE not in manifest.files:
        raise ManifestError(f"{folder / MANIFEST_FILE} lists no {GRAPH_FILE}; export the bundle again")
    for name, record in manifest.files.items():
        _check_file(folder, name, record.size)
    graph = folder / GRAPH_FILE
    header = read_graph_header(graph)
    weights = manifest.files.get(WEIGHTS_FILE)
    for location, offset, length in header.external:
        _check_location(graph, location, offset, length, None if weights is None else weights.size)
    return BundleFiles(folder=folder, graph=graph, manifest=manifest, header=header)


def _check_file(folder: Path, name: str, size: int) -> None:
    if name != Path(name).name or name in ("", ".", ".."):
        raise ValueError(f"{folder / MANIFEST_FILE} lists {name!r}; a bundle's files lie directly in its folder")
    path = folder / name
    target = path.resolve()
    if target.parent != folder:
        raise ValueError(f"{path} links to {target}, outside the bundle; replace the link by a copy of the file")
    try:
        status = target.stat()
    except FileNotFoundError as error:
        raise ManifestError(
            f"{path} is missing; the manifest lists it, restore it or export the bundle again"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file; replace it by a copy of the file")
    if status.st_nlink > 1 and name in (GRAPH_FILE, WEIGHTS_FILE):
        raise ValueError(
            f"{path} has {status.st_nlink} hard links, so it may be a file from elsewhere; copy the bundle"
        )
    if status.st_size != size:
        raise ManifestError(
            f"{path} has {status.st_size} bytes, the manifest says {size}; it is torn or was changed, "
            "export the bundle again"
        )


def _check_location(graph: Path, location: str, offset: int, length: int | None, size: int | None) -> None:
    if location != WEIGHTS_FILE:
        raise ValueError(
            f"{graph} reads tensor data from {location!r}; a bundle's graph may read only its own {WEIGHTS_FILE}"
        )
    if size is None:
        raise ManifestError(f"{graph} needs {WEIGHTS_FILE}, which the manifest does not list; export the bundle again")
    end = offset + (length or 0)
    if offset < 0 or (length or 0) < 0 or end > size:
        raise ValueError(
            f"{graph} reads bytes {offset} to {end} of {WEIGHTS_FILE}, which has {size}; export the bundle again"
        )


def read_graph_header(path: Path) -> GraphHeader:
    """Versions and external tensors of the ONNX file at `path`, read without the onnx package.

    Raises ManifestError when the file is no ONNX model.
    """
    if path.stat().st_size == 0:
        raise ManifestError(f"{path} is empty; export the bundle again")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(data)
    except (ValueError, IndexError, UnicodeDecodeError, KeyError) as error:
        raise ManifestError(f"{path} is no ONNX model ({error}); export the bundle again") from error


def _header(data: mmap.mmap) -> GraphHeader:
    opsets: dict[str, int] = {}
    external: list[tuple[str, int, int | None]] = []
    ir_version = 0
    pending = [("model", 0, len(data))]
    while pending:
        message, start, end = pending.pop()
        entries: dict[str, str] = {}
        for number, value in _fields(data, start, end):
            if message == "model" and number == _IR_VERSION and isinstance(value, int):
                ir_version = value
            kind = _MESSAGES[message].get(number)
            if kind is None or isinstance(value, int):
                continue
            if kind == "entry":
                pair = dict(_fields(data, *value))
                entries[_text(data, pair[_ENTRY_KEY])] = _text(data, pair[_ENTRY_VALUE])
            elif kind == "opset":
                pair = dict(_fields(data, *value))
                version = pair.get(_OPSET_VERSION, 0)
                domain = _text(data, pair[_OPSET_DOMAIN]) if _OPSET_DOMAIN in pair else ""
                opsets[domain] = max(opsets.get(domain, 0), version if isinstance(version, int) else 0)
            else:
                pending.append((kind, *value))
        if entries:
            length = int(entries["length"]) if "length" in entries else None
            external.append((entries.get("location", ""), int(entries.get("offset", "0")), length))
    if not ir_version:
        raise ValueError("it states no IR version")
    return GraphHeader(ir_version=ir_version, opsets=opsets, external=tuple(external))


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
    """Fields of one protobuf message: (number, varint) or (number, (start, end)) of a length-delimited one."""
    position = start
    while position < end:
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
        elif wire == _BYTES:
            length, position = _varint(data, position)
            if position + length > end:
                raise ValueError("a field runs past the end")
            yield tag >> 3, (position, position + length)
            position += length
        elif wire in (_FIXED64, _FIXED32):
            position += 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _text(data: mmap.mmap, span: int | tuple[int, int]) -> str:
    if isinstance(span, int):
        raise ValueError("a string field holds a number")
    return data[span[0] : span[1]].decode("utf-8")

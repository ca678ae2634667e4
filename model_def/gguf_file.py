"""The container of a GGUF file: metadata and where each tensor lies, checked against the file's size.

In: a path. Out: `GgufFile` and its tensors as float32 (or as raw blocks). It knows no architecture (see `gguf.py`).
Own parsing, because `gguf.GGUFReader` takes 2.3 s on a vocabulary of 49,152 (this 0.2 s) and checks no lengths.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from graphport.model_def.checkpoint_record import CheckpointError, Shape

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7

# GGUF value type -> struct format; string and array are read by their own functions
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies: `shape` in torch's order, `offset` and `num_bytes` in the file."""

    name: str
    shape: Shape
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A checked GGUF header; `metadata` holds Python scalars, texts and lists by GGUF key."""

    path: Path
    metadata: dict[str, Any]  # scalars, texts and lists, as the file types them
    tensors: dict[str, GgufTensor]

    def has_any(self, *endings: str) -> bool:
        """Whether a layer has one of the tensors; if one has, all must (the accounting sees to it)."""
        return any(name.startswith("blk.") and name.endswith(endings) for name in self.tensors)

    def blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as stored, uint8 [rows, bytes a row], mapped read-only."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        data = np.memmap(self.path, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,))
        return data.reshape(rows, tensor.num_bytes // rows)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as a float32 array of its own memory, in torch's shape."""
        tensor = self.tensors[name]
        with np.errstate(invalid="ignore"):  # a scale that is not finite; the reader of the weights refuses it
            values = dequantize(np.ascontiguousarray(self.blocks(name)), tensor.kind)
        return np.require(values.reshape(tensor.shape), dtype=np.float32, requirements=["C", "W"])


def read_gguf_file(path: Path) -> GgufFile:
    """Parse the header of `path`.

    Raises CheckpointError, naming file and tensor, for a foreign, big-endian, truncated or padded file, an unknown
    version, and tensor types that the gguf package does not decode.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        _check_start(path, stream.read(64), size)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Parser(data, path, size).parse()
            except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
                raise CheckpointError(
                    f"{path} is truncated or garbled within its header ({error}; {size} bytes); fetch it again"
                ) from error


def _check_start(path: Path, start: bytes, size: int) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the model; run `git lfs pull`")
    if size < 24:
        raise CheckpointError(f"{path} has {size} bytes and is no GGUF file; fetch it again")
    if not start.startswith(_MAGIC):
        raise CheckpointError(f"{path} is no GGUF file: it starts with {start[:4]!r}, not {_MAGIC!r}")
    (version,) = struct.unpack("<I", start[4:8])
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"{path} is a big-endian GGUF file; convert it with gguf_convert_endian of the gguf package"
        )
    if version not in _VERSIONS:
        raise CheckpointError(f"{path} has GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are read")


class _Parser:
    """A position in a mapped file; each method reads on from it."""

    def __init__(self, data: mmap.mmap, path: Path, size: int) -> None:
        self._data, self._path, self._size = data, path, size
        self._at = 8  # magic and version are checked
        self._readers: dict[int, Callable[[], Any]] = {_STRING: self._text, _ARRAY: self._list}

    def parse(self) -> GgufFile:
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}  # as in GgufFile
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                raise CheckpointError(f"{self._path} has the metadata key {key} twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        tensors = self._place(infos, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        return GgufFile(path=self._path, metadata=metadata, tensors=tensors)

    def _number(self, form: str) -> Any:  # noqa: ANN401 - the struct format decides the type
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _text(self) -> str:
        length = self._number("Q")
        end = self._at + length
        if end > self._size:
            raise IndexError(f"a text of {length} bytes")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:  # noqa: ANN401 - the file types it
        if kind in self._readers:
            return self._readers[kind]()
        if kind not in _SCALARS:
            raise IndexError(f"unknown value type {kind}")
        return self._number(_SCALARS[kind])

    def _list(self) -> list[Any]:  # the file types its items
        kind, length = self._number("I"), self._number("Q")
        if kind in _SCALARS:
            end = self._at + length * struct.calcsize(f"<{_SCALARS[kind]}")
            if end > self._size:
                raise IndexError(f"a list of {length} numbers")
            values = struct.unpack_from(f"<{length}{_SCALARS[kind]}", self._data, self._at)
            self._at = end
            return list(values)
        return [self._value(kind) for _ in range(length)]

    def _tensor_info(self) -> tuple[str, Shape, int, int]:
        name = self._text()
        num_dims = self._number("I")
        if num_dims > 4:
            raise IndexError(f"tensor {name} with {num_dims} dimensions")
        dims = tuple(self._number("Q") for _ in range(num_dims))
        return name, tuple(reversed(dims)), self._number("I"), self._number("Q")

    def _place(self, infos: list[tuple[str, Shape, int, int]], alignment: int) -> dict[str, GgufTensor]:
        """Absolute offsets; every tensor must have a known type and lie wholly within the file."""
        if alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        _check_kinds(self._path, infos)
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in infos:
            if name in tensors:
                raise CheckpointError(f"{self._path} has the tensor {name} twice")
            kind = GGMLQuantizationType(number)
            values, num_bytes = GGML_QUANT_SIZES[kind]
            if not shape or 0 in shape or shape[-1] % values:
                raise CheckpointError(
                    f"{self._path}: {name} has shape {list(shape)}; {kind.name} needs rows of {values}n"
                )
            total = math.prod(shape) // values * num_bytes
            tensors[name] = GgufTensor(name=name, shape=shape, kind=kind, offset=start + offset, num_bytes=total)
        _check_size(self._path, list(tensors.values()), size=self._size, start=start, alignment=alignment)
        return tensors


def _check_kinds(path: Path, infos: list[tuple[str, Shape, int, int]]) -> None:
    decodable: dict[int, bool] = {}
    for name, _, number, _ in infos:
        if number not in decodable:
            decodable[number] = _can_decode(number)
        if not decodable[number]:
            known = number in list(GGMLQuantizationType)
            label = GGMLQuantizationType(number).name if known else f"number {number}"
            names = ", ".join(kind.name for kind in GGMLQuantizationType if _can_decode(kind))
            raise CheckpointError(
                f"{path}: tensor {name} has type {label}, which the gguf package does not decode; known are {names}; "
                "quantise the model to one"
            )


def _can_decode(number: int) -> bool:
    """Ask the gguf package by decoding one block of zeros."""
    if number not in list(GGMLQuantizationType):
        return False
    kind = GGMLQuantizationType(number)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _check_size(path: Path, tensors: list[GgufTensor], *, size: int, start: int, alignment: int) -> None:
    end = start
    for tensor in tensors:
        end = max(end, tensor.offset + tensor.num_bytes)
        if tensor.offset + tensor.num_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, the file "
                f"has {size}; fetch it again"
            )
    if size > -(-end // alignment) * alignment:
        raise CheckpointError(f"{path} has {size - end} bytes after its last tensor; it is garbled, fetch it again")

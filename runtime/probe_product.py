"""One product with a 4-bit matrix as a graph of its own, to learn which kernel ONNX Runtime takes for it here.

In: entries of a session's configuration. Out: whether they change what the product gives. The graph is written field by
field (onnx.proto3: ModelProto, GraphProto, NodeProto, TensorProto), because the runtime does without the onnx package.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

_K, _N, _BLOCK = 64, 16, 32
_FLOAT, _UINT8, _INT = 1, 2, 2  # two types of tensors, one of attributes
_IR_VERSION, _OPSET = 10, 21


def changes_product(entries: Mapping[str, str]) -> bool:
    """Whether a product that may round its activations to 8 bits gives other bits with `entries` than without."""
    random = np.random.default_rng(0)
    matrix = random.integers(256, size=(_N, _K // _BLOCK, _BLOCK // 2), dtype=np.uint8)
    scales = random.uniform(0.5, 1.0, size=_N * _K // _BLOCK).astype(np.float32)
    row = random.normal(size=(1, _K)).astype(np.float32)
    graph = _model(matrix, scales)
    plain, changed = (_session(graph, each).run(None, {"a": row})[0] for each in ({}, entries))
    return not np.array_equal(plain, changed)


def _session(graph: bytes, entries: Mapping[str, str]) -> Any:  # noqa: ANN401 - ORT is untyped
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _model(matrix: NDArray[np.uint8], scales: NDArray[np.float32]) -> bytes:
    attributes = {"K": _K, "N": _N, "bits": 4, "block_size": _BLOCK, "accuracy_level": 4}
    node = b"".join(_bytes(1, name) for name in (b"a", b"b", b"scales")) + _bytes(2, b"y") + _bytes(4, b"MatMulNBits")
    for name, value in attributes.items():
        node += _bytes(5, _bytes(1, name.encode()) + _number(3, value) + _number(20, _INT))
    node += _bytes(7, b"com.microsoft")
    graph = _bytes(1, node) + _bytes(2, b"probe")
    graph += _bytes(5, _tensor(b"b", matrix, _UINT8)) + _bytes(5, _tensor(b"scales", scales, _FLOAT))
    graph += _bytes(11, _value(b"a", _K)) + _bytes(12, _value(b"y", _N))
    domains = _bytes(8, _bytes(1, b"") + _number(2, _OPSET)) + _bytes(8, _bytes(1, b"com.microsoft") + _number(2, 1))
    return _number(1, _IR_VERSION) + _bytes(7, graph) + domains


def _tensor(name: bytes, values: NDArray[Any], element: int) -> bytes:
    sizes = b"".join(_number(1, size) for size in values.shape)
    return sizes + _number(2, element) + _bytes(8, name) + _bytes(9, values.tobytes())


def _value(name: bytes, width: int) -> bytes:
    """A float input or output [1, width]."""
    shape = b"".join(_bytes(1, _number(1, size)) for size in (1, width))
    return _bytes(1, name) + _bytes(2, _bytes(1, _number(1, _FLOAT) + _bytes(2, shape)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])

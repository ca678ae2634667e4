"""One product with a 4-bit matrix as a graph of its own, to learn which kernel ONNX Runtime takes for it here.

In: entries of a session's configuration. Out: whether they change what the product gives. The graph is written field by
field (onnx.proto3: ModelProto, GraphProto, NodeProto, TensorProto).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from graphport.runtime.protobuf_fields import bytes_field, number_field

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
    node = b"".join(bytes_field(1, name) for name in (b"a", b"b", b"scales"))
    node += bytes_field(2, b"y") + bytes_field(4, b"MatMulNBits")
    for name, value in attributes.items():
        node += bytes_field(5, bytes_field(1, name.encode()) + number_field(3, value) + number_field(20, _INT))
    node += bytes_field(7, b"com.microsoft")
    graph = bytes_field(1, node) + bytes_field(2, b"probe")
    graph += bytes_field(5, _tensor(b"b", matrix, _UINT8)) + bytes_field(5, _tensor(b"scales", scales, _FLOAT))
    graph += bytes_field(11, _value(b"a", _K)) + bytes_field(12, _value(b"y", _N))
    opsets = ((b"", _OPSET), (b"com.microsoft", 1))
    domains = [bytes_field(8, bytes_field(1, domain) + number_field(2, version)) for domain, version in opsets]
    return number_field(1, _IR_VERSION) + bytes_field(7, graph) + b"".join(domains)


def _tensor(name: bytes, values: NDArray[Any], element: int) -> bytes:
    sizes = b"".join(number_field(1, size) for size in values.shape)
    return sizes + number_field(2, element) + bytes_field(8, name) + bytes_field(9, values.tobytes())


def _value(name: bytes, width: int) -> bytes:
    """A float input or output [1, width]."""
    shape = b"".join(bytes_field(1, number_field(1, size)) for size in (1, width))
    return bytes_field(1, name) + bytes_field(2, bytes_field(1, number_field(1, _FLOAT) + bytes_field(2, shape)))

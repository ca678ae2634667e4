"""Bundles whose files were changed and whose hashes agree again, so that only the numbers can tell.

In: a bundle folder. Out: the same folder, other bytes, fitting manifest and certificate. It verifies nothing.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from graphport.model_def.certificate import certified_files
from graphport.model_def.file_hashes import record_file
from graphport.model_def.signature import CERTIFICATE_FILE, GRAPH_FILE, MANIFEST_FILE, WEIGHTS_FILE, read_manifest


def rehash(bundle: Path, *, certificate: bool = True) -> None:
    """List the files as they are now; with `certificate` it vouches for them too."""
    _rewrite_manifest(bundle)
    if certificate:
        change_certificate(bundle, files=certified_files(read_manifest(bundle)))
        _rewrite_manifest(bundle)


def change_certificate(bundle: Path, **changes: Any) -> None:
    """Replace top-level entries of `certificate.json`."""
    path = bundle / CERTIFICATE_FILE
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, **changes}), encoding="utf-8")


def _rewrite_manifest(bundle: Path) -> None:
    files = {path.name: record_file(path) for path in sorted(bundle.iterdir()) if path.name != MANIFEST_FILE}
    manifest = dataclasses.replace(read_manifest(bundle), files=files)
    (bundle / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")


def edit_graph(
    bundle: Path, change: Callable[[onnx.ModelProto], None], *, graph: str = GRAPH_FILE, weights: str = WEIGHTS_FILE
) -> None:
    """Change a graph or its weights; all hashes agree again."""
    model = onnx.load(bundle / graph)
    change(model)
    (bundle / weights).unlink(missing_ok=True)
    onnx.save(model, bundle / graph, save_as_external_data=True, location=weights, size_threshold=1024)
    rehash(bundle)


def edit_weight(model: onnx.ModelProto, part: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Replace the one weight of layer 0, or outside the layers, whose name holds `part`."""
    (tensor,) = [t for t in model.graph.initializer if part in t.name]
    values = change(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))


def edit_attribute(model: onnx.ModelProto, op_type: str, name: str, value: float) -> None:
    """Set an attribute of all nodes of a type that have it."""
    nodes = [node for node in model.graph.node if node.op_type == op_type]
    found = [attribute for node in nodes for attribute in node.attribute if attribute.name == name]
    assert found, (op_type, name)
    for attribute in found:
        attribute.CopyFrom(onnx.helper.make_attribute(name, value))


def lose_last_token(model: onnx.ModelProto) -> None:
    """Layer 1 writes each step's tokens one place too early, over the last that is cached."""
    graph = model.graph
    added = [
        helper.make_node("Shape", ["input_ids"], ["fault_shape"], start=1, end=2),
        helper.make_node("Squeeze", ["fault_shape"], ["fault_new"]),
        helper.make_node("Cast", ["total_sequence_length"], ["fault_total"], to=onnx.TensorProto.INT64),
        helper.make_node("Less", ["fault_new", "fault_total"], ["fault_has_past"]),
        helper.make_node("Cast", ["fault_has_past"], ["fault_one"], to=onnx.TensorProto.INT32),
        helper.make_node("Sub", ["seqlens_k", "fault_one"], ["fault_seqlens"]),
    ]
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"][1]
    at = list(attention.input).index("seqlens_k")
    attention.input[at] = "fault_seqlens"
    for node in reversed(added):
        graph.node.insert(0, node)

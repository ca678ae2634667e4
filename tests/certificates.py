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
from onnx import numpy_helper

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


def edit_graph(bundle: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    """Change the graph or its weights; all hashes agree again."""
    model = onnx.load(bundle / GRAPH_FILE)
    change(model)
    (bundle / WEIGHTS_FILE).unlink(missing_ok=True)
    onnx.save(model, bundle / GRAPH_FILE, save_as_external_data=True, location=WEIGHTS_FILE, size_threshold=1024)
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

"""Opening a bundle folder: everything that ONNX Runtime would read is checked first."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tiny_bundles import tiny_model, tiny_weights, write_manifest, write_tiny_bundle

from graphport.model_def.signature import GRAPH_FILE, MANIFEST_FILE, WEIGHTS_FILE, ManifestError
from graphport.runtime.bundle_files import open_bundle, read_graph_header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_bundle(tmp_path / "bundle").folder


def _edit_entries(folder: Path, change: Callable[[onnx.TensorProto, dict[str, str]], None]) -> None:
    """Rewrite the external data entries of every tensor of the graph, and the manifest to agree."""
    model = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.external_data:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            change(tensor, entries)
            del tensor.external_data[:]
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=value)
    (folder / GRAPH_FILE).write_bytes(model.SerializeToString())
    write_manifest(folder)


def test_open_bundle_reads_manifest_versions_and_places_of_weights(folder: Path) -> None:
    bundle = open_bundle(folder)
    assert bundle.folder == folder.resolve()
    assert bundle.graph.is_absolute()
    assert bundle.header.ir_version == 10
    assert bundle.header.opsets == {"": 23, "com.microsoft": 1}
    model = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    assert len(bundle.header.external) == sum(bool(tensor.external_data) for tensor in model.graph.initializer) > 10
    sizes = [(folder / name).stat().st_size for name in (GRAPH_FILE, WEIGHTS_FILE)]
    assert bundle.weights_bytes == sum(sizes)


def test_open_bundle_refuses_a_folder_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="is no graphport bundle"):
        open_bundle(tmp_path)


@pytest.mark.parametrize("location", ["../x", "/etc/hostname", "a/../../x", "other.data", ""])
def test_b87_refuses_weights_outside_the_bundles_own_file(folder: Path, location: str) -> None:
    (folder.parent / "x").write_bytes(b"secret")

    def change(_: onnx.TensorProto, entries: dict[str, str]) -> None:
        entries["location"] = location

    _edit_entries(folder, change)
    with pytest.raises(ValueError, match=f"reads tensor data from '{location}'.*only its own {WEIGHTS_FILE}"):
        open_bundle(folder)


@pytest.mark.parametrize(("key", "value"), [("offset", 1 << 40), ("length", 1 << 40), ("offset", -4096)])
def test_b87_refuses_weights_beyond_the_end_of_the_file(folder: Path, key: str, value: int) -> None:
    _edit_entries(folder, lambda _, entries: entries.update({key: str(value)}))
    with pytest.raises(ValueError, match=r"reads bytes .* of model.onnx.data, which has"):
        open_bundle(folder)


@pytest.mark.parametrize("name", [GRAPH_FILE, WEIGHTS_FILE])
def test_b87_refuses_a_symlink_that_leaves_the_folder(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match=r"links to .*outside the bundle"):
        open_bundle(folder)


@pytest.mark.parametrize("name", [GRAPH_FILE, WEIGHTS_FILE])
def test_b87_refuses_a_hard_link(folder: Path, name: str) -> None:
    os.link(folder / name, folder.parent / "elsewhere")
    with pytest.raises(ValueError, match="has 2 hard links"):
        open_bundle(folder)


@pytest.mark.parametrize("name", [GRAPH_FILE, WEIGHTS_FILE])
def test_b87_refuses_a_fifo_without_waiting_for_it(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match="is not a regular file"):
        open_bundle(folder)


def test_b87_refuses_a_manifest_that_names_files_elsewhere(folder: Path) -> None:
    text = (folder / MANIFEST_FILE).read_text().replace(f'"{WEIGHTS_FILE}"', '"../outside"')
    (folder / MANIFEST_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"lists '../outside'; a bundle's files lie directly in its folder"):
        open_bundle(folder)


def test_b87_finds_external_tensors_in_attributes_subgraphs_and_functions(folder: Path) -> None:
    def outside(location: str) -> onnx.TensorProto:
        tensor = numpy_helper.from_array(np.zeros(2, np.float32), "t")
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        return tensor

    model = tiny_model(tiny_weights())
    constant = helper.make_node("Constant", [], ["c"], value=outside("attribute"))
    branch = helper.make_graph([], "branch", [], [], [outside("subgraph")])
    model.graph.node.extend([constant, helper.make_node("If", ["c"], ["d"], then_branch=branch, else_branch=branch)])
    inner = helper.make_node("Constant", [], ["y"], value=outside("function"))
    model.functions.append(helper.make_function("local", "f", [], ["y"], [inner], [helper.make_opsetid("", 23)]))
    (folder / GRAPH_FILE).write_bytes(model.SerializeToString())
    found = {location for location, _, _ in read_graph_header(folder / GRAPH_FILE).external}
    assert found == {"attribute", "subgraph", "function"}


def test_open_bundle_refuses_a_missing_file(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ManifestError, match=r"model.onnx.data is missing; the manifest lists it"):
        open_bundle(folder)


def test_open_bundle_refuses_a_file_of_another_size(folder: Path) -> None:
    with (folder / WEIGHTS_FILE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ManifestError, match=r"has \d+ bytes, the manifest says \d+"):
        open_bundle(folder)


def test_open_bundle_refuses_weights_that_the_manifest_does_not_list(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "hidden")
    write_manifest(folder)
    with pytest.raises(ManifestError, match=r"needs model.onnx.data, which the manifest does not list"):
        open_bundle(folder)
    (folder / GRAPH_FILE).unlink()
    write_manifest(folder)
    with pytest.raises(ManifestError, match=r"lists no model.onnx"):
        open_bundle(folder)


@pytest.mark.parametrize("content", [b"", b"not an onnx model", b"\x00" * 64, b"\x3a\xff\xff\xff\x7f", b"\x80" * 100])
def test_open_bundle_refuses_a_graph_file_that_is_no_model(folder: Path, content: bytes) -> None:
    (folder / GRAPH_FILE).write_bytes(content)
    write_manifest(folder)
    with pytest.raises(ManifestError, match=r"(is empty|is no ONNX model)"):
        open_bundle(folder)

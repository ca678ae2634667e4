"""Opening a session: from anywhere, checked against its manifest, placed where asked, within memory."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from parity import TOLERANCES
from tiny_bundles import (
    HIDDEN,
    VOCAB,
    TinyBundle,
    reference_logits,
    tiny_config,
    tiny_model,
    tiny_weights,
    write_manifest,
    write_tiny_bundle,
)
from tiny_requests import random_ids
from tiny_sessions import all_logits, open_session

from graphport.model_def.signature import (
    GRAPH_FILE,
    WEIGHTS_FILE,
    ManifestError,
    Signature,
    TensorSpec,
    decoder_signature,
)
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.device import DeviceError, default_threads
from graphport.runtime.graph_checks import check_placement, check_signature
from graphport.runtime.session import Session

TOLERANCE = TOLERANCES["tiny bundle", "float32"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("session") / "bundle")


@pytest.fixture(scope="module")
def session(bundle: TinyBundle) -> Session:
    return open_session(bundle.folder)


def test_b82_opens_from_any_directory_after_moving_and_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_tiny_bundle(tmp_path / "a" / "b").weights
    ids = random_ids(5)
    expected = reference_logits(weights, ids)

    def check(path: Path) -> None:
        assert np.abs(all_logits(open_session(path), ids, 5) - expected).max() < TOLERANCE

    monkeypatch.chdir("/")
    check(tmp_path / "a" / "b")
    moved = tmp_path / "with spaces" / "模型 ünïcode"
    moved.parent.mkdir()
    shutil.move(tmp_path / "a" / "b", moved)
    check(moved)
    (tmp_path / "link").symlink_to(moved)
    check(tmp_path / "link")
    monkeypatch.chdir(moved.parent)
    check(Path(moved.name))
    (moved / WEIGHTS_FILE).rename(moved / "renamed")
    with pytest.raises(ManifestError, match=r"model.onnx.data is missing"):
        open_session(moved)


def test_b82_a_session_keeps_working_when_the_working_directory_changes(
    bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.folder.parent)
    session = open_session(Path(bundle.folder.name))
    monkeypatch.chdir("/")
    ids = random_ids(5)
    assert np.abs(all_logits(session, ids, 5) - reference_logits(bundle.weights, ids)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("ir_version", "opset", "match"),
    [
        (
            18,
            23,
            r"ONNX Runtime [\d.]+ cannot open .*\(IR version 18; opsets ai.onnx 23.*max supported IR version: \d+",
        ),
        (10, 99, r"ONNX Runtime [\d.]+ cannot open .*opsets ai.onnx 99.*support for domain ai.onnx is till opset \d+"),
    ],
)
def test_b89_a_graph_newer_than_the_runtime_is_refused_naming_both_versions(
    tmp_path: Path, ir_version: int, opset: int, match: str
) -> None:
    model = tiny_model(tiny_weights())
    model.ir_version = ir_version
    model.opset_import[0].version = opset
    write_tiny_bundle(tmp_path, model=model)
    with pytest.raises(ValueError, match=match):
        open_session(tmp_path)


def _renamed(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "tokens"
    model.graph.node[0].input[1] = "tokens"


def _shape(spec: TensorSpec, shape: tuple[int | str, ...]) -> TensorSpec:
    return TensorSpec(name=spec.name, dtype=spec.dtype, shape=shape)


def test_a_graph_whose_inputs_differ_from_the_manifest_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model(tiny_weights())
    _renamed(model)
    write_tiny_bundle(tmp_path, model=model)
    with pytest.raises(ValueError, match="inputs differ from the manifest: missing input_ids, not expected tokens"):
        open_session(tmp_path)


@pytest.mark.parametrize(
    ("index", "changed"),
    [
        (0, TensorSpec(name="input_ids", dtype="int32", shape=("batch", "sequence"))),
        (0, TensorSpec(name="input_ids", dtype="int64", shape=("batch",))),
        (4, TensorSpec(name="past_key_values.0.key", dtype="float32", shape=("batch", 3, "capacity", 16))),
        (4, TensorSpec(name="past_key_values.0.key", dtype="float16", shape=("batch", 2, "capacity", 16))),
    ],
)
def test_a_dtype_rank_or_size_that_differs_from_the_manifest_is_refused_by_name(
    tmp_path: Path, index: int, changed: TensorSpec
) -> None:
    right = decoder_signature(tiny_config())
    inputs = tuple(changed if i == index else spec for i, spec in enumerate(right.inputs))
    write_tiny_bundle(tmp_path, signature=Signature(inputs=inputs, outputs=right.outputs))
    with pytest.raises(ValueError, match=f"graph input {changed.name} is tensor.*the manifest says {changed.dtype}"):
        open_session(tmp_path)


@pytest.mark.parametrize("change", [{"vocab_size": VOCAB + 1}, {"blocks": tiny_config().blocks[:1]}])
def test_a_configuration_that_is_not_its_graphs_is_refused_when_opened(tmp_path: Path, change: dict[str, Any]) -> None:
    bundle = open_bundle(write_tiny_bundle(tmp_path).folder)
    config = dataclasses.replace(bundle.manifest.config, **change)
    wrong = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, config=config))
    with pytest.raises(ValueError, match="the manifest's configuration does not fit its graph: it needs"):
        Session(wrong, device="cpu", threads=1)


def test_outputs_are_compared_with_the_manifest_too(session: Session) -> None:
    outputs = list(session.manifest.signature.outputs)
    outputs[0] = _shape(outputs[0], ("rows", VOCAB + 1))
    with pytest.raises(ValueError, match=f"graph output logits is .*{VOCAB}.*the manifest says .*{VOCAB + 1}"):
        check_signature("output", outputs, session._session.get_outputs())


def test_placement_is_recorded_and_everything_runs_on_the_cpu(session: Session) -> None:
    assert session.device == "cpu"
    assert session.placement["CPUExecutionProvider", "GroupQueryAttention"] == 2
    assert {provider for provider, _ in session.placement} == {"CPUExecutionProvider"}


def test_a_computing_node_on_the_cpu_under_cuda_is_an_error() -> None:
    placed = {("CUDAExecutionProvider", "MatMul"): 9, ("CPUExecutionProvider", "Shape"): 1}
    check_placement(placed, "cuda")
    stray = {**placed, ("CPUExecutionProvider", "GroupQueryAttention"): 2, ("CPUExecutionProvider", "Gather"): 1}
    with pytest.raises(
        DeviceError, match="cuda was chosen, but 1 x Gather, 2 x GroupQueryAttention would run on the CPU"
    ):
        check_placement(stray, "cuda")
    check_placement(stray, "cpu")


def test_a_reshaped_second_use_of_a_large_constant_is_not_stored_twice(tmp_path: Path) -> None:
    weights = tiny_weights()
    model = tiny_model(weights)
    flat = numpy_helper.from_array(weights["embedding"].reshape(-1), "embedding_flat")
    assert flat.ByteSize() > 32768
    for tensor in list(model.graph.initializer):
        if tensor.name == "embedding":
            model.graph.initializer.remove(tensor)
    shape = numpy_helper.from_array(np.array([VOCAB, HIDDEN]), "embedding_shape")
    model.graph.initializer.extend([flat, shape])
    model.graph.node.insert(0, helper.make_node("Reshape", ["embedding_flat", "embedding_shape"], ["embedding"]))
    write_tiny_bundle(tmp_path, model=model)
    session = open_session(tmp_path)
    assert session.placement["CPUExecutionProvider", "Reshape"] == 2
    ids = random_ids(6)
    assert np.abs(all_logits(session, ids, 3) - reference_logits(weights, ids)).max() < TOLERANCE


def test_threads_must_be_positive_and_default_to_the_cores_allowed(bundle: TinyBundle) -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
    assert open_session(bundle.folder, threads=None).threads == default_threads()
    with pytest.raises(ValueError, match=r"threads must be 1 to \d+ \(4 a processor\); got 0"):
        open_session(bundle.folder, threads=0)


def test_a_graph_that_is_damaged_beyond_its_header_is_refused_with_its_path(tmp_path: Path) -> None:
    model = tiny_model(tiny_weights())
    model.graph.node[0].op_type = "NoSuchOp"
    write_tiny_bundle(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"cannot open .*model.onnx.*NoSuchOp"):
        open_session(tmp_path)
    (tmp_path / GRAPH_FILE).unlink()
    write_manifest(tmp_path)
    with pytest.raises(ManifestError, match=r"lists no model\.onnx"):
        open_session(tmp_path)

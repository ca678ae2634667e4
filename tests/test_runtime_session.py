"""A session: opened from anywhere, on the device asked for, checked against its manifest, and right at every step."""

import dataclasses
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
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

from graphport.model_def.signature import (
    GRAPH_FILE,
    WEIGHTS_FILE,
    ManifestError,
    Signature,
    TensorSpec,
    decoder_signature,
)
from graphport.runtime import device as device_module
from graphport.runtime import session as session_module
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.device import DeviceError, cuda_problem, default_threads
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.memory import NotEnoughMemoryError
from graphport.runtime.session import Session, check_placement, check_signature

TOLERANCE = TOLERANCES["tiny bundle", "float32"]
P8 = (1, 2, 3, 5, 8, 13, 21, 34)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("session") / "bundle")


@pytest.fixture(scope="module")
def session(bundle: TinyBundle) -> Session:
    return open_session(bundle.folder)


def open_session(folder: Path, **options: Any) -> Session:
    return Session(open_bundle(folder), **{"device": "cpu", "threads": 1, **options})


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()  # type: ignore[no-any-return]


def all_logits(session: Session, ids: list[int], chunk: int) -> np.ndarray[Any, Any]:
    cache = session.new_cache(max_slots=1, max_length=128)
    cache.claim()
    parts = []
    for begin in range(0, len(ids), chunk):
        piece = np.array([ids[begin : begin + chunk]])
        parts.append(session.step(cache, piece, np.arange(piece.size)).copy())
    return np.concatenate(parts)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 100])
def test_b22_logits_equal_the_reference_in_one_piece_in_chunks_and_by_single_steps(
    session: Session, bundle: TinyBundle, chunk: int
) -> None:
    ids = random_ids(100)
    assert np.abs(all_logits(session, ids, chunk) - reference_logits(bundle.weights, ids)).max() < TOLERANCE


@pytest.mark.parametrize("length", [1, 5])
def test_b22_a_prompt_of_one_token_needs_no_past(session: Session, bundle: TinyBundle, length: int) -> None:
    ids = random_ids(length)
    assert np.abs(all_logits(session, ids, 5) - reference_logits(bundle.weights, ids)).max() < TOLERANCE


def test_b22_three_empty_rows_step_together(session: Session, bundle: TinyBundle) -> None:
    cache = session.new_cache(max_slots=3, max_length=64)
    rows = [random_ids(4, seed) for seed in range(3)]
    for _ in rows:
        cache.claim()
    for position in range(4):
        logits = session.step(cache, np.array([[row[position]] for row in rows])).copy()
    for row, got in zip(rows, logits, strict=True):
        assert np.abs(got - reference_logits(bundle.weights, row)[-1]).max() < TOLERANCE


@pytest.mark.parametrize("broken", [{"shift_from": 60}, {"hide_before": 1}, {"swap_kv_heads": True}])
def test_the_comparison_rejects_shifted_positions_a_zeroed_cache_and_swapped_heads(
    session: Session, bundle: TinyBundle, broken: dict[str, Any]
) -> None:
    ids = random_ids(100)
    difference = np.abs(all_logits(session, ids, 7) - reference_logits(bundle.weights, ids, **broken))
    assert difference[60:].max() > 1000 * TOLERANCE


def test_b09_b11_ragged_rows_decode_as_each_row_alone(
    session: Session, bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = session.new_cache(max_slots=8, max_length=128)
    rows = [random_ids(length) for length in P8]
    for row in rows:
        session.step(cache, np.array([row]), first_slot=cache.claim())
    seen: list[tuple[list[int], int]] = []
    run = session._session.run_with_iobinding

    def spy(binding: Any) -> None:
        seen.append((session._seqlens[:8].tolist(), int(session._total)))
        run(binding)

    monkeypatch.setattr(session._session, "run_with_iobinding", spy)
    for _ in range(20):
        for row in rows:
            row.append((row[-1] * 7 + len(row)) % VOCAB)
        logits = session.step(cache, np.array([[row[-1]] for row in rows])).copy()
    for row, got in zip(rows, logits, strict=True):
        assert np.abs(got - reference_logits(bundle.weights, row)[-1]).max() < TOLERANCE
    for step, (seqlens, total) in enumerate(seen):
        assert seqlens == [length + step for length in P8]  # tokens after the step, minus one
        assert total == max(P8) + step + 1


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_b11_every_row_sees_its_own_tokens_in_a_buffer_longer_than_them(
    session: Session, bundle: TinyBundle, batch: int
) -> None:
    cache = session.new_cache(max_slots=batch, max_length=32)
    rows = [random_ids(3, seed) for seed in range(batch)]
    for row in rows:
        session.step(cache, np.array([row[:2]]), first_slot=cache.claim())
    assert cache.capacity == 32
    logits = session.step(cache, np.array([row[2:] for row in rows]))
    for row, got in zip(rows, logits, strict=True):
        assert np.abs(got - reference_logits(bundle.weights, row)[-1]).max() < TOLERANCE


def test_a_new_cache_is_bound_even_where_a_dead_one_lay(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    bind = session._bind_cache

    def spy(cache: KVCache, first_slot: int, batch: int) -> None:
        bound.append(id(cache))
        bind(cache, first_slot, batch)

    monkeypatch.setattr(session, "_bind_cache", spy)
    for _ in range(20):
        all_logits(session, random_ids(4), 4)
    assert len(bound) == 20
    assert len(set(bound)) < 20  # addresses were used again, so they cannot tell caches apart


def test_only_the_rows_asked_for_are_returned(session: Session, bundle: TinyBundle) -> None:
    ids = random_ids(9)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    logits = session.step(cache, np.array([ids]), np.array([8, 2]))
    assert np.abs(logits - reference_logits(bundle.weights, ids)[[8, 2]]).max() < TOLERANCE
    cache.rewind(0, 0)
    assert session.step(cache, np.array([ids])).shape == (1, VOCAB)


def test_steps_that_the_graph_cannot_take_are_refused(session: Session) -> None:
    cache = session.new_cache(max_slots=2, max_length=4)
    with pytest.raises(ValueError, match="slots 0 to 0 are not active; 0 are"):
        session.step(cache, np.array([[1]]))
    cache.claim()
    cache.claim()
    with pytest.raises(ValueError, match="a step of 2 tokens takes one row at a time, got 2"):
        session.step(cache, np.array([[1, 2], [3, 4]]))
    with pytest.raises(ValueError, match="exceed the cache's limits of 2 rows and 4 tokens"):
        session.step(cache, np.array([[1, 2, 3, 4, 5]]))
    assert cache.lengths.tolist() == [0, 0]


def test_a_failed_step_leaves_the_row_as_it_was(
    session: Session, bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(6)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    session.step(cache, np.array([ids[:4]]))

    def fail(_: Any) -> None:
        raise RuntimeError("kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(session._session, "run_with_iobinding", fail)
        with pytest.raises(RuntimeError, match="kernel failed"):
            session.step(cache, np.array([ids[4:]]))
    assert cache.lengths[0] == 4
    logits = session.step(cache, np.array([ids[4:]]))
    assert np.abs(logits - reference_logits(bundle.weights, ids)[-1]).max() < TOLERANCE


def test_a_decode_step_binds_nothing_anew(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of a step beyond ONNX Runtime's own run would be binding (0.013 ms is left without it)."""
    cache = session.new_cache(max_slots=2, max_length=64)
    cache.claim()
    ids = np.array([[5]])
    session.step(cache, ids)
    bound: list[str] = []
    for kind in ("bind_input", "bind_output"):
        monkeypatch.setattr(session._binding, kind, lambda name, *_: bound.append(name))
    for _ in range(20):
        session.step(cache, ids)
    assert bound == []
    cache.claim()
    session.step(cache, np.array([[5], [6]]))  # another batch is bound, so that the count can fail
    assert bound


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


def test_weights_larger_than_free_memory_are_refused(bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "free_memory", lambda: 1000)
    with pytest.raises(
        NotEnoughMemoryError, match=r"loading .*model.onnx needs 0.\d MiB, 0.0 MiB are free; export with"
    ):
        open_session(bundle.folder)


def test_threads_must_be_positive_and_default_to_the_cores_allowed(bundle: TinyBundle) -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
    assert open_session(bundle.folder, threads=None).threads == default_threads()
    with pytest.raises(ValueError, match=r"threads must be 1 to \d+ \(4 a processor\); got 0"):
        open_session(bundle.folder, threads=0)


def test_an_unknown_device_is_refused(bundle: TinyBundle) -> None:
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda; got 'gpu'"):
        open_session(bundle.folder, device="gpu")


def _hide_libraries(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda **_: None)
    monkeypatch.setattr(device_module, "_can_load", lambda name: name not in hidden)


@pytest.mark.parametrize("library", ["libcublas.so.13", "libcublasLt.so.13", "libcuda.so.1"])
def test_b91_cuda_that_cannot_start_is_an_error_naming_the_library(
    bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    _hide_libraries(monkeypatch, library)
    with pytest.raises(DeviceError, match=f"device cuda cannot be used: {library} .*use device='cpu'"):
        open_session(bundle.folder, device="cuda")


def test_b91_auto_says_in_one_line_what_it_took(
    tmp_path: Path, bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="graphport")
    assert open_session(bundle.folder, device="auto").device == "cpu"
    assert [record.getMessage() for record in caplog.records] == ["device auto: cpu (the bundle was compiled for cpu)"]
    caplog.clear()
    _hide_libraries(monkeypatch, "libcurand.so.10")
    folder = write_tiny_bundle(tmp_path, target="cuda").folder
    assert open_session(folder, device="auto").device == "cpu"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("device auto: cpu (libcurand.so.10 cannot be loaded; install CUDA 13")


class _BrokenCuda:
    """An InferenceSession that lists CUDA and then runs on the CPU, or fails, as broken installations do."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.real = onnxruntime.InferenceSession
        self.calls: list[list[str]] = []

    def __call__(self, path: str, options: Any, *, providers: list[str], enable_fallback: int) -> Any:
        assert enable_fallback == 0
        self.calls.append(providers)
        if "CUDAExecutionProvider" in providers and self.error is not None:
            raise self.error
        return self.real(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (None, "cuda is listed by ONNX Runtime but did not start; it fell back to CPUExecutionProvider"),
        (RuntimeError("CUDA failure 100: no device"), "listed by ONNX Runtime but does not start: CUDA failure 100"),
    ],
)
def test_b91_b92_cuda_that_is_listed_but_broken_is_an_error_and_auto_falls_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    match: str,
) -> None:
    _hide_libraries(monkeypatch)
    broken = _BrokenCuda(error)
    monkeypatch.setattr(onnxruntime, "InferenceSession", broken)
    folder = write_tiny_bundle(tmp_path, target="cuda").folder
    with pytest.raises(DeviceError, match=match):
        open_session(folder, device="cuda")
    assert open_session(folder, device="auto").device == "cpu"
    assert match.rsplit(maxsplit=1)[-1] in caplog.text
    assert broken.calls[-1] == ["CPUExecutionProvider"]


def test_b92_a_wheel_without_cuda_is_told_from_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "was built without CUDA; uninstall onnxruntime and install onnxruntime-gpu" in (cuda_problem() or "")
    _hide_libraries(monkeypatch, "libcudart.so.13")
    assert (cuda_problem() or "").startswith("libcudart.so.13 cannot be loaded")
    _hide_libraries(monkeypatch)
    assert cuda_problem() is None


def test_b92_the_diagnosis_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    cuda_problem()
    assert capfd.readouterr() == ("", "")


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

"""Image encoders through every stage: exported, compiled, quantised, placed on CUDA, of any size or a fixed one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stubs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from parity import RELATIVE_TOLERANCES
from test_parity_encoder import make_plan
from tiny_vision import make_pixels, make_vision, reference_outputs, save_vision_folder

from graphport.export import export
from graphport.export.bundle import write_graph
from graphport.export.image_feed import image_states
from graphport.export.model_kinds import IMAGE_ENCODER
from graphport.export.parity import ParityError
from graphport.export.pipeline import compile_graph, count_fusions
from graphport.export.source import SourceModel, open_source
from graphport.export.targets import CPU, CUDA, TargetError
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.export.verify import fresh_certificate
from graphport.model_def.position_config import ConfigError
from graphport.model_def.signature import GRAPH_FILE
from graphport.runtime.graph_checks import SHAPE_OPS
from graphport.runtime.verification import verify

# one of each way to cut, add, norm and read out
KINDS = ("vit", "deit with teacher", "dinov2 swiglu", "dinov2 classifier", "clip vision projection", "siglip vision")
SIZES = ((32, 32), (40, 24), (16, 16))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vision")
    return {kind: save_vision_folder(folder / kind, make_vision(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def opened(sources: dict[str, Path]) -> dict[str, SourceModel]:
    return {kind: open_source(folder, seed=0) for kind, folder in sources.items()}


@pytest.fixture(scope="module")
def exported(opened: dict[str, SourceModel]) -> dict[str, ir.Model]:
    return {kind: _traced(source) for kind, source in opened.items()}


def _traced(source: SourceModel) -> ir.Model:
    config = source.model.config
    module = IMAGE_ENCODER.module(source.model, 17)
    return torch_to_onnx(module, IMAGE_ENCODER.traced(config), IMAGE_ENCODER.sizes(config))


@pytest.mark.parametrize("kind", KINDS)
def test_b132_exported_and_certified_at_every_size(
    kind: str, sources: dict[str, Path], exported: dict[str, ir.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 proves all stages: the exported graph, its fp32 twin, what ships. The trace is reused, for time."""
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", lambda *_: exported[kind])
    bundle = export(sources[kind], tmp_path / "out", precision="int8")
    assert bundle.manifest.kind == "image_encoder"
    assert "pictures of another size" not in "".join(bundle.notes)
    stages = ["exported", "compiled", "compiled", "int8", "neighbours"]
    assert [check.name.split(":")[0] for check in bundle.certificate][: len(stages)] == stages
    assert all(check.passed for check in bundle.certificate)
    assert "32 x 32, 40 x 24, 16 x 40, 16 x 16, 8 x 8" in bundle.certificate[0].name
    assert bundle.fusions["attention"] == bundle.fusions["packed_qkv"] == 2
    assert bundle.fusions["residual_norm"] == (3 if "clip" in kind else 4)
    assert bundle.fusions["silu"] == (2 if kind in ("clip vision projection", "dinov2 swiglu") else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_b132_the_compiled_graph_equals_transformers(
    kind: str, opened: dict[str, SourceModel], exported: dict[str, ir.Model], tmp_path: Path
) -> None:
    graph = exported[kind].clone()
    compile_graph(graph, make_plan(opened[kind].model.config, CPU, "fp32"))
    write_graph(graph, tmp_path)
    reference = make_vision(kind)
    for size in SIZES:
        for count in (1, 5):
            pixels = make_pixels(count, *size)
            states, vectors = reference_outputs(kind, reference, pixels)
            found = image_states(tmp_path / GRAPH_FILE, [pixels.numpy()])
            _assert_near(np.stack(found.hidden), states)
            assert found.read_out is not None
            assert vectors is not None
            _assert_near(np.stack(found.read_out), vectors)


def _assert_near(found: np.ndarray, wanted: torch.Tensor) -> None:
    assert found.shape == tuple(wanted.shape)
    gap = np.abs(found - wanted.numpy()).max() / float(wanted.abs().max())
    assert gap < RELATIVE_TOLERANCES["checkpoint", "float32"], gap


def _patches_by_column(graph: ir.Model) -> None:
    """The kernel reads its patch transposed."""
    _change(graph, "patches.projection.weight", lambda w: w.reshape(-1, 3, 8, 8).swapaxes(2, 3).reshape(w.shape))


def _positions_one_later(graph: ir.Model) -> None:
    _change(graph, "patches.positions", lambda table: np.roll(table, 1, axis=0))


def _class_token_dropped(graph: ir.Model) -> None:
    _change(graph, "patches.prefix", np.zeros_like)


def _positions_not_interpolated(graph: ir.Model) -> None:
    """Weights of the nearest position, as nearest-neighbour resampling has them."""
    function = next(f for f in graph.functions.values() if f.name == "CubicWeights")
    floor = next(node for node in function if node.op_type == "Floor")
    source = floor.inputs[0]
    assert source is not None
    rounded = ir.node("Round", [source])
    function.insert_before(floor, rounded)
    for user in list(source.uses()):
        if user.node is not rounded:
            user.node.replace_input_with(user.idx, rounded.outputs[0])


def _change(graph: ir.Model, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    value = graph.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(np.ascontiguousarray(change(value.const_value.numpy())), name=name)


@pytest.mark.parametrize(
    "breaks", [_patches_by_column, _positions_one_later, _class_token_dropped, _positions_not_interpolated]
)
def test_broken_graphs_are_rejected_and_leave_nothing(
    breaks: Callable[[ir.Model], None],
    sources: dict[str, Path],
    exported: dict[str, ir.Model],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = exported["vit"].clone()
    breaks(broken)
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", lambda *_: broken)
    with pytest.raises(ParityError, match=r"exported: 15 images of 32 x 32, .*relative"):
        export(sources["vit"], tmp_path / "out", precision="fp32")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_what_computes_lands_on_cuda_without_a_mask(
    kind: str,
    opened: dict[str, SourceModel],
    exported: dict[str, ir.Model],
    tmp_path: Path,
    cuda: cuda_stubs.Placer,
) -> None:
    graph = exported[kind].clone()
    reports = compile_graph(graph, make_plan(opened[kind].model.config, CUDA, "fp16"))
    assert count_fusions(reports)["attention"] == 2
    write_graph(graph, tmp_path)
    placement = cuda.place(tmp_path / GRAPH_FILE)
    assert set(placement.cpu) <= set(SHAPE_OPS)
    assert placement.cuda["MultiHeadAttention"] == 2
    kernels = [node for node in graph.graph if node.op_type == "MultiHeadAttention"]
    assert all(len([value for value in kernel.inputs if value is not None]) == 3 for kernel in kernels)


def test_fp16_for_cuda_computes_the_same_on_the_cpu(
    opened: dict[str, SourceModel], exported: dict[str, ir.Model], tmp_path: Path
) -> None:
    graph = exported["clip vision projection"].clone()
    compile_graph(graph, make_plan(opened["clip vision projection"].model.config, CUDA, "fp16"))
    write_graph(graph, tmp_path)
    pixels = make_pixels(2, 40, 24)
    found = image_states(tmp_path / GRAPH_FILE, [pixels.numpy()], optimize=True)
    with torch.inference_mode():
        wanted = opened["clip vision projection"].model(pixels).numpy()
    gap = np.abs(np.stack(found.hidden) - wanted).max() / np.abs(wanted).max()
    assert 1e-5 < gap < 2e-2


def test_b132_a_fixed_size_is_in_the_graph_the_manifest_and_the_certificate(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    bundle = export(sources["dinov2 swiglu"], tmp_path / "out", precision="fp32", image_size=(40, 24))
    assert bundle.manifest.signature.inputs[0].shape == ("batch", 3, 40, 24)
    assert bundle.manifest.max_length == 16
    assert "makes pictures of another size: an image of 32 x 32 is not of the size 40 x 24" in "".join(bundle.notes)
    assert "3 images of 40 x 24" in bundle.certificate[0].name
    fresh, references = fresh_certificate(bundle.path, sources["dinov2 swiglu"])
    assert verify(bundle.path, certificate=fresh, references=references).passed
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    assert manifest["config"]["image"]["fixed_size"] == [40, 24]


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"precision": "int4"}, TargetError, "precision int4 rounds weights on text.*choose fp32, int8"),
        ({"precision": "auto"}, TargetError, "precision auto"),
        ({"kv_cache": "int8"}, TargetError, "image_encoder has no KV cache"),
        ({"image_size": (40, 20)}, ConfigError, "40 x 20 is no whole number of patches of 8 x 8"),
        ({"image_size": (0, 8)}, ConfigError, "image_size must be a height and a width in pixels"),
        ({"image_size": (32, 32), "context": 5}, ConfigError, "leave --context out"),
        ({"context": 1}, ConfigError, r"max_length \(1\) must lie in 2"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_any_work(
    options: dict[str, Any], error: type[Exception], reason: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        export(sources["vit"], tmp_path / "out", **{"precision": "fp32", **options})
    assert not list(tmp_path.iterdir())

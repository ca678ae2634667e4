"""`export()` from sources to bundles: what is written, refused and noted, and that two runs come out equal."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
import torch
from tiny_checkpoints import make_model as make_checkpoint
from tiny_checkpoints import save_folder
from tiny_graphs import CONFIGS, exported, make_block, make_config, tiny_model

import graphport.export.bundle_records as records_module
import graphport.export.decoder_evidence as evidence_module
import graphport.export.model_export as export_module
from graphport.export.bundle import Bundle, BundleError
from graphport.export.export_limits import longest_context
from graphport.export.model_export import export
from graphport.export.pipeline import FusionError
from graphport.export.source import SourceModel
from graphport.export.targets import CPU, CUDA, TargetError, find_target
from graphport.model_def.position_config import ConfigError, DynamicScaling, RotaryPosition
from graphport.model_def.signature import (
    CERTIFICATE_FILE,
    FUSIONS_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    GenerationDefaults,
    read_manifest,
)
from graphport.model_def.transformer import Transformer
from graphport.runtime import SamplingParams, load

FILES = {GRAPH_FILE, WEIGHTS_FILE, MANIFEST_FILE, FUSIONS_FILE}


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Hugging Face folder."""
    model = make_checkpoint("llama").to(torch.bfloat16)
    return save_folder(tmp_path_factory.mktemp("llama"), model)


@pytest.fixture(scope="module")
def llama_bundle(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(llama_folder, tmp_path_factory.mktemp("out") / "llama", precision="int8")


def open_as(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every source be this model."""
    opened = SourceModel(
        model=model,
        generation=GenerationDefaults(eos_token_ids=(2,)),
        tokenizer_json=None,
        chat_template="{{ text }}",
        source={"format": "test"},
        special_tokens={},
        notes=("a note",),
    )
    monkeypatch.setattr(export_module, "open_source", lambda *_, **__: opened)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources and traces of the shared tiny model: what comes after them is tested."""
    open_as(tiny_model("llama"), monkeypatch)
    monkeypatch.setattr(export_module, "torch_to_onnx", lambda *_: exported("llama"))


def test_a_hugging_face_folder_becomes_a_verified_bundle(llama_bundle: Bundle) -> None:
    assert {path.name for path in llama_bundle.path.iterdir()} == FILES | {CERTIFICATE_FILE}
    manifest = read_manifest(llama_bundle.path)
    assert manifest == llama_bundle.manifest
    assert (manifest.target, manifest.precision, manifest.max_length) == ("cpu", "int8", 64)
    assert manifest.generation.eos_token_ids == (2,)
    for name, record in manifest.files.items():
        assert (llama_bundle.path / name).stat().st_size == record.size
    assert set(manifest.files) == (FILES | {CERTIFICATE_FILE}) - {MANIFEST_FILE}
    certificate = json.loads((llama_bundle.path / CERTIFICATE_FILE).read_text())
    assert [check["name"] for check in certificate["checks"]] == [check.name for check in llama_bundle.certificate]
    assert len(llama_bundle.certificate) == 1 + 3 + 1 + 5
    assert all(check["passed"] for check in certificate["checks"])
    assert certificate["candidate"]["precision"] == "int8"
    fusions = json.loads((llama_bundle.path / FUSIONS_FILE).read_text())
    graph = onnx.load(llama_bundle.path / GRAPH_FILE, load_external_data=False).graph
    assert fusions["nodes"] == len(graph.node)
    assert fusions["counts"] == llama_bundle.fusions
    assert [value.name for value in graph.input] == [spec.name for spec in manifest.signature.inputs]
    assert [value.name for value in graph.output] == [spec.name for spec in manifest.signature.outputs]


def test_b51_a_bf16_checkpoint_on_cpu_is_widened_and_said_so(llama_bundle: Bundle) -> None:
    assert "BF16 weights were widened to float32" in llama_bundle.notes
    assert llama_bundle.manifest.cache_dtype == "float32"


@pytest.mark.parametrize(
    ("target", "precision", "reason"),
    [
        ("cpu", "bf16", "has no bfloat16 kernels .*choose one of fp32, int8, int4"),
        ("cpu", "fp16", "widens float16 to float32"),
        ("cpu", "int3", "precision 'int3' on target cpu: unknown precision; choose one of fp32, int8, int4"),
        ("tpu", "fp32", "unknown target 'tpu'; choose one of cpu, cuda"),
    ],
)
def test_b51_what_a_target_cannot_run_is_refused_before_anything_is_read(
    target: str, precision: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(TargetError, match=reason):
        export(tmp_path / "no model here", tmp_path / "out", target=target, precision=precision)
    assert not (tmp_path / "out").exists()


def test_targets_are_found_by_name() -> None:
    assert [find_target(name) for name in ("cpu", "cuda")] == [CPU, CUDA]


@pytest.mark.parametrize(
    ("target", "precision", "kv_cache", "reason"),
    [
        (
            "cpu",
            "int8",
            "fp8",
            "'fp8' on target cpu: the CPU provider's attention has no float8 cache; choose one of auto",
        ),
        ("cpu", "fp32", "fp16", "a float cache has the activations' type, which is float32 for precision fp32; choose"),
        ("cpu", "int8", "nonsense", "'nonsense' on target cpu: unknown type; choose one of auto, int8, int4"),
        (
            "cuda",
            "fp16",
            "int4",
            "'int4' on target cuda: .*dequantise the whole cache at every step; choose .*int8, fp8",
        ),
        ("cuda", "bf16", "fp16", "which is bfloat16 for precision bf16"),
    ],
)
def test_a_cache_type_that_cannot_be_is_refused(
    target: str, precision: str, kv_cache: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(TargetError, match=reason):
        export("any", tmp_path / "out", target=target, precision=precision, kv_cache=kv_cache)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4"])
def test_cuda_bundles_are_written_with_half_precision_caches(precision: str, tmp_path: Path) -> None:
    bundle = export("any", tmp_path / "out", target="cuda", precision=precision, verify=precision == "fp16")
    half = "bfloat16" if precision == "bf16" else "float16"
    assert bundle.manifest.cache_dtype == half
    model = onnx.load(tmp_path / "out" / GRAPH_FILE)
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    wanted = onnx.TensorProto.BFLOAT16 if precision == "bf16" else onnx.TensorProto.FLOAT16
    assert types.pop("logits") == onnx.TensorProto.FLOAT
    assert {kind for name, kind in types.items() if name.startswith(("past", "present"))} == {wanted}
    assert sum(node.op_type == "GroupQueryAttention" for node in model.graph.node) == 2
    if precision == "fp16":
        assert any("checked on the CPU in fp32, not in fp16 on cuda" in note for note in bundle.notes)
        assert len(bundle.certificate) == 4


@pytest.mark.usefixtures("cached")
def test_a_bundle_without_verification_has_no_certificate(tmp_path: Path) -> None:
    bundle = export("any", tmp_path / "out", verify=False)
    assert bundle.certificate == ()
    assert {path.name for path in bundle.path.iterdir()} == FILES | {"chat_template.jinja"}
    assert bundle.notes[0] == "a note"
    assert all("filled with zeros" in note for note in bundle.notes[1:])


@pytest.mark.usefixtures("cached")
def test_b83_exporting_twice_to_one_place_keeps_replaces_and_reproduces(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = export("any", out, precision="int4", verify=False)
    with pytest.raises(BundleError, match="holds a bundle already; replace it with --force"):
        export("any", out, precision="int4", verify=False)
    again = export("any", out, precision="int4", verify=False, force=True)
    assert again.manifest == first.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"context": 16.0}, TypeError, r"context must be a whole number, got 16.0 \(float\)"),
        ({"context": "16"}, TypeError, "context must be a whole number, got '16'"),
        ({"context": True}, TypeError, "context must be a whole number, got True"),
        ({"seed": 1.5}, TypeError, "seed must be a whole number, got 1.5"),
        ({"seed": -1}, ValueError, "seed must be a whole number from 0 to 9223372036854775807, got -1"),
        (
            {"seed": 2**63},
            ValueError,
            "seed must be a whole number from 0 to 9223372036854775807, got 92233720368547758",
        ),
    ],
)
def test_numbers_of_another_kind_are_refused_before_the_model_is_read(
    options: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        export("nothing", tmp_path / "out", **options)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("context", [0, -3, 65])
def test_a_context_that_the_model_has_not_is_refused(context: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"max_length \({context}\) must lie in 1 .. .* \(64\); .*--context"):
        export("any", tmp_path / "out", context=context)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("context", [1, 7])
def test_a_shorter_context_is_kept_and_verified(context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_as(tiny_model("llama"), monkeypatch)
    bundle = export("any", tmp_path / "out", precision="fp32", context=context)
    assert bundle.manifest.max_length == context
    assert any(f"{context} tokens at once" in check.name for check in bundle.certificate)


def test_a_length_switching_rotary_limits_the_context_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scaling = DynamicScaling(factor=2.0, original_max_positions=24)
    config = make_config(make_block({"rotary": RotaryPosition(theta=1e4, scaling=scaling)}))
    assert longest_context(config, None) == (
        24,
        ("context limited to 24 tokens, where the rotary scaling changes its frequencies",),
    )
    assert longest_context(config, 20) == (20, ())
    assert longest_context(CONFIGS["llama"], None) == (64, ())
    open_as(Transformer(config), monkeypatch)
    with pytest.raises(ConfigError, match="DynamicScaling changes its frequencies beyond 24 positions"):
        export("any", tmp_path / "out", context=25)


@pytest.mark.usefixtures("cached")
def test_required_fusions_pin_counts_and_a_miss_leaves_nothing(tmp_path: Path) -> None:
    required: dict[str, Any] = {"packed_qkv": 2, "silu": "all"}
    export("any", tmp_path / "out", verify=False, require_fused=required)
    with pytest.raises(FusionError, match=r"rule packed_qkv fused 2 sites, 3 are called for"):
        export("any", tmp_path / "other", verify=False, require_fused={"packed_qkv": 3})
    with pytest.raises(FusionError, match="residual_norm is required everywhere; it fused 4 sites"):
        export("any", tmp_path / "other", verify=False, require_fused={"residual_norm": "all"})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


STAGES = (
    (export_module, "torch_to_onnx"),
    (evidence_module, "eager_logits"),
    (evidence_module, "certify_stages"),
    (export_module, "compile_graph"),
    (export_module, "write_graph"),
    (export_module, "bundle_certificate"),
    (records_module, "write_json"),
    (records_module, "record_files"),
)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(("module", "stage"), STAGES, ids=[stage for _, stage in STAGES])
def test_a_failure_at_any_stage_leaves_nothing(
    module: ModuleType, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(module, stage, fail)
    with pytest.raises(OSError, match="the disk is full"):
        export("any", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("cached")
def test_progress_names_every_stage(tmp_path: Path) -> None:
    seen: list[str] = []
    export("any", tmp_path / "out", progress=seen.append)
    assert seen == [
        "reading the model",
        "exporting to ONNX",
        "running eager PyTorch",
        "parity of the exported graph",
        "parity of the fused graph",
        "compiling the graph",
        "writing the bundle",
        *[f"parity of the bundle: {run}" for run in ("prefill", "decode", "chunked prefill", "ragged batch", "rewind")],
        "errors by layer",
    ]


@pytest.mark.usefixtures("cached")
def test_a_taken_destination_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    seen: list[str] = []
    with pytest.raises(BundleError, match="exists and is no bundle"):
        export("any", tmp_path, force=True, progress=seen.append)
    assert seen == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_b81_a_model_over_two_gibibytes_goes_all_the_way(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = Transformer(make_config(vocab_size=280_000, hidden_size=2048))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data = torch.zeros(parameter.shape)  # pages that nothing has written take no memory
    with torch.no_grad():
        model.embedding.weight[-8:].normal_()
        for block in model.layers:
            block.attention.query.weight.normal_()
    assert sum(p.nbytes for p in model.parameters()) > 2**31
    open_as(model.eval(), monkeypatch)
    bundle = export("any", tmp_path / "out", precision=precision, context=4)
    assert len(bundle.certificate) >= 4
    assert (tmp_path / "out" / WEIGHTS_FILE).stat().st_size > (2**31 if precision == "fp32" else 2**29)
    assert (tmp_path / "out" / GRAPH_FILE).stat().st_size < 30_000
    with load(bundle.path, max_batch=1) as lm:
        (output,) = lm.generate([[1, 2]], SamplingParams(max_new_tokens=2, temperature=0.0))
    assert len(output.token_ids) == 2

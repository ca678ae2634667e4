"""Precision gguf: graphs that compute with a GGUF file's own values, whatever its types; what is refused, reported."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from parity import TOLERANCES
from tiny_blocks import BY_NAME, random_matrix, stored
from tiny_checkpoints import make_model as make_checkpoint
from tiny_checkpoints import save_folder, write_gguf
from tiny_graphs import (
    count_ops,
    decoder_feed,
    eager_step,
    export_decoder,
    make_block,
    make_config,
    make_model,
    make_plan,
    run_graph,
)

from graphport.export.bundle import Bundle, write_graph
from graphport.export.gguf_matrices import KeptMatrix, keep_matrices
from graphport.export.graph_pass import PassReport
from graphport.export.model_export import export
from graphport.export.pipeline import compile_graph
from graphport.export.targets import TargetError
from graphport.export.verify import fresh_certificate
from graphport.model_def.signature import FUSIONS_FILE, GRAPH_FILE, WEIGHTS_FILE
from graphport.model_def.transformer import Transformer
from graphport.runtime import SamplingParams, load
from graphport.runtime.verification import verify

EXACT = TOLERANCES["quantised, exact activations", "float32"]
_KIND = GGMLQuantizationType
_SUPER = make_block({"num_heads": 8, "num_kv_heads": 2, "head_dim": 32}, {"width": 512})
_CONFIG = make_config(_SUPER, _SUPER, hidden_size=256)  # whole super-blocks of 256

_PACKED = ("packed_qkv", "packed_gate_up")

Kinds = Callable[[str], str]


@functools.cache
def _exported() -> ir.Model:
    return export_decoder(make_model(_CONFIG))


def with_blocks(kind_of: Kinds) -> tuple[Transformer, dict[str, KeptMatrix]]:
    """A model whose matrices are what random blocks decode to, and these blocks as operands."""
    model, matrices = make_model(_CONFIG), {}
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() == 2:
                kind = _KIND[kind_of(name)]
                matrix = stored(kind, random_matrix(kind, *parameter.shape, seed=index))
                parameter.copy_(torch.from_numpy(matrix.dequantize()))
                matrices[name] = matrix
    return model, keep_matrices(matrices)


def compiled(matrices: dict[str, KeptMatrix], *, level: int = 0) -> tuple[ir.Model, tuple[PassReport, ...]]:
    graph = _exported().clone()
    plan = make_plan(_CONFIG, "gguf", matrices=matrices, accuracy_level=level)
    return graph, compile_graph(graph, plan)


def logits(model: ir.Model, *, num_new: int = 12) -> np.ndarray:
    return run_graph(model, decoder_feed(_CONFIG, (0,), num_new))["logits"]


def eager(model: Transformer, *, num_new: int = 12) -> np.ndarray:
    return eager_step(model, decoder_feed(_CONFIG, (0,), num_new))["logits"]


def q4_k_m(name: str) -> str:
    """As llama.cpp mixes them: value and down in more bits, the embedding in Q6_K."""
    return "Q6_K" if name.split(".")[-2] in ("value", "down", "embedding") else "Q4_K"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_model_of_any_one_type_equals_eager_on_the_decoded_weights(name: str) -> None:
    model, matrices = with_blocks(lambda _: name)
    graph, reports = compiled(matrices)
    assert np.abs(logits(graph) - eager(model)).max() <= EXACT
    counts = count_ops(graph)
    assert counts["MatMulNBits"] == 4 * _CONFIG.num_layers + 1  # qkv, output, gate and up, down; the head
    assert counts["GatherBlockQuantized"] == 1
    assert not [report for report in reports if report.missed and report.rule in ("linear", *_PACKED)]


def test_weights_of_other_blocks_are_rejected_by_the_same_comparison() -> None:
    _, matrices = with_blocks(lambda _: "Q4_K")
    other = make_model(_CONFIG, seed=1)
    graph, _ = compiled(matrices)
    assert np.abs(logits(graph) - eager(other)).max() > 100 * EXACT


def test_a_mixed_file_packs_what_has_one_form_and_says_why_it_left_the_rest() -> None:
    model, matrices = with_blocks(q4_k_m)
    graph, reports = compiled(matrices)
    assert np.abs(logits(graph) - eager(model)).max() <= EXACT
    qkv, gate_up = (next(r for r in reports if r.rule == rule) for rule in _PACKED)
    assert qkv.fused == ("layer 0 attention, query and key", "layer 1 attention, query and key")
    assert [miss.site for miss in qkv.missed] == ["layer 0 attention", "layer 1 attention"]
    assert qkv.missed[0].check == "the matrices are stored in one form"
    assert qkv.missed[0].found == "query: 4-bit/32 + minima; key: 4-bit/32 + minima; value: 8-bit/16"
    assert len(gate_up.fused) == 2
    assert not gate_up.missed
    assert count_ops(graph)["MatMulNBits"] == 5 * _CONFIG.num_layers + 1


def test_a_layer_of_three_forms_stays_in_three_products() -> None:
    kinds = {"query": "Q4_K", "key": "Q6_K", "value": "Q8_0", "gate": "Q4_K", "up": "Q5_K"}
    model, matrices = with_blocks(lambda name: kinds.get(name.split(".")[-2], "Q8_0"))
    graph, reports = compiled(matrices)
    assert np.abs(logits(graph) - eager(model)).max() <= EXACT
    for rule in _PACKED:
        report = next(r for r in reports if r.rule == rule)
        assert (len(report.fused), len(report.missed)) == (0, 2)


@pytest.mark.parametrize("table", ["Q8_0", "Q6_K", "Q4_K", "Q4_0", "Q4_1", "Q5_1"])
def test_b85_a_tied_table_of_any_type_is_stored_once(table: str, tmp_path: Path) -> None:
    model, matrices = with_blocks(lambda name: table if name == "embedding.weight" else "Q8_0")
    graph, _ = compiled(matrices)
    assert np.abs(logits(graph) - eager(model)).max() <= EXACT
    write_graph(graph, tmp_path)
    kept = [matrix.blocks for matrix in matrices.values() if matrix.blocks is not None]
    arrays = [array for blocks in kept for array in (blocks.packed, blocks.scales, blocks.minima) if array is not None]
    rest = 4 * sum(p.numel() for p in model.parameters() if p.dim() == 1) + 2 * 64 * 16 * 4  # norms, rotary tables
    assert (tmp_path / WEIGHTS_FILE).stat().st_size <= 1.02 * (sum(array.nbytes for array in arrays) + rest) + 16_000


def test_the_activations_of_no_rows_are_multiplied_too() -> None:
    _, matrices = with_blocks(lambda _: "Q4_1")
    graph, _ = compiled(matrices, level=4)
    feed = decoder_feed(_CONFIG, (0,), 5) | {"logits_rows": np.zeros(0, np.int64)}
    assert run_graph(graph, feed)["logits"].shape == (0, _CONFIG.vocab_size)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_b60_any_batch_and_length_runs_with_and_without_a_past(name: str) -> None:
    model, matrices = with_blocks(lambda _: name)
    graph, _ = compiled(matrices)
    for lengths, num_new in (((0,), 1), ((0, 0, 0), 17), ((9,), 17), ((9, 3, 0), 1)):
        feed = decoder_feed(_CONFIG, lengths, num_new)
        assert np.abs(run_graph(graph, feed)["logits"] - eager_step(model, feed)["logits"]).max() <= EXACT


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_b56_the_accuracy_level_is_that_of_every_product_and_level_0_is_the_exact_one(name: str) -> None:
    """Outlier channels, 100 times the others: rounding activations to the largest of 32 shows."""
    _, matrices = with_blocks(lambda _: name)
    error = {}
    for level in (0, 4):
        graph, _ = compiled(matrices, level=level)
        levels = {n.attributes["accuracy_level"].as_int() for n in graph.graph if n.op_type == "MatMulNBits"}
        assert levels == {level}
        norm = next(v for v in graph.graph.initializers.values() if v.name == "blocks.0.feed_forward_norm.weight")
        assert norm.const_value is not None
        weight = norm.const_value.numpy().copy()
        weight[::40] *= 100
        norm.const_value = ir.tensor(weight, name=norm.name)
        model, _ = with_blocks(lambda _: name)
        with torch.no_grad():
            model.get_parameter("blocks.0.feed_forward_norm.weight").copy_(torch.from_numpy(weight))
        error[level] = np.abs(logits(graph) - eager(model)).max()
    assert error[0] <= 10 * EXACT  # activations a hundred times larger
    assert error[4] > 100 * error[0]


# from here on whole exports, of files


_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
_NAMES = {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K", "lm_head": "Q6_K", "o_proj": "Q5_0"}


def _file(folder: Path, kind_of: Kinds, **changes: object) -> Path:
    model = make_checkpoint("llama", **_SIZES, **changes)
    return write_gguf(folder / "tiny.gguf", model, kind=lambda name: _KIND[kind_of(name)])


def _mixed(name: str) -> str:
    return _NAMES.get(name.split(".")[-2], "Q4_K")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _file(tmp_path_factory.mktemp("gguf"), _mixed, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def bundle(gguf_file: Path) -> Bundle:
    return export(gguf_file, gguf_file.parent / "bundle", require_exact=True)


def test_a_gguf_file_keeps_its_values_unless_told_otherwise_and_the_certificate_shows_it(bundle: Bundle) -> None:
    assert bundle.manifest.precision == "gguf"
    stages = [check.name.partition(":")[0] for check in bundle.certificate]
    assert stages[:6] == ["exported", "compiled", "compiled", "compiled", "exact blocks", "gguf"]
    exact = next(check for check in bundle.certificate if check.name.startswith("exact blocks"))
    assert exact.measured <= exact.tolerance == 1e-6
    shipped = next(check for check in bundle.certificate if check.name.startswith("gguf"))
    assert shipped.measured > 1e3 * exact.measured  # 8-bit activations


def test_the_account_names_type_form_and_error_of_every_matrix(bundle: Bundle) -> None:
    account = json.loads((bundle.path / FUSIONS_FILE).read_text())
    rows = {row["name"]: row for row in account["matrices"]}
    assert len(rows) == 1 + 7 * 2
    assert rows["blocks.1.attention.query.weight"] == {
        "name": "blocks.1.attention.query.weight",
        "source": "Q4_K",
        "form": "4-bit/32 + minima",
        "exact": True,
        "max_error": 0.0,
    }
    assert (rows["embedding.weight"]["source"], rows["embedding.weight"]["form"]) == ("Q6_K", "8-bit/16")
    assert rows["blocks.0.attention.output.weight"]["form"] == "8-bit/32"
    assert account["accuracy_level"] == 4


def test_b58_the_saved_file_is_small_and_runs_without_its_source(bundle: Bundle, tmp_path: Path) -> None:
    size = (bundle.path / WEIGHTS_FILE).stat().st_size
    values = sum(np.prod(shape) for shape in _shapes(bundle))
    assert size < 0.35 * 4 * values
    lm = load(bundle.path)
    ids = [1, 5, 9, 30]
    (answer,) = lm.generate([ids], SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(answer.token_ids) == 4
    assert verify(bundle.path).passed


def test_b73_b74_verify_against_the_file_sees_the_same_model(bundle: Bundle, gguf_file: Path) -> None:
    fresh, references = fresh_certificate(bundle.path, gguf_file)
    assert references[0].measured < 1e-5
    assert verify(bundle.path, certificate=fresh, references=references).passed


def _shapes(bundle: Bundle) -> list[tuple[int, ...]]:
    with torch.device("meta"):
        model = Transformer(bundle.manifest.config)
    return [tuple(parameter.shape) for parameter in model.parameters()]


def test_smoothing_never_touches_the_blocks(bundle: Bundle) -> None:
    assert bundle.fusions["smoothed"] == 0


def test_accuracy_level_0_can_be_asked_for_and_is_recorded(gguf_file: Path, tmp_path: Path) -> None:
    exact = export(gguf_file, tmp_path / "exact", accuracy_level=0)
    shipped = next(check for check in exact.certificate if check.name.startswith("gguf"))
    assert shipped.measured < 1e-6
    graph = onnx.load(exact.path / GRAPH_FILE, load_external_data=False).graph
    levels = [a.i for n in graph.node if n.op_type == "MatMulNBits" for a in n.attribute if a.name == "accuracy_level"]
    assert set(levels) == {0}
    assert json.loads((exact.path / FUSIONS_FILE).read_text())["accuracy_level"] == 0


def test_a_file_with_a_type_that_has_no_form_is_encoded_anew_reported_and_refused_when_exactness_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, lambda name: "MXFP4" if "up_proj" in name else "Q8_0")
    bundle = export(path, tmp_path / "bundle")
    rows = json.loads((bundle.path / FUSIONS_FILE).read_text())["matrices"]
    changed = {row["name"]: row["max_error"] for row in rows if not row["exact"]}
    assert set(changed) == {"blocks.0.feed_forward.up.weight", "blocks.1.feed_forward.up.weight"}
    assert all(error > 0 for error in changed.values())
    assert any(check.name.startswith("blocks anew") for check in bundle.certificate)
    assert any("2 of 16 matrices are encoded anew at 8 bits: MXFP4" in note for note in bundle.notes)
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", None)  # refused before this would be called
    with pytest.raises(TargetError, match=r"2 of 16 matrices would be encoded anew: blocks\.0\..*\(MXFP4\)"):
        export(path, tmp_path / "other", require_exact=True)
    assert not (tmp_path / "other").exists()


def test_float_matrices_of_a_mixed_file_stay_float32(tmp_path: Path) -> None:
    path = _file(tmp_path, lambda name: "F16" if "down_proj" in name else "Q4_1", tie_word_embeddings=True)
    bundle = export(path, tmp_path / "bundle", require_exact=True)
    assert bundle.manifest.precision == "gguf"
    graph = onnx.load(bundle.path / GRAPH_FILE, load_external_data=False).graph
    ops = [node.op_type for node in graph.node]
    assert ops.count("MatMulNBits") == 3 * 2 + 1
    rows = json.loads((bundle.path / FUSIONS_FILE).read_text())["matrices"]
    assert {row["form"] for row in rows if row["source"] == "F16"} == {"float32"}


def test_a_file_of_floats_is_no_file_of_blocks(tmp_path: Path) -> None:
    path = _file(tmp_path, lambda _: "F16")
    assert export(path, tmp_path / "default", verify=False).manifest.precision == "int8"
    assert export(path, tmp_path / "asked", precision="gguf", verify=False).manifest.precision == "gguf"


def test_what_precision_gguf_does_not_fit_is_refused_before_any_work(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", None)
    folder, out = save_folder(tmp_path / "hf", make_checkpoint("llama")), tmp_path / "out"
    cases: list[tuple[Path, dict[str, object], type[Exception], str]] = [
        (folder, {"precision": "gguf"}, TargetError, "keeps the blocks of a GGUF file; this source is huggingface"),
        (folder, {"require_exact": True}, TargetError, "require_exact is for precision gguf; int8 does not keep"),
        (gguf_file, {"precision": "fp32", "accuracy_level": 0}, TargetError, "precision fp32 has none"),
        (gguf_file, {"accuracy_level": 3}, ValueError, "accuracy_level must be 0 .* or 4 .*, got 3"),
        (gguf_file, {"accuracy_level": True}, ValueError, "accuracy_level must be 0 .*, got True"),
        (gguf_file, {"target": "cuda", "accuracy_level": 4}, TargetError, "kernels of cuda choose their arithmetic"),
        (
            gguf_file,
            {"target": "cuda", "precision": "gguf"},
            TargetError,
            "on target cuda: embedding.weight of type Q6_K",
        ),
    ]
    for source, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            export(source, out, **options)  # type: ignore[arg-type]
    assert not out.exists()


def test_every_block_size_divides_the_rows_that_a_file_may_have() -> None:
    """Rows of a file are whole blocks of its type, and those are whole blocks of ours: nothing is ever padded."""
    for block_type in BY_NAME.values():
        assert GGML_QUANT_SIZES[block_type.kind][0] % block_type.block_size == 0

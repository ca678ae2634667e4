"""Graphs for other runtimes: what they are called by, that they compute the bundle's logits, what is refused."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from tiny_models import tiny_configs, tiny_model
from typer.testing import CliRunner

from graphport.cli import app
from graphport.export import export
from graphport.export.layout_parity import GrowingRunner, layout_check, masked_inputs
from graphport.export.layouts import ATTENTION_MASK, GENAI, LAYOUTS, OPTIMUM, Layout, LayoutError, find_layouts
from graphport.export.parity import TOLERANCES
from graphport.model_def.signature import INPUT_IDS, read_manifest

MAX_LENGTH = 40


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("layouts") / "bundle"
    model = tiny_model(tiny_configs()["grouped_query"])
    export(model, out, precision="fp32", context=MAX_LENGTH, layouts=("genai", "optimum"))
    return out


def _runner(bundle: Path, layout: Layout) -> GrowingRunner:
    return GrowingRunner(bundle / layout.graph_file, read_manifest(bundle).config)


def _ids(*shape: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(1, 61, size=shape)


def test_graphs_share_the_weights_and_are_recorded(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    for layout in LAYOUTS:
        model = ir.load(bundle / layout.graph_file)
        names = [value.name for value in model.graph.inputs]
        assert names[:3] == [INPUT_IDS, ATTENTION_MASK, "past_key_values.0.key"]
        assert model.graph.outputs[0].name == "logits"
        assert layout.graph_file in manifest.files
    assert [path.name for path in bundle.glob("*.data")] == ["model.onnx.data"]
    assert {"genai_config.json", "config.json", "generation_config.json"} <= set(manifest.files)


def test_the_certificate_says_that_both_compute_the_bundles_logits(bundle: Path) -> None:
    checks = json.loads((bundle / "certificate.json").read_text(encoding="utf-8"))["checks"]
    found = {check["name"].split(":")[0]: check for check in checks if check["name"].startswith("layout")}
    assert set(found) == {"layout genai", "layout optimum"}
    assert all(check["measured"] == 0 and check["tolerance"] == 0 for check in found.values())


def test_a_graph_with_another_mask_fails_its_check(bundle: Path) -> None:
    broken = bundle / OPTIMUM.graph_file
    kept = broken.read_bytes()
    model = ir.load(broken)
    minus = next(node for node in model.graph if node.op_type == "Sub")  # the last position of a text: length - 1
    minus.replace_input_with(1, next(v for v in model.graph.initializers.values() if v.name == "layout.2"))
    try:
        ir.save(model, broken)
        config = read_manifest(bundle).config
        assert not layout_check(bundle, OPTIMUM, config, max_length=MAX_LENGTH, seed=0).passed
    finally:
        broken.write_bytes(kept)


def test_rows_of_different_lengths_are_each_what_they_are_alone(bundle: Path) -> None:
    ids, lengths = _ids(3, 7), (7, 2, 5)
    mask = np.array([[1] * length + [0] * (7 - length) for length in lengths])
    for layout in LAYOUTS:
        runner = _runner(bundle, layout)
        together, _ = runner.run({INPUT_IDS: ids, ATTENTION_MASK: mask}, runner.empty_cache(3))
        assert together.shape == (3, 7 if layout.every_row else 1, 61)
        for row, length in enumerate(lengths):
            alone, _ = runner.run(masked_inputs(ids[row, :length], length), runner.empty_cache(1))
            last = together[row, length - 1 if layout.every_row else 0]
            assert np.abs(last - alone[0, -1]).max() <= TOLERANCES["compiled", "max_abs"]


def test_chunks_and_steps_continue_a_text(bundle: Path) -> None:
    ids = _ids(11)
    for layout in LAYOUTS:
        runner = _runner(bundle, layout)
        whole, _ = runner.run(masked_inputs(ids, 11), runner.empty_cache(1))
        past = runner.empty_cache(1)
        for begin, end in ((0, 4), (4, 10), (10, 11)):
            logits, past = runner.run(masked_inputs(ids[begin:end], end), past)
        assert np.abs(logits[0, -1] - whole[0, -1]).max() <= TOLERANCES["compiled", "max_abs"]


def test_padding_before_a_text_gives_nan_and_no_other_text(bundle: Path) -> None:
    mask = np.ones((2, 5), np.int64)
    mask[1, 0] = 0
    for layout in LAYOUTS:
        runner = _runner(bundle, layout)
        logits, _ = runner.run({INPUT_IDS: _ids(2, 5), ATTENTION_MASK: mask}, runner.empty_cache(2))
        assert np.isfinite(logits[0]).all()
        assert np.isnan(logits[1]).all()


def test_settings_name_sizes_and_ids(bundle: Path) -> None:
    genai = json.loads((bundle / "genai_config.json").read_text(encoding="utf-8"))["model"]
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    attention = read_manifest(bundle).config.blocks[0].attention
    decoder = genai["decoder"]
    assert decoder["filename"] == GENAI.graph_file
    sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    assert (decoder["num_attention_heads"], decoder["num_key_value_heads"], decoder["head_size"]) == sizes
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == sizes
    assert genai["context_length"] == config["max_position_embeddings"] == MAX_LENGTH
    assert "eos_token_id" not in config  # the model names none; a number must stand in its place for onnxruntime-genai
    assert genai["eos_token_id"] == [0]


def test_what_these_runtimes_cannot_call_is_refused_before_work_is_done(tmp_path: Path) -> None:
    decoder, out = tiny_model(tiny_configs()["grouped_query"]), tmp_path / "bundle"
    write = partial(export, decoder, out, layouts=("genai",))
    with pytest.raises(LayoutError, match="layout genai, for onnxruntime-genai, is for the cpu target, got cuda"):
        write(target="cuda", precision="fp16")
    with pytest.raises(LayoutError, match=r"has a KV cache in float32, .* got int8; choose --kv-cache auto"):
        write(kv_cache="int8")
    with pytest.raises(LayoutError, match="layout 'onnx' is unknown; there are genai and optimum"):
        find_layouts(("genai", "onnx"))
    assert not out.exists()


def test_the_command_line_names_the_layouts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "model.gguf", str(tmp_path / "out"), "--layout", "mlx"])
    assert done.exit_code == 1
    assert str(done.exception) == "layout 'mlx' is unknown; there are genai and optimum"

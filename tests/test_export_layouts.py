"""Graphs for other runtimes: what they are called by, that they compute the bundle's logits, what is refused."""

import json
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from parity import TOLERANCES as PARITY_TOLERANCES
from test_masked_heads import save_masked
from test_runtime_classifiers import LABELS, make_classifier
from tiny_encoders import TEXTS, make_encoder, save_sentence_folder
from tiny_models import tiny_configs, tiny_model
from typer.testing import CliRunner

from graphport.cli import app
from graphport.export import export
from graphport.export.layout_parity import GrowingRunner, encoder_layout_check, layout_check, masked_inputs
from graphport.export.layouts import ATTENTION_MASK, GENAI, LAYOUTS, OPTIMUM, Layout, LayoutError, find_layouts
from graphport.export.parity import TOLERANCES
from graphport.model_def.signature import INPUT_IDS, read_manifest
from graphport.runtime import SamplingParams, load_encoder, load_language_model

MAX_LENGTH = 40
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11], [2]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("layouts") / "bundle"
    model = tiny_model(tiny_configs()["grouped_query"])
    export(model, out, precision="fp32", context=MAX_LENGTH, layouts=("genai", "optimum"))
    return out


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    sources = {
        "pooled": save_sentence_folder(folder / "bert", make_encoder("bert")),
        "plain": folder / "roberta",
        "masked": save_masked(folder / "electra", "electra", tied=False),
        "classifier": folder / "labels",
    }
    labels = make_classifier("bert", "text", problem_type="multi_label_classification")
    labels.save_pretrained(sources["classifier"])
    make_encoder("roberta").save_pretrained(sources["plain"])
    wanted = {"precision": "fp32", "context": 32, "layouts": ("optimum",)}
    return {kind: export(source, folder / kind, **wanted).path for kind, source in sources.items()}


def _ask_optimum(python: Path, *arguments: str) -> list[list[int]]:
    command = [python, Path(__file__).with_name("run_optimum.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answer


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
    assert config["eos_token_id"] is None  # left out, the end of Gemma's configuration would hold
    assert genai["eos_token_id"] == [0]


def test_an_encoders_graph_takes_a_mask_and_gives_its_states(encoders: dict[str, Path]) -> None:
    for kind, folder in encoders.items():
        model = ir.load(folder / OPTIMUM.graph_file)
        names = [value.name for value in model.graph.inputs]
        assert names == [INPUT_IDS, ATTENTION_MASK, *([] if kind == "plain" else ["token_type_ids"])]
        others = ["logits"] if kind in ("masked", "classifier") else ["embeddings"]
        assert [value.name for value in model.graph.outputs] == ["last_hidden_state", *others]
        checks = json.loads((folder / "certificate.json").read_text(encoding="utf-8"))["checks"]
        (found,) = [
            check for check in checks if check["name"].startswith("layout optimum: 3 texts in one padded batch")
        ]
        assert found["measured"] == found["tolerance"] == 0
        assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "bert"
        assert not (folder / "generation_config.json").exists()


def test_a_classifiers_settings_name_its_labels(encoders: dict[str, Path]) -> None:
    config = json.loads((encoders["classifier"] / "config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == "multi_label_classification"
    assert config["id2label"] == {str(number): label for number, label in LABELS.items()}
    assert config["label2id"] == {label: number for number, label in LABELS.items()}
    assert "id2label" not in json.loads((encoders["pooled"] / "config.json").read_text(encoding="utf-8"))


def test_an_encoders_graph_with_another_length_fails_its_check(encoders: dict[str, Path]) -> None:
    broken = encoders["pooled"] / OPTIMUM.graph_file
    kept, model = broken.read_bytes(), ir.load(broken)
    total = next(node for node in model.graph if node.op_type == "ReduceSum")
    total.op_type = "ReduceMax"  # every text is one token long
    try:
        ir.save(model, broken)
        config = read_manifest(encoders["pooled"]).config
        check = encoder_layout_check(encoders["pooled"], OPTIMUM, config, max_length=32, seed=0)
        assert check.name.startswith("layout optimum: 3 texts")
        assert not check.passed
    finally:
        broken.write_bytes(kept)


def test_the_real_optimum_generates_the_same_tokens(bundle: Path, tmp_path: Path, optimum_python: Path) -> None:
    """The head size is no share of the hidden size, and there are fewer key/value heads than heads."""
    with load_language_model(bundle) as model:
        outputs = model.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0.0))
    own = [list(output.token_ids) for output in outputs]
    assert _ask_optimum(optimum_python, "tokens", str(bundle), json.dumps(PROMPTS), "12") == own


@pytest.mark.parametrize("kind", ["pooled", "plain", "masked"])
def test_the_real_optimum_gives_the_same_states(kind: str, encoders: dict[str, Path], optimum_python: Path) -> None:
    rows = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    found = _ask_optimum(optimum_python, "states", str(encoders[kind]), json.dumps(rows))
    with load_encoder(encoders[kind]) as encoder:
        own = encoder.hidden_states(rows)
        for mine, theirs in zip(own, found, strict=True):
            assert np.abs(mine - np.array(theirs)).max() < PARITY_TOLERANCES["exported", "float32"]
        if kind == "pooled":
            texts = [text for text in TEXTS if text]
            assert encoder.tokenizer is not None
            ids = [encoder.tokenizer.encode(text) for text in texts]
            assert _ask_optimum(optimum_python, "texts", str(encoders[kind]), json.dumps(texts)) == ids


def test_what_these_runtimes_cannot_call_is_refused_before_work_is_done(tmp_path: Path) -> None:
    decoder, out = tiny_model(tiny_configs()["grouped_query"]), tmp_path / "bundle"
    write = partial(export, decoder, out, layouts=("genai",))
    with pytest.raises(LayoutError, match="layout genai, for onnxruntime-genai, is for the cpu target, got cuda"):
        write(target="cuda", precision="fp16")
    with pytest.raises(LayoutError, match=r"has a KV cache in float32, .* got int8; choose --kv-cache auto"):
        write(kv_cache="int8")
    with pytest.raises(LayoutError, match="layout 'onnx' is unknown; there are genai and optimum"):
        find_layouts(("genai", "onnx"))
    encoder = make_encoder("bert")
    encoder.save_pretrained(tmp_path / "bert")
    with pytest.raises(
        LayoutError, match=r"layout genai, .* is a decoder's over a KV cache, and this is an encoder; leave"
    ):
        export(tmp_path / "bert", out, layouts=("genai",))
    assert not out.exists()


def test_the_command_line_names_the_layouts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "model.gguf", str(tmp_path / "out"), "--layout", "mlx"])
    assert done.exit_code == 1
    assert str(done.exception) == "layout 'mlx' is unknown; there are genai and optimum"

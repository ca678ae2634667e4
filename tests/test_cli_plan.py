"""`graphport plan`: memory against what is free, of bundles and of sources, with nothing taken."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_bundles import TinyBundle, write_tiny_bundle
from tiny_encoders import make_encoder, save_sentence_folder
from tiny_sources import write_tiny_source

from graphport.cli import main
from graphport.export import export
from graphport.model_def.signature import GRAPH_FILE, WEIGHTS_FILE, read_manifest
from graphport.runtime import load, plan_report

CONFIG_FILE = """
from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import RotaryPosition

def model():
    norm = NormConfig(epsilon=1e-6)
    attention = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=16, rotary=RotaryPosition(theta=10000.0))
    block = BlockConfig(attention=attention, feed_forward=FeedForwardConfig(width=256), norm=norm)
    return TransformerConfig(
        vocab_size=1000, hidden_size=96, max_positions=512, blocks=(block,) * 3, final_norm=norm, head="separate"
    )

def number():
    return 3
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("plan") / "bundle")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("source") / "model.py"
    path.write_text(CONFIG_FILE, encoding="utf-8")
    return f"{path}:model"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["plan", *arguments])
    return status, capsys.readouterr().err


def test_counts_beyond_every_machine_are_planned_and_do_not_fit(
    bundle: TinyBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, str(bundle.folder), "--batch", str(10**26))
    assert (found["fits"], found["batch"]) == (False, 10**26)
    assert 0 < found["largest_batch_that_fits"] < 10**12


@pytest.mark.parametrize("options", [(), ("--prefill-chunk", "32")])
def test_the_plan_of_a_bundle_is_the_one_that_load_makes(
    bundle: TinyBundle, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    found = plan(capsys, str(bundle.folder), "--context", "100", "--batch", "3", *options)
    chunk = {"prefill_chunk": int(options[1])} if options else {}
    with load(bundle.folder, max_length=100, max_batch=3, threads=1, **chunk) as lm:
        expected = lm.memory_plan
    assert found["bytes"] == {name: getattr(expected, name) for name in found["bytes"]}
    assert found["total"] == expected.total == sum(found["bytes"].values()) - expected.timing
    assert (found["device"], found["kv_cache"], found["is_estimate"]) == ("cpu", "float32", False)
    assert (found["fits"], found["longest_context_that_fits"], found["largest_batch_that_fits"]) == (True, 100, 3)


@pytest.mark.parametrize(
    ("precision", "kv_cache"), [("fp32", "auto"), ("int8", "auto"), ("int8", "int8"), ("int4", "int4")]
)
def test_the_estimate_of_a_source_is_near_what_its_export_holds(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, kv_cache: str
) -> None:
    options = ("--context", "256", "--batch", "4")
    planned = plan(capsys, source, "--precision", precision, "--kv-cache", kv_cache, *options)
    export(source, tmp_path / "b", precision=precision, kv_cache=kv_cache, context=256, verify=False)
    found = plan(capsys, str(tmp_path / "b"), *options)
    assert planned["is_estimate"]
    assert planned["bytes"]["cache"] == found["bytes"]["cache"]
    assert planned["bytes"]["workspace"] == found["bytes"]["workspace"]
    files = read_manifest(tmp_path / "b").files
    graph = files[GRAPH_FILE].size  # which an estimate leaves out, and is small but for a tiny model
    assert files[WEIGHTS_FILE].size > 200_000
    assert abs(planned["bytes"]["weights"] - (found["bytes"]["weights"] - graph)) < 0.1 * found["bytes"]["weights"]


def test_a_gguf_file_is_planned_from_its_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_source(tmp_path / "model.gguf")
    found = plan(capsys, str(tmp_path / "model.gguf"), "--context", "64")
    assert found["bytes"]["weights"] > 0
    assert (found["context"], found["batch"], found["is_estimate"]) == (64, 8, True)


def test_what_does_not_fit_is_shown_with_what_would(
    bundle: TinyBundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan(capsys, str(bundle.folder))
    free = whole["total"] - whole["bytes"]["cache"] // 2
    monkeypatch.setattr(plan_report, "free_memory", lambda: free)
    found = plan(capsys, str(bundle.folder))
    assert (found["free"], found["fits"]) == (free, False)
    assert 0 < found["longest_context_that_fits"] < 128
    assert 0 < found["largest_batch_that_fits"] < 8
    assert main(["plan", str(bundle.folder)]) == 0
    shown = capsys.readouterr().out
    for text in ("cache (float32)", "no", "tokens that fit with 8 rows", "rows that fit with 128 tokens"):
        assert text in shown


def test_a_device_that_is_not_there_has_nothing_free(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, source, "--target", "cuda", "--precision", "fp16", "--context", "128")
    assert found["device"] == "cuda"
    if found["free"] is None:  # no GPU on this machine
        assert found["fits"] is None
        assert main(["plan", source, "--target", "cuda"]) == 0
        assert "no cuda device here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("BUNDLE", "--kv-cache", "int8"), 2, "--kv-cache is for a SOURCE"),
        (("BUNDLE", "--precision", "int8", "--target", "cpu"), 2, "--target, --precision is for a SOURCE"),
        (("BUNDLE", "--context", "129"), 1, "context must be 1 to 128, the bundle's own; got 129"),
        (("BUNDLE", "--batch", "0"), 2, "--batch"),
        (("SOURCE", "--precision", "bf16"), 1, "precision 'bf16' on target cpu"),
        (("SOURCE", "--precision", "gguf"), 1, "precision gguf keeps the blocks of a GGUF file"),
        (("SOURCE", "--kv-cache", "fp16"), 1, "KV cache type 'fp16' on target cpu"),
        (("owner/name",), 1, "no model at 'owner/name'; a plan needs a local Hugging Face folder"),
        (("FOLDER",), 1, "has no config.json"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    bundle: TinyBundle,
    source: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    places = {"BUNDLE": str(bundle.folder), "SOURCE": source, "FOLDER": str(tmp_path)}
    found, error = error_of(capsys, *(places.get(word, word) for word in arguments))
    assert found == status
    assert message in error
    assert error.count("\n") == 1


def test_a_function_that_returns_no_model_is_refused(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, error = error_of(capsys, source.replace(":model", ":number"))
    assert status == 1
    assert "returned int; needed is a TransformerConfig or Transformer" in error


def test_the_plan_of_a_bundle_imports_no_torch(bundle: TinyBundle) -> None:
    program = f"""
import sys
from graphport.cli import main
assert main(["plan", {str(bundle.folder)!r}, "--json"]) == 0
assert "torch" not in sys.modules
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_an_encoder_is_planned_once_it_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_sentence_folder(tmp_path / "encoder", make_encoder("bert"))
    status, error = error_of(capsys, str(tmp_path / "encoder"))
    assert status == 1
    assert "is an encoder, of which no configuration is read alone; export it first" in error
    export(tmp_path / "encoder", tmp_path / "b", precision="fp32", verify=False)
    found = plan(capsys, str(tmp_path / "b"), "--context", "16")
    assert found["bytes"]["cache"] == 0
    assert found["total"] > found["bytes"]["weights"] > 0

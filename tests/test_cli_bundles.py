"""`export`, `verify` and `report`: what they pass on and what they print. The exporter is a fake."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_fakes import CHECK, FakeExport, take_torch_away, tiny_manifest

from graphport.cli import main


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text(tiny_manifest().to_json())
    (tmp_path / "fusions.json").write_text(json.dumps({"counts": {"pack_qkv": 2}}))
    (tmp_path / "certificate.json").write_text(json.dumps({"checks": [CHECK]}))
    return tmp_path


@pytest.mark.usefixtures("fake_export")
def test_the_command_to_run_next_can_be_copied_whatever_the_folder_is_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["export", "model.gguf", "my models/a$b"]) == 0
    assert "next: graphport generate 'my models/a$b' " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "has", "command"),
    [
        ("encoder", {}, 'graphport embed out "A sentence to embed."'),
        ("encoder", {"classifier": 1}, "graphport report out, or load it in Python to classify texts"),
        ("encoder", {"masked_head": 1}, "graphport report out, or load it in Python to fill masks"),
        ("image_encoder", {}, "graphport report out, or load it in Python for its images"),
        ("encoder_decoder", {"encoder": SimpleNamespace(audio=None)}, 'graphport generate out "A text to read."'),
        ("encoder_decoder", {"encoder": SimpleNamespace(audio=1)}, "graphport transcribe out recording.wav"),
    ],
)
def test_every_kind_of_bundle_has_a_command_to_run_next(
    kind: str, has: dict[str, Any], command: str, fake_export: FakeExport, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SimpleNamespace(**{"classifier": None, "masked_head": None, "encoder": None, **has})
    fake_export.manifest = SimpleNamespace(kind=kind, config=config, files=tiny_manifest().files)
    assert main(["export", "model", "out"]) == 0
    assert f"next: {command}" in capsys.readouterr().err


def test_export_prints_the_path_on_stdout_and_tables_on_stderr(
    fake_export: FakeExport, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "model.gguf", "build/out"]) == 0
    out, err = capsys.readouterr()
    assert out == "build/out\n"
    for piece in ("tracing [30 layers]", "2.5 MB", "pack_qkv", "30", "0.004", "0.006", "ok", "context limited"):
        assert piece in err
    assert "next: graphport generate build/out " in err
    (arguments, options), *_ = fake_export.calls
    del options["progress"]
    assert arguments == ("model.gguf", Path("build/out"))
    assert options == {
        "target": "cpu",
        "precision": None,
        "kv_cache": "auto",
        "context": None,
        "image_size": None,
        "accuracy_level": None,
        "calibration": None,
        "max_kl": None,
        "seed": 0,
        "verify": True,
        "require_fused": {},
        "require_exact": False,
        "disable_passes": (),
        "layouts": (),
        "force": False,
    }


def test_export_passes_every_option_on(fake_export: FakeExport) -> None:
    options = "--target cuda --precision fp16 --kv-cache int8 --context 64 --accuracy-level 4 --seed 3"
    options += " --no-verify --force --require-exact --calibration my.txt --max-kl 0.02"
    options += " --disable-pass silu --disable-pass norm --image-size 32x48 --layout genai"
    fused = ["--require-fused", "attention=all", "--require-fused", "pack_qkv=30"]
    assert main(["export", "m", "o", *options.split(), *fused]) == 0
    passed = fake_export.calls[0][1]
    del passed["progress"]
    assert passed == {
        "target": "cuda",
        "precision": "fp16",
        "kv_cache": "int8",
        "context": 64,
        "image_size": (32, 48),
        "accuracy_level": 4,
        "calibration": Path("my.txt"),
        "max_kl": 0.02,
        "seed": 3,
        "verify": False,
        "require_fused": {"attention": "all", "pack_qkv": 30},
        "require_exact": True,
        "disable_passes": ("silu", "norm"),
        "layouts": ("genai",),
        "force": True,
    }


@pytest.mark.parametrize("command", [["export", "a", "b"], ["diff", "a", "b"]])
def test_a_missing_optional_dependency_is_named_with_the_install_command(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_torch_away(monkeypatch)
    assert main(command) == 1
    assert "needs torch, which is not installed; do: pip install 'graphport[export]'" in capsys.readouterr().err


def test_report_shows_manifest_files_fusions_and_certificate(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(bundle)]) == 0
    err = capsys.readouterr().err
    for piece in ("int8", "13 tokens", "tiny[1].gguf", "model.onnx", "2.5 MB", "pack_qkv", "int8 against fp32, KL"):
        assert piece in err
    assert main(["report", str(bundle), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["manifest"]["precision"] == "int8"
    assert data["fusions"] == {"pack_qkv": 2}
    assert data["checks"] == [{**CHECK, "inputs": ""}]


def test_report_groups_the_matrices_of_a_gguf_file_by_place_type_and_form(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(name: str, source: str, error: float) -> dict[str, Any]:
        return {"name": name, "source": source, "form": "8-bit/32", "exact": error == 0, "max_error": error}

    path = bundle / "fusions.json"
    account = json.loads(path.read_text())
    queries = [row(f"blocks.{layer}.attention.query.weight", "Q8_0", 0.0) for layer in range(12)]
    rows = [*queries, row("blocks.0.feed_forward.up.weight", "NVFP4", 0.0125)]
    path.write_text(json.dumps(account | {"matrices": rows, "accuracy_level": 4}))
    assert main(["report", str(bundle)]) == 0
    shown = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().err.splitlines()]
    assert "attention.query 12 Q8_0 8-bit/32 exact" in shown
    assert "feed_forward.up 1 NVFP4 8-bit/32 0.0125, encoded anew" in shown
    assert "accuracy level 4: activations rounded to 8 bits" in shown
    assert main(["report", str(bundle), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["matrices"], data["accuracy_level"]) == (rows, 4)


def test_report_shows_what_precision_auto_chose_and_what_it_measured(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(layer: int, form: str, sensitivity: float | None) -> dict[str, Any]:
        names = [f"blocks.{layer}.feed_forward.{part}.weight" for part in ("gate", "up")]
        sizes = {"num_bytes": 600_000, "other_bytes": 1_200_000}
        return {"names": names, "form": form, "sensitivity": sensitivity, **sizes}

    groups = [row(0, "4-bit/32", 2.5e-4), row(1, "4-bit/32", 7e-4), row(2, "8-bit/32", 0.003), row(3, "4-bit/16", None)]
    probes = [{"num_high": 1, "kl": 0.0087, "num_bytes": 98_700_000}]
    choice = {"max_kl": 0.01, "kl": 0.0087, "num_tokens": 512, "num_bytes": 98_700_000, "probes": probes}
    path = bundle / "fusions.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"choice": choice | {"groups": groups}}))
    assert main(["report", str(bundle)]) == 0
    shown = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().err.splitlines()]
    assert "feed_forward.gate, up 2 4-bit/32 1.2 MB 0.00025 to 0.0007" in shown
    assert "feed_forward.gate, up 1 8-bit/32 0.6 MB 0.003 to 0.003" in shown
    assert "feed_forward.gate, up 1 4-bit/16 0.6 MB not smaller" in shown
    assert any(line.startswith("measured KL 0.0087 on 512 tokens that were held out, budget 0.01") for line in shown)
    assert main(["report", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choice"] == choice | {"groups": groups}
    path.write_text(json.dumps({"counts": {}, "choice": {"max_kl": 0.01}}))
    assert main(["report", str(bundle)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_report_says_when_there_is_no_certificate(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "certificate.json").unlink()
    assert main(["report", str(bundle)]) == 0
    assert "no certificate" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"checks": [{"name": "x"}]}'])
def test_report_refuses_a_damaged_certificate(text: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "certificate.json").write_text(text)
    assert main(["report", str(bundle)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_report_refuses_a_folder_that_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "is no graphport bundle" in capsys.readouterr().err

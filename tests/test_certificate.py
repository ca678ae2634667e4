"""Certificates: what `export` writes, `verify` repeats it without torch, and what is refused with which reason."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certificates import change_certificate, rehash
from tiny_graphs import CONFIGS, make_config, make_model, tiny_model
from tiny_sources import write_tiny_source

from graphport.cli import main
from graphport.export import export
from graphport.export.verify import fresh_certificate
from graphport.model_def.certificate import CertificateError, Surroundings, read_certificate, text_of
from graphport.model_def.decoder_runs import planned_runs, text_length, uncovered
from graphport.model_def.position_config import RotaryPosition, YarnScaling
from graphport.model_def.signature import CERTIFICATE_FILE, TOKENIZER_FILE, WEIGHTS_FILE, read_manifest
from graphport.runtime import certified_bundle, load
from graphport.runtime.verification import verify, write_certificate

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
RUNS = ["prefill", "decode", "chunked prefill", "ragged batch", "rewind"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_source(tmp_path_factory.mktemp("source") / "model.gguf", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An int8 bundle with tokenizer and chat template."""
    return export(source, tmp_path_factory.mktemp("made") / "bundle", precision="int8").path


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def test_the_certificate_says_what_was_compared_with_what(made: Path) -> None:
    manifest = read_manifest(made)
    certificate = read_certificate(made, manifest)
    assert certificate.files.keys() == manifest.files.keys() - {CERTIFICATE_FILE}
    assert {TOKENIZER_FILE, WEIGHTS_FILE} <= certificate.files.keys()
    assert certificate.reference["source"] == manifest.source
    assert certificate.reference["libraries"].keys() == {"torch", "transformers", "tokenizers", "numpy"}
    assert certificate.reference["dtype"] == "float32"
    assert certificate.candidate["provider"] == "CPUExecutionProvider"
    assert certificate.candidate["accuracy_level"] == 4
    assert certificate.inputs.origin == "the shipped English text"
    assert len(text_of(certificate)) == manifest.max_length == 128
    assert list(certificate.shipped) == list(certificate.errors) == RUNS
    assert all(check.passed for check in certificate.checks)
    for run in RUNS:
        assert any(check.name.startswith(f"{run}: kl against eager PyTorch") for check in certificate.checks)
    assert (made / CERTIFICATE_FILE).stat().st_size < 2_000_000


def test_it_holds_the_error_of_every_place_of_both_graphs(made: Path) -> None:
    layers = read_certificate(made, read_manifest(made)).layers
    fused, shipped = layers["the same passes in fp32"], layers["the graph that ships"]
    assert list(layers) == ["the same passes in fp32", "the graph that ships"]
    for series in (fused, shipped):
        assert series["prompt"] == 28
        assert [len(row) for row in series["relative"]] == [len(series["sites"])] * 5
        assert {"embedding", "layer 1 attention.key", "layer 1 feed_forward.down", "logits"} <= set(series["sites"])
        assert not any("value" in site for site in series["sites"])  # smoothing scales them
    assert max(map(max, fused["relative"])) < 1e-4
    assert 1e-4 < max(map(max, shipped["relative"])) < 0.6


def test_it_survives_the_way_to_its_file_and_back(made: Path) -> None:
    certificate = read_certificate(made, read_manifest(made))
    assert certificate.to_json() == (made / CERTIFICATE_FILE).read_text(encoding="utf-8")


def test_verify_repeats_every_run_to_the_last_bit_on_the_same_machine(made: Path) -> None:
    result = verify(made, device="cpu", threads=1)
    assert result.passed
    names = [check.name for check in result.checks]
    assert names[:5] == [
        "files: changed since the export",
        "tokenizer: texts with other ids",
        "tokenizer: ids with other tokens",
        "tokenizer: merges or scores",
        "chat template: chats written otherwise",
    ]
    for run in RUNS:
        again = next(check for check in result.checks if check.name == f"{run}: kl against itself as exported")
        assert again.measured == 0
        assert again.inputs
    assert not any("here" in note for note in result.notes)


def test_verify_needs_no_torch(made: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnx_ir', 'onnxscript', 'transformers'): sys.modules[name] = None\n"
        f"from graphport.cli import main; raise SystemExit(main(['verify', {str(made)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True


def test_against_the_source_compares_with_eager_again(bundle: Path, source: Path) -> None:
    fresh, (again,) = fresh_certificate(bundle, source)
    result = verify(bundle, certificate=fresh, references=(again,), device="cpu", threads=1)
    assert result.passed
    assert again in result.checks
    assert again.name == "reference: logits of the certificate against eager PyTorch, relative"
    assert again.measured < 1e-5


def test_another_source_is_refused_and_other_weights_fail(bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("def make():\n    import tiny_graphs\n    return tiny_graphs.tiny_model('llama')\n")
    with pytest.raises(ValueError, match=r"is another model than .*: their configurations differ"):
        fresh_certificate(bundle, f"{other}:make")
    made = export(make_model(CONFIGS["llama"], seed=1), tmp_path / "llama", precision="fp32").path
    fresh, references = fresh_certificate(made, f"{other}:make")
    result = verify(made, certificate=fresh, references=references, device="cpu", threads=1)
    failed = [check.name for check in result.checks if not check.passed]
    assert "reference: logits of the certificate against eager PyTorch, relative" in failed
    assert "prefill: max_abs against eager PyTorch" in failed


@pytest.mark.parametrize("name", [WEIGHTS_FILE, TOKENIZER_FILE])
def test_changed_bytes_fail_and_nothing_is_run(name: str, bundle: Path) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / name).write_bytes(data)
    (check,) = verify(bundle).checks
    assert not check.passed
    assert check.detail == f"missing or changed: {name}"
    with pytest.raises(CertificateError, match=f"strict=True, and {name} changed since the export"):
        load(bundle, strict=True)


def truncate(bundle: Path) -> None:
    path = bundle / CERTIFICATE_FILE
    path.write_text(path.read_text()[:3000])


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "none": (lambda bundle: (bundle / CERTIFICATE_FILE).unlink(), "has no certificate.json, so nothing says"),
    "truncated": (truncate, "is damaged"),
    "newer": (
        lambda bundle: change_certificate(bundle, format=6),
        "has format 6, this graphport reads 5; install a newer",
    ),
    "older": (
        lambda bundle: change_certificate(bundle, format=4),
        "has format 4, this graphport reads 5; make one with",
    ),
    "other bytes": (lambda bundle: change_certificate(bundle, files={"model.onnx": "0"}), "is for other bytes than"),
    "no text": (
        lambda bundle: change_certificate(bundle, inputs={"origin": "", "ids": []}),
        "another vocabulary or no text",
    ),
    "ids": (
        lambda bundle: change_certificate(bundle, inputs={"origin": "", "ids": [10**9]}),
        "has ids beyond the vocab",
    ),
    "wrong kind": (lambda bundle: change_certificate(bundle, limits=[{"against": "me"}]), "is damaged"),
    "huge": (lambda bundle: change_certificate(bundle, candidate={"x": "x" * 9_000_000}), "more than any certificate"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_certificate_that_says_nothing_is_refused_with_the_reason_and_the_way_out(
    kind: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = BAD[kind]
    spoil(bundle)
    rehash(bundle, certificate=False)
    assert main(["verify", str(bundle)]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert f"graphport verify {bundle} --against SOURCE --write" in err
    with pytest.raises(CertificateError, match=message.split(",")[0]):
        load(bundle, strict=True)


def test_a_bundle_without_certificate_gets_one_from_its_source(
    bundle: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle / CERTIFICATE_FILE).unlink()
    rehash(bundle, certificate=False)
    assert main(["verify", str(bundle), "--against", str(source), "--json", "--write"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["passed"], answer["written"]) == (True, True)
    assert CERTIFICATE_FILE in read_manifest(bundle).files
    assert verify(bundle).passed
    load(bundle, strict=True, threads=1).close()


def test_without_write_nothing_changes_on_disk(bundle: Path, source: Path) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    assert main(["verify", str(bundle), "--against", str(source)]) == 0
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


def test_a_failed_check_is_not_written(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = [{"against": "original", "figure": "kl", "tolerance": 0, "where": "anywhere"}]
    change_certificate(bundle, limits=zero)
    rehash(bundle, certificate=False)
    before = (bundle / CERTIFICATE_FILE).read_bytes()
    assert main(["verify", str(bundle), "--write", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["passed"], answer["written"]) == (False, False)
    assert (bundle / CERTIFICATE_FILE).read_bytes() == before
    with pytest.raises(ValueError, match="a check failed, so no certificate was written"):
        write_certificate(bundle, verify(bundle))


def test_a_tolerance_of_zero_where_it_cannot_hold_fails_as_a_check(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_certificate(bundle, limits=[{"against": "original", "figure": "kl", "tolerance": 0, "where": "anywhere"}])
    rehash(bundle, certificate=False)
    assert main(["verify", str(bundle)]) == 1
    out, err = capsys.readouterr()
    assert out == "failed\n"
    assert "FAILED prefill: kl against eager PyTorch" in err
    assert "error" not in err


def elsewhere(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    here = certified_bundle.surroundings("cpu")
    other = dataclasses.replace(here, **changes)
    for module in ("graphport.runtime.certified_bundle", "graphport.runtime.verification"):
        monkeypatch.setattr(f"{module}.surroundings", lambda _: other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"onnxruntime": "9.9.9"}, r"ONNX Runtime: \d+\.\d+\.\d+ in the certificate, 9\.9\.9 here"),
        ({"provider": "CUDAExecutionProvider"}, "provider: CPUExecutionProvider in the certificate, CUDAExecution"),
    ],
)
def test_another_runtime_is_said_and_strict_refuses_it_until_certified_there(
    changes: dict[str, str], words: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch, **changes)
    result = verify(bundle, device="cpu", threads=1)
    assert result.passed
    assert not any("rms against itself" in check.name for check in result.checks)
    assert any(re.search(words, note) for note in result.notes)
    with pytest.raises(CertificateError, match=words):
        load(bundle, strict=True, threads=1)
    write_certificate(bundle, verify(bundle, device="cpu", threads=1, keep_rows=True))
    load(bundle, strict=True, threads=1).close()
    assert verify(bundle, device="cpu", threads=1).notes == ()


def test_another_processor_is_said_and_is_no_obstacle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch, processor="riscv64")
    assert any("riscv64 here" in note for note in verify(bundle).notes)
    load(bundle, strict=True, threads=1).close()


def test_strict_refuses_a_certificate_whose_checks_failed_or_are_none(bundle: Path) -> None:
    checks = json.loads((bundle / CERTIFICATE_FILE).read_text())["checks"]
    for spoilt, words in (([], "has no checks"), ([{**checks[0], "measured": 9.0}], "failed: exported")):
        change_certificate(bundle, checks=spoilt)
        rehash(bundle, certificate=False)
        with pytest.raises(CertificateError, match=words):
            load(bundle, strict=True)


@pytest.mark.parametrize("context", [1, 4, 7, 24])
def test_short_contexts_have_the_runs_that_they_have_room_for(context: int, tmp_path: Path) -> None:
    made = export(tiny_model("llama"), tmp_path / "b", precision="fp32", context=context).path
    result = verify(made, device="cpu", threads=1)
    assert result.passed
    runs = {check.name.split(":")[0] for check in result.checks} - {"files"}
    assert runs == set({1: RUNS[:1], 4: RUNS[:3], 7: RUNS[:3], 24: RUNS}[context])


def test_texts_go_beyond_windows_and_scalings_and_say_what_they_do_not_reach() -> None:
    def config(window: int | None, original: int | None) -> Any:
        scaling = None if original is None else YarnScaling(factor=4.0, original_max_positions=original)
        plain = CONFIGS["llama"].blocks[0]
        attention = dataclasses.replace(
            plain.attention, window=window, rotary=RotaryPosition(theta=1e4, scaling=scaling)
        )
        return make_config(dataclasses.replace(plain, attention=attention), max_positions=8192)

    assert text_length(config(None, None), 8192) == 2048  # a small model, on which eager is fast
    large = dataclasses.replace(config(None, None), hidden_size=8192)
    assert text_length(large, 8192) == 512
    # beyond 759, where rows are dropped
    assert text_length(dataclasses.replace(config(600, None), hidden_size=8192), 8192) == 775
    assert text_length(config(600, None), 610) == 610
    both = config(600, 1024)
    assert text_length(dataclasses.replace(both, hidden_size=8192), 8192) == 1040
    names = [run.name for run in planned_runs(both, [0] * 1040)]
    assert names[-3:] == ["window of 600", "rotary scaling at 1024", "rows beyond the window"]
    assert uncovered(both, 8192, 1040) == (
        "lengths from 1041 to 8192: eager PyTorch would take longer on them than the export",
    )
    assert uncovered(config(4096, None), 8192, 512)[1] == "window of 4096: it lies beyond the text"
    assert uncovered(config(1900, None), 8192, 1916)[1].endswith("its first step lies 2187 tokens into a text")


def test_surroundings_name_every_difference() -> None:
    here = Surroundings(provider="a", onnxruntime="1", processor="x")
    assert here.differences(dataclasses.asdict(here)) == ()
    assert len(here.differences({})) == 3

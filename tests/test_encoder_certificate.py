"""Certificates of encoders, classifiers and image encoders: the same commands as for decoders, faults are caught."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import numpy as np
import onnx
import pytest
from certificates import change_certificate, edit_attribute, edit_graph, edit_weight, rehash
from tiny_encoders import make_encoder, save_sentence_folder
from tiny_vision import make_vision, save_vision_folder

from graphport.cli import main
from graphport.export import export
from graphport.model_def.certificate import CertificateError, read_certificate
from graphport.model_def.signature import CERTIFICATE_FILE, TOKENIZER_FILE, read_manifest
from graphport.runtime import certified_bundle, load
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.verification import verify

KINDS = ("text", "vit classifier")
INVARIANCE = ["batch neighbours", "row order", "batch size", "earlier requests", "thread count", "max_length"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    image = make_vision("vit classifier")
    return {
        "text": save_sentence_folder(folder / "text", make_encoder("bert")),
        "vit classifier": save_vision_folder(folder / "image", image),
    }


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {kind: export(sources[kind], folder / kind.split()[0], precision="fp32").path for kind in KINDS}


@pytest.fixture(params=KINDS)
def bundle(request: pytest.FixtureRequest, made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(copytree(made[request.param], tmp_path / "bundle"))


def failed_checks(bundle: Path) -> list[str]:
    return [check.name for check in verify(bundle, device="cpu", threads=1).checks if not check.passed]


def test_the_certificate_holds_rows_of_every_output_and_stays_small(made: dict[str, Path]) -> None:
    for kind, outputs in (("text", {"hidden_states", "embeddings"}), ("vit classifier", {"hidden_states", "logits"})):
        manifest = read_manifest(made[kind])
        certificate = read_certificate(made[kind], manifest)
        assert certificate.original.keys() == outputs
        assert certificate.files.keys() == manifest.files.keys() - {CERTIFICATE_FILE}
        assert len(certificate.shipped) == 4
        assert (made[kind] / CERTIFICATE_FILE).stat().st_size < 2_000_000
        assert certificate.to_json() == (made[kind] / CERTIFICATE_FILE).read_text(encoding="utf-8")


def test_b57_verify_and_its_invariance_need_no_torch(bundle: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnx_ir', 'onnxscript', 'transformers'): sys.modules[name] = None\n"
        f"from graphport.cli import main; raise SystemExit(main(['verify', {str(bundle)!r}, '--json', '--invariance']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = [check["name"] for check in json.loads(done.stdout)["checks"]]
    wanted = [f"invariance: {name}" for name in INVARIANCE]
    assert set(wanted) <= set(names)
    assert ("invariance: padding" in names) == (read_manifest(bundle).kind == "encoder")


def test_against_the_source_and_written_anew(bundle: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources["text" if read_manifest(bundle).kind == "encoder" else "vit classifier"]
    (bundle / CERTIFICATE_FILE).unlink()
    rehash(bundle, certificate=False)
    with pytest.raises(CertificateError, match=r"has no certificate\.json"):
        load(bundle, strict=True)
    assert main(["verify", str(bundle), "--against", str(source), "--write"]) == 0
    load(bundle, strict=True, threads=1).close()
    assert main(["verify", str(bundle), "--against", str(source)]) == 0


def test_strict_refuses_changed_bytes_and_another_runtime(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified_bundle.onnxruntime, "__version__", "9.9.9")
    with pytest.raises(CertificateError, match=r"9\.9\.9 here"):
        load(bundle, strict=True, threads=1)
    data = bytearray((bundle / "model.onnx.data").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "model.onnx.data").write_bytes(data)
    with pytest.raises(CertificateError, match=r"strict=True, and model\.onnx\.data changed since the export"):
        load(bundle, strict=True, threads=1)


def test_a_damaged_certificate_is_replaced_only_where_it_is_asked_for(
    bundle: Path, sources: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = sources["text" if read_manifest(bundle).kind == "encoder" else "vit classifier"]
    change_certificate(bundle, format=99)
    rehash(bundle, certificate=False)
    assert main(["verify", str(bundle), "--against", str(source)]) == 1
    assert "has format 99, this graphport reads 5; install a newer graphport" in capsys.readouterr().err
    assert main(["verify", str(bundle), "--against", str(source), "--write"]) == 0
    assert "replacing the certificate: " in capsys.readouterr().err
    assert main(["verify", str(bundle)]) == 0


def flip_bit(values: np.ndarray) -> np.ndarray:
    values.view(np.uint32)[7, 11] ^= 1 << 23
    return values


def ignore_lengths(model: onnx.ModelProto) -> None:
    """Every text is as long as the longest of its batch."""
    graph = model.graph
    graph.node.insert(0, onnx.helper.make_node("ReduceMax", ["lengths"], ["fault_longest"], keepdims=1))
    graph.node.insert(1, onnx.helper.make_node("Max", ["lengths", "fault_longest"], ["fault_lengths"]))
    for node in list(graph.node)[2:]:
        for index, name in enumerate(node.input):
            if name == "lengths":
                node.input[index] = "fault_lengths"


QKV = "blocks.0.attention.query_key_value.weight_transposed"
FAULTS: dict[str, tuple[str, Callable[[onnx.ModelProto], None], str]] = {
    "weight bit flip": ("text", lambda m: edit_weight(m, QKV, flip_bit), "embeddings"),
    "swapped heads": ("text", lambda m: edit_weight(m, QKV, lambda w: np.roll(w, 16, axis=1)), "hidden states"),
    "position + 1": (
        "text",
        lambda m: edit_weight(m, "position.weight", lambda w: np.roll(w, -1, axis=0)),
        "hidden states",
    ),
    "wrong eps": ("text", lambda m: edit_attribute(m, "SkipLayerNormalization", "epsilon", 1e-2), "hidden states"),
    "image weight bit flip": ("vit classifier", lambda m: edit_weight(m, QKV, flip_bit), "logits"),
}
OUTPUTS = {"embeddings": "embeddings", "hidden states": "hidden states", "logits": "logits"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_the_numbers(fault: str, made: dict[str, Path], tmp_path: Path) -> None:
    kind, change, output = FAULTS[fault]
    bundle = Path(copytree(made[kind], tmp_path / "b"))
    edit_graph(bundle, lambda _: None)
    assert failed_checks(bundle) == []
    edit_graph(bundle, change)
    assert any(f", {OUTPUTS[output]}: relative against eager PyTorch" in name for name in failed_checks(bundle))


def test_a_mask_that_is_lost_shows_in_the_padded_batch_alone(made: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(copytree(made["text"], tmp_path / "b"))
    edit_graph(bundle, ignore_lengths)
    assert {name.split(",")[0] for name in failed_checks(bundle)} == {"padded batch"}
    assert main(["verify", str(bundle), "--invariance"]) == 1


def test_rows_that_see_each_other_fail_the_invariance(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = EncoderSession.run_images

    def broken(self: EncoderSession, pixels: np.ndarray, output: str) -> np.ndarray:
        found = run(self, pixels, output).copy()
        found[0] += 0.01 * (len(pixels) - 1)
        return found

    monkeypatch.setattr(EncoderSession, "run_images", broken)
    assert main(["verify", str(made["vit classifier"]), "--invariance"]) == 1


def test_a_tokenizer_off_by_one_word_is_caught(made: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(copytree(made["text"], tmp_path / "b"))
    path = bundle / TOKENIZER_FILE
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in vocabulary if token.isalpha()][-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    rehash(bundle)
    assert {name.split(":")[0] for name in failed_checks(bundle)} == {"tokenizer"}

"""Certificates of encoder-decoders: the same format and commands as for decoders, and faults of either graph show."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx
import pytest
from certificates import change_certificate, edit_graph, edit_weight, lose_last_token, rehash
from numpy.typing import NDArray
from onnx import helper
from tiny_encoder_decoders import LANGUAGES, language_tokenizer, make_encoder_decoder

from graphport.cli import main
from graphport.export import export
from graphport.model_def.audio_config import num_frames
from graphport.model_def.certificate import CERTIFICATE_FORMAT, CertificateError, read_certificate
from graphport.model_def.certified_inputs import SourceInputs
from graphport.model_def.seeded_sources import certified_sources, seeded_features
from graphport.model_def.signature import (
    CERTIFICATE_FILE,
    ENCODER_GRAPH_FILE,
    ENCODER_WEIGHTS_FILE,
    GRAPH_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    read_manifest,
)
from graphport.runtime import certified_bundle, load
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.source_invariance import check_source_invariance
from graphport.runtime.source_rows import SourceRows
from graphport.runtime.verification import verify

KINDS = ("bart", "t5", "whisper")  # learned positions and a tokenizer, relative ones, recordings
RUNS = {"prefill", "decode", "chunked prefill", "rewind", "ragged batch", "another source"}
STEPS = RUNS - {"prefill"}
INVARIANCE = [
    "batch neighbours",
    "row order",
    "padding",
    "chunk size 1",
    "chunk size 7",
    "rewind",
    "another source",
    "beams",
    "cache growth",
    "max_length",
    "earlier requests",
    "thread count",
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    for kind in KINDS:
        make_encoder_decoder(kind).save_pretrained(folder / kind)
    language_tokenizer().save(str(folder / "bart" / "tokenizer.json"))
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {kind: export(sources[kind], folder / kind, precision="fp32").path for kind in KINDS}


@pytest.fixture
def bundle(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(copytree(made["bart"], tmp_path / "bundle"))


def failed_checks(bundle: Path) -> list[str]:
    return [check.name for check in verify(bundle, device="cpu", threads=1).checks if not check.passed]


def failed_runs(bundle: Path) -> set[str]:
    return {name.split(":")[0] for name in failed_checks(bundle)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_certificate_holds_rows_and_what_was_fed_and_stays_small(kind: str, made: dict[str, Path]) -> None:
    manifest = read_manifest(made[kind])
    certificate = read_certificate(made[kind], manifest)
    inputs = certificate.inputs
    assert isinstance(inputs, SourceInputs)
    lengths = [len(source) for source in inputs.sources]
    assert lengths == {"bart": [72, 1, 17, 5], "t5": [150, 1, 17, 5], "whisper": []}[kind]
    assert len(certificate.original["logits"].positions) == (3 if kind == "whisper" else 4) * len(inputs.ids)
    assert certificate.shipped.keys() == RUNS
    assert certificate.files.keys() == manifest.files.keys() - {CERTIFICATE_FILE}
    assert (made[kind] / CERTIFICATE_FILE).stat().st_size < 1_000_000
    assert certificate.to_json() == (made[kind] / CERTIFICATE_FILE).read_text(encoding="utf-8")
    assert ("sources of 151 to 512 tokens" in " ".join(certificate.uncovered)) == (kind == "t5")
    assert not any("chat template" in words for words in certificate.uncovered)


def test_recordings_are_drawn_anew_to_the_same_bits(made: dict[str, Path]) -> None:
    manifest = read_manifest(made["whisper"])
    inputs = read_certificate(made["whisper"], manifest).inputs
    assert isinstance(inputs, SourceInputs)
    encoder = manifest.config.encoder
    assert encoder is not None
    found = certified_sources(manifest.config, inputs)
    again = seeded_features(encoder, 3, seed=inputs.seed)
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))
    assert again[0].shape == (80, num_frames(50))
    assert not np.array_equal(again[0], again[1])
    whole = np.stack(again)
    assert (float(whole.min()) >= -1, float(whole.max()) < 1) == (True, True)
    assert abs(float(whole.mean())) < 0.01
    assert again[0][0, 0] == np.float32((np.random.PCG64(inputs.seed).random_raw() >> 40) / 2**23 - 1)


def test_b57_verify_its_invariance_and_a_fault_of_the_encoder_need_no_torch(
    made: dict[str, Path], bundle: Path
) -> None:
    edit_graph(bundle, lambda m: edit_weight(m, QKV, flip_bit), graph=ENCODER_GRAPH_FILE, weights=ENCODER_WEIGHTS_FILE)
    commands = [["verify", str(made[kind]), "--json", "--invariance", "--device", "cpu"] for kind in KINDS]
    commands.append(["verify", str(bundle), "--json"])
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnx_ir', 'onnxscript', 'transformers'): sys.modules[name] = None\n"
        "from graphport.cli import main\n"
        f"raise SystemExit(''.join(str(main(command)) for command in {commands!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "0001"
    *found, faulty = [json.loads(line) for line in done.stdout.splitlines()]
    for kind, result in zip(KINDS, found, strict=True):
        names = [check["name"] for check in result["checks"]]
        assert [f"invariance: {name}" for name in INVARIANCE] == [name for name in names if name.startswith("inv")]
        assert {name.split(":")[0] for name in names} - {"files", "tokenizer", "invariance"} == RUNS
        assert ("tokenizer: texts with other ids" in names) == (kind == "bart")
    failed = {check["name"].split(":")[0] for check in faulty["checks"] if not check["passed"]}
    assert failed == RUNS


@pytest.mark.parametrize("kind", ["bart", "whisper"])
def test_against_the_source_and_written_anew(
    kind: str, made: dict[str, Path], sources: dict[str, Path], tmp_path: Path
) -> None:
    bundle = Path(copytree(made[kind], tmp_path / "bundle"))
    load(bundle, strict=True, threads=1).close()
    (bundle / CERTIFICATE_FILE).unlink()
    rehash(bundle, certificate=False)
    with pytest.raises(CertificateError, match=r"has no certificate\.json"):
        load(bundle, strict=True)
    assert main(["verify", str(bundle), "--against", str(sources[kind]), "--write"]) == 0
    load(bundle, strict=True, threads=1).close()
    assert main(["verify", str(bundle), "--against", str(sources[kind])]) == 0
    make_encoder_decoder(kind, seed=1).save_pretrained(tmp_path / "other")
    assert main(["verify", str(bundle), "--against", str(tmp_path / "other")]) == 1


def test_a_certificate_of_checks_alone_is_refused_and_replaced_where_it_is_asked_for(
    bundle: Path, sources: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    change_certificate(bundle, format="checks alone")  # what encoder-decoders had
    rehash(bundle, certificate=False)
    assert main(["verify", str(bundle)]) == 1
    assert f"has format checks alone, this graphport reads {CERTIFICATE_FORMAT}; make one" in capsys.readouterr().err
    assert main(["verify", str(bundle), "--against", str(sources["bart"]), "--write"]) == 0
    assert "replacing the certificate: " in capsys.readouterr().err
    load(bundle, strict=True, threads=1).close()


def test_strict_refuses_changed_bytes_and_verify_says_another_runtime(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certified_bundle.onnxruntime, "__version__", "9.9.9")
    with pytest.raises(CertificateError, match=r"9\.9\.9 here"):
        load(bundle, strict=True, threads=1)
    result = verify(bundle, device="cpu", threads=1)
    assert result.passed
    assert any("9.9.9 here" in note for note in result.notes)
    assert not any("itself as exported" in check.name for check in result.checks)  # other kernels: only the original
    data = bytearray((bundle / ENCODER_WEIGHTS_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / ENCODER_WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(CertificateError, match=r"strict=True, and encoder\.onnx\.data changed since the export"):
        load(bundle, strict=True, threads=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sources": [[5] * 73]}, "has sources longer than the model reads"),
        ({"sources": [[5], [67]]}, "has ids beyond the vocabulary"),
        ({"sources": [[5], []]}, "is for another vocabulary or no text"),
        ({"ids": [5, 67]}, "has ids beyond the vocabulary"),
        ({"sources": []}, "is for sources of another kind, or for none"),
        ({"num_recordings": 2}, "is for sources of another kind, or for none"),
        ({"sources": [], "num_recordings": 2}, "is for sources of another kind, or for none"),
        ({"seed": -1}, "is for sources of another kind, or for none"),
        ({"ids": None}, "is damaged"),
    ],
)
def test_inputs_of_another_model_are_refused_in_one_line(changes: dict[str, Any], words: str, bundle: Path) -> None:
    inputs = json.loads((bundle / CERTIFICATE_FILE).read_text(encoding="utf-8"))["inputs"]
    change_certificate(bundle, inputs={**inputs, **changes})
    rehash(bundle, certificate=False)
    with pytest.raises(CertificateError, match=words):
        verify(bundle, device="cpu", threads=1)


def test_more_recordings_than_any_certificate_has_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(copytree(made["whisper"], tmp_path / "bundle"))
    inputs = json.loads((bundle / CERTIFICATE_FILE).read_text(encoding="utf-8"))["inputs"]
    change_certificate(bundle, inputs={**inputs, "num_recordings": 10**9})
    rehash(bundle, certificate=False)
    with pytest.raises(CertificateError, match=r"has 1000000000 recordings, more than any certificate \(16\)"):
        verify(bundle, device="cpu", threads=1)


def flip_bit(values: NDArray[Any]) -> NDArray[Any]:
    values.view(np.uint32)[7, 11] ^= 1 << 23  # twice or half the value
    return values


def read_another_row(model: onnx.ModelProto) -> None:
    """Keys and values of layer 1's source are those of the row that is as far from the other end of the batch."""
    graph = model.graph
    for name in ("source.1.key", "source.1.value"):
        for node in graph.node:
            for index, read in enumerate(node.input):
                if read == name:
                    node.input[index] = f"fault_{name}"
        inputs = [name, "fault_begin", "fault_end", "fault_axis", "fault_step"]
        graph.node.insert(0, helper.make_node("Slice", inputs, [f"fault_{name}"]))
    values = {"begin": -1, "end": -(2**31), "axis": 0, "step": -1}
    for name, value in values.items():
        graph.initializer.append(helper.make_tensor(f"fault_{name}", onnx.TensorProto.INT64, [1], [value]))


QKV = "blocks.0.attention.query_key_value.weight_transposed"
DECODER, ENCODER = (GRAPH_FILE, WEIGHTS_FILE), (ENCODER_GRAPH_FILE, ENCODER_WEIGHTS_FILE)
Change = Callable[[onnx.ModelProto], None]
FAULTS: dict[str, tuple[str, tuple[str, str], Change, set[str]]] = {
    "weight bit flip": ("bart", DECODER, lambda m: edit_weight(m, QKV, flip_bit), RUNS),
    "encoder's weight bit flip": ("bart", ENCODER, lambda m: edit_weight(m, QKV, flip_bit), RUNS),
    "swapped heads of cross-attention": (
        "bart",
        DECODER,
        lambda m: edit_weight(m, "blocks.0.cross_attention.query.weight", lambda w: np.roll(w, 8, axis=1)),
        RUNS,
    ),
    "source's position + 1": (
        "bart",
        ENCODER,
        lambda m: edit_weight(m, "position.weight", lambda w: np.roll(w, -1, axis=0)),
        RUNS,
    ),
    "source's row of another": ("bart", DECODER, read_another_row, {"ragged batch"}),
    "missing last token in the cache": ("bart", DECODER, lose_last_token, STEPS),
    "relative distance + 1": (
        "t5",
        DECODER,
        lambda m: edit_weight(m, "embedding_1", lambda w: np.roll(w, 1, axis=0)),
        RUNS,
    ),
    "source's relative bias": (
        "t5",
        ENCODER,
        lambda m: edit_weight(m, "relative_bias.weight", lambda w: np.roll(w, 1, axis=0)),
        RUNS,
    ),
    "row of another source, relative bias": ("t5", DECODER, read_another_row, {"ragged batch"}),
    "missing last token, relative bias": ("t5", DECODER, lose_last_token, STEPS),
    "frames' positions": (
        "whisper",
        ENCODER,
        lambda m: edit_weight(m, "frames.positions", lambda w: np.roll(w, 1, axis=0)),
        RUNS,
    ),
    "row of another recording": ("whisper", DECODER, read_another_row, {"ragged batch"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_only_written_again_passes(kind: str, made: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(copytree(made[kind], tmp_path / "b"))
    for graph, weights in (DECODER, ENCODER):
        edit_graph(bundle, lambda _: None, graph=graph, weights=weights)
    assert failed_checks(bundle) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_the_numbers(fault: str, made: dict[str, Path], tmp_path: Path) -> None:
    kind, (graph, weights), change, runs = FAULTS[fault]
    bundle = Path(copytree(made[kind], tmp_path / "b"))
    edit_graph(bundle, change, graph=graph, weights=weights)
    failed = failed_checks(bundle)
    assert {name.split(":")[0] for name in failed} == runs
    assert {name.split(":")[0] for name in failed if name.endswith("against eager PyTorch")} == runs


def test_a_longer_source_that_still_shows_is_caught(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write = SourceRows.write

    def broken(self: SourceRows, slot: int, rows: Any) -> None:
        before = int(self.lengths[slot])
        write(self, slot, rows)
        self.lengths[slot] = max(before, int(self.lengths[slot]))

    monkeypatch.setattr(SourceRows, "write", broken)
    for kind in ("bart", "t5"):
        assert failed_runs(made[kind]) == {"another source"}
    assert main(["verify", str(made["bart"]), "--invariance"]) == 1


def test_a_cache_that_forgets_to_rewind_is_caught(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    rewind = KVCache.rewind
    monkeypatch.setattr(KVCache, "rewind", lambda self, slot, length: None if length else rewind(self, slot, 0))
    assert failed_runs(made["t5"]) == {"rewind"}


def test_rows_that_read_the_source_of_a_neighbour_fail_the_invariance(bundle: Path) -> None:
    edit_graph(bundle, read_another_row)
    certificate = read_certificate(bundle, read_manifest(bundle))
    assert isinstance(certificate.inputs, SourceInputs)
    checks = check_source_invariance(open_bundle(bundle), certificate.inputs, device="cpu", threads=1)
    failed = {check.name.removeprefix("invariance: ") for check in checks if not check.passed}
    assert {"batch neighbours", "padding"} <= failed <= {"batch neighbours", "padding", "row order"}


def test_too_short_a_text_is_refused_by_the_invariance_alone(bundle: Path) -> None:
    certificate = read_certificate(bundle, read_manifest(bundle))
    assert isinstance(certificate.inputs, SourceInputs)
    short = dataclasses.replace(certificate.inputs, ids=certificate.inputs.ids[:7])
    with pytest.raises(ValueError, match="invariance needs a text of 8 tokens, got 7; export with a larger --context"):
        check_source_invariance(open_bundle(bundle), short)


def test_a_tokenizer_that_names_another_language_is_caught(bundle: Path) -> None:
    path = bundle / TOKENIZER_FILE
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["post_processor"]["special_tokens"]["en_XX"]["ids"] = [LANGUAGES["de_DE"]]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    rehash(bundle)
    assert failed_runs(bundle) == {"tokenizer"}

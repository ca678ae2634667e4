"""`graphport embed`: vectors on stdout, timing on stderr, texts from arguments, a file or stdin."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_encoders import make_encoder, save_sentence_folder

from graphport.cli import main
from graphport.runtime import load_encoder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle made by the command itself."""
    folder = tmp_path_factory.mktemp("embed")
    source = save_sentence_folder(folder / "source", make_encoder("bert"))
    assert main(["export", str(source), str(folder / "bundle"), "--precision", "int8"]) == 0
    return folder / "bundle"


def _vectors(out: str) -> np.ndarray:
    return np.array([json.loads(line) for line in out.splitlines()])


def test_one_vector_a_line_from_arguments_a_file_and_stdin(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["embed", str(bundle), "a text", "naïve café"]) == 0
    out, err = capsys.readouterr()
    found = _vectors(out)
    assert "2 texts, 48 dimensions" in err
    with load_encoder(bundle) as encoder:
        assert np.array_equal(found.astype(np.float32), encoder.encode(["a text", "naïve café"]))
    (tmp_path / "texts.txt").write_text("a text\nnaïve café\n", encoding="utf-8")
    assert main(["embed", str(bundle), "--file", str(tmp_path / "texts.txt")]) == 0
    assert np.array_equal(_vectors(capsys.readouterr().out), found)
    monkeypatch.setattr("sys.stdin", io.StringIO("a text\nnaïve café\n"))
    assert main(["embed", str(bundle)]) == 0
    assert np.array_equal(_vectors(capsys.readouterr().out), found)


def test_only_ends_of_lines_end_a_text(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    texts = ["a\u2028text", "", "the\x0ccat\x85sat", "x\r"]
    (tmp_path / "texts.txt").write_bytes("\r\n".join(texts).encode() + b"\n")
    with load_encoder(bundle) as encoder:
        expected = encoder.encode([*texts[:-1], "x"])
    assert main(["embed", str(bundle), "--file", str(tmp_path / "texts.txt")]) == 0
    assert np.array_equal(_vectors(capsys.readouterr().out).astype(np.float32), expected)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    assert main(["embed", str(bundle)]) == 0
    assert np.array_equal(_vectors(capsys.readouterr().out).astype(np.float32), expected)


def test_json_is_one_object_and_options_are_heeded(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    command = ["embed", str(bundle), "a", "the " * 40, "--truncate", "--no-normalize", "--batch-size", "1", "--json"]
    assert main(command) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["bundle"], data["dimension"], len(data["embeddings"])) == (str(bundle), 48, 2)
    assert abs(np.linalg.norm(data["embeddings"][0]) - 1) > 0.01


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["a", "--file", "x"], 2, "give texts or --file, not both"),
        (["the " * 40], 1, "text 0 has 42 tokens, more than max_length (32)"),
        (["--file", "/nowhere.txt"], 1, "no file at /nowhere.txt; --file names a text in UTF-8"),
    ],
)
def test_what_cannot_be_embedded_is_one_line(
    arguments: list[str], status: int, message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["embed", str(bundle), *arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_other_commands_say_what_an_encoder_is(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(bundle), "Hello"]) == 1
    assert (
        "is an encoder, which continues no text; use load, and encode, or `graphport embed`" in capsys.readouterr().err
    )
    assert main(["report", str(bundle)]) == 0
    err = capsys.readouterr().err
    assert "mean, normalised" in err
    assert "KV cache" not in err
    assert main(["verify", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    source = bundle.parent / "source"
    assert main(["verify", str(bundle), "--against", str(source)]) == 0
    assert "running eager PyTorch" in capsys.readouterr().err

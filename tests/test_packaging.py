"""What a user receives: the wheel made from the source archive, the Makefile, the README, and the rules on imports.

In: a copy of the checkout. Nothing is installed and nothing is fetched.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer

from graphport.cli import app

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE = ("pyproject.toml", "README.md", "model_def", "export", "runtime", "src")


def _copy(target: Path) -> Path:
    for name in PACKAGE:
        source = CHECKOUT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(source, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target / name)
    return target


def _import_every_module(installed: Path) -> subprocess.CompletedProcess[str]:
    script = CHECKOUT / ".ci/import_every_module.py"
    checkout = str(CHECKOUT / "src/graphport")
    code = f"import runpy, sys; sys.path.insert(0, {str(installed)!r}); sys.argv = ['', {checkout!r}]; "
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=120)


def test_wheel_from_the_source_archive_has_every_module_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "checkout"
    source.mkdir()
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(_copy(source))]
    done = subprocess.run(build, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert "graphport/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"graphport"}
    done = _import_every_module(tmp_path / "installed")
    assert done.returncode == 0, done.stderr
    (tmp_path / "installed/graphport/model_def/config.py").unlink()
    (tmp_path / "installed/graphport/py.typed").unlink()
    done = _import_every_module(tmp_path / "installed")
    assert done.returncode == 1
    assert "graphport.model_def.config is not in the wheel" in done.stderr
    assert "without py.typed" in done.stderr


def test_import_check_refuses_the_checkout_itself() -> None:
    done = _import_every_module(CHECKOUT / "src")
    assert done.returncode == 1
    assert "the checkout itself" in done.stderr


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; "
    code += "sys.exit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("model_def/config.py", "import graphport.export", "model_def knows neither export nor runtime"),
        ("model_def/signature.py", "import graphport.runtime", "model_def knows neither export nor runtime"),
        ("model_def/config.py", "import graphport.cli", "model_def knows neither export nor runtime"),
        ("export/__init__.py", "import graphport.runtime", "export and runtime do not know each other"),
        ("runtime/__init__.py", "import graphport.export", "export and runtime do not know each other"),
        ("runtime/__init__.py", "import torch", "runtime needs no torch, onnx or onnxscript"),
        ("runtime/__init__.py", "import graphport.zz_uses_gguf", "runtime needs no torch, onnx or onnxscript"),
        ("model_def/position_config.py", "import numpy", "the shared contracts are torch-free"),
        ("model_def/signature.py", "import torch", "the shared contracts are torch-free"),
        ("src/graphport/cli_tables.py", "import torch", "the command line starts without torch"),
        ("src/graphport/cli_answers.py", "import onnxruntime", "the command line starts without torch"),
    ],
)
def test_each_import_rule_can_fail(module: str, line: str, contract: str, tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    (folder / "src/graphport/zz_uses_gguf.py").write_text("import gguf\n")
    path = folder / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = _lint_imports(folder)
    assert done.returncode == 1, done.stdout
    assert f"{contract} BROKEN" in " ".join(done.stdout.split())


def test_import_rules_hold(tmp_path: Path) -> None:
    done = _lint_imports(_copy(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


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
        '#!/bin/sh\necho "$@" >> calls\n[ $1 = generate ] || { mkdir -p "$3" && : > "$3/manifest.json"; }\n'
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


def test_constraints_pin_every_requirement_exactly() -> None:
    lines = [line for line in (CHECKOUT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pinned = {re.sub(r"[._-]+", "-", line.split("==")[0]).lower() for line in lines}
    required = set(re.findall(r'^ +"([a-z0-9-]+)[>=\[]', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE))
    # graphport is this project; plain onnxruntime is for machines without a GPU wheel
    assert required - pinned == {"graphport", "onnxruntime"}
    assert "torch==2.13.0" in lines


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

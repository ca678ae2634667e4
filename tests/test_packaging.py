"""What a user installs: the wheel made from the source archive, the pinned versions; and the rules on imports.

In: a copy of the checkout. Nothing is installed and nothing is fetched.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    assert {"graphport/py.typed", "graphport/runtime/server_page.html"} <= set(names)
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
        ("src/graphport/cli_run.py", "import graphport.export", "the command line starts without torch"),
        ("src/graphport/cli_serve.py", "import torch", "the command line starts without torch"),
        ("src/graphport/cli_eval.py", "import graphport.export.source", "the command line starts without torch"),
        ("src/graphport/cli_options.py", "import torch", "the command line starts without torch"),
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


def test_constraints_pin_every_requirement_exactly() -> None:
    lines = [line for line in (CHECKOUT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pinned = {re.sub(r"[._-]+", "-", line.split("==")[0]).lower() for line in lines}
    required = set(re.findall(r'^ +"([a-z0-9-]+)[>=\[]', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE))
    # graphport is this project; plain onnxruntime is for machines without a GPU wheel; where there is a GPU, torch pins
    # the libraries of CUDA itself
    others = {name for name in required - pinned if not name.startswith("nvidia-")}
    assert others == {"graphport", "onnxruntime"}
    assert "torch==2.13.0" in lines

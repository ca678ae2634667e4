"""docs/server.md: its Python and its curl run as they stand, against a server at the address that they name."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_bundles import write_tiny_bundle
from tiny_server import TinyServer, serving

TEXT = (Path(__file__).resolve().parent.parent / "docs/server.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
CURL = re.findall(r"```sh\n(curl .*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    write_tiny_bundle(folder / "build/model", tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def server(workplace: Path) -> Iterator[TinyServer]:
    with serving({"model": workplace / "build/model"}) as running:
        yield running


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_of_the_page_runs(
    number: int,
    server: TinyServer,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workplace)
    code = PYTHON[number].replace("http://127.0.0.1:8000", server.url)
    exec(compile(code, "page", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", CURL)
def test_curl_of_the_page_runs(command: str, server: TinyServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    done = subprocess.run(
        ["bash", "-c", command.replace("http://127.0.0.1:8000", server.url)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("data: {")
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_the_page_shows_both() -> None:
    assert len(PYTHON) == 2
    assert len(CURL) == 1

"""`graphport serve` before anything is served: names of models, missing packages, addresses, keys."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_bundles import write_tiny_bundle

from graphport.cli import main
from graphport.cli_serve import _is_loopback
from graphport.runtime import server as server_module


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("command") / "tiny", tokenizer=True).folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be served: the servers are made, and not run."""
    servers: list[Any] = []

    def run(self: Any, on_ready: Any) -> None:
        servers.append(self)
        on_ready()
        for model in self._models.by_name.values():
            model.background.close()
            model.lm.close()

    monkeypatch.setattr(server_module.Server, "run", run)
    monkeypatch.setattr(server_module, "raise_file_limit", lambda: None)
    monkeypatch.setattr("graphport.runtime.server_log.log_as_json", lambda **_: None)
    return servers


def test_models_are_named_by_their_folders_or_as_told(
    bundle: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--port", "0", "--prefix-cache", "0", "--threads", "1", "--max-batch", "3", "--max-queue", "5"]
    assert main(["serve", str(bundle), f"other={bundle}", *options]) == 0
    (server,) = started
    assert list(server._models.by_name) == ["tiny", "other"]
    places = server._models.by_name["other"].places
    assert (places._running, places._most) == (3, 8)
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["{bundle}", "{bundle}"], 2, "two bundles have the name 'tiny'; give NAME=BUNDLE"),
        (["={bundle}"], 2, "empty name or path"),
        (["x="], 2, "empty name or path"),
        (["nowhere/at/all"], 1, "nowhere/at/all"),
        (["{bundle}", "--port", "70000"], 2, "--port.*65535"),
        (["{bundle}", "--port", "{taken}"], 1, "cannot listen on 127.0.0.1 port .*; choose another --host or --port"),
        (["{bundle}", "--host", "no.such.host.invalid"], 1, "cannot listen on no.such.host.invalid"),
        (["{bundle}", "--prefill-products", "float32"], 1, "cannot be heeded by .*: its matrices are not quantised"),
        (["{bundle}", "--grace", "-1"], 1, "grace must be a number of seconds above 0; got -1"),
        (["{bundle}", "--api-key-file", "{bundle}/none"], 1, "No such file"),
        (["{bundle}", "--max-length", "1000"], 1, "--max-length must be 1 to 128, the limit of .*tiny; got 1000"),
    ],
)
def test_bad_arguments_are_told_in_one_line(
    arguments: list[str], status: int, why: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        filled = [each.format(bundle=bundle, taken=taken.getsockname()[1]) for each in arguments]
        assert main(["serve", "--port", "0", *filled]) == status
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("graphport: error: ")
    with pytest.raises(ValueError, match=why):
        raise ValueError(error)


def test_a_later_bundle_that_cannot_be_served_is_refused_before_the_first_is_opened(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = write_tiny_bundle(tmp_path / "short", max_length=64).folder
    monkeypatch.setattr("graphport.runtime.load", lambda *_, **__: pytest.fail("a bundle was opened"))
    for later, options, why in (
        (tmp_path / "none", [], "none"),
        (short, ["--max-length", "100"], "--max-length must be 1 to 64, the limit of .*short; got 100"),
    ):
        assert main(["serve", str(bundle), str(later), "--port", "0", *options]) == 1
        with pytest.raises(ValueError, match=why):
            raise ValueError(capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "prometheus_client"])
def test_a_missing_package_names_the_extra(
    package: str, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package or "runtime.server" in name]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.split(".", maxsplit=1)[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert main(["serve", str(bundle)]) == 1
    assert f'needs {package}, which is not installed; do: pip install "graphport[serve]"' in capsys.readouterr().err


def test_listening_beyond_this_machine_without_keys_is_warned_of(
    bundle: Path, started: list[Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert _is_loopback("127.0.0.1")
    assert _is_loopback("::1")
    assert _is_loopback("localhost")
    assert not _is_loopback("0.0.0.0")
    options = [str(bundle), "--host", "0.0.0.0", "--port", "0", "--prefix-cache", "0"]
    assert main(["serve", *options]) == 0
    assert "anybody who reaches 0.0.0.0 can use the models" in caplog.text
    caplog.clear()
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-is-long-enough\n")
    assert main(["serve", *options, "--api-key-file", str(keys)]) == 0
    assert "anybody" not in caplog.text
    assert "a-key" not in json.dumps([record.getMessage() for record in caplog.records])

"""The comparison of servers: both answer the same requests by turns; the peer is built once from pinned sources.

In: a tiny bundle, served twice. llama.cpp's server is not built here.
"""

import contextlib
import functools
import sys
from http.client import HTTPConnection
from pathlib import Path

import peer_environments
import pytest
import servers
from peer_process import PeerError
from tiny_bundles import VOCAB, write_tiny_bundle

CODE = "import sys; from graphport.cli import main; sys.exit(main())"


def _served(name: str, bundle: Path) -> servers.AskedServer:
    port = servers._free_port()
    command = [sys.executable, "-c", CODE, "serve", f"model={bundle}", "--port", str(port), "--max-batch", "2"]
    return servers.AskedServer(name, [*command, "--threads", "1", "--prefix-cache", "0"], port, cpu_time=True)


def _tokens_generated(server: servers.AskedServer) -> float:
    with contextlib.closing(HTTPConnection("127.0.0.1", server._port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("graphport_generated_tokens_total")).split()[-1])


def test_servers_are_asked_by_turns_and_compared(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "tiny", max_length=64).folder
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(contextlib.closing(_served(name, bundle))) for name in ("a", "b")]
        for server in both:
            with server.awake():
                server.wait()
        with pytest.raises(PeerError, match=r"a did not give 90 tokens: .*context_length_exceeded"):
            both[0].seconds([[1, 2, 3]], 90)
        for server in both:
            server.clock = functools.partial(_tokens_generated, server)  # the only time that is the same each time
        found = servers.measure(both, callers=(1, 2), new_tokens=25, rounds=1, vocab_size=VOCAB)
        assert found == [servers.Rates(name=name, by_callers={1: 1.0, 2: 1.0}) for name in ("a", "b")]
        both[1].clock = lambda: 1.0
        with pytest.raises(PeerError, match="b took no longer for 3 tokens than for one; ask for more"):
            servers.measure(both, callers=(1,), new_tokens=3, rounds=1, vocab_size=VOCAB)


def test_a_server_that_ends_before_it_answers_is_told() -> None:
    with (
        contextlib.closing(servers.AskedServer("x", ["/bin/false"], servers._free_port(), cpu_time=False)) as server,
        pytest.raises(PeerError, match="x ended with status 1 before it answered"),
    ):
        server.wait()


def test_the_peers_server_is_built_once_from_the_pinned_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def record(command: list[str | Path], _: Path) -> None:
        """Writes a command down, and makes what it would make."""
        words = [str(word) for word in command]
        ran.append(words)
        if "venv" in words:
            Path(words[-1]).mkdir(parents=True)
        elif "download" in words:
            work = Path(words[words.index("--dest") + 1])
            work.mkdir()
            (work / "llama_cpp_python-1.tar.gz").touch()
        elif "tarfile" in words:
            (Path(words[-1]) / "llama_cpp_python-1/vendor/llama.cpp").mkdir(parents=True)
        elif "--build" in words:
            built = Path(words[words.index("--build") + 1]) / "bin/llama-server"
            built.parent.mkdir(parents=True)
            built.touch()

    monkeypatch.setattr(peer_environments, "_logged", record)
    server = peer_environments.llama_server(tmp_path)
    assert server == tmp_path / "llama_server/llama-server"
    assert server.is_file()
    assert not (tmp_path / "llama_server/work").exists()
    pinned = (peer_environments.HERE / "requirements_llama_cpp.txt").read_text().splitlines()
    assert ran[2][-1] in pinned
    assert len(ran) == 6
    assert peer_environments.llama_server(tmp_path) == server
    assert len(ran) == 6
    (tmp_path / "llama_server/built_from.txt").write_text("llama-cpp-python==0")
    peer_environments.llama_server(tmp_path)
    assert len(ran) == 10

"""`graphport serve` and llama.cpp's server with as many slots: tokens a second of many callers at once, by HTTP.

    python benchmarks/servers.py MODEL.gguf BUNDLE [--callers 1,8,16] [--new-tokens 48] [--rounds 3] [--out FILE.md]

Both answer the same requests (/v1/completions, prompts as ids, greedy), in processes of their own that take turns; the
one that is not asked is stopped. llama.cpp's server is built once, below build/peers, from the sources of its Python
package: a quarter of an hour on 2 cores. On a busy machine give --cpu-time --threads 1.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]  # it has no types
from machine import commit, describe_machine
from options import count, lengths
from peer_environments import llama_server
from peer_process import PeerError

from graphport.runtime.bundle_files import open_bundle

PROMPT = 32
READY_SECONDS = 120.0


class AskedServer:
    """A server process, which runs only while it is asked. `clock`: seconds of its CPU time, or of the wall."""

    def __init__(self, name: str, command: Sequence[str | Path], port: int, *, cpu_time: bool) -> None:
        self.name = name
        self._port = port
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.clock: Callable[[], float] = self._cpu_seconds if cpu_time else time.perf_counter

    def wait(self) -> None:
        """Return when it answers. Raises PeerError if it ends, or never does."""
        last = time.monotonic() + READY_SECONDS
        while time.monotonic() < last:
            if self._process.poll() is not None:
                raise PeerError(f"{self.name} ended with status {self._process.returncode} before it answered")
            connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
            with contextlib.suppress(OSError), contextlib.closing(connection):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.1)
        raise PeerError(f"{self.name} did not answer within {READY_SECONDS:g} s")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """It runs within."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def seconds(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Time for all `prompts`, asked at once by a caller each."""
        with self.awake(), ThreadPoolExecutor(len(prompts)) as callers:
            begin = self.clock()
            list(callers.map(lambda prompt: self._ask(prompt, new_tokens), prompts))
            return self.clock() - begin

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _ask(self, prompt: Sequence[int], new_tokens: int) -> None:
        body = {"model": "model", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        connection = HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            record = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200 or record["usage"]["completion_tokens"] != new_tokens:
            raise PeerError(f"{self.name} did not give {new_tokens} tokens: {json.dumps(record)[:300]}")

    def _cpu_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens a second of one server, by number of callers."""

    name: str
    by_callers: dict[int, float]


def measure(
    servers: Sequence[AskedServer], *, callers: Sequence[int], new_tokens: int, rounds: int, vocab_size: int
) -> list[Rates]:
    """Medians of `rounds` after one that does not count; a run of one token is taken off, so that prompts do not."""
    random = np.random.default_rng(0)

    def prompts(num: int) -> list[list[int]]:
        """New ones each time, of which no server knows a beginning."""
        ids: list[list[int]] = random.integers(vocab_size, size=(num, PROMPT)).tolist()
        return ids

    found: dict[tuple[str, int], list[float]] = {(server.name, num): [] for server in servers for num in callers}
    for number in range(rounds + 1):
        for num in callers:
            for server in servers:
                first, whole = (server.seconds(prompts(num), new) for new in (1, new_tokens))
                if whole <= first:
                    raise PeerError(f"{server.name} took no longer for {new_tokens} tokens than for one; ask for more")
                if number:
                    found[server.name, num].append(num * (new_tokens - 1) / (whole - first))
        print(f"round {number} of {rounds}", file=sys.stderr)
    return [
        Rates(name=server.name, by_callers={num: statistics.median(found[server.name, num]) for num in callers})
        for server in servers
    ]


def main() -> int:
    arguments = _arguments()
    try:
        vocab_size = open_bundle(arguments.bundle).manifest.config.vocab_size
        peer = llama_server(arguments.environments)
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(contextlib.closing(each)) for each in _servers(arguments, peer)]
            for server in servers:
                with server.awake():
                    server.wait()
            found = measure(
                servers,
                callers=arguments.callers,
                new_tokens=arguments.new_tokens,
                rounds=arguments.rounds,
                vocab_size=vocab_size,
            )
    except (PeerError, ValueError, OSError) as error:
        print(f"servers: error: {error}", file=sys.stderr)
        return 1
    text = markdown(found, arguments)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def _servers(arguments: argparse.Namespace, peer: Path) -> Iterator[AskedServer]:
    most = str(max(arguments.callers))
    threads = str(arguments.threads)
    length = PROMPT + arguments.new_tokens
    code = "import sys; from graphport.cli import main; sys.exit(main())"
    ours = [sys.executable, "-c", code, "serve", f"model={arguments.bundle}", "--max-batch", most]
    ours += ["--threads", threads, "--max-length", str(length), "--prefix-cache", "0"]
    # a slot has its share of the context, which is rounded up to multiples of 256
    context = str(max(arguments.callers) * (-(-length // 256) * 256))
    theirs = [str(peer), "--model", str(arguments.model), "--parallel", most, "--ctx-size", context]
    theirs += ["--threads", threads, "--threads-batch", threads]
    for name, command in (
        ("graphport serve", ours),
        ("llama.cpp server", theirs),
        ("llama.cpp server, flash attention off", [*theirs, "--flash-attn", "off"]),
    ):
        port = _free_port()
        options = ["--host", "127.0.0.1", "--port", str(port)]
        yield AskedServer(name, [*command, *options], port, cpu_time=arguments.cpu_time)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def markdown(found: Sequence[Rates], arguments: argparse.Namespace) -> str:
    """The table, with where and how it was measured."""
    ours, *theirs = found
    clock = "CPU time of the servers" if arguments.cpu_time else "wall time"
    lines = [
        "# Servers",
        "",
        f"{datetime.date.today().isoformat()}, {describe_machine()}, {arguments.threads} threads, {clock}.",
        f"Command: `python {shlex.join(sys.argv)}`, commit {commit()}. Decoded tokens a second by HTTP, medians of "
        f"{arguments.rounds} rounds; to reach: llama.cpp's server at 8 and 16.",
        "",
        f"| callers | {' | '.join(rates.name for rates in found)} | to the faster of llama.cpp |",
        f"|---|{'---|' * (len(found) + 1)}",
    ]
    for num, rate in ours.by_callers.items():
        others = [rates.by_callers[num] for rates in theirs]
        values = " | ".join(f"{value:.1f}" for value in (rate, *others))
        lines.append(f"| {num} | {values} | {rate / max(others):.2f}x |")
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the .gguf file that llama.cpp serves")
    parser.add_argument("bundle", type=Path, help="what graphport made of it")
    parser.add_argument("--callers", type=lengths, default=(1, 8, 16))
    parser.add_argument("--new-tokens", type=count, default=48)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--threads", type=count, default=psutil.cpu_count() or 1)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine: the servers' CPU time")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"), help="where the peer is built")
    parser.add_argument("--out", type=Path, metavar="FILE.md")
    arguments = parser.parse_args()
    if arguments.new_tokens < 2:
        parser.error("--new-tokens must be at least 2: the first does not count")
    return arguments


if __name__ == "__main__":
    sys.exit(main())

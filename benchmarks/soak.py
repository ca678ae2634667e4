"""Thousands of mixed requests against `graphport serve`: every answer is verified, memory must stay flat.

    python benchmarks/soak.py BUNDLE [--requests 2000] [--concurrent 16] [--seed 0] [--out FILE.md]

The kinds are ragged, streamed, sampled, several samples, constrained, refused and cancelled requests. Each different
request is asked once alone first; then the mixture is asked by many threads at once and compared with that, text by
text. Memory is the server's resident set, sampled by the number of requests done. BUNDLE needs a chat template.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no types
from machine import commit, describe_machine
from soak_callers import Case, Said, SlowReader, ask, mixed_cases

MOST_GROWTH = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What came of it. `memory`: bytes after each sample's number of requests. `wrong`: what differed, in words."""

    counts: Counter[str]
    wrong: list[str]
    memory: list[tuple[int, int]]
    seconds: float

    @property
    def growth(self) -> float:
        """Growth of memory over the last half of the requests, as a share; of medians, which one peak does not move."""
        half = [size for done, size in self.memory if done >= self.memory[-1][0] / 2]
        if len(half) < 4:
            return 0.0
        quarter = len(half) // 2
        begin, end = sorted(half[:quarter]), sorted(half[-quarter:])
        return end[len(end) // 2] / begin[len(begin) // 2] - 1


def run_soak(
    host: str,
    port: int,
    cases: Sequence[Case],
    alone: Sequence[Said],
    *,
    requests: int,
    concurrent: int,
    seed: int,
    memory: Callable[[], int],
    note: Callable[[str], None] = lambda _: None,
) -> Soak:
    """Ask `requests` cases, drawn at random, `concurrent` at a time; `alone`: what is said to each when asked alone."""
    rng = random.Random(seed)
    order = [rng.randrange(len(cases)) for _ in range(requests)]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    sizes: list[tuple[int, int]] = []
    lock = threading.Lock()
    every = max(1, requests // 40)

    def one(number: int) -> None:
        case = cases[number]
        try:
            got = ask(host, port, case)
        except Exception as error:  # an answer that was lost
            got = 0, repr(error)
        with lock:
            counts[case.kind] += 1
            if got != alone[number]:
                wrong.append(f"{case.kind} {json.dumps(case.body)}: {got!r} instead of {alone[number]!r}")
            done = counts.total()
            if done % every == 0:
                sizes.append((done, memory()))
                if done % (4 * every) == 0:
                    note(f"{done} done, {len(wrong)} wrong, {sizes[-1][1] / 2**20:.1f} MiB")

    begin = time.monotonic()
    with ThreadPoolExecutor(concurrent) as threads:
        list(threads.map(one, order))
    return Soak(counts=counts, wrong=wrong, memory=sizes, seconds=time.monotonic() - begin)


@contextlib.contextmanager
def served(bundle: Path, options: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A server in a process of its own, ended by SIGTERM."""
    code = "import sys; from graphport.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", f"model={bundle}", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
        yield process, host, int(port)
        process.terminate()


def idle(host: str, port: int, count: int) -> list[socket.socket]:
    """Connections that ask nothing."""
    return [socket.create_connection((host, port)) for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--cases", type=int, default=80, help="different requests")
    parser.add_argument("--idle", type=int, default=1000, help="connections that ask nothing meanwhile")
    parser.add_argument("--most-words", type=int, default=60)
    parser.add_argument("--most-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    options = ["--read-timeout", "86400"] if arguments.idle else []
    options += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    cases = mixed_cases(
        "model",
        arguments.cases,
        seed=arguments.seed,
        most_words=arguments.most_words,
        most_tokens=arguments.most_tokens,
    )
    with served(arguments.bundle, options) as (process, host, port):
        connections = idle(host, port, arguments.idle)
        resident = psutil.Process(process.pid)
        alone = [ask(host, port, case) for case in cases]
        print(f"{len(cases)} requests were asked alone", file=sys.stderr)
        slow = SlowReader(host, port, cases[0])
        soak = run_soak(
            host,
            port,
            cases,
            alone,
            requests=arguments.requests,
            concurrent=arguments.concurrent,
            seed=arguments.seed,
            memory=lambda: resident.memory_info().rss,
            note=lambda line: print(line, file=sys.stderr),
        )
        if (said := slow.rest()) != alone[0]:
            soak.wrong.append(f"a byte a second: {said!r} instead of {alone[0]!r}")
        for connection in connections:
            connection.close()
    text = markdown(soak, arguments.idle)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return int(bool(soak.wrong) or soak.growth > MOST_GROWTH)


def markdown(soak: Soak, num_idle: int) -> str:
    """The result as a page."""
    total = soak.counts.total()
    lines = [f"| {kind} | {count} |" for kind, count in sorted(soak.counts.items())]
    sizes = ", ".join(f"{size / 2**20:.0f}" for _, size in soak.memory[:: max(1, len(soak.memory) // 10)])
    return "\n".join(
        [
            "# Soak of the server",
            "",
            f"`python benchmarks/soak.py {shlex.join(sys.argv[1:])}`, commit {commit()}, {describe_machine()}.",
            "",
            f"{total} requests in {soak.seconds:.0f} s beside {num_idle} idle connections and a caller who reads a "
            "byte a second; "
            f"{len(soak.wrong)} answers differed from those asked alone. Resident memory in MiB: {sizes}; growth over "
            f"the last half {soak.growth:+.2%} (at most {MOST_GROWTH:.0%}).",
            "",
            "| kind | requests |",
            "| --- | --- |",
            *lines,
            *([""] + [f"* {each}" for each in soak.wrong[:20]] if soak.wrong else []),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

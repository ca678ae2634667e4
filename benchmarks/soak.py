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
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it has no types
from machine import commit, describe_machine

WORDS = ("the", "cat", "sat", "on", "mat,", "and", "told", "a", "long", "story", "42", "& “gold”", "😀", "你好", "\n")
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MOST_GROWTH = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. `is_left`: its caller reads some bytes and leaves."""

    kind: str
    path: str
    body: dict[str, Any]
    is_left: bool = False


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


def mixed_cases(model: str, count: int, *, seed: int, most_words: int, most_tokens: int) -> list[Case]:
    """`count` different requests of all kinds."""
    rng = random.Random(seed)
    return [_case(model, number, rng, most_words, most_tokens) for number in range(count)]


def _case(model: str, number: int, rng: random.Random, most_words: int, most_tokens: int) -> Case:
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, most_words)))
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randint(1, most_tokens), "temperature": 0}
    plain, chat = body | {"prompt": text}, body | {"messages": [{"role": "user", "content": text}]}
    sampled = {"temperature": 1.1, "top_p": 0.95, "seed": number}
    shape = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    match number % 8:
        case 0:
            return Case(kind="greedy", path=COMPLETIONS, body=plain)
        case 1:
            return Case(kind="chat, streamed", path=CHATS, body=chat | {"stream": True})
        case 2:
            return Case(kind="sampled", path=CHATS, body=chat | sampled)
        case 3:
            return Case(kind="two samples, streamed", path=COMPLETIONS, body=plain | sampled | {"n": 2, "stream": True})
        case 4:
            constrained = {"response_format": shape, "max_tokens": 40}
            return Case(kind="constrained", path=CHATS, body=chat | sampled | constrained)
        case 5:
            return Case(kind="cancelled", path=CHATS, body=chat | {"stream": True, "ignore_eos": True}, is_left=True)
        case 6:
            wrong = rng.choice(({"temperature": -1}, {"max_tokens": 10**9}, {"stop": [""]}, {"colour": 1}))
            return Case(kind="refused", path=CHATS, body=chat | wrong)
    return Case(kind="stop string", path=COMPLETIONS, body=plain | sampled | {"stop": ["e", "the"], "logprobs": 2})


Said = tuple[int, Any] | None  # status and texts with reasons, or the error


def ask(host: str, port: int, case: Case) -> Said:
    """What an answer says: the status, and texts and reasons by index (of a refusal, the error)."""
    connection = HTTPConnection(host, port, timeout=600)
    try:
        connection.request("POST", case.path, json.dumps(case.body), {"content-type": "application/json"})
        response = connection.getresponse()
        if case.is_left:
            response.read1(1 + case.body["max_tokens"] % 400)
            return None
        data = response.read()
    finally:
        connection.close()
    if response.status != 200 or not case.body.get("stream"):
        record = json.loads(data)
        return response.status, record.get("error") or [_said(choice) for choice in record["choices"]]
    return response.status, _streamed(data.decode())


def _said(choice: dict[str, Any]) -> tuple[str, str]:
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


def _streamed(text: str) -> list[tuple[str, str]]:
    *pieces, end, _ = text.split("\n\n")
    assert end == "data: [DONE]", end
    found: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        record = json.loads(piece.removeprefix("data: "))
        assert "error" not in record, record
        for choice in record["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            before = found.get(choice["index"], ("", ""))[0]
            found[choice["index"]] = before + said, choice["finish_reason"] or ""
    return [found[index] for index in sorted(found)]


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
            f"{total} requests in {soak.seconds:.0f} s beside {num_idle} idle connections; "
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

"""One system of a comparison as a process: requests on stdin, replies on stdout, a line of JSON each.

In: {"command": "load" | "run" | "logits", "clock": "wall" | "cpu", ...}. Out: a reply a request, {"error": ...} where
it failed. It runs in the environment of the system, so it needs NumPy alone; it knows of no other system.
"""

import ctypes
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

Reply = dict[str, Any]

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}

_PR_SET_PDEATHSIG = 1  # prctl(2)


class System(Protocol):
    """What a system does for the comparison. Its library is imported in `load`, so that loading counts the import."""

    def load(self, model: str, *, threads: int, context: int) -> Reply:
        """Open `model` for at most `context` tokens; replies with `vocab_size` and `versions` (name to version)."""

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        """The greedy continuation of `prompt`, `count` ids one by one, whatever ids end a text."""

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Logits [len(ids), vocab] of every position."""


def serve(system: System, more: dict[str, Callable[..., Reply]] | None = None) -> None:
    """Answer the requests on stdin until it ends. `more` are commands that only this system has."""
    # A stopped worker would outlive a killed parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    clock = CLOCKS["wall"]
    commands: dict[str, Callable[..., Reply]] = {
        "load": system.load,
        "run": lambda **request: _run(system, clock, **request),
        "logits": lambda **request: _logits(system, **request),
        **(more or {}),
    }
    replies = _take_stdout()
    for line in sys.stdin:
        request = json.loads(line)
        clock = CLOCKS[request.pop("clock")]
        begin = clock()
        try:
            reply = commands[request.pop("command")](**request)
        except Exception as error:  # the parent reports it, with the name of the system
            reply = {"error": f"{type(error).__name__}: {error}"}
        reply = {"seconds": clock() - begin, "peak_bytes": peak_bytes(), **reply}
        print(json.dumps(reply), file=replies, flush=True)


def require_rows(rows: list[list[int]], prompts: list[list[int]], new_tokens: int) -> Reply:
    """The reply to a batch of prompts: `rows`, the new tokens of each. Raises ValueError where one has not all."""
    lengths = [len(row) for row in rows]
    if lengths != [new_tokens] * len(prompts):
        raise ValueError(f"{lengths} new tokens came out, {new_tokens} were asked for in each of {len(prompts)} rows")
    return {"ids": rows}


def peak_bytes() -> int:
    """Most resident memory of this process so far, files mapped into it included (VmHWM).

    Not getrusage: the ru_maxrss of a child starts at its parent's size.
    """
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123 - no pathlib in a measured process
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def _take_stdout() -> TextIO:
    """Stdout for the replies alone: whatever a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _run(system: System, clock: Clock, *, prompt: list[int], new_tokens: int) -> Reply:
    begin = clock()
    stream = system.tokens(prompt, new_tokens)
    ids = list(itertools.islice(stream, 1))
    first = clock()
    ids += stream
    end = clock()
    if len(ids) != new_tokens:
        raise ValueError(f"{len(ids)} new tokens came out, {new_tokens} were asked for")
    return {"first_s": first - begin, "rest_s": end - first, "ids": ids}


def _logits(system: System, *, ids: list[int], file: str) -> Reply:
    rows = system.logits(ids)
    if rows.dtype != np.float32 or rows.shape[0] != len(ids) or rows.ndim != 2:
        raise ValueError(f"logits are {rows.dtype} {rows.shape}; float32 [{len(ids)}, vocab] is needed")
    np.save(file, rows)
    return {"file": file}

"""A worker of `peer_worker.py` seen from the comparison: started, asked, stopped while others are asked.

In: an interpreter, a script, requests. Out: replies, or PeerError in one line. A worker that is not being asked is
stopped (SIGSTOP), so that no idle thread of one system spins while another is timed.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it ships no types

HERE = Path(__file__).resolve().parent


class PeerError(RuntimeError):
    """A system could not do what it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How to start a system: `python` runs `script` (a file of this folder), which opens `model` with `options`."""

    name: str
    python: Path
    script: str
    model: Path
    options: Mapping[str, str] = field(default_factory=dict)


class PeerProcess:
    """A running worker. `pid` is its process."""

    def __init__(self, system: System, *, threads: int, clock: str = "wall") -> None:
        self.name, self._clock = system.name, clock
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # Both are read when the libraries load; ONNX Runtime and llama.cpp are told by their own options as well.
        counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [system.python, HERE / system.script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **counts},
            text=True,
        )
        self.pid = self._process.pid

    def ask(self, command: str, **arguments: object) -> dict[str, Any]:
        """The reply to one request. The worker runs only while it is asked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        self._send(signal.SIGCONT)
        with suppress(BrokenPipeError):  # it has ended, which the empty line says
            self._process.stdin.write(json.dumps({"command": command, "clock": self._clock, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        self._send(signal.SIGSTOP)
        if not line:
            raise PeerError(f"{self.name}: the process ended at {command!r}; its last words: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{self.name}: {command!r} failed: {reply['error']}")
        return reply

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # also ends one that is stopped
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that it never read
                pipe.close()
        self._process.wait()
        self._errors.close()

    def _send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "none"


@contextmanager
def started(systems: Mapping[str, System], *, threads: int, clock: str = "wall") -> Iterator[dict[str, PeerProcess]]:
    """A worker for each system, all ended at the end. `clock` is what they time themselves by: "wall" or "cpu"."""
    workers: dict[str, PeerProcess] = {}
    try:
        for name, system in systems.items():
            workers[name] = PeerProcess(system, threads=threads, clock=clock)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of CPU time since boot, of all cores and of one process, and the seconds that there were."""

    busy: float
    own: float
    available: float

    @classmethod
    def now(cls, pid: int | None = None) -> "CpuTimes":
        """The state now; `pid` is the process whose time is its own."""
        every = psutil.cpu_times()
        # guest time is part of user time; time stolen by the hypervisor is not ours either
        busy = every.user + every.nice + every.system + every.irq + every.softirq + every.steal
        own = psutil.Process(pid).cpu_times() if pid is not None else None
        return cls(busy, own.user + own.system if own else 0.0, busy + every.idle + every.iowait)

    def others_since(self, before: "CpuTimes") -> float:
        """Share of the machine's CPU time since `before` that went to anything but the process."""
        available = self.available - before.available
        others = (self.busy - before.busy) - (self.own - before.own)
        # the clocks of cores and processes do not tick together
        return min(max(others / available, 0.0), 1.0) if available > 0 else 0.0

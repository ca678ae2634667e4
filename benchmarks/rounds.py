"""Measuring several systems in turn on one machine, so that its drift hits all alike.

In: systems, prompts. Out: starts (a fresh process each), runs (warm processes, one run a system in each round), logits.
A measurement during which other processes took more of the CPU than allowed is thrown away and done again.
"""

import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from comparison import Run, Start
from peer_process import CpuTimes, PeerError, PeerProcess, System, started

Measured = TypeVar("Measured")

_WINDOW_S = 1.0  # the clock of CPU time ticks in hundredths of a second


@dataclass(kw_only=True)
class Quiet:
    """Waits until other processes take at most `max_others` of the CPU, for `patience_s` seconds in all.

    `redone` counts the measurements thrown away because they took more meanwhile.
    """

    max_others: float
    patience_s: float
    redone: int = 0

    def measured(self, measure: Callable[[], tuple[Measured, float]]) -> Measured:
        """The result of `measure`, which also returns the share of the others, once that is small enough."""
        while True:
            self._wait()
            begin = time.monotonic()
            result, others = measure()
            if others <= self.max_others:
                return result
            self.redone += 1
            self._spend(time.monotonic() - begin, others)

    def _wait(self) -> None:
        while (others := _others_now()) > self.max_others:
            self._spend(_WINDOW_S, others)

    def _spend(self, seconds: float, others: float) -> None:
        self.patience_s -= seconds
        if self.patience_s < 0:
            raise PeerError(
                f"other processes take {others:.0%} of the CPU, {self.max_others:.0%} is allowed, and the patience is "
                "spent; end them, or give a larger --patience or --max-others"
            )


def _others_now() -> float:
    before = CpuTimes.now()
    time.sleep(_WINDOW_S)
    return CpuTimes.now().others_since(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, by which clock ("wall" or "cpu")."""

    systems: Mapping[str, System]
    prompts: tuple[int, ...]
    new_tokens: int
    rounds: int
    threads: int
    vocab_size: int
    clock: str = "wall"

    @property
    def context(self) -> int:
        """Length of the longest request."""
        return max(self.prompts) + self.new_tokens

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random ids, so that no cache of earlier prompts serves one."""
        return random.Random(f"{length} {seed}").choices(range(self.vocab_size), k=length)


def measure_starts(plan: Plan, quiet: Quiet) -> list[Start]:
    """Every prompt once to a fresh process of every system, which has room for that prompt and no more."""
    starts = []
    for length in plan.prompts:
        for system in plan.systems.values():
            _say(f"a fresh process answers {length} tokens: {system.name}")
            starts.append(quiet.measured(partial(_start, plan, system, length)))
    return starts


def _start(plan: Plan, system: System, length: int) -> tuple[Start, float]:
    before, begin = CpuTimes.now(), time.perf_counter()
    with started({system.name: system}, threads=plan.threads, clock=plan.clock) as workers:
        worker = workers[system.name]
        load = worker.ask(**opening(system, threads=plan.threads, context=length + plan.new_tokens))
        run = worker.ask("run", prompt=plan.prompt(length, seed=0), new_tokens=plan.new_tokens)
        wall = time.perf_counter() - begin
        after = CpuTimes.now(worker.pid)  # all of a fresh process's time is its own
    start = Start(
        system=system.name,
        prompt=length,
        load_s=load["seconds"],
        answer_s=(after.own if plan.clock == "cpu" else wall) - run["rest_s"],
        peak_bytes=run["peak_bytes"],
        others=after.others_since(before),
    )
    return start, start.others


def measure_rounds(plan: Plan, quiet: Quiet) -> list[Run]:
    """`plan.rounds` rounds of one run a system and prompt; each round begins with another system."""
    runs = []
    with started(plan.systems, threads=plan.threads, clock=plan.clock) as workers:
        for name, worker in workers.items():
            worker.ask(**opening(plan.systems[name], threads=plan.threads, context=plan.context))
        names = list(workers)
        for number in range(-1, plan.rounds):  # the round before the first warms up
            _say(f"round {number + 1} of {plan.rounds}")
            turn = max(number, 0) % len(names)
            for length in plan.prompts:
                prompt = plan.prompt(length, seed=number + 2)
                for name in names[turn:] + names[:turn]:
                    if number < 0:
                        workers[name].ask("run", prompt=prompt, new_tokens=2)
                    else:
                        runs.append(quiet.measured(partial(_run, plan, workers[name], prompt)))
    return runs


def _run(plan: Plan, worker: PeerProcess, prompt: list[int]) -> tuple[Run, float]:
    before = CpuTimes.now(worker.pid)
    reply = worker.ask("run", prompt=prompt, new_tokens=plan.new_tokens)
    others = CpuTimes.now(worker.pid).others_since(before)
    return (
        Run(system=worker.name, prompt=len(prompt), first_s=reply["first_s"], rest_s=reply["rest_s"], others=others),
        others,
    )


def ask_once(system: System, request: dict[str, Any], *, threads: int) -> tuple[dict[str, Any], float]:
    """A fresh process's reply to one request, and the share of the CPU that others took meanwhile."""
    before = CpuTimes.now()
    with started({system.name: system}, threads=threads) as workers:
        worker = workers[system.name]
        reply = worker.ask(**request)
        return reply, CpuTimes.now(worker.pid).others_since(before)


def write_logits(system: System, ids: list[int], file: Path, *, threads: int) -> None:
    """Logits [len(ids), vocab] of a fresh process into `file` (.npy)."""
    with started({system.name: system}, threads=threads) as workers:
        worker = workers[system.name]
        worker.ask(**opening(system, threads=threads, context=len(ids) + 1))
        worker.ask("logits", ids=ids, file=str(file))


def opening(system: System, *, threads: int, context: int) -> dict[str, Any]:
    """The request that opens a system's model."""
    return {"command": "load", "model": str(system.model), "threads": threads, "context": context, **system.options}


def _say(text: str) -> None:
    print(text, file=sys.stderr)

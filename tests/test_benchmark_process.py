"""Benchmarks: a system behind lines of JSON, and several of them in turn.

In: graphport's worker on a tiny bundle, and a made-up worker that writes down what it is asked. No peer is installed.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import rounds
from parity import assert_parity
from peer_process import CpuTimes, PeerError, PeerProcess, System, started
from rounds import Plan, Quiet, ask_once, measure_rounds, measure_starts, opening
from tiny_bundles import VOCAB, write_tiny_bundle

from graphport.runtime import load

BENCHMARKS = Path(rounds.__file__).parent
PYTHON = Path(sys.executable)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_tiny_bundle(tmp_path / "bundle").folder


@pytest.fixture
def worker(bundle: Path) -> Iterator[PeerProcess]:
    system = System(name="graphport tiny", python=PYTHON, script="peer_graphport.py", model=bundle)
    with started({system.name: system}, threads=1) as workers:
        yield workers[system.name]


def test_graphports_worker_gives_tokens_times_and_logits_of_the_bundle(
    worker: PeerProcess, bundle: Path, tmp_path: Path
) -> None:
    opened = worker.ask("load", model=str(bundle), threads=1, context=40)
    assert opened["vocab_size"] == VOCAB
    assert set(opened["versions"]) == {"graphport", "onnxruntime-gpu"}
    ids = [5, 9, 2, 250, 17]
    run = worker.ask("run", prompt=ids, new_tokens=7)
    assert len(run["ids"]) == 7
    assert 0 < run["first_s"] + run["rest_s"] <= run["seconds"]
    worker.ask("logits", ids=ids, file=str(tmp_path / "rows.npy"))
    with load(bundle) as lm:
        (rows,) = lm.logits([ids])
    assert_parity(np.load(tmp_path / "rows.npy"), rows, "reused cache")
    assert run["ids"][0] == rows[-1].argmax()


def test_peak_memory_is_the_workers_own(worker: PeerProcess, bundle: Path) -> None:
    peak = worker.ask("load", model=str(bundle), threads=1, context=40)["peak_bytes"]
    resident = psutil.Process(worker.pid).memory_info().rss
    assert 0.9 * resident < peak < 2 * resident
    ballast = np.ones(resident, np.int8)  # of the parent's
    assert worker.ask("run", prompt=[1], new_tokens=2)["peak_bytes"] < peak + ballast.nbytes // 2


def test_cpu_time_leaves_out_what_a_system_waits_for(fakes: dict[str, System]) -> None:
    def seconds(clock: str) -> float:
        with started({"one": fakes["one"]}, threads=1, clock=clock) as workers:
            workers["one"].ask("load", model="one", threads=1, context=20)
            run: dict[str, float] = workers["one"].ask("run", prompt=[2], new_tokens=3)
            return run["first_s"] + run["rest_s"]

    assert seconds("cpu") < 0.2 <= seconds("wall")


def test_a_failed_request_is_one_line_with_the_systems_name_and_the_worker_goes_on(
    worker: PeerProcess, bundle: Path
) -> None:
    with pytest.raises(PeerError, match=r"^graphport tiny: 'load' failed: ManifestError: .*nowhere") as failure:
        worker.ask("load", model="nowhere", threads=1, context=40)
    assert "\n" not in str(failure.value)
    worker.ask("load", model=str(bundle), threads=1, context=40)
    with pytest.raises(
        PeerError, match=r"^graphport tiny: 'run' failed: ValueError: 0 new tokens came out, 7 were asked"
    ):
        worker.ask("run", prompt=[1] * 40, new_tokens=7)
    assert len(worker.ask("run", prompt=[1], new_tokens=2)["ids"]) == 2


FAKE = """
import os, sys, time
import numpy as np
sys.path.insert(0, {benchmarks!r})
from peer_worker import serve

class Fake:
    def load(self, model, *, threads, context, flavour="plain"):
        print("noise on stdout")
        if context == 99:
            print("out of luck", file=sys.stderr)
            os._exit(3)
        self.model, self.context = model, context
        return {{"vocab_size": 50, "versions": {{"fake": flavour}}}}

    def tokens(self, prompt, count):
        if prompt == [2]:
            time.sleep(0.2)
        with open({log!r}, "a") as log:
            print(self.model, self.context, count, *prompt, file=log)
        return iter(range(count if prompt != [7] else count - 1))

    def logits(self, ids):
        return np.zeros((len(ids), 50), np.float64)

serve(Fake())
"""


@pytest.fixture
def fakes(tmp_path: Path) -> dict[str, System]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(benchmarks=str(BENCHMARKS), log=str(tmp_path / "log")))
    return {
        name: System(name=name, python=PYTHON, script=str(script), model=Path(name)) for name in ("one", "two", "three")
    }


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    """Measures at once, however busy the machine is."""
    monkeypatch.setattr(rounds, "_others_now", lambda: 0.0)
    return Quiet(max_others=1.0, patience_s=0)


def _plan(systems: dict[str, System]) -> Plan:
    return Plan(systems=systems, prompts=(3, 8), new_tokens=5, rounds=3, threads=1, vocab_size=50)


def _log(tmp_path: Path) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """Model, context, new tokens and prompt of every request, in order."""
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    return [(line[0], int(line[1]), int(line[2]), tuple(map(int, line[3:]))) for line in lines]


def test_rounds_interleave_the_systems_on_the_same_prompts(
    fakes: dict[str, System], quiet: Quiet, tmp_path: Path
) -> None:
    runs = measure_rounds(_plan(fakes), quiet)
    assert [(run.system, run.prompt) for run in runs] == [
        (name, length)
        for order in (("one", "two", "three"), ("two", "three", "one"), ("three", "one", "two"))
        for length in (3, 8)
        for name in order
    ]
    asked = _log(tmp_path)
    assert {context for _, context, _, _ in asked} == {8 + 5}
    warm, timed = asked[:6], asked[6:]
    assert {count for *_, count, _ in warm} == {2}
    assert {count for *_, count, _ in timed} == {5}
    prompts = [prompt for *_, prompt in timed]
    for group in range(0, len(prompts), 3):
        assert len(set(prompts[group : group + 3])) == 1, "systems of a round got different prompts"
    assert len(set(prompts)) == 6, "a prompt came twice, so a cache could serve it"
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)


def test_a_start_is_a_fresh_process_with_room_for_its_own_prompt(
    fakes: dict[str, System], quiet: Quiet, tmp_path: Path
) -> None:
    starts = measure_starts(_plan(fakes), quiet)
    assert [(start.system, start.prompt) for start in starts] == [
        (name, length) for length in (3, 8) for name in ("one", "two", "three")
    ]
    assert [context for _, context, _, _ in _log(tmp_path)] == [3 + 5] * 3 + [8 + 5] * 3
    for start in starts:
        assert 0 < start.load_s < start.answer_s
        assert start.peak_bytes > 1 << 20


def test_a_system_is_opened_with_its_own_options(fakes: dict[str, System]) -> None:
    def flavour(system: System) -> str:
        reply, _ = ask_once(system, opening(system, threads=1, context=20), threads=1)
        return str(reply["versions"]["fake"])

    assert flavour(fakes["one"]) == "plain"
    assert flavour(replace(fakes["one"], options={"flavour": "other"})) == "other"


def test_only_the_system_that_is_asked_can_run(fakes: dict[str, System]) -> None:
    with started(fakes, threads=1) as workers:
        for name, worker in workers.items():
            worker.ask("load", model=name, threads=1, context=20)
        for worker in workers.values():
            worker.ask("run", prompt=[1], new_tokens=3)
            _wait_until_stopped(workers)
    assert not any(psutil.pid_exists(worker.pid) for worker in workers.values())


def _wait_until_stopped(workers: dict[str, PeerProcess]) -> None:
    """The signal is sent before `ask` returns; the kernel acts on it a little later."""
    for _ in range(1000):
        states = {psutil.Process(worker.pid).status() for worker in workers.values()}
        if states == {psutil.STATUS_STOPPED}:
            return
        time.sleep(0.01)
    pytest.fail(f"a worker that was not asked is {states}")


def test_a_worker_that_dies_is_named_with_its_last_words(fakes: dict[str, System]) -> None:
    with started({"one": fakes["one"]}, threads=1) as workers:
        with pytest.raises(PeerError, match=r"^one: the process ended at 'load'; its last words: out of luck$"):
            workers["one"].ask("load", model="one", threads=1, context=99)
        with pytest.raises(PeerError, match=r"^one: the process ended at 'run'"):
            workers["one"].ask("run", prompt=[1], new_tokens=2)


def test_a_system_that_stops_early_or_gives_other_logits_is_refused(fakes: dict[str, System], tmp_path: Path) -> None:
    with started({"one": fakes["one"]}, threads=1) as workers:
        workers["one"].ask("load", model="one", threads=1, context=20)
        with pytest.raises(PeerError, match="2 new tokens came out, 3 were asked for"):
            workers["one"].ask("run", prompt=[7], new_tokens=3)
        with pytest.raises(PeerError, match=r"logits are float64 \(2, 50\); float32 \[2, vocab\] is needed"):
            workers["one"].ask("logits", ids=[1, 2], file=str(tmp_path / "rows.npy"))
    assert not (tmp_path / "rows.npy").exists()


def test_a_measurement_that_others_disturbed_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_others_now", iter([0.5, 0.0, 0.0, 0.0]).__next__)
    measured = iter([("first", 0.3), ("second", 0.2), ("third", 0.1)])
    quiet = Quiet(max_others=0.1, patience_s=60)
    assert quiet.measured(lambda: next(measured)) == "third"
    assert quiet.redone == 2


def test_a_machine_that_never_gets_quiet_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_others_now", lambda: 0.5)
    quiet = Quiet(max_others=0.1, patience_s=3)
    with pytest.raises(
        PeerError, match=r"other processes take 50% of the CPU, 10% is allowed, .* give a larger --patience"
    ):
        quiet.measured(lambda: pytest.fail("measured on a busy machine"))


def test_others_share_of_the_cpu_leaves_out_the_worker() -> None:
    before = CpuTimes(busy=100.0, own=10.0, available=200.0)
    assert CpuTimes(busy=108.0, own=16.0, available=220.0).others_since(before) == pytest.approx(0.1)
    assert CpuTimes(busy=105.99, own=16.0, available=220.0).others_since(before) == 0.0
    now = CpuTimes.now(psutil.Process().pid)
    assert 0 < now.own <= now.busy <= now.available

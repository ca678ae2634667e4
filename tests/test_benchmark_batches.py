"""Decoding of rows together: the whole command on a tiny bundle, its figures, and what is refused.

In: a tiny bundle in a process of its own, and a worker made up by hand. No peer is installed.
"""

import os
import sys
from pathlib import Path
from typing import Any, cast

import batches
import pytest
import rounds
from peer_process import PeerError, PeerProcess
from peer_worker import require_rows
from rounds import Plan, Quiet
from tiny_bundles import write_tiny_bundle


def _plan(new_tokens: int = 5) -> Plan:
    return Plan(systems={}, prompts=(3,), new_tokens=new_tokens, rounds=1, threads=1, vocab_size=50)


class _Worker:
    """Takes a second for a prompt and a tenth for every token of a row."""

    name, pid = "made up", os.getpid()

    def __init__(self, second_a_token: float = 0.1) -> None:
        self._second_a_token = second_a_token
        self.asked: list[list[list[int]]] = []

    def ask(self, command: str, *, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        assert command == "batch"
        self.asked.append(prompts)
        return {"seconds": len(prompts) * (1 + self._second_a_token * new_tokens)}


def test_a_rate_is_that_of_all_rows_without_their_prompts() -> None:
    worker = _Worker()
    rates, _ = batches._rates(_plan(), cast(PeerProcess, worker), (1, 4), 1)
    assert rates == {1: pytest.approx(10), 4: pytest.approx(10)}
    assert [len(prompts) for prompts in worker.asked] == [1, 1, 4, 4]
    assert worker.asked[2] == worker.asked[3]  # the run that is taken off had the same prompts
    assert len({tuple(prompt) for prompt in worker.asked[3]}) == 4


def test_a_time_that_does_not_grow_with_the_tokens_is_refused() -> None:
    with pytest.raises(PeerError, match="made up took no longer for 5 tokens than for one; give a larger --new-tokens"):
        batches._rates(_plan(), cast(PeerProcess, _Worker(0)), (1,), 1)


def test_rows_that_ended_early_are_refused() -> None:
    assert require_rows([[1, 2], [3, 4]], [[0], [0]], 2) == {"ids": [[1, 2], [3, 4]]}
    with pytest.raises(ValueError, match=r"\[2, 1\] new tokens came out, 2 were asked for in each of 2 rows"):
        require_rows([[1, 2], [3]], [[0], [0]], 2)


def test_the_table_has_gains_over_one_row_and_over_genai() -> None:
    rates = {("one", 1): [10.0, 12.0, 11.0], ("one", 8): [33.0] * 3}
    rates |= {(batches.GENAI, 1): [22.0] * 3, (batches.GENAI, 8): [22.0] * 3}
    plan = Plan(
        systems=dict.fromkeys(["one", batches.GENAI]),  # type: ignore[arg-type]  # names alone are read
        prompts=(3,),
        new_tokens=5,
        rounds=3,
        threads=1,
        vocab_size=50,
    )
    text = batches.markdown(rates, plan, (1, 8), Quiet(max_others=1.0, patience_s=0))
    assert "| one | 11 (10-12) | 33 (33-33) |" in text
    assert "| one | 1.00, 0.50 | 3.00, 1.50 |" in text


def test_the_whole_command_on_a_tiny_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_tiny_bundle(tmp_path / "tiny", max_length=64).folder
    out = tmp_path / "results/table.md"
    options = ["--peers", "none", "--rows", "1,3", "--prompt", "4", "--new-tokens", "30", "--rounds", "1"]
    options += ["--threads", "1", "--max-others", "1", "--out", str(out)]
    monkeypatch.setattr(rounds, "_others_now", lambda: 0.0)
    monkeypatch.setattr(sys, "argv", ["batches.py", str(bundle), str(bundle), *options])
    assert batches.main() == 0, capsys.readouterr().err
    text = out.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    assert "| | rows: 1 | rows: 3 |" in text
    assert "| graphport tiny | 1.00 | " in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "a"], "nothing is no file or folder"),
        (["{}", "x/a", "y/a"], "different names for the table, got a, a"),
        (["{}", "a", "--new-tokens", "1"], "at least 2 to time decoding"),
    ],
)
def test_arguments_that_cannot_be_measured_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["batches.py", *(each.format(tmp_path) for each in arguments)])
    with pytest.raises(SystemExit) as ended:
        batches.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err

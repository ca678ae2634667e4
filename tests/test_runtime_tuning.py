"""`graphport tune`: what is faster and within tolerance is kept, what fits the machine is taken, the rest is said."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from certificates import change_certificate, rehash
from parity import assert_parity
from tiny_graphs import tiny_model

from graphport.cli import main
from graphport.export import export
from graphport.model_def.certificate import CertificateError, Check
from graphport.model_def.signature import MANIFEST_FILE, TUNING_FILE
from graphport.runtime import load, prepare
from graphport.runtime.device import default_threads
from graphport.runtime.memory import MIB
from graphport.runtime.trials import FEWEST_ROUNDS, MOST_ROUNDS
from graphport.runtime.tuner import questions, thread_counts, tune_choice
from graphport.runtime.tuning import Choice, Tuning, read_tuning
from graphport.runtime.tuning_trial import TuneError, tune, write_tuning
from graphport.runtime.verification import verify

FIRST = Choice(packed=True, threads=2, spinning=True, prefill_products="as_exported", prefill_chunk=64)
GOOD = (Check(name="request", measured=0.0, tolerance=1.0),)
BAD = (Check(name="request", measured=2.0, tolerance=1.0),)


class Machine:
    """Stands for a machine: how long a choice takes, what it computes, and a clock that runs as it works."""

    def __init__(
        self,
        cost: Callable[[Choice], float],
        checks: Callable[[Choice], Sequence[Check]] = lambda _: GOOD,
        memory: Callable[[Choice], int] = lambda _: 0,
    ) -> None:
        self.now = 0.0
        self.runs: list[Choice] = []
        self.cost, self.checks_of, self.memory = cost, checks, memory

    def open(self, choice: Choice) -> "Fake":
        return Fake(self, choice)

    def tune(self, *, max_seconds: float = 1e9, longest_chunk: int = 100) -> Any:
        asked = questions(has_packed=True, has_float_products=True, processors=3, longest_chunk=longest_chunk)
        return tune_choice(FIRST, asked, self.open, max_seconds=max_seconds, clock=lambda: self.now)


@dataclasses.dataclass
class Fake:
    machine: Machine
    choice: Choice

    @property
    def planned_bytes(self) -> int:
        return self.machine.memory(self.choice)

    def checks(self) -> Sequence[Check]:
        return self.machine.checks_of(self.choice)

    def seconds(self) -> float:
        taken = self.machine.cost(self.choice)
        self.machine.runs.append(self.choice)
        self.machine.now += taken
        return taken


def test_each_question_is_asked_of_the_best_so_far_and_the_fastest_is_kept() -> None:
    machine = Machine(lambda c: 10 - c.threads - (not c.spinning) - (c.prefill_chunk == 16) + c.packed)
    best, trials = machine.tune()
    assert best == dataclasses.replace(FIRST, packed=False, threads=3, spinning=False, prefill_chunk=16)
    assert [(trial.what, trial.kept) for trial in trials] == [
        ("the graph as exported", True),
        ("threads: 3", True),
        ("threads: 1", False),
        ("idle threads sleeping", True),
        ("prompts with float32 products, 100 tokens a step", False),
        ("32 prompt tokens a step", False),
        ("16 prompt tokens a step", True),
    ]
    assert (trials[1].best_seconds, trials[1].seconds, trials[1].ratio) == (8, 7, 7 / 8)
    assert trials[2].verdict == "not measured: the other way is faster"


def test_the_nearest_sizes_are_tried_first_and_none_beyond_one_that_is_slower() -> None:
    machine = Machine(lambda c: 10 + abs(c.prefill_chunk - 64) / 64)
    best, trials = machine.tune(longest_chunk=512)
    assert best.prefill_chunk == 64
    sizes = [(trial.what, trial.verdict) for trial in trials if "prompt tokens" in trial.what]
    assert sizes == [
        ("128 prompt tokens a step", "left: slower"),
        ("256 prompt tokens a step", "not measured: 128 prompt tokens a step is slower already"),
        ("512 prompt tokens a step", "not measured: 128 prompt tokens a step is slower already"),
        ("32 prompt tokens a step", "left: slower"),
        ("16 prompt tokens a step", "not measured: 32 prompt tokens a step is slower already"),
    ]


def test_float32_products_are_tried_with_their_own_size_and_sizes_are_asked_after_them() -> None:
    def cost(choice: Choice) -> float:
        return (
            10 - 2 * (choice.prefill_products == "float32" and choice.prefill_chunk >= 128) - choice.prefill_chunk / 512
        )

    machine = Machine(cost, memory=lambda choice: 70 * MIB * (choice.prefill_products == "float32"))
    best, trials = machine.tune(longest_chunk=256)
    assert (best.prefill_products, best.prefill_chunk) == ("float32", 256)
    tried = next(trial for trial in trials if "products" in trial.what)
    assert tried.what == "prompts with float32 products, 128 tokens a step"
    assert tried.verdict == "kept: faster by more than the noise, +70 MiB planned"
    assert tried.more_bytes == 70 * MIB
    assert "128 prompt tokens a step" not in [trial.what for trial in trials]


def test_runs_take_turns_and_end_early_where_nothing_is_gained() -> None:
    machine = Machine(lambda c: 5.0 - (c.threads == 3))
    _, trials = machine.tune()
    exported = [choice.packed for choice in machine.runs[: 2 + 2 * FEWEST_ROUNDS]]
    assert exported == [False, True, *[False, True] * FEWEST_ROUNDS]
    three = [choice for choice in machine.runs if choice == dataclasses.replace(FIRST, threads=3)]
    assert len(three) >= 1 + MOST_ROUNDS
    assert [trial.kept for trial in trials].count(True) == 1


def test_a_gain_within_the_noise_is_left_and_much_noise_is_said() -> None:
    for spread, is_kept in ((0.0, True), (2.0, False)):
        shaky = iter(range(10**6))
        machine = Machine(
            lambda c, spread=spread, shaky=shaky: 10 - 0.5 * (not c.packed) + spread * ((next(shaky) + 1) // 2 % 2)
        )
        _, trials = machine.tune()
        assert trials[0].kept is is_kept
        assert trials[0].verdict.startswith(
            "kept: faster" if is_kept else "left: too noisy to tell (ratios of the times"
        )
    machine = Machine(lambda c: 10 - 0.05 * (not c.packed))  # half a hundredth
    assert machine.tune()[1][0].verdict == "left: not faster by more than the noise"


def test_what_is_not_within_tolerance_is_left_however_fast() -> None:
    machine = Machine(lambda c: 10.0 if c.packed else 1.0, lambda c: GOOD if c.packed else BAD)
    best, trials = machine.tune()
    assert best.packed
    assert trials[0].verdict == "left: not within tolerance (request 2 > 1)"
    assert trials[0].seconds is None
    with pytest.raises(ValueError, match="nothing can be tuned: as it is opened now it fails request"):
        Machine(lambda _: 1.0, lambda _: BAD).tune()


def test_every_question_has_its_share_of_the_time_and_no_trial_begins_after_it() -> None:
    machine = Machine(lambda _: 1.0)
    _, trials = machine.tune(max_seconds=40.0)  # 8 a question, as long as one trial
    measured = [trial.what for trial in trials if trial.seconds is not None]
    assert {"the graph as exported", "threads: 3", "idle threads sleeping", "32 prompt tokens a step"} <= set(measured)
    assert trials[-1].verdict == "not measured: no time was left"
    assert all(trial.seconds is None for trial in Machine(lambda _: 1.0).tune(max_seconds=0)[1])


def test_threads_are_all_up_to_eight_and_powers_of_two_beyond() -> None:
    assert thread_counts(1) == (1,)
    assert thread_counts(6) == (1, 2, 3, 4, 5, 6)
    assert thread_counts(48) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 48)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_model("llama"), tmp_path_factory.mktemp("tuned") / "bundle", precision="int8").path


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def tuned(bundle: Path, **changes: Any) -> Tuning:
    """A tuning of `bundle` for this machine, written."""
    found = tune(bundle, max_seconds=0)
    found = dataclasses.replace(found, choice=dataclasses.replace(found.choice, prefill_chunk=5, spinning=False))
    found = dataclasses.replace(found, **changes)
    write_tuning(bundle, found)
    return found


def opened(bundle: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[int, int, str]:
    """Prompt tokens a step, threads, and the log."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="graphport"), load(bundle, device="cpu", **options) as lm:
        chunk = lm._engine._prefill_chunk  # type: ignore[union-attr]
        return chunk, lm.threads, " ".join(record.getMessage() for record in caplog.records)


def test_what_was_measured_is_taken_said_and_can_be_ignored(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "tuned" not in opened(bundle, caplog)[2]
    tuned(bundle)
    chunk, threads, said = opened(bundle, caplog)
    assert (chunk, threads) == (5, default_threads())
    assert f"{bundle} is opened as tuned on this machine (as exported; threads: {threads}, sleeping" in said
    assert opened(bundle, caplog, prefill_chunk=7)[0] == 7  # what is asked for goes before
    for options in ({"tuned": False}, {"strict": True}):
        chunk, _, said = opened(bundle, caplog, **options)
        assert (chunk, "tuned" in said) == (64, False)
    assert verify(bundle, device="cpu", threads=1).passed  # the manifest does not list it


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"onnxruntime": "9.9"}, f"it was measured with ONNX Runtime 9.9, this is {onnxruntime.__version__}"),
        ({"processor": "vax"}, "it was measured on a processor with vax, this one has"),
        ({"processors": 99}, "it was measured where 99 threads run at once, here"),
        ({"sources": {"model.onnx": "0"}}, "another graph was measured"),
        ({"prepared": "0"}, "the bundle was prepared for this processor since"),
    ],
)
def test_what_was_measured_elsewhere_is_left_and_said(
    changes: dict[str, Any], words: str, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(bundle, **changes)
    chunk, _, said = opened(bundle, caplog)
    assert chunk == 64
    assert f"its tuning is left: {words}" in said
    assert f"`graphport tune {bundle}` makes it anew" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "its tuning cannot be used"),
        ('{"format": 1}', "has format 1, this version reads 2"),
        ('{"format": 2, "processors": 2}', "is damaged"),
        ('{"format": 2, "processors": Infinity, "choice": {}}', "is damaged"),
        pytest.param("[" * 100_000, "is damaged", id="nested"),
        (
            '{"format": 2, "processors": 2, "choice": '
            '{"packed": false, "threads": 9, "spinning": true, "prefill_products": "as_exported", "prefill_chunk": 1}}',
            "threads must be 1 to 2",
        ),
        (
            '{"format": 2, "processors": 2, "choice": '
            '{"packed": 0, "threads": 1, "spinning": true, "prefill_products": "as_exported", "prefill_chunk": 1}}',
            "packed and spinning are true or false",
        ),
    ],
)
def test_a_damaged_file_is_left_and_said(text: str, words: str, bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    (bundle / TUNING_FILE).write_text(text)
    chunk, _, said = opened(bundle, caplog)
    assert (chunk, words in said) == (64, True), said


def test_a_choice_is_opened_as_it_says_and_is_the_same_model(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(bundle)
    ids = list(range(30))
    with load(bundle, device="cpu") as lm:
        wanted = lm.logits([ids])[0]
    arguments = ["tune", str(bundle), "--prompt-tokens", "20", "--new-tokens", "4", "--json"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    found = read_tuning(bundle)
    assert answer["path"] == str(bundle / TUNING_FILE)
    assert answer["choice"] == dataclasses.asdict(found.choice)
    assert answer["request"] == "a prompt of 20 tokens and 4 more one by one"
    measured = [trial.what for trial in found.trials if trial.seconds is not None]
    assert measured[0] == "the graph as exported"
    assert {"idle threads sleeping", "16 prompt tokens a step"} <= set(measured)
    with load(bundle, device="cpu") as lm:
        assert (lm.is_prepared, lm.threads) == (found.choice.packed, found.choice.threads)
        assert_parity(lm.logits([ids])[0], wanted, "opened otherwise")
    assert main(["report", str(bundle), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tuning"]["words"] == found.choice.words()
    page = bundle.parent / "page.html"
    assert main(["report", str(bundle), "--html", str(page)]) == 0
    assert "Tuned on this machine" in page.read_text(encoding="utf-8")
    prepare(bundle)  # the record is another one only if what it holds is
    (bundle / TUNING_FILE).write_text("{")
    assert main(["report", str(bundle)]) == 0
    assert "its tuning cannot be used" in capsys.readouterr().err


def test_a_choice_that_computes_something_else_is_not_within_tolerance(bundle: Path) -> None:
    limits = [{"against": "original", "figure": "kl", "tolerance": 0, "where": "anywhere"}]
    change_certificate(bundle, limits=limits)
    rehash(bundle)
    with pytest.raises(ValueError, match="as it is opened now it fails request: kl against eager PyTorch"):
        tune(bundle)
    assert not (bundle / TUNING_FILE).exists()


def test_what_cannot_be_tuned_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TuneError, match=r"prompt_tokens \(60\) \+ new_tokens \(9\) exceed the certificate's text of 64"
    ):
        tune(bundle, prompt_tokens=60, new_tokens=9)
    (bundle / "certificate.json").unlink()
    rehash(bundle, certificate=False)
    with pytest.raises(CertificateError, match="--against SOURCE --write"):
        tune(bundle)
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    (bundle / MANIFEST_FILE).write_text(json.dumps(manifest | {"target": "cuda"}))
    with pytest.raises(TuneError, match="is a decoder for cuda; only decoders for cpu are tuned"):
        tune(bundle)

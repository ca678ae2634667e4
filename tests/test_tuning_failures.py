"""`graphport tune`: an alternative or a variant that fails costs nothing but itself, and what is given is kept."""

from pathlib import Path

import pytest
from tiny_graphs import tiny_model

from graphport.export import export
from graphport.runtime import tuning_trial as trial_module
from graphport.runtime.tuner import Question, tune_choice
from graphport.runtime.tuning import Choice
from graphport.runtime.tuning_trial import TuneError, tune

FIRST = Choice(packed=False, threads=1, spinning=True, prefill_products="as_exported", prefill_chunk=16)


class Opened:
    """Computes what it should, in no time that matters."""

    planned_bytes = 0

    def checks(self) -> tuple[()]:
        return ()

    def seconds(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_model("llama"), tmp_path_factory.mktemp("tune") / "b", precision="fp32").path


def test_an_alternative_that_cannot_be_opened_is_left_and_the_others_are_measured() -> None:
    def open_candidate(choice: Choice) -> Opened:
        if choice.threads == 2:
            raise ValueError("no memory for 2 threads")
        return Opened()

    asked = (Question(name="threads", values=(1, 2, 3)),)
    best, trials = tune_choice(FIRST, asked, open_candidate, max_seconds=1e9)
    assert best == FIRST
    assert trials[0].verdict == "left: it cannot be opened (no memory for 2 threads)"
    assert [trial.seconds for trial in trials] == [None, 1.0]


def test_the_default_request_shrinks_to_the_text_and_a_given_one_is_refused(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "questions", lambda **_: ())
    assert tune(bundle).request == "a prompt of 56 tokens and 8 more one by one"
    assert tune(bundle, prompt_tokens=60).request == "a prompt of 60 tokens and 4 more one by one"
    with pytest.raises(TuneError, match=r"prompt_tokens \(256\) \+ new_tokens \(32\) exceed the certificate's text"):
        tune(bundle, prompt_tokens=256, new_tokens=32)

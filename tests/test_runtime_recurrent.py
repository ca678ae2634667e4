"""Recurrent decoders generate: ragged prompts in one batch, each row with its own state, as each text stepped alone."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_texts import log_softmax
from parity import TOLERANCES

from graphport.cli import main
from graphport.export import export
from graphport.runtime import RecurrentModel, SamplingParams, load, recurrent_engine
from graphport.runtime.recurrent_model import RecurrentState
from graphport.runtime.sampling import Sampler
from graphport.runtime.sequence_state import SequenceState

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/linear_attention.py"
VOCAB, MAX_LENGTH = 100, 128
PROMPTS = [np.random.default_rng(size).integers(VOCAB, size=size).tolist() for size in (5, 1, 70, 12, 64, 3)]
GREEDY = SamplingParams(max_new_tokens=9, temperature=0.0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(f"{EXAMPLE}:decoder", tmp_path_factory.mktemp("recurrent") / "bundle", verify=False).path


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[RecurrentModel]:
    with load(bundle, max_batch=3, threads=1) as opened:
        assert isinstance(opened, RecurrentModel)
        yield opened


def _alone(model: RecurrentModel, prompt: list[int], params: SamplingParams, *, index: int = 0) -> list[int]:
    """New ids of one text, stepped by hand in the chunks that the engine has."""
    sampler = Sampler(params, prompt, vocab_size=VOCAB, index=index)
    state: RecurrentState | None = None
    for begin in range(0, len(prompt), 64):
        logits, state = model.step([prompt[begin : begin + 64]], state)
    ids: list[int] = []
    while len(ids) < (params.max_new_tokens or 0):
        ids.append(sampler.sample(logits[0, -1]).token_id)
        logits, state = model.step([ids[-1:]], state)
    return ids


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(max_new_tokens=9, temperature=1.5, top_k=20, repetition_penalty=1.3, seed=4)],
    ids=["greedy", "sampled"],
)
def test_ragged_prompts_get_what_each_gets_alone(params: SamplingParams, model: RecurrentModel) -> None:
    outputs = model.generate(PROMPTS, params)
    wanted = [_alone(model, prompt, params) for prompt in PROMPTS]
    assert [list(output.token_ids) for output in outputs] == wanted
    assert len({tuple(ids) for ids in wanted}) == len(PROMPTS)
    assert {output.finish_reason for output in outputs} == {"length"}
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in PROMPTS]


def test_states_that_change_rows_are_noticed(model: RecurrentModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = recurrent_engine.run_step

    def swaps(session: Any, ids: Any, lengths: Any, tensors: Any) -> Any:
        logits, after = right(session, ids, lengths, tensors)
        return logits, tuple(tensor[::-1] for tensor in after)

    wanted = [output.token_ids for output in model.generate(PROMPTS[:3], GREEDY)]
    monkeypatch.setattr(recurrent_engine, "run_step", swaps)
    assert [output.token_ids for output in model.generate(PROMPTS[:3], GREEDY)] != wanted


def test_samples_of_one_prompt_begin_at_the_same_state(model: RecurrentModel) -> None:
    params = SamplingParams(max_new_tokens=7, temperature=1.0, seed=11, n=3)
    (output,) = model.generate([PROMPTS[2]], params)
    found = [list(sample.token_ids) for sample in output.samples]
    assert found == [_alone(model, PROMPTS[2], params, index=index) for index in range(3)]
    assert len({tuple(ids) for ids in found}) == 3


def test_a_stream_brings_the_same_tokens_and_frees_its_place(model: RecurrentModel) -> None:
    (output,) = model.generate([PROMPTS[3]], GREEDY)
    events = list(model.stream(PROMPTS[3], GREEDY))
    assert [event.token_id for event in events] == list(output.token_ids)
    assert [event.finish_reason for event in events] == [None] * 8 + ["length"]
    for _ in range(5):  # more than there are places
        stream = model.stream(PROMPTS[3], GREEDY)
        next(stream)
        stream.close()  # type: ignore[attr-defined]  # a generator
    assert model.generate([PROMPTS[3]], GREEDY)[0].token_ids == output.token_ids


def test_stop_ids_the_limit_and_time_outs_end_a_text(model: RecurrentModel) -> None:
    (output,) = model.generate([PROMPTS[0]], GREEDY)
    stop = output.token_ids[3]
    first = output.token_ids.index(stop)
    stopped, other = model.generate(
        PROMPTS[:2], [SamplingParams(max_new_tokens=9, temperature=0.0, stop_token_ids=(stop,)), GREEDY]
    )
    assert (stopped.token_ids, stopped.finish_reason) == (output.token_ids[: first + 1], "stop")
    assert (len(other.token_ids), other.finish_reason) == (9, "length")
    (full,) = model.generate([[1] * (MAX_LENGTH - 2)], SamplingParams(temperature=0.0))
    assert (len(full.token_ids), full.finish_reason) == (2, "length")
    (late,) = model.generate([PROMPTS[0]], GREEDY, timeout=1e-9)
    assert (late.token_ids, late.finish_reason) == ((), "cancelled")
    assert model.generate([], GREEDY) == []
    (nothing,) = model.generate([PROMPTS[0]], SamplingParams(max_new_tokens=0))
    assert (nothing.token_ids, nothing.finish_reason) == ((), "length")


def test_log_probabilities_are_those_of_the_logits(model: RecurrentModel) -> None:
    prompt = PROMPTS[2]
    (output,) = model.generate(
        [prompt], SamplingParams(max_new_tokens=1, temperature=0.0, logprobs=2, prompt_logprobs=0)
    )
    logits = model.step([prompt])[0][0]
    shares = log_softmax(logits)
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    found = [sample.logprob for sample in output.prompt_logprobs[1:] if sample is not None]
    wanted = [shares[place, token] for place, token in enumerate(prompt[1:])]
    assert found == pytest.approx(wanted, abs=TOLERANCES["log probability", "float32"])
    assert output.logprobs[0].top_logprobs[0][0] == output.token_ids[0] == int(logits[-1].argmax())


def test_threads_take_turns_over_one_batch(model: RecurrentModel) -> None:
    wanted = [output.token_ids for output in model.generate(PROMPTS, GREEDY)]
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = [output.token_ids for output in model.generate(PROMPTS, GREEDY)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), wanted)


def test_a_step_that_fails_ends_its_own_rows(model: RecurrentModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = recurrent_engine.run_step

    def fails(session: Any, ids: Any, lengths: Any, tensors: Any) -> Any:
        if 77 in ids:
            raise RuntimeError("the step failed")
        return right(session, ids, lengths, tensors)

    other = model.stream(PROMPTS[1], GREEDY)
    begun = [next(other).token_id]
    monkeypatch.setattr(recurrent_engine, "run_step", fails)
    with pytest.raises(RuntimeError, match="the step failed"):
        model.generate([[77, 5]], GREEDY)
    monkeypatch.setattr(recurrent_engine, "run_step", right)
    begun += [event.token_id for event in other]
    assert begun == list(model.generate([PROMPTS[1]], GREEDY)[0].token_ids)


@pytest.mark.parametrize(
    ("prompt", "params", "options", "reason"),
    [
        ([1], {"num_beams": 2}, {}, "beam search is not built for recurrent decoders; leave num_beams out"),
        (
            [1],
            {},
            {"keep_state": True},
            "state and keep_state are rows of a KV cache; a recurrent decoder's states are",
        ),
        ([1], {"n": 4, "temperature": 1.0}, {}, r"asks for n=4 samples, .* there are 3: load the bundle with a larger"),
        ("text", {}, {}, "needs a tokenizer, which this bundle does not have; give prompts as lists of ids"),
        ([1], {"stop": ("x",)}, {}, "stop needs a tokenizer"),
        ([VOCAB], {}, {}, "has id 100, outside the vocabulary: ids are 0 to 99"),
        ([], {}, {}, "is empty; give at least one token"),
        ([1] * 129, {}, {}, r"has 129 tokens, more than max_length \(128\)"),
        ([1], {}, {"language": "de"}, "language is for models that read a source"),
    ],
)
def test_what_a_recurrent_decoder_cannot_do_is_refused_before_it_runs(
    prompt: Any, params: dict[str, Any], options: dict[str, Any], reason: str, model: RecurrentModel
) -> None:
    with pytest.raises(ValueError, match=reason):
        model.generate([prompt], SamplingParams(**{"temperature": 0.0, **params}), **options)
    with pytest.raises(ValueError, match=reason):
        model.stream(prompt, SamplingParams(**{"temperature": 0.0, **params}), **options)


def test_states_of_another_kind_and_closed_models_are_refused(bundle: Path, model: RecurrentModel) -> None:
    _, state = model.step([[1, 2]])
    with pytest.raises(ValueError, match="state and keep_state are rows of a KV cache"):
        model.generate([[1]], GREEDY, state=state)  # type: ignore[arg-type]  # what a caller may try
    assert not isinstance(state, SequenceState)
    closed = load(bundle)
    assert isinstance(closed, RecurrentModel)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="this RecurrentModel is closed"):
        closed.generate([[1]], GREEDY)


def test_invariance_is_refused_before_the_certificate_is_run(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(bundle), "--invariance"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "is a recurrent decoder, of which no invariance is checked; leave --invariance out" in words

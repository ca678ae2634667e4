"""Streams and threads: texts that join to the one-shot text, requests that share a model, cancelling, closing."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, write_tiny_bundle
from tiny_requests import P8, greedy, num_steps, random_ids, seeded

from graphport.runtime import LanguageModel, SamplingParams, load

TOLERANCE = TOLERANCES["tiny bundle", "float32"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("model") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


def _varied_texts(model: LanguageModel, count: int) -> list[tuple[list[int], SamplingParams, Any]]:
    cases = []
    for seed in range(count):
        prompt, params = random_ids(1 + seed % 9, seed), seeded(seed, 1 + seed % 30)
        cases.append((prompt, params, model.generate([prompt], params)[0]))
    return cases


def test_the_texts_of_a_stream_join_to_the_one_shot_text(model: LanguageModel) -> None:
    for prompt, params, output in _varied_texts(model, 40):
        events = list(model.stream(prompt, params))
        assert "".join(event.text for event in events) == output.text
        assert tuple(event.token_id for event in events) == output.token_ids
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [output.finish_reason]


def test_stop_strings_cut_text_and_stream_alike_and_unfinished_ones_are_flushed(model: LanguageModel) -> None:
    cut = 0
    for prompt, params, output in _varied_texts(model, 40):
        middle = len(output.text) // 2
        for stop in (output.text[middle : middle + 3], output.text[-3:] + "never"):
            if not stop:
                continue
            stopping = SamplingParams(
                max_new_tokens=params.max_new_tokens, temperature=1.5, seed=params.seed, stop=stop
            )
            (got,) = model.generate([prompt], stopping)
            expected = output.text.split(stop)[0]
            assert got.text == expected
            assert got.finish_reason == ("stop" if stop in output.text else output.finish_reason)
            assert "".join(event.text for event in model.stream(prompt, stopping)) == expected
            cut += got.text != output.text
    assert cut > 10


def test_b93_concurrent_calls_give_what_each_gives_alone(model: LanguageModel) -> None:
    prompts = [random_ids(length) for length in P8]
    expected = model.generate(prompts, greedy())
    expected_logits = model.logits(prompts)
    failures: list[str] = []

    def guarded(work: Callable[[int], bool]) -> Callable[[int], None]:
        def call(index: int) -> None:
            try:
                if not all(work(i) for i in range(12)):
                    failures.append(f"thread {index} got another result")
            except Exception as error:
                failures.append(f"thread {index}: {error!r}")

        return call

    def generates(_: int) -> bool:
        return model.generate(prompts, greedy()) == expected

    def streams(i: int) -> bool:
        texts = [event.text for event in model.stream(prompts[i % 8], greedy())]
        return "".join(texts) == expected[i % 8].text

    def scores(i: int) -> bool:
        (logits,) = model.logits([prompts[i % 8]])
        return bool(np.abs(logits - expected_logits[i % 8]).max() < TOLERANCE)

    def abandons(i: int) -> bool:
        stream = iter(model.stream(prompts[i % 8], greedy()))
        return next(stream).token_id == expected[i % 8].token_ids[0]

    work = [generates, streams, scores, abandons] * 2
    threads = [threading.Thread(target=guarded(each), args=(i,)) for i, each in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    model.generate([[1]], greedy(1))
    assert model.num_active == 0


def test_a_stream_that_nobody_reads_does_not_block_others(bundle: TinyBundle) -> None:
    model = load(bundle.folder, max_batch=1, threads=1)
    expected = model.generate([[3], [4]], greedy(6))
    stream = iter(model.stream([3], greedy(6)))
    events = [next(stream)]
    assert model.generate([[4]], greedy(6)) == expected[1:]
    assert model.logits([[4]])[0].shape == (1, VOCAB)
    events += stream
    assert tuple(event.token_id for event in events) == expected[0].token_ids


def test_a_stream_is_served_while_another_thread_generates(bundle: TinyBundle) -> None:
    model = load(bundle.folder, max_batch=4, threads=1)
    stops = threading.Event()
    rounds: list[int] = []

    def work() -> None:
        while not stops.is_set():
            rounds.append(len(model.generate([[1], [2], [3]], greedy(100))))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        expected = load(bundle.folder, threads=1).generate([[9]], greedy(20))[0]
        served = []
        for _ in range(3):
            before = len(rounds)
            got = tuple(event.token_id for event in model.stream([9], greedy(20)))
            served.append((got == expected.token_ids, len(rounds) - before <= 1))
    finally:
        stops.set()
        thread.join(timeout=60)
    assert served == [(True, True)] * 3  # 20 tokens come within the time of 100 of the neighbours


@pytest.mark.parametrize("how", ["close", "drop"])
def test_leaving_a_stream_cancels_it_and_frees_its_slot(model: LanguageModel, how: str) -> None:
    stream: Any = iter(model.stream(random_ids(4), greedy(50)))
    next(stream)
    assert model.num_active == 1
    before = num_steps(model)
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    assert model.num_active == 0
    assert num_steps(model) == before


def test_a_stream_that_was_never_read_takes_nothing(model: LanguageModel) -> None:
    before = num_steps(model)
    model.stream(random_ids(4), greedy(50))
    assert model.num_active == 0
    assert num_steps(model) == before


def test_an_interrupt_in_generate_frees_every_row(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model._engine is not None
    engine, real = model._engine, model._engine.step
    calls = []

    def interrupted() -> None:
        real()
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate([[1], [2], [3]] * 5, greedy(20))
    assert model.num_active == 0
    assert engine.all_sequences() == []


def test_a_closed_model_refuses_work_and_ends_its_streams(bundle: TinyBundle) -> None:
    with load(bundle.folder, threads=1) as model:
        stream = iter(model.stream([1, 2], greedy(50)))
        next(stream)
    assert len(list(stream)) < 50
    for call in (lambda: model.generate([[1]]), lambda: list(model.stream([1])), lambda: model.logits([[1]])):
        with pytest.raises(RuntimeError, match="this LanguageModel is closed; load the bundle again"):
            call()
    model.close()
    assert model.num_active == 0

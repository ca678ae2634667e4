"""The Python contract: requests checked, texts and ids out, limits, streams, threads, memory, reuse."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, reference_logits, tiny_weights, write_tiny_bundle

from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.sampling import NonFiniteLogitsError

TOLERANCE = TOLERANCES["tiny bundle", "float32"]
P8 = (1, 2, 3, 5, 8, 13, 21, 34)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("model") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()  # type: ignore[no-any-return]


def greedy(new: int | None = 8, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=0.0, **options)


def seeded(seed: int | None, new: int = 10) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=1.5, seed=seed)


def num_steps(model: LanguageModel) -> int:
    assert model._engine is not None
    return model._engine.num_steps


def test_generate_takes_and_gives_lists_of_texts_or_ids(model: LanguageModel, bundle: TinyBundle) -> None:
    assert model.tokenizer is not None
    text, ids = "the cat", random_ids(5)
    first, second = model.generate([text, ids], greedy())
    assert list(first.prompt_token_ids) == model.tokenizer.encode(text)
    assert second.prompt_token_ids == tuple(ids)
    for output in (first, second):
        assert len(output.token_ids) == 8
        assert output.finish_reason == "length"
        assert output.text == model.tokenizer.decode(output.token_ids) or max(output.token_ids) >= VOCAB - 2
        assert output.logprobs is None
        expected = reference_logits(bundle.weights, list(output.prompt_token_ids))[-1]
        assert output.token_ids[0] == expected.argmax()
    assert model.generate([], greedy()) == []


def test_b07_b08_b14_batches_equal_single_prompts_and_row_order_does_not_matter(model: LanguageModel) -> None:
    end = random_ids(1, 5)[0]
    prompts = [random_ids(length) for length in P8]
    prompts[4][3] = end  # an end id inside a prompt hides nothing
    params = greedy(20, stop_token_ids=[end])
    single = [model.generate([prompt], params)[0] for prompt in prompts]
    assert model.generate(prompts, params) == single
    order = [3, 7, 0, 6, 1, 5, 2, 4]
    assert model.generate([prompts[i] for i in order], params) == [single[i] for i in order]


def test_more_prompts_than_max_batch_are_queued(bundle: TinyBundle, model: LanguageModel) -> None:
    prompts = [random_ids(1 + i % 7, i) for i in range(20)]
    with load(bundle.folder, max_batch=3, threads=1) as small:
        assert small.generate(prompts, greedy()) == model.generate(prompts, greedy())
        assert small._engine is not None
        assert small._engine.cache.num_slots <= 3


def test_parameters_may_be_given_one_a_prompt(model: LanguageModel) -> None:
    outputs = model.generate([[1], [1], [1]], [greedy(1), greedy(3, logprobs=2), seeded(3, 2)])
    assert [len(output.token_ids) for output in outputs] == [1, 3, 2]
    assert outputs[0].logprobs is None
    assert outputs[1].logprobs is not None
    assert [sample.token_id for sample in outputs[1].logprobs] == list(outputs[1].token_ids)
    assert all(len(sample.top_logprobs) == 2 for sample in outputs[1].logprobs)
    with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts; give one for all, or one a prompt"):
        model.generate([[1]], [greedy(), greedy()])
    with pytest.raises(TypeError, match="params must be SamplingParams or a list of them, got int"):
        model.generate([[1]], 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be SamplingParams, got dict"):
        model.generate([[1]], [{}])  # type: ignore[list-item]


@pytest.mark.parametrize("method", ["generate", "logits"])
def test_a_bare_prompt_where_a_list_is_needed_is_refused(model: LanguageModel, method: str) -> None:
    with pytest.raises(TypeError, match=r"list.*got str"):
        getattr(model, method)("hello")
    with pytest.raises(TypeError, match=r"prompt 0 is of type int; give a str or a list of ids"):
        getattr(model, method)([1, 2, 3])


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([], ValueError, "prompt 1 is empty; give at least one token"),
        ([1, VOCAB], ValueError, f"prompt 1 has id {VOCAB}, outside the vocabulary: ids are 0 to {VOCAB - 1}"),
        ([1, -1], ValueError, "prompt 1 has id -1, outside the vocabulary"),
        ([2**70], ValueError, "outside the vocabulary"),
        ([1, True], TypeError, r"prompt 1 holds True \(bool\); ids are integers"),
        ([1.0], TypeError, r"prompt 1 holds 1.0 \(float\); ids are integers"),
        ([None], TypeError, r"prompt 1 holds None \(NoneType\); ids are integers"),
        (["a"], TypeError, r"prompt 1 holds 'a' \(str\); ids are integers"),
        (b"ab", TypeError, "prompt 1 is of type bytes"),
        (np.array([1.0, 2.0]), TypeError, r"prompt 1 is a float64 array of shape \[2\]; give one row of integer ids"),
        (np.array([True]), TypeError, "prompt 1 is a bool array"),
        (np.array([[1, 2]]), TypeError, r"prompt 1 is a int64 array of shape \[1, 2\]"),
    ],
)
def test_ids_that_are_no_prompt_are_refused_before_anything_runs(
    model: LanguageModel, ids: Any, error: type[Exception], match: str
) -> None:
    before = num_steps(model)
    for call in (model.generate, model.logits):
        with pytest.raises(error, match=match):
            call([[1], ids])
    with pytest.raises(error):
        model.stream(ids)
    assert num_steps(model) == before


def test_b94_b99_ids_of_any_integer_type_and_memory_layout_are_the_same_prompt(model: LanguageModel) -> None:
    ids = random_ids(6)
    wide = np.zeros((6, 4), np.int64)
    wide[:, 2] = ids
    forms: list[Any] = [
        tuple(ids),
        np.array(ids, np.int32),
        np.array(ids, np.uint16),
        np.array(ids, ">i8"),
        np.array(ids[::-1])[::-1],
        np.array([i for pair in zip(ids, ids, strict=True) for i in pair])[::2],
        wide[:, 2],
        np.asfortranarray(wide)[:, 2],
        wide.T[2],
        [np.int32(i) for i in ids],
    ]
    expected = model.generate([ids], greedy())[0]
    assert model.generate(forms, greedy()) == [expected] * len(forms)
    (logits,) = model.logits([ids])
    for got in model.logits(forms):
        assert np.abs(got - logits).max() < TOLERANCE


@pytest.mark.parametrize(("length", "is_allowed"), [(15, True), (16, True), (17, False), (40, False), (0, False)])
@pytest.mark.parametrize("new", [0, 1, 5, None])
def test_b17_prompts_around_the_limit_are_decided_before_any_run(
    bundle: TinyBundle, length: int, is_allowed: bool, new: int | None
) -> None:
    model = load(bundle.folder, max_length=16, threads=1)
    if not is_allowed:
        match = "is empty" if length == 0 else f"prompt 0 has {length} tokens, more than max_length \\(16\\)"
        for call in (model.generate, model.logits):
            with pytest.raises(ValueError, match=match):
                call([random_ids(length)])
        with pytest.raises(ValueError, match=match.replace("prompt 0", "prompt")):
            model.stream(random_ids(length), greedy(new))
        assert num_steps(model) == 0
        return
    (output,) = model.generate([random_ids(length)], greedy(new))
    expected = min(16 - length, 16 if new is None else new)
    assert (len(output.token_ids), output.finish_reason) == (expected, "length")
    assert num_steps(model) == expected
    assert model.logits([random_ids(length)])[0].shape == (length, VOCAB)


@pytest.mark.parametrize("length", [30, 31, 32])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_b18_prompt_and_new_tokens_share_one_limit(bundle: TinyBundle, length: int, new: int) -> None:
    model = load(bundle.folder, max_length=32, threads=1)
    (output,) = model.generate([random_ids(length)], greedy(new))
    assert len(output.token_ids) == min(new, 32 - length)
    assert output.finish_reason == "length"
    events = list(model.stream(random_ids(length), greedy(new)))
    assert [event.token_id for event in events] == (list(output.token_ids) or [None])
    with pytest.raises(ValueError, match="prompt 0 has 33 tokens, more than max_length"):
        model.generate([random_ids(33)], greedy(new))


@pytest.mark.parametrize("max_length", [0, 129, -1])
def test_a_limit_beyond_the_bundles_own_is_refused(bundle: TinyBundle, max_length: int) -> None:
    with pytest.raises(ValueError, match=f"max_length must be 1 to 128, the bundle's own; got {max_length}"):
        load(bundle.folder, max_length=max_length)
    with pytest.raises(ValueError, match="max_batch must be at least 1; got 0"):
        load(bundle.folder, max_batch=0)


def test_b23_generation_ends_when_the_context_is_full(bundle: TinyBundle) -> None:
    model = load(bundle.folder, max_length=32, threads=1)
    begin = time.monotonic()
    prompt = random_ids(28)
    (output,) = model.generate([prompt], greedy(100))
    assert (len(output.token_ids), output.finish_reason) == (4, "length")
    ids = [*prompt, *output.token_ids]
    assert output.token_ids == tuple(reference_logits(bundle.weights, ids[:-1])[27:].argmax(-1))
    events = list(model.stream(prompt, greedy(100)))
    assert [event.token_id for event in events] == list(output.token_ids)
    assert events[-1].finish_reason == "length"
    assert time.monotonic() - begin < 10


def test_logits_of_every_position_come_through_the_cache_in_chunks(bundle: TinyBundle) -> None:
    prompts = [random_ids(length) for length in (1, 70, 128)]
    for chunk in (1, 7, 512):
        for prompt, got in zip(
            prompts, load(bundle.folder, threads=1, prefill_chunk=chunk).logits(prompts), strict=True
        ):
            assert got.shape == (len(prompt), VOCAB)
            assert got.dtype == np.float32
            assert np.abs(got - reference_logits(bundle.weights, prompt)).max() < TOLERANCE


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


@pytest.mark.parametrize("own", [(), (0,), (0, 1)])
@pytest.mark.parametrize("callers", [(), (2,), (0, 3)])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_b105_end_ids_are_the_bundles_and_the_callers(
    tmp_path: Path, own: tuple[int, ...], callers: tuple[int, ...], ignore_eos: bool
) -> None:
    weights = tiny_weights()
    prompt = random_ids(4, 3)
    free = load(write_tiny_bundle(tmp_path / "free", weights=weights).folder, threads=1).generate([prompt], greedy(9))[
        0
    ]
    ids = free.token_ids
    places = [ids[2], ids[4], ids[6], ids[8]]  # what the small numbers above stand for
    model = load(
        write_tiny_bundle(tmp_path / "b", weights=weights, eos_token_ids=tuple(places[i] for i in own)).folder,
        threads=1,
    )
    params = greedy(9, stop_token_ids=[places[i] for i in callers], ignore_eos=ignore_eos)
    (output,) = model.generate([prompt], params)
    ends = {places[i] for i in callers} | (set() if ignore_eos else {places[i] for i in own})
    first = next((i for i, token_id in enumerate(ids) if token_id in ends), None)
    assert output.token_ids == (ids if first is None else ids[: first + 1])
    assert output.finish_reason == ("length" if first is None else "stop")


@pytest.mark.parametrize("end", ["limit", "end id", "stop string"])
def test_b100_a_second_turn_equals_a_one_shot_run_over_the_same_ids(
    model: LanguageModel, bundle: TinyBundle, end: str
) -> None:
    prompt = random_ids(5)
    free = model.generate([prompt], greedy(12))[0]
    options = {"limit": {}, "end id": {"stop_token_ids": [free.token_ids[6]]}, "stop string": {"stop": free.text[2:5]}}
    first = model.generate([prompt], greedy(12, **options[end]))[0]
    assert first.finish_reason == ("length" if end == "limit" else "stop")
    conversation = [*prompt, *first.token_ids, *random_ids(4, 9)]
    second = model.generate([conversation], greedy(5))[0]
    ids = list(conversation)
    for _ in range(5):
        ids.append(int(reference_logits(bundle.weights, ids)[-1].argmax()))
    assert list(second.token_ids) == ids[len(conversation) :]


def test_b100_appending_to_a_cached_conversation_runs_its_last_token_first(
    model: LanguageModel, bundle: TinyBundle
) -> None:
    assert model._engine is not None
    session = model._engine.session
    prompt, more = random_ids(5), random_ids(4, 9)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    generated = [int(session.step(cache, np.array([prompt])).argmax())]
    for _ in range(5):
        generated.append(int(session.step(cache, np.array([[generated[-1]]])).argmax()))
    conversation = [*prompt, *generated, *more]
    expected = reference_logits(bundle.weights, conversation)[-1]
    assert cache.lengths[0] == len(prompt) + len(generated) - 1  # the last token has been chosen, not run
    right = session.step(cache, np.array([[generated[-1], *more]])).copy()
    assert np.abs(right - expected).max() < TOLERANCE
    cache.rewind(0, len(prompt) + len(generated) - 1)
    forgotten = session.step(cache, np.array([more]))
    assert np.abs(forgotten - expected).max() > 1000 * TOLERANCE


def test_b102_warm_equals_cold_over_fifty_pairs_of_prompts(bundle: TinyBundle, model: LanguageModel) -> None:
    random = np.random.default_rng(0)
    for pair in range(50):
        shared = random_ids(int(random.integers(0, 20)), pair)
        first = [*shared, *random_ids(int(random.integers(1, 9)), 100 + pair)]
        second = [*shared, *random_ids(int(random.integers(1, 9)), 200 + pair)]
        with load(bundle.folder, threads=1) as cold:
            expected, expected_logits = cold.generate([second], greedy())[0], cold.logits([second])[0]
        if pair % 4 == 0:
            model.generate([first], greedy(6, stop="a"))
        elif pair % 4 == 1:
            model.generate([first], greedy(6))
        elif pair % 4 == 2:
            next(iter(model.stream(first, greedy(6))))
        else:
            with pytest.raises(ValueError, match="outside the vocabulary"):
                model.generate([first, [VOCAB]])
        assert model.generate([second], greedy())[0] == expected
        assert np.abs(model.logits([second])[0] - expected_logits).max() < TOLERANCES["reused cache", "float32"]


def test_b114_a_seeded_row_does_not_depend_on_its_neighbours_or_earlier_calls(
    bundle: TinyBundle, model: LanguageModel
) -> None:
    prompt, state = random_ids(6), np.random.get_state()[1].tolist()  # type: ignore[union-attr,index]  # legacy tuple
    expected = load(bundle.folder, threads=1).generate([prompt], seeded(42))[0]
    assert expected != model.generate([prompt], seeded(43))[0]
    batch = model.generate([[5], prompt, random_ids(9)], [seeded(None), seeded(42), seeded(7)])
    assert batch[1] == expected
    assert model.generate([prompt, [5]], [seeded(42), seeded(42)])[0] == expected
    for _ in range(10):
        model.generate([[3, 4]], seeded(None))
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(model.generate([prompt], seeded(42))))
    thread.start()
    thread.join()
    assert results == [expected]
    assert "".join(event.text for event in model.stream(prompt, seeded(42))) == expected.text
    assert np.random.get_state()[1].tolist() == state  # type: ignore[union-attr,index]  # legacy tuple


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


def test_b50_overflowing_logits_raise_and_are_never_a_stream_of_id_zero(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["1.down"][0, 0] = np.inf
    model = load(write_tiny_bundle(tmp_path, weights=weights).folder, threads=1)
    for call in (
        lambda: model.generate([[1, 2]], greedy()),
        lambda: list(model.stream([1, 2], greedy())),
        lambda: model.logits([[1, 2]]),
    ):
        with pytest.raises(NonFiniteLogitsError, match=r"not finite.*overflowed"):
            call()
    assert model.num_active == 0


def test_chat_renders_the_template_and_streams_the_answer(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    messages = [{"role": "user", "content": "hello"}]
    ids = model.tokenizer.encode("user: hello\nassistant: ")
    assert list(model.chat(messages, greedy())) == list(model.stream(ids, greedy()))


def test_a_bundle_without_tokenizer_speaks_ids_only(tmp_path: Path) -> None:
    model = load(write_tiny_bundle(tmp_path).folder, threads=1)
    (output,) = model.generate([[1, 2]], greedy(3))
    assert (output.text, len(output.token_ids)) == ("", 3)
    with pytest.raises(ValueError, match="a str prompt needs a tokenizer, which this bundle does not have"):
        model.generate(["hello"])
    with pytest.raises(ValueError, match="stop strings needs a tokenizer"):
        model.generate([[1]], greedy(3, stop="x"))
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        model.chat([{"role": "user", "content": "hello"}])


def test_b97_memory_is_flat_over_two_thousand_generations(model: LanguageModel) -> None:
    process = psutil.Process()
    random = np.random.default_rng(0)

    def once(i: int) -> None:
        prompt = random_ids(int(random.integers(1, 60)), i)
        if i % 10 == 7:
            with pytest.raises(ValueError, match="outside the vocabulary"):
                model.generate([prompt, [VOCAB]], greedy(3))
        elif i % 10 == 8:
            next(iter(model.stream(prompt, greedy(9))))
        elif i % 10 == 9:
            model.logits([prompt])
        else:
            model.generate([prompt], seeded(i, 1 + i % 5))

    for i in range(200):
        once(i)
    gc.collect()
    before = process.memory_info().rss
    for i in range(200, 2000):
        once(i)
    gc.collect()
    assert process.memory_info().rss - before < 5 * 2**20
    assert model.num_active == 0


def test_importing_the_package_is_cheap_and_loading_needs_no_torch_and_no_onnx() -> None:
    program = """
import sys
import graphport.runtime
assert "onnxruntime" not in sys.modules and "numpy" not in sys.modules
from graphport.runtime import GenerationOutput, LanguageModel, SamplingParams, StreamEvent, load
for name in ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "safetensors", "gguf"):
    assert name not in sys.modules, name
assert not hasattr(graphport.runtime, "no_such_name")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("name", ["max_batch", "max_length", "threads", "prefill_chunk"])
@pytest.mark.parametrize("value", [1.5, True, "8"])
def test_load_refuses_numbers_of_another_kind(name: str, value: object, bundle: TinyBundle) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a whole number, .*; got {value!r}"):
        load(bundle.folder, **{name: value})

"""A model used again: further turns, warm caches, seeds, memory over many requests."""

import gc
import threading
from typing import Any

import numpy as np
import psutil
import pytest
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, reference_logits, write_tiny_bundle
from tiny_requests import greedy, random_ids, seeded

from graphport.runtime import LanguageModel, load

TOLERANCE = TOLERANCES["tiny bundle", "float32"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("model") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


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

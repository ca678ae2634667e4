"""Requests and memory: what can never fit is refused with the numbers, what fits later waits, what fits runs."""

import pytest
from tiny_bundles import VOCAB, TinyBundle, write_tiny_bundle
from tiny_requests import greedy, num_steps, random_ids

from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.memory import NotEnoughMemoryError
from graphport.runtime.sequence import Sequence

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes


class Memory:
    """Bytes that are free besides what the cache of a model takes; pages count when they are written."""

    def __init__(self, model: LanguageModel, total: int) -> None:
        assert model._engine is not None
        self._cache = model._engine.cache
        self.total = total
        self._cache._free = self.free

    def free(self) -> int:
        written = TOKEN_BYTES * int(self._cache.lengths[: self._cache.num_active].sum())
        return max(0, self.total - written)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("admission") / "bundle", max_length=1024)


@pytest.fixture
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1, max_batch=4, prefill_chunk=512)


@pytest.fixture(scope="module")
def expected(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1, max_batch=4)


def test_what_can_never_fit_is_refused_with_the_numbers_before_anything_runs(model: LanguageModel) -> None:
    Memory(model, 300 * TOKEN_BYTES)
    for params, rows, tokens in (
        (greedy(301), 1, 311),
        (SamplingParams(max_new_tokens=100, n=3), 3, 110),
    ):
        needed = rows * tokens * TOKEN_BYTES / 2**20
        match = f"a request of {rows} rows of {tokens} tokens needs {needed:.1f} MiB, 0.1 MiB are free; give a shorter"
        for call in (lambda p: model.generate([random_ids(10)], p), lambda p: model.stream(random_ids(10), p)):
            with pytest.raises(NotEnoughMemoryError, match=match):
                call(params)
    assert num_steps(model) == 0
    assert model.num_active == 0


def test_a_request_without_a_limit_is_admitted_for_what_its_prompt_needs(model: LanguageModel) -> None:
    memory = Memory(model, 300 * TOKEN_BYTES)
    stream = iter(model.stream(random_ids(200), greedy(None)))
    next(stream)
    memory.total = 10**9
    assert len(list(stream)) == 1024 - 200 - 1


def test_a_request_that_fits_later_waits_for_memory(model: LanguageModel, expected: LanguageModel) -> None:
    """Two rows of 192 tokens would need twice what is there; one after the other fits."""
    Memory(model, 300 * TOKEN_BYTES)
    prompts = [random_ids(130, seed) for seed in range(3)]
    active = []
    engine = model._engine
    assert engine is not None
    step = engine.step

    def watched() -> None:
        step()
        active.append(engine.scheduler.num_active)

    engine.step = watched  # type: ignore[method-assign]
    found = model.generate(prompts, greedy(12))
    assert found == expected.generate(prompts, greedy(12))
    assert max(active) == 1


def test_slots_that_nobody_holds_are_given_up_for_a_long_row(model: LanguageModel, expected: LanguageModel) -> None:
    memory = Memory(model, 10**9)
    short = [random_ids(20, seed) for seed in range(4)]
    model.generate(short, greedy(5))
    assert model._engine is not None
    cache = model._engine.cache
    assert (cache.num_slots, cache.capacity) == (4, 64)
    memory.total = 720 * TOKEN_BYTES
    long = random_ids(600)
    assert model.generate([long], greedy(5)) == expected.generate([long], greedy(5))
    assert (cache.num_slots, cache.capacity) == (1, 640)
    assert model.generate(short, greedy(5)) == expected.generate(short, greedy(5))


def test_a_row_that_cannot_double_grows_by_a_little(model: LanguageModel, expected: LanguageModel) -> None:
    Memory(model, 240 * TOKEN_BYTES)
    prompt = random_ids(120)
    assert model.generate([prompt], greedy(40)) == expected.generate([prompt], greedy(40))
    assert model._engine is not None
    assert model._engine.cache.capacity == 192


def test_a_row_that_grows_beside_samples_in_prefill_keeps_their_slots(
    model: LanguageModel, expected: LanguageModel
) -> None:
    memory = Memory(model, 10**9)
    engine = model._engine
    assert engine is not None
    engine._prefill_chunk = 4  # the prompt stays in prefill while the row beside it grows
    row = Sequence(tuple(random_ids(60)), greedy(), vocab_size=VOCAB, max_total=100)
    group = [
        Sequence(tuple(random_ids(50, 1)), greedy(), vocab_size=VOCAB, max_total=60, index=index) for index in range(2)
    ]
    engine.submit(row)
    while not row.token_ids:
        engine.step()
    engine.submit(*group)
    engine.step()
    memory.total = 500 * TOKEN_BYTES
    while engine.all_sequences():
        engine.step()
    assert isinstance(row.error, NotEnoughMemoryError)  # it would fit into fewer slots, which are promised
    for sequence in group:
        new = len(sequence.token_ids)
        assert sequence.error is None
        (output,) = expected.generate([sequence.prompt_ids], greedy(new))
        assert sequence.token_ids == list(output.token_ids)


def test_when_nothing_is_left_the_longest_row_fails_and_the_others_end(model: LanguageModel) -> None:
    memory = Memory(model, 10**9)
    streams = [iter(model.stream(random_ids(50 + 10 * seed, seed), greedy(100))) for seed in range(2)]
    for stream in streams:
        next(stream)
    memory.total = 0
    with pytest.raises(NotEnoughMemoryError, match="a KV cache of"):
        list(streams[1])
    memory.total = 10**9
    assert len(list(streams[0])) == 99
    assert model.num_active == 0

"""Rows of earlier prompts: found by their ids, given up within a budget, and never seen in a result."""

import logging
from typing import Any

import numpy as np
import pytest
from fake_cuda import on_fake_device
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, write_tiny_bundle
from tiny_requests import greedy, random_ids, seeded

from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.engine import Engine
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.prefix_cache import PrefixCache
from graphport.runtime.row_reuse import BLOCK_TOKENS
from graphport.runtime.sequence import ScoringSequence, Sequence
from graphport.runtime.session import Session

TOLERANCE = TOLERANCES["reused cache", "float32"]
BUDGET = 1 << 22


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("prefixes") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def cold(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


@pytest.fixture
def warm(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1, prefix_cache_bytes=BUDGET)


def last_logits(model: LanguageModel, ids: list[int]) -> np.ndarray:
    (row,) = model.stream_logits(ids, first_row=len(ids) - 1)
    return row


def test_b102_warm_equals_cold_over_fifty_pairs_of_prompts(cold: LanguageModel, warm: LanguageModel) -> None:
    random = np.random.default_rng(0)
    for pair in range(50):
        shared = random_ids(int(random.integers(0, 90)), pair)
        first = [*shared, *random_ids(int(random.integers(1, 20)), 100 + pair)]
        second = [*shared, *random_ids(int(random.integers(1, 20)), 200 + pair)]
        _run_first(warm, first, pair)
        if pair % 5 == 3:  # history edited in the middle
            second[len(second) // 2] = (second[len(second) // 2] + 1) % VOCAB
        params = greedy() if pair % 2 else seeded(pair)
        expected, got = cold.generate([second], params)[0], warm.generate([second], params)[0]
        assert got == expected
        assert np.abs(last_logits(warm, second) - last_logits(cold, second)).max() < TOLERANCE
    found = warm.statistics.prefix_cache
    assert found is not None
    assert found.num_hits > 80
    assert found.num_reused_tokens > 0.3 * found.num_prompt_tokens
    assert warm.num_active == 0


def _run_first(model: LanguageModel, prompt: list[int], pair: int) -> None:
    """A request with this prompt that ends in one of all the ways."""
    if pair % 5 == 0:
        text = model.generate([prompt], greedy(6))[0].text
        model.generate([prompt], greedy(6, stop=text[1:3] or "a"))
    elif pair % 5 == 1:
        model.generate([prompt], greedy(6))
    elif pair % 5 == 2:
        next(iter(model.stream(prompt, greedy(6))))
    elif pair % 5 == 3:
        assert model._engine is not None
        engine, real = model._engine, model._engine.session.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.session, "run", lambda *a, **k: _fail_when_decoding(real, *a, **k))
            with pytest.raises(RuntimeError, match="kernel failed"):
                model.generate([prompt], greedy(6))
    else:
        (sample, *_) = model.generate([prompt], SamplingParams(max_new_tokens=5, n=2, seed=1))[0].samples
        assert sample.finish_reason == "length"


def _fail_when_decoding(run: Any, cache: Any, ids: Any, *rest: Any, **options: Any) -> Any:
    if ids.shape[1] == 1:
        raise RuntimeError("kernel failed")
    return run(cache, ids, *rest, **options)


@pytest.mark.parametrize("broken", ["heads swapped", "rows of another place"])
def test_b102_a_cache_that_gives_wrong_rows_is_noticed(
    warm: LanguageModel, cold: LanguageModel, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(70)
    warm.generate([ids], greedy(1))
    find = PrefixCache.find

    def wrong(self: PrefixCache, ids: Any, **bounds: int) -> Any:
        found = find(self, ids, **bounds)
        assert len(found) == 4
        if broken == "heads swapped":
            return [tuple(rows[::-1] for rows in block) for block in found]
        return [found[0], *found[:3]]

    monkeypatch.setattr(PrefixCache, "find", wrong)
    assert np.abs(last_logits(warm, ids) - last_logits(cold, ids)).max() > 1000 * TOLERANCE


def test_a_second_turn_runs_only_what_is_new(warm: LanguageModel, cold: LanguageModel) -> None:
    prompt = random_ids(40)
    (first,) = warm.generate([prompt], greedy(24))
    conversation = [*prompt, *first.token_ids, *random_ids(10, 3)]
    before = warm.statistics.prefix_cache
    (second,) = warm.generate([conversation], greedy(6))
    after = warm.statistics.prefix_cache
    assert before is not None
    assert after is not None
    assert after.num_reused_tokens - before.num_reused_tokens == 48  # of 63 that had run, the whole blocks of 16
    assert second == cold.generate([conversation], greedy(6))[0]


def test_rows_that_a_state_gives_are_not_counted_as_found(warm: LanguageModel, cold: LanguageModel) -> None:
    prompt = random_ids(40)
    (first,) = warm.generate([prompt], greedy(5), keep_state=True)
    conversation = [*prompt, *first.token_ids, *random_ids(10, 3)]
    before = warm.statistics.prefix_cache
    (second,) = warm.generate([conversation], greedy(6), state=first.state)  # 44 rows; the cache has 32 of them
    after = warm.statistics.prefix_cache
    assert before is not None
    assert after is not None
    assert after.num_prompts == before.num_prompts + 1
    assert (after.num_hits, after.num_reused_tokens) == (before.num_hits, before.num_reused_tokens)
    assert second == cold.generate([conversation], greedy(6))[0]


def test_a_request_finds_what_one_that_still_runs_has_read(warm: LanguageModel) -> None:
    prompt = random_ids(40)
    stream = iter(warm.stream(prompt, greedy(30)))
    next(stream)
    warm.generate([[*prompt, 5]], greedy(1))
    assert warm.statistics.prefix_cache is not None
    assert warm.statistics.prefix_cache.num_reused_tokens == 32


def test_all_positions_whose_logits_are_asked_for_are_run(bundle: TinyBundle, cold: LanguageModel) -> None:
    ids = random_ids(60)
    with load(bundle.folder, threads=1, prefix_cache_bytes=BUDGET) as warm:
        warm.generate([ids], greedy(1))
        (got,), (expected,) = warm.logits([ids]), cold.logits([ids])
        assert np.abs(got - expected).max() < TOLERANCE
        pieces = np.concatenate(list(warm.stream_logits(ids, first_row=35)))
        assert np.abs(pieces - expected[35:]).max() < TOLERANCE
        assert warm.statistics.prefix_cache is not None
        assert warm.statistics.prefix_cache.num_reused_tokens == 32


def test_without_a_budget_nothing_is_kept(cold: LanguageModel) -> None:
    assert cold.statistics.prefix_cache is None


@pytest.mark.parametrize(
    ("budget", "error", "match"),
    [
        (-1, ValueError, "prefix_cache_bytes must be at least 1; got -1"),
        (1.5, TypeError, "prefix_cache_bytes must be a whole number"),
        (8191, ValueError, "prefix_cache_bytes must be 0 or at least 8192, a block of 16 tokens; got 8191"),
        (1 << 60, MemoryError, "the prefix cache needs .* MiB are free; give fewer prefix_cache_bytes"),
    ],
)
def test_budgets_that_cannot_be_are_refused(
    bundle: TinyBundle, budget: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        load(bundle.folder, threads=1, prefix_cache_bytes=budget)


def test_the_budget_is_kept_and_what_was_used_last_stays(bundle: TinyBundle) -> None:
    block = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, width, bytes
    with load(bundle.folder, threads=1, prefix_cache_bytes=6 * block) as lm:
        prompts = [random_ids(33, seed) for seed in range(4)]
        for prompt in prompts[:3]:
            lm.generate([prompt], greedy(1))
        lm.generate([prompts[0]], greedy(1))  # used again: the second is the oldest now
        lm.generate([prompts[3]], greedy(1))
        reused = []
        for prompt in (prompts[0], prompts[2], prompts[3], prompts[1]):
            before = lm.statistics.prefix_cache
            lm.generate([prompt], greedy(1))
            after = lm.statistics.prefix_cache
            assert before is not None
            assert after is not None
            reused.append(after.num_reused_tokens - before.num_reused_tokens)
            assert after.num_bytes <= after.budget == 6 * block
        assert reused == [32, 32, 32, 0]
        assert after.num_evicted == 4


def test_where_results_depend_on_cuts_only_whole_chunks_of_prompts_are_used_again(bundle: TinyBundle) -> None:
    session = Session(open_bundle(bundle.folder), device="cpu", threads=1)

    class Rounding:
        depends_on_cuts = True

        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

    engine = Engine(
        Rounding(),  # type: ignore[arg-type]
        max_batch=2,
        max_length=128,
        prefill_chunk=24,
        prefix_cache_bytes=BUDGET,
    )

    def run(sequence: Sequence) -> int:
        assert engine.reuse.prefixes is not None
        before = engine.reuse.prefixes.statistics.num_reused_tokens
        engine.submit(sequence)
        while engine.all_sequences():
            engine.step()
        return engine.reuse.prefixes.statistics.num_reused_tokens - before

    ids = random_ids(60)

    def request(ids: list[int], new: int) -> Sequence:
        return Sequence(tuple(ids), greedy(), vocab_size=VOCAB, max_total=len(ids) + new)

    assert run(ScoringSequence(tuple(ids), vocab_size=VOCAB)) == 0  # its chunks may be cut elsewhere
    first = request(ids, 30)
    assert run(first) == 0
    assert run(request([*ids, *first.token_ids, 5], 2)) == 48  # not the 12 that follow, nor what was generated


def test_rows_on_a_device_go_to_the_host_and_come_back(
    bundle: TinyBundle, cold: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(open_bundle(bundle.folder), device="cpu", threads=1)
    fake = on_fake_device(session, monkeypatch)
    engine = Engine(session, max_batch=2, max_length=128, prefill_chunk=64, prefix_cache_bytes=BUDGET)
    prompts = [[*random_ids(50), *random_ids(5, seed)] for seed in range(3)]
    for prompt in prompts:
        sequence = Sequence(tuple(prompt), greedy(), vocab_size=VOCAB, max_total=len(prompt) + 8, keeps_state=True)
        engine.submit(sequence)
        while engine.all_sequences():
            engine.step()
        (expected,) = cold.generate([prompt], greedy(8), keep_state=True)
        assert sequence.token_ids == list(expected.token_ids)
        assert expected.state is not None
        assert sequence.kept_rows is not None
        for rows, wanted in zip(sequence.kept_rows.rows, expected.state.rows, strict=True):
            assert np.abs(rows - wanted).max() < TOLERANCE
    assert engine.reuse.prefixes is not None
    assert engine.reuse.prefixes.statistics.num_reused_tokens == 2 * 48
    assert fake.blocks


def test_rows_are_copied_in_blocks_that_join_to_the_slot(bundle: TinyBundle) -> None:
    session = Session(open_bundle(bundle.folder), device="cpu", threads=1)
    cache: KVCache = session.new_cache(max_slots=2, max_length=128)
    cache.claim()
    cache.claim()
    session.step(cache, np.array([random_ids(50)]), first_slot=1)
    whole = cache.read_rows(1, 0, 50)
    for begin, end in ((0, BLOCK_TOKENS), (BLOCK_TOKENS, 50)):
        cache.append_rows(0, cache.read_rows(1, begin, end))
    for got, expected in zip(cache.read_rows(0, 0, 50), whole, strict=True):
        assert got.tobytes() == expected.tobytes()
    assert cache.lengths.tolist() == [50, 50]


@pytest.mark.parametrize("call", [0, 1], ids=["after the prompt", "at the end"])
def test_rows_that_cannot_be_kept_cost_no_answer_and_no_place(
    call: int, cold: LanguageModel, warm: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    engine = warm._engine
    assert engine is not None
    keep, calls = engine.reuse.keep, iter(range(10))

    def failing(sequence: Sequence, slot: int) -> None:
        if next(calls) == call:
            raise MemoryError("no room for the copy")
        keep(sequence, slot)

    monkeypatch.setattr(engine.reuse, "keep", failing)
    with caplog.at_level(logging.WARNING, logger="graphport.runtime.engine"):
        assert warm.generate([random_ids(40)], greedy()) == cold.generate([random_ids(40)], greedy())
    assert "rows of a prompt could not be kept" in caplog.text
    assert engine.cache.num_active == 0


def test_a_state_that_cannot_be_handed_over_is_its_owners_error(
    warm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = warm._engine
    assert engine is not None

    def failing(sequence: Sequence, slot: int) -> None:
        raise MemoryError(f"no room for the rows of slot {slot}")

    with monkeypatch.context() as patch:
        patch.setattr(engine.reuse, "hand_over", failing)
        for new in (0, 5):
            with pytest.raises(MemoryError, match="no room for the rows of slot 0"):
                warm.generate([random_ids(9)], greedy(new, prompt_logprobs=0), keep_state=True)
    assert engine.cache.num_active == 0
    assert len(warm.generate([random_ids(9)], greedy(5))[0].token_ids) == 5

"""Continuous batching: every row gets what it would get alone, whatever joins, leaves, fails or is cancelled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, reference_logits, tiny_tokenizer, write_tiny_bundle

from graphport.runtime import engine as engine_module
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.device_memory import HostMemory
from graphport.runtime.engine import Engine
from graphport.runtime.memory import NotEnoughMemoryError
from graphport.runtime.sampling import NonFiniteLogitsError
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import ScoringSequence, Sequence
from graphport.runtime.session import Session
from graphport.runtime.step_outputs import StepOutputs
from graphport.runtime.tokenizer import Tokenizer

TOLERANCE = TOLERANCES["tiny bundle", "float32"]
MAX_LENGTH = 128
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("engine") / "bundle")


@pytest.fixture(scope="module")
def session(bundle: TinyBundle) -> Session:
    return Session(open_bundle(bundle.folder), device="cpu", threads=1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def new_engine(session: Session, **options: int) -> Engine:
    return Engine(session, **{"max_batch": 4, "max_length": MAX_LENGTH, "prefill_chunk": 512, **options})


def random_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist())


def request(ids: tuple[int, ...], new: int = 12, params: SamplingParams = GREEDY, **options: Any) -> Sequence:
    return Sequence(ids, params, vocab_size=VOCAB, max_total=min(MAX_LENGTH, len(ids) + new), **options)


def run(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        engine.submit(sequence)
    finish(engine, *sequences)


def finish(engine: Engine, *sequences: Sequence) -> None:
    for _ in range(10_000):
        if all(sequence.is_finished for sequence in sequences):
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def alone(session: Session, sequence: Sequence) -> Sequence:
    """The same request, run on an engine of its own, unbatched and in one piece."""
    new = sequence._max_total - len(sequence.prompt_ids)
    copy = request(tuple(sequence.prompt_ids.tolist()), new, sequence.params, end_ids=sequence._end_ids)
    run(new_engine(session, max_batch=1), copy)
    return copy


def assert_same(got: Sequence, expected: Sequence) -> None:
    assert got.error is None
    assert got.token_ids == expected.token_ids
    assert got.finish_reason == expected.finish_reason
    differences = [abs(a.logprob - b.logprob) for a, b in zip(got.samples, expected.samples, strict=True)]
    assert max(differences, default=0.0) < TOLERANCE


def distinct_greedy(session: Session, count: int, new: int = 12) -> list[Sequence]:
    """Finished greedy requests whose new ids are all different, so that any of them can serve as an end id."""
    found = []
    for seed in range(200):
        sequence = request(random_ids(3 + seed % 9, seed), new)
        run(new_engine(session), sequence)
        if len(set(sequence.token_ids)) == new:
            found.append(sequence)
        if len(found) == count:
            return found
    raise AssertionError("no such prompts")


def test_greedy_ids_equal_a_full_recomputation_at_every_step(session: Session, bundle: TinyBundle) -> None:
    sequence = request(random_ids(9), 20)
    run(new_engine(session), sequence)
    ids = list(sequence.prompt_ids)
    for sample in sequence.samples:
        logits = reference_logits(bundle.weights, ids)[-1]
        assert sample.token_id == logits.argmax()
        assert abs(sample.logprob - (logits.max() - np.log(np.exp(logits).sum()))) < TOLERANCE
        ids.append(sample.token_id)
    assert len(sequence.token_ids) == 20


def test_b07_b08_a_batch_of_ragged_prompts_equals_each_prompt_alone_in_any_order(session: Session) -> None:
    for order in (1, -1):
        requests = [request(random_ids(length), 20) for length in (1, 2, 3, 5, 8, 13, 21, 34)][::order]
        run(new_engine(session, max_batch=8), *requests)
        for sequence in requests:
            assert_same(sequence, alone(session, sequence))


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_running_row_goes_on_while_the_cache_grows_for_a_long_prompt(
    session: Session, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    monkeypatch.setattr(engine_module, "GROWTH_BYTES", 1)
    engine = new_engine(session)
    running, long = request(random_ids(5), new=40), request(random_ids(80, seed=1), new=8)
    engine.submit(running)
    engine.step()
    engine.submit(long)
    capacity, before = engine.cache.capacity, len(running.token_ids)
    for step in range(1, 6):  # a byte of each step takes one head of one row of one buffer
        engine.step()
        assert (engine.cache.capacity, len(running.token_ids)) == (capacity, before + step)
    assert engine.cache._growth is not None
    if cancelled:
        engine.cancellations.append(long)
        engine.step()
        assert engine.cache._growth is None
    finish(engine, running, *([] if cancelled else [long]))
    assert_same(running, alone(session, running))
    if not cancelled:
        assert_same(long, alone(session, long))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompts_in_chunks_give_the_same_tokens(session: Session, chunk: int) -> None:
    requests = [request(random_ids(length), 6) for length in (70, 1, 33)]
    run(new_engine(session, prefill_chunk=chunk), *requests)
    for sequence in requests:
        assert_same(sequence, alone(session, sequence))


def test_b16_finished_rows_leave_and_only_the_needed_steps_run(session: Session) -> None:
    free = distinct_greedy(session, 4)
    ends = [frozenset({sequence.token_ids[step]}) for sequence, step in zip(free, (0, 2, 4), strict=False)]
    requests = [
        request(tuple(sequence.prompt_ids.tolist()), 12, end_ids=end)
        for sequence, end in zip(free, [*ends, frozenset[int]()], strict=True)
    ]
    engine = new_engine(session)
    run(engine, *requests)
    assert [len(sequence.token_ids) for sequence in requests] == [1, 3, 5, 12]
    assert [sequence.finish_reason for sequence in requests] == ["stop", "stop", "stop", "length"]
    for sequence, unstopped in zip(requests, free, strict=True):
        assert sequence.token_ids == unstopped.token_ids[: len(sequence.token_ids)]
    assert engine.num_steps == 4 + 11  # four prompts, whose logits give the first token, and eleven decode steps


def test_waiting_prompts_join_as_rows_leave_first_come_first_served(session: Session) -> None:
    engine = new_engine(session, max_batch=2)
    requests = [request(random_ids(4, seed), new) for seed, new in enumerate((9, 2, 3, 2, 5))]
    started: list[int] = []
    for sequence in requests:
        engine.submit(sequence)
    while engine.all_sequences():
        engine.step()
        assert engine.cache.num_active == engine.scheduler.num_active <= 2
        started += [i for i, sequence in enumerate(requests) if sequence.token_ids and i not in started]
    assert started == [0, 1, 2, 3, 4]
    for sequence in requests:
        assert_same(sequence, alone(session, sequence))


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_come_go_and_are_cancelled_at_random_never_disturb_each_other(session: Session, seed: int) -> None:
    random = np.random.default_rng(seed)
    engine = new_engine(session, max_batch=int(random.integers(1, 5)), prefill_chunk=int(random.integers(1, 9)))
    requests = [request(random_ids(int(random.integers(1, 40)), i), int(random.integers(1, 20))) for i in range(14)]
    to_come = list(requests)
    cancelled = set()
    while to_come or engine.all_sequences():
        if to_come and random.random() < 0.4:
            engine.submit(to_come.pop())
        if random.random() < 0.05 and engine.all_sequences():
            victim = random.choice(np.array(engine.all_sequences(), object))
            engine.cancellations.append(victim)
            cancelled.add(victim)
        engine.step()
    assert engine.cache.num_active == 0
    for sequence in requests:
        if sequence in cancelled:
            assert sequence.finish_reason == "cancelled"
            assert sequence.token_ids == alone(session, sequence).token_ids[: len(sequence.token_ids)]
        else:
            assert_same(sequence, alone(session, sequence))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_frees_the_slot_while_waiting_in_prefill_and_while_decoding(session: Session, steps: int) -> None:
    engine = new_engine(session, max_batch=2, prefill_chunk=8)
    other, victim = request(random_ids(5), 15), request(random_ids(20), 15)
    engine.submit(other)
    engine.submit(victim)
    for _ in range(steps):
        engine.step()
    assert victim.finish_reason is None
    engine.cancellations.append(victim)
    engine.step()
    assert victim.finish_reason == "cancelled"
    assert engine.scheduler.num_active == engine.cache.num_active == 1
    finish(engine, other)
    assert_same(other, alone(session, other))


def test_scoring_gives_the_logits_of_every_position_beside_decoding_rows(session: Session, bundle: TinyBundle) -> None:
    engine = new_engine(session, max_batch=2, prefill_chunk=6)
    decoding = request(random_ids(4), 12)
    engine.submit(decoding)
    engine.step()
    scoring = ScoringSequence(random_ids(40), vocab_size=VOCAB)
    run(engine, scoring)
    finish(engine, decoding)
    expected = reference_logits(bundle.weights, scoring.prompt_ids.tolist())
    assert np.abs(np.concatenate(scoring.pieces) - expected).max() < TOLERANCE
    assert_same(decoding, alone(session, decoding))


def test_a_request_without_room_for_a_token_ends_before_any_step(session: Session) -> None:
    engine = new_engine(session)
    full = request(random_ids(5), 0)
    run(engine, full)
    assert full.finish_reason == "length"
    assert [(event.text, event.token_id, event.finish_reason) for event in full.events] == [("", None, "length")]
    assert engine.num_steps == 0


def test_when_the_cache_cannot_grow_only_the_longest_row_fails(session: Session) -> None:
    engine = new_engine(session, max_batch=2)
    long, short = request(random_ids(60), 20), request(random_ids(5), 20)
    engine.submit(long)
    engine.submit(short)
    engine.step()
    engine.cache._free = lambda: 0
    finish(engine, long, short)
    assert isinstance(long.error, NotEnoughMemoryError)
    assert 60 + len(long.token_ids) == 65  # the 64 tokens that fit, and the one chosen from them
    assert_same(short, alone(session, short))


def test_b101_a_failed_step_fails_its_rows_and_leaves_the_engine_usable(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(session)
    rows = [request(random_ids(4, seed)) for seed in range(3)]
    for sequence in rows:
        engine.submit(sequence)
    engine.step()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(engine.session, "run", fail)
        late = request(random_ids(7))
        engine.submit(late)
        engine.step()
    for sequence in (*rows, late):
        assert isinstance(sequence.error, RuntimeError)
    assert engine.cache.num_active == 0
    again = request(random_ids(4, 1))
    run(engine, again)
    assert_same(again, alone(session, again))


def test_b50_a_row_whose_logits_are_not_finite_fails_alone(tmp_path: Path, bundle: TinyBundle) -> None:
    weights = {**bundle.weights, "embedding": bundle.weights["embedding"].copy()}
    weights["embedding"][7] = np.inf
    session = Session(open_bundle(write_tiny_bundle(tmp_path, weights=weights).folder), device="cpu", threads=1)
    engine = new_engine(session)
    bad, good = request((1, 7)), request((1, 8))
    scoring = ScoringSequence((1, 2, 7), vocab_size=VOCAB)
    run(engine, bad, good, scoring)
    assert isinstance(bad.error, NonFiniteLogitsError)
    assert bad.token_ids == []
    assert isinstance(scoring.error, NonFiniteLogitsError)
    assert "the logits at position" in str(scoring.error)
    assert_same(good, alone(session, good))


def test_an_engine_needs_a_chunk_of_at_least_one_token(session: Session) -> None:
    with pytest.raises(ValueError, match="prefill_chunk must be at least 1; got 0"):
        new_engine(session, prefill_chunk=0)


def _fed(tokenizer: Tokenizer | None, ids: list[int], **options: Any) -> Sequence:
    """A request for which the model chooses `ids` one after the other."""
    text = {} if tokenizer is None else {"text_stream": tokenizer.stream(), "num_text_ids": tokenizer.vocab_size}
    sequence = request((1,), options.pop("new", 50), options.pop("params", GREEDY), **text, **options)
    for token_id in ids:
        memory = HostMemory()
        logits = memory.tensor((1, VOCAB), "float32")
        logits.host[0, token_id] = 9
        sequence.accept(StepOutputs(memory, logits, {}, num_rows=1, vocab_size=VOCAB))
        if sequence.is_finished:
            break
    return sequence


def test_b105_any_of_several_end_ids_ends_the_text_and_is_kept_among_the_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat")
    for end in (0, 1, 282):
        sequence = _fed(tokenizer, [*ids, end, 5], end_ids=frozenset({0, 1, 282}))
        assert (sequence.text, sequence.finish_reason) == ("the cat", "stop")
        assert sequence.token_ids == [*ids, end]


def test_a_stop_string_across_tokens_cuts_the_text_and_is_never_shown(tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, stop=["t sa"])
    sequence = _fed(tokenizer, tokenizer.encode("the cat sat on"), params=params)
    assert (sequence.text, sequence.finish_reason) == ("the ca", "stop")
    assert "".join(event.text for event in sequence.events) == "the ca"
    assert len(sequence.token_ids) < len(tokenizer.encode("the cat sat on"))


@pytest.mark.parametrize("end", ["length", "stop"])
def test_what_a_stop_string_held_back_is_flushed_at_the_end(tokenizer: Tokenizer, end: str) -> None:
    ids = tokenizer.encode("the cat")
    params = SamplingParams(temperature=0.0, stop=["cat!"])
    sequence = _fed(tokenizer, [*ids, 0], params=params, new=len(ids) + (end == "stop"), end_ids=frozenset({0}))
    assert (sequence.text, sequence.finish_reason) == ("the cat", end)
    events = list(sequence.events)
    assert "".join(event.text for event in events) == "the cat"
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [end]


def test_an_unfinished_character_is_shown_as_invalid_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")[:1]
    sequence = _fed(tokenizer, [*tokenizer.encode("a"), *ids], new=1 + len(ids))
    assert [event.text for event in sequence.events] == ["a", "\ufffd"]


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size < VOCAB
    sequence = _fed(tokenizer, [*tokenizer.encode("a"), VOCAB - 1, *tokenizer.encode("b")], new=3)
    assert (sequence.text, len(sequence.token_ids)) == ("ab", 3)


def test_a_prompts_first_token_waits_for_no_decoding_step(session: Session) -> None:
    engine = new_engine(session)
    sequence = request(random_ids(5), 3)
    engine.submit(sequence)
    for step in (1, 2, 3):
        engine.step()
        assert len(sequence.token_ids) == step
        assert engine.num_steps == step

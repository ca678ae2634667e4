"""Prompts that overtake others in prefill: short ones and urgent ones, without a changed token or a longer gap."""

from pathlib import Path

import numpy as np
import pytest
from tiny_bundles import VOCAB, write_tiny_bundle
from tiny_requests import greedy, random_ids

from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.engine import Engine
from graphport.runtime.scheduler import PromptGroup, Scheduler
from graphport.runtime.sequence import Sequence
from graphport.runtime.session import Session

CHUNK = 8


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder: Path = write_tiny_bundle(tmp_path_factory.mktemp("overtaking") / "bundle").folder
    return Session(open_bundle(folder), device="cpu", threads=1)


def new_engine(session: Session, max_batch: int = 4) -> Engine:
    return Engine(session, max_batch=max_batch, max_length=128, prefill_chunk=CHUNK)


def request(ids: list[int], new: int = 6, *, priority: int = 0, index: int = 0) -> Sequence:
    return Sequence(tuple(ids), greedy(), vocab_size=VOCAB, max_total=len(ids) + new, priority=priority, index=index)


def steps_until(engine: Engine, sequence: Sequence) -> int:
    for count in range(1, 1000):
        engine.step()
        if sequence.token_ids:
            return count
    raise AssertionError("its first token never comes")


def finish(engine: Engine) -> None:
    while engine.all_sequences():
        engine.step()
    assert engine.cache.num_active == 0


def assert_as_alone(session: Session, *sequences: Sequence) -> None:
    for sequence in sequences:
        alone = request(sequence.prompt_ids.tolist(), len(sequence.token_ids))
        engine = new_engine(session, max_batch=1)
        engine.submit(alone)
        finish(engine)
        assert sequence.error is None
        assert sequence.token_ids == alone.token_ids


def test_a_short_prompt_does_not_wait_for_a_long_one(session: Session) -> None:
    engine = new_engine(session)
    running, long, short = request(random_ids(3), 40), request(random_ids(100)), request(random_ids(12))
    engine.submit(running)
    engine.submit(long)
    for _ in range(3):
        engine.step()
    engine.submit(short)
    assert steps_until(engine, short) == 3  # its two chunks, and one of the long prompt between them
    assert not long.token_ids
    finish(engine)
    assert_as_alone(session, running, long, short)


def test_a_long_prompt_keeps_half_of_the_chunks_and_equals_come_in_order(session: Session) -> None:
    engine = new_engine(session)
    long = request(random_ids(96))
    engine.submit(long)
    engine.step()
    short = [request(random_ids(16, seed), 1) for seed in range(20)]
    for sequence in short:
        engine.submit(sequence)
    assert steps_until(engine, long) == 21  # eleven chunks of its own, and ten of others between them
    assert [bool(each.token_ids) for each in short] == [True] * 5 + [False] * 15
    finish(engine)
    assert_as_alone(session, long, *short)

    equals = [request(random_ids(40, seed), 1) for seed in range(3)]
    for sequence in equals:
        engine.submit(sequence)
    firsts = [steps_until(engine, sequence) for sequence in equals]
    assert firsts == [5, 5, 5]  # as if each had come when the one before was done


def test_an_urgent_prompt_gets_every_chunk_even_if_it_is_longer(session: Session) -> None:
    engine = new_engine(session)
    ordinary, urgent = request(random_ids(60)), request(random_ids(80), priority=-1)
    engine.submit(ordinary)
    engine.step()
    engine.submit(urgent)
    assert steps_until(engine, urgent) == 10
    assert engine.scheduler.slot_of(ordinary) == 1
    assert engine.cache.lengths[1] == CHUNK
    finish(engine)
    assert_as_alone(session, ordinary, urgent)


def test_without_a_slot_to_change_places_a_short_prompt_waits(session: Session) -> None:
    for max_batch, waits in ((2, True), (3, False)):
        engine = new_engine(session, max_batch=max_batch)
        long, short = request(random_ids(60)), request(random_ids(4))
        engine.submit(long)
        engine.step()
        engine.submit(short)
        steps_until(engine, short)
        assert bool(long.token_ids) == waits
        finish(engine)
        assert_as_alone(session, long, short)


def samples_overtake(session: Session) -> list[Sequence]:
    """Three samples of a short prompt, and the long prompts that they overtake, all of which have to move."""
    engine = new_engine(session, max_batch=8)
    long, shorter = request(random_ids(100)), request(random_ids(70), priority=-1)
    short = [request(random_ids(12), 20, priority=-2, index=index) for index in range(3)]
    for sequences in ([long], [shorter], short):
        engine.submit(*sequences)
        engine.step()
        engine.step()
    assert len(engine.scheduler.decoding) == 3
    assert len(engine.scheduler.prefilling) == 2
    finish(engine)
    return [long, shorter, *short]


def test_samples_that_overtake_take_the_slots_of_those_before_them(session: Session) -> None:
    assert_as_alone(session, *samples_overtake(session))


def come_and_go(session: Session, seed: int) -> list[Sequence]:
    """Prompts of all lengths, urgencies, numbers of samples, some of them cancelled; those that ended by themselves."""
    rng = np.random.default_rng(seed)
    engine = new_engine(session, max_batch=6)
    groups: list[list[Sequence]] = []
    most = 0
    while len(groups) < 24 or engine.all_sequences():
        if len(groups) < 24 and rng.random() < 0.5:
            ids = random_ids(int(rng.choice([2, 5, 9, 17, 40, 90])), len(groups))
            new, priority = int(rng.integers(1, 12)), int(rng.integers(-1, 2))
            samples = range(int(rng.integers(1, 4)))
            groups.append([request(ids, new, priority=priority, index=index) for index in samples])
            engine.submit(*groups[-1])
        unfinished = engine.all_sequences()
        if unfinished and rng.random() < 0.1:
            engine.cancellations.append(unfinished[rng.integers(len(unfinished))])
        engine.step()
        most = max(most, len(engine.scheduler.prefilling))
        assert engine.cache.num_active == engine.scheduler.num_active
    assert most >= 2  # some did overtake
    return [each for group in groups for each in group if each.finish_reason != "cancelled"]


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_overtake_join_and_leave_at_random_never_disturb_each_other(session: Session, seed: int) -> None:
    assert_as_alone(session, *come_and_go(session, seed))


@pytest.mark.parametrize("broken", ["_move_to", "_make_way"])
def test_slots_that_do_not_move_with_their_prompts_are_noticed(
    session: Session, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(Scheduler, broken)

    def moving_only_in_name(self: Scheduler, *arguments: int | PromptGroup) -> None:
        lengths = self._cache.lengths
        with monkeypatch.context() as patch:
            patch.setattr(self._cache, "copy_slot", lambda source, target: lengths.put(target, lengths[source]))
            whole(self, *arguments)

    monkeypatch.setattr(Scheduler, broken, moving_only_in_name)
    sequences = samples_overtake(session)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_as_alone(session, *sequences)

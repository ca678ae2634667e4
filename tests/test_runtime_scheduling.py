"""Who runs when: pace beside long prompts, priorities, deadlines, several samples of a prompt."""

from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, write_tiny_bundle
from tiny_requests import greedy, random_ids, seeded

from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.engine import Engine
from graphport.runtime.sampling import Sampler
from graphport.runtime.sequence import ScoringSequence, Sequence
from graphport.runtime.session import Session

TOLERANCE = TOLERANCES["tiny bundle", "float32"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A session that notes how many tokens each run takes, by row and in length."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.runs: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, cache: Any, ids: Any, rows: Any = None, *, first_slot: int = 0) -> Any:
        self.runs.append(ids.shape)
        return self._session.run(cache, ids, rows, first_slot=first_slot)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("scheduling") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def session(bundle: TinyBundle) -> Session:
    return Session(open_bundle(bundle.folder), device="cpu", threads=1)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1, max_batch=4)


def new_engine(session: Any, **options: Any) -> Engine:
    return Engine(session, **{"max_batch": 4, "max_length": 128, "prefill_chunk": 8, **options})


def request(ids: list[int], new: int = 12, **options: Any) -> Sequence:
    return Sequence(tuple(ids), greedy(), vocab_size=VOCAB, max_total=len(ids) + new, **options)


def finish(engine: Engine) -> None:
    while engine.all_sequences():
        engine.step()


def greedy_ids(session: Session, ids: list[int], new: int) -> list[int]:
    engine, sequence = new_engine(session, max_batch=1, prefill_chunk=64), request(ids, new)
    engine.submit(sequence)
    finish(engine)
    return sequence.token_ids


@pytest.mark.parametrize("paced", [1, 8, 64])
def test_a_long_prompt_takes_a_bounded_share_of_every_step_beside_running_rows(session: Session, paced: int) -> None:
    watched = Watched(session)
    engine = new_engine(watched, prefill_chunk=paced)
    running = request(random_ids(3), 60)
    engine.submit(running)
    while not running.token_ids:
        engine.step()
    long = [request(random_ids(100, seed), 4) for seed in range(2)]
    for sequence in (*long, ScoringSequence(tuple(random_ids(40)), vocab_size=VOCAB)):
        engine.submit(sequence)
    while not running.is_finished:
        watched.runs.clear()
        before = len(running.token_ids)
        engine.step()
        assert len(running.token_ids) == before + 1  # one token a step, whatever comes in
        assert sum(batch * length for batch, length in watched.runs[1:]) <= paced
    finish(engine)
    for sequence in (running, *long):
        assert sequence.token_ids == greedy_ids(session, sequence.prompt_ids.tolist(), len(sequence.token_ids))


def test_prompts_of_one_step_have_no_more_than_a_chunk_together(session: Session) -> None:
    watched = Watched(session)
    engine = new_engine(watched)
    for sequence in (request(random_ids(3)), request(random_ids(4)), request(random_ids(60))):
        engine.submit(sequence)
    engine.step()
    assert watched.runs == [(1, 3), (1, 4)]  # the first two fit into eight tokens together, the third waits
    engine.step()
    assert watched.runs[2:] == [(2, 1), (1, 8)]


@pytest.mark.parametrize("has_neighbours", [False, True])
def test_a_prompt_is_cut_at_the_same_places_whatever_else_runs(session: Session, has_neighbours: bool) -> None:
    watched = Watched(session)
    engine = new_engine(watched)
    if has_neighbours:
        for seed in range(2):
            engine.submit(request(random_ids(5 + seed, seed), 30))
        engine.step()
        engine.step()
    watched.runs.clear()
    engine.submit(request(random_ids(20), 1))
    finish(engine)
    assert [shape for shape in watched.runs if shape[1] > 1] == [(1, 8), (1, 8), (1, 4)]


def test_the_most_urgent_prompt_runs_first_and_equals_in_order_of_arrival(session: Session) -> None:
    engine = new_engine(session, max_batch=1)
    requests = [request(random_ids(4, seed), 3, priority=p) for seed, p in enumerate((0, 5, 0, -1, 5, 0))]
    engine.submit(requests[0])
    engine.step()  # begun: it is not interrupted
    for sequence in requests[1:]:
        engine.submit(sequence)
    ended: list[int] = []
    while engine.all_sequences():
        engine.step()
        ended += [i for i, each in enumerate(requests) if each.is_finished and i not in ended]
    assert ended == [0, 3, 2, 5, 1, 4]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_past_its_deadline_ends_as_cancelled_wherever_it_is(session: Session, steps: int) -> None:
    clock = Clock()
    engine = new_engine(session, max_batch=2, clock=clock)
    other, late = request(random_ids(5), 30), request(random_ids(20), 30, deadline=10.0)
    engine.submit(other)
    engine.submit(late)
    for _ in range(steps):
        engine.step()
    clock.now = 9.9
    engine.drop_cancelled()
    assert late.finish_reason is None
    clock.now = 10.0
    engine.step()
    assert late.finish_reason == "cancelled"
    assert late.events[-1].finish_reason == "cancelled"
    assert late.events[-1].token_id is None
    assert engine.scheduler.num_active == engine.cache.num_active == 1
    finish(engine)
    assert other.token_ids == greedy_ids(session, other.prompt_ids.tolist(), 30)


def test_a_timed_out_request_gives_what_it_has(model: LanguageModel) -> None:
    (whole,) = model.generate([[5]], greedy(100))
    (output,) = model.generate([[5]], greedy(100), timeout=1e-9)
    assert (output.finish_reason, output.text, output.token_ids) == ("cancelled", "", ())
    events = []
    for event in model.stream([5], greedy(100), timeout=60):
        events.append(event)
        if len(events) == 5:
            assert model._engine is not None
            model._engine._clock = lambda: float("inf")
    model._engine._clock = Clock()  # type: ignore[union-attr]
    assert [event.finish_reason for event in events] == [None] * 5 + ["cancelled"]
    text = "".join(event.text for event in events)
    assert whole.text.startswith(text.rstrip("\ufffd"))
    assert model.num_active == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"priority": 0.5}, TypeError, "priority must be a whole number, the lower the sooner; got 0.5"),
        ({"priority": True}, TypeError, "priority must be a whole number"),
        ({"timeout": "1"}, TypeError, "timeout must be None or a number of seconds above 0; got '1'"),
        ({"timeout": 0}, ValueError, "timeout must be None or a number of seconds above 0, up to 1e[+]09; got 0"),
        (
            {"timeout": 10**400},
            ValueError,
            "timeout must be None or a number of seconds above 0, up to 1e[+]09; got 1000",
        ),
        (
            {"timeout": float("nan")},
            ValueError,
            "timeout must be None or a number of seconds above 0, up to 1e[+]09; got nan",
        ),
        ({"urgency": 1}, TypeError, "unexpected keyword argument 'urgency'"),
    ],
)
def test_options_of_a_request_are_checked_before_anything_runs(
    model: LanguageModel, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(error, match=match):
            call([[1]] if call == model.generate else [1], greedy(), **options)


def test_samples_of_a_prompt_run_it_once_and_are_those_of_separate_requests(session: Session) -> None:
    watched = Watched(session)
    engine = new_engine(watched, prefill_chunk=64)
    ids = random_ids(20)
    params = SamplingParams(temperature=1.5, seed=42)

    def samples(*indices: int) -> list[Sequence]:
        return [
            Sequence(tuple(ids), params, vocab_size=VOCAB, max_total=30, index=index, end_ids=frozenset({7}))
            for index in indices
        ]

    together = samples(0, 1, 2)
    engine.submit(*together)
    finish(engine)
    assert [shape for shape in watched.runs if shape[1] > 1] == [(1, 20)]
    assert len({tuple(sequence.token_ids) for sequence in together}) == 3
    for index, sequence in enumerate(together):
        (alone,) = samples(index)
        single = new_engine(session)
        single.submit(alone)
        finish(single)
        assert sequence.token_ids == alone.token_ids
        assert sequence.finish_reason == alone.finish_reason
    assert engine.cache.num_active == 0


def test_samples_wait_until_there_are_slots_for_all_of_them(session: Session) -> None:
    engine = new_engine(session, max_batch=3)
    first = [request(random_ids(4, seed), 6 + seed) for seed in range(2)]
    group = [request(random_ids(9), 5, index=index) for index in range(2)]
    behind = request(random_ids(3), 2)
    for sequences in ([first[0]], [first[1]], group, [behind]):
        engine.submit(*sequences)
    while not group[0].token_ids:
        engine.step()
        assert group[0].token_ids or not behind.token_ids  # nobody overtakes
    assert first[0].is_finished
    finish(engine)
    for sequence in (*first, *group, behind):
        expected = greedy_ids(session, sequence.prompt_ids.tolist(), len(sequence.token_ids))
        assert sequence.token_ids == expected


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_one_sample_may_be_cancelled_and_the_others_go_on(session: Session, steps: int) -> None:
    engine = new_engine(session)
    group = [request(random_ids(12), 9, index=index) for index in range(3)]
    engine.submit(*group)
    for _ in range(steps):
        engine.step()
    engine.cancellations.append(group[0])
    engine.step()
    assert group[0].finish_reason == "cancelled"
    finish(engine)
    assert engine.cache.num_active == 0
    for sequence in group[1:]:
        assert sequence.token_ids == greedy_ids(session, random_ids(12), 9)


def test_samples_are_one_output_and_their_events_carry_numbers(model: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=1.5, seed=3, n=3)
    ids = random_ids(5)
    outputs = model.generate([ids, [9]], [params, greedy(2)])
    assert outputs[0].samples == (outputs[0], *outputs[0].others)
    assert [len(output.samples) for output in outputs] == [3, 1]
    (alone,) = model.generate([ids], seeded(3, 6))
    assert (outputs[0].token_ids, outputs[0].text) == (alone.token_ids, alone.text)
    events = list(model.stream(ids, params))
    for index, sample in enumerate(outputs[0].samples):
        own = [event for event in events if event.index == index]
        assert tuple(event.token_id for event in own) == sample.token_ids
        assert "".join(event.text for event in own) == sample.text
        assert own[-1].finish_reason == "length"


def test_n_beyond_the_batch_is_refused_before_anything_runs(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="prompt 0 asks for n=5 samples, which need as many places in the batch"):
        model.generate([[1]], SamplingParams(n=5))


def test_b114_the_streams_of_samples_are_the_children_of_the_seed() -> None:
    params = SamplingParams(seed=11)
    logits = np.zeros(64, np.float32)

    def drawn(index: int) -> list[int]:
        sampler = Sampler(params, (), vocab_size=64, index=index)
        return [sampler.sample(logits).token_id for _ in range(20)]

    children = [np.random.default_rng(np.random.SeedSequence(11, spawn_key=(i,))).random(20) for i in (1, 2)]
    for index, uniforms in enumerate(children, start=1):
        assert drawn(index) == (uniforms * 64).astype(int).tolist()
    assert drawn(0) == (np.random.default_rng(11).random(20) * 64).astype(int).tolist()


def test_when_the_cache_cannot_take_the_samples_all_of_them_fail_before_the_work(session: Session) -> None:
    engine = new_engine(session)
    engine.cache._free = lambda: 0
    group = [request(random_ids(5), 3, index=index) for index in range(2)]
    engine.submit(*group)
    engine.step()
    assert all(isinstance(sequence.error, MemoryError) for sequence in group)
    assert engine.cache.num_active == 0
    assert engine.num_steps == 0


def test_statistics_count_requests_and_tokens(bundle: TinyBundle) -> None:
    with load(bundle.folder, threads=1, max_batch=2) as lm:
        streams = [iter(lm.stream(random_ids(5, seed), greedy(20))) for seed in range(3)]
        for stream in streams[:2]:
            next(stream)
        third = streams[2]
        assert next(third).index == 0  # waits until one of the others, which nobody reads, has ended
        for stream in streams:
            list(stream)
        lm.generate([[1, 2]], SamplingParams(max_new_tokens=4, n=2, seed=0))
        found = lm.statistics
        assert (found.num_waiting, found.num_active) == (0, 0)
        assert (found.num_prompt_tokens, found.num_generated_tokens) == (17, 68)
        assert (found.num_drafted, found.num_drafted_right, found.prefix_cache) == (0, 0, None)
        assert found.cache_bytes == lm.cache_bytes > 0
    with pytest.raises(RuntimeError, match="this LanguageModel is closed"):
        _ = lm.statistics

"""Decoding with inputs and outputs on a device: nothing goes up that is there, no more comes down than is needed."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCudart, on_fake_device
from sampled_requests import GREEDY, MIXED, TOLERANCE, assert_same, engine_with, mixed_requests, request, run
from sampling_bundles import write_sampling_bundle
from tiny_bundles import VOCAB, TinyBundle, reference_logits, tiny_weights, write_tiny_bundle
from tiny_requests import random_ids
from tiny_sessions import open_session

from graphport.model_def.signature import NUM_CANDIDATES
from graphport.runtime.engine import Engine
from graphport.runtime.sampling import NonFiniteLogitsError
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import ScoringSequence
from graphport.runtime.session import Session

GREEDY_BYTES = 8 + 4  # an id and the logarithm of a sum
CANDIDATE_BYTES = NUM_CANDIDATES * (4 + 8)
ROW_BYTES = 4 * VOCAB


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """The same weights without reductions, on the CPU's own way."""
    return open_session(write_tiny_bundle(tmp_path_factory.mktemp("plain") / "bundle").folder)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_sampling_bundle(tmp_path_factory.mktemp("reduced") / "bundle")


@pytest.fixture
def session(bundle: TinyBundle) -> Session:
    return open_session(bundle.folder)


@pytest.fixture
def fake(session: Session, monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """`session` on a device of its own."""
    return on_fake_device(session, monkeypatch)


def steady(engine: Engine, fake: FakeCudart, steps: int) -> None:
    """Run until every sequence decodes and three steps more, then `steps` steps that are counted."""
    while engine.scheduler.waiting or engine.arrivals or engine.scheduler.prefilling:
        engine.step()
    for _ in range(3):
        engine.step()
    fake.reset()
    for _ in range(steps):
        engine.step()


@pytest.mark.parametrize("params", MIXED)
def test_every_kind_of_sampling_gives_the_ids_of_the_plain_graph(
    params: SamplingParams, session: Session, fake: FakeCudart, plain: Session
) -> None:
    found, expected = ([request(random_ids(5 + 3 * i), 20, params) for i in range(3)] for _ in range(2))
    run(session, *found)
    run(plain, *expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_rows_that_join_and_leave_get_the_ids_of_the_plain_graph(
    session: Session, fake: FakeCudart, plain: Session
) -> None:
    """Greedy and drawn rows share batches of every size, so that inputs are now on the device and now are not."""
    found, expected = mixed_requests(24), mixed_requests(24)
    run(session, *found, max_batch=6)
    run(plain, *expected, max_batch=6)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_a_reduced_graph_on_the_cpu_gives_the_ids_of_the_plain_graph(session: Session, plain: Session) -> None:
    """Where a bundle for CUDA runs on the CPU: host and device are one memory."""
    found, expected = mixed_requests(12), mixed_requests(12)
    run(session, *found)
    run(plain, *expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_greedy_step_moves_one_id_a_row_and_uploads_nothing(batch: int, session: Session, fake: FakeCudart) -> None:
    engine = engine_with(session, *(request(random_ids(4 + i), 60) for i in range(batch)))
    steady(engine, fake, steps=10)
    assert fake.bytes["upload"] == 0
    assert fake.bytes["download"] == 10 * batch * GREEDY_BYTES
    assert fake.bytes["copy"] == 10 * batch * (8 + 4)  # ids and lengths, to the inputs
    assert fake.calls["synchronize"] == 10


@pytest.mark.parametrize(
    ("params", "row_bytes"),
    [
        (SamplingParams(temperature=0.0, logprobs=4), CANDIDATE_BYTES),
        (SamplingParams(temperature=0.9, top_k=8, seed=0), CANDIDATE_BYTES),
        (SamplingParams(temperature=0.9, top_k=8, top_p=0.9, seed=0), CANDIDATE_BYTES),
        (SamplingParams(temperature=0.7, min_p=0.1, seed=0), CANDIDATE_BYTES),
        (SamplingParams(seed=0), ROW_BYTES),
        (SamplingParams(temperature=0.0, repetition_penalty=1.2), ROW_BYTES),
        (SamplingParams(temperature=0.0, logprobs=100), ROW_BYTES),
        (SamplingParams(temperature=0.9, top_k=100, seed=0), ROW_BYTES),
    ],
)
def test_a_step_moves_candidates_where_they_are_enough_and_else_the_row(
    params: SamplingParams, row_bytes: int, session: Session, fake: FakeCudart
) -> None:
    engine = engine_with(session, request(random_ids(4), 60, params), request(random_ids(6), 60, params))
    steady(engine, fake, steps=10)
    assert fake.bytes["download"] == 10 * 2 * (GREEDY_BYTES + row_bytes)


def test_only_the_row_that_needs_all_its_logits_comes_down(session: Session, fake: FakeCudart) -> None:
    rows = [request(random_ids(4), 60), request(random_ids(5), 60, SamplingParams(seed=0)), request(random_ids(6), 60)]
    steady(engine_with(session, *rows), fake, steps=10)
    assert fake.bytes["download"] == 10 * (3 * GREEDY_BYTES + ROW_BYTES)


def test_logits_of_every_position_come_down_when_asked_for(
    session: Session, fake: FakeCudart, bundle: TinyBundle
) -> None:
    prompt = random_ids(40)
    scoring = ScoringSequence(tuple(prompt), vocab_size=VOCAB)
    run(session, scoring)
    assert np.abs(np.concatenate(scoring.pieces) - reference_logits(bundle.weights, prompt)).max() < TOLERANCE


def test_a_row_that_ends_leaves_no_stale_id_behind(session: Session, fake: FakeCudart, plain: Session) -> None:
    """The last slot moves into the gap: what the device holds for the gap is another row's."""
    for order in (1, -1):
        lengths = (3, 30, 12)[::order]
        found, expected = ([request(random_ids(5, i), new) for i, new in enumerate(lengths)] for _ in range(2))
        run(session, *found)
        run(plain, *expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def _overflowing(tmp_path: Path, number: float) -> TinyBundle:
    weights = tiny_weights()
    weights["embedding"] = weights["embedding"].copy()
    weights["embedding"][7] = number
    return write_sampling_bundle(tmp_path / "bundle", weights=weights)


@pytest.mark.parametrize("params", [GREEDY, MIXED[1], MIXED[2], MIXED[4], MIXED[5]])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_b50_a_reduced_row_that_is_not_finite_fails_alone(
    number: float, params: SamplingParams, tmp_path: Path, plain: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(_overflowing(tmp_path, number).folder)
    on_fake_device(session, monkeypatch)
    bad, good, same = request([1, 7], 6, params), request([1, 8], 6), request([1, 8], 6)
    run(session, bad, good)
    run(plain, same)
    assert isinstance(bad.error, NonFiniteLogitsError)
    assert f"{VOCAB} of {VOCAB} logits are not finite" in str(bad.error)
    assert bad.token_ids == []
    assert_same(good, same)


def test_a_step_that_fails_is_repeated_with_the_same_inputs(
    session: Session, fake: FakeCudart, plain: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = session.new_cache(max_slots=2, max_length=64)
    cache.claim()
    session.run(cache, np.array([random_ids(6)]))
    first = session.run(cache, np.array([[5]])).row(0).reduced
    assert first is not None

    def fail(*_: Any) -> None:
        raise RuntimeError("kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(session._runner, "run", fail)
        with pytest.raises(RuntimeError, match="kernel failed"):
            session.run(cache, np.array([[first.greedy_id]]))
    assert cache.lengths[0] == 7
    logits = session.step(cache, np.array([[first.greedy_id]]))
    expected = reference_logits(tiny_weights(), [*random_ids(6), 5, first.greedy_id])[-1]
    assert np.abs(logits - expected).max() < TOLERANCE


def test_b97_device_memory_is_given_back(bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(bundle.folder)
    fake = on_fake_device(session, monkeypatch)
    for _ in range(3):  # caches come and go, the tensors of steps stay
        run(session, *(request(random_ids(4 + i), 10) for i in range(3)))
        gc.collect()
        held = len(fake.blocks)
    run(session, *(request(random_ids(4 + i), 10) for i in range(3)))
    gc.collect()
    assert len(fake.blocks) == held > 0
    del session
    gc.collect()
    assert fake.blocks == {}
    assert fake.streams == []

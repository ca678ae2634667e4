"""Decode steps as CUDA graphs: few batch sizes, replayed at fixed addresses, captured again when these move."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import on_fake_device
from parity import TOLERANCES
from replayed_graphs import ReplayedGraphs
from sampled_requests import MIXED, assert_same, mixed_requests, request, run
from sampling_bundles import SAMPLING, write_sampling_bundle
from tiny_bundles import VOCAB, TinyBundle, write_tiny_bundle
from tiny_models import tiny_configs, tiny_model
from tiny_requests import random_ids
from tiny_sessions import open_session

from graphport.export import model_export
from graphport.runtime import decode_graphs, load
from graphport.runtime.decode_graphs import NO_GRAPH, DecodeGraphs, padded_batch
from graphport.runtime.engine import Engine
from graphport.runtime.run_thread import RunThread
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import Sequence
from graphport.runtime.session import Session
from graphport.runtime.speculation import Speculation


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_sampling_bundle(tmp_path_factory.mktemp("graphs") / "bundle")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return open_session(write_tiny_bundle(tmp_path_factory.mktemp("plain") / "bundle").folder)


@pytest.fixture
def session(bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch) -> Session:
    opened = open_session(bundle.folder)
    on_fake_device(opened, monkeypatch)
    return opened


@pytest.fixture
def graphs(session: Session, monkeypatch: pytest.MonkeyPatch) -> ReplayedGraphs:
    return ReplayedGraphs(session, monkeypatch)


def test_batches_are_padded_to_powers_of_two_within_the_limit() -> None:
    assert [padded_batch(batch, 8) for batch in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert [padded_batch(batch, 6) for batch in range(1, 7)] == [1, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_replayed_steps_give_the_ids_of_plain_steps(
    count: int, session: Session, graphs: ReplayedGraphs, plain: Session
) -> None:
    found, expected = ([request(random_ids(3 + 5 * i, i), 40, MIXED[i]) for i in range(count)] for _ in range(2))
    run(session, *found, max_batch=8)
    run(plain, *expected, max_batch=8)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert sum(graphs.replays.values()) > 30


def test_rows_that_join_and_leave_replay_graphs_of_few_sizes(
    session: Session, graphs: ReplayedGraphs, plain: Session
) -> None:
    found, expected = mixed_requests(24), mixed_requests(24)
    run(session, *found, max_batch=6)
    run(plain, *expected, max_batch=6)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert set(graphs.batches) <= {1, 2, 4, 6}
    assert graphs.captured == sorted(set(graphs.captured))  # no id is captured twice


def test_a_cache_that_grows_is_captured_again_under_a_new_id(
    session: Session, graphs: ReplayedGraphs, plain: Session
) -> None:
    """From 64 tokens to 128: the old graph writes to memory that is no longer the cache's."""
    found, expected = request(random_ids(50), 60), request(random_ids(50), 60)
    run(session, found, max_batch=1)
    run(plain, expected, max_batch=1)
    assert_same(found, expected)
    assert graphs.captured == [1, 2]
    assert sum(graphs.replays.values()) == 59 - 2


def test_drafts_are_checked_without_a_graph_between_replayed_steps(
    session: Session, graphs: ReplayedGraphs, plain: Session
) -> None:
    """Steps of several tokens leave ids and lengths elsewhere: the next replay must not read its own old ones."""
    for params in (MIXED[0], MIXED[1]):
        expected = request(random_ids(9), 60, params)
        run(plain, expected)
        whole = [*random_ids(9), *expected.token_ids]

        class Sometimes:
            def propose(self, ids: Any, most: int) -> list[int]:
                draft = whole[len(ids) : len(ids) + most]  # noqa: B023 - used within this round
                return [] if len(ids) % 5 else [*draft[:2], 5]

        found = Sequence(
            tuple(random_ids(9)),
            params,
            vocab_size=VOCAB,
            max_total=69,
            speculation=Speculation(Sometimes(), longest=8),
        )
        before = sum(graphs.replays.values())
        run(session, found, max_batch=1)
        assert_same(found, expected)
        assert sum(graphs.replays.values()) - before > 10


def test_a_second_cache_where_the_first_lay_replays_its_graphs(session: Session, graphs: ReplayedGraphs) -> None:
    """A graph is known by the addresses it holds, not by the cache: same addresses, same graph."""
    keys = []
    for _ in range(2):
        cache = session.new_cache(max_slots=1, max_length=64)
        cache.claim()
        session.run(cache, np.array([[3]]))
        keys.append(session._decode_tensors[1, True].bound_to())
        del cache
    assert (keys[0] == keys[1]) == (len(graphs.captured) == 1)


def test_rows_that_fill_a_batch_up_touch_no_slot_in_use(session: Session, graphs: ReplayedGraphs) -> None:
    """Five rows decode in a graph of eight; the three others write one token into slots that nobody has claimed."""
    cache = session.new_cache(max_slots=8, max_length=64)
    for seed in range(5):
        session.run(cache, np.array([random_ids(3 + seed, seed)]), first_slot=cache.claim())
    for _ in range(4):
        session.run(cache, np.array([[1], [2], [3], [4], [5]]))
    tensors = session._decode_tensors[8, True]
    assert graphs.batches == [8]
    assert tensors._seqlens.host.tolist() == [7, 8, 9, 10, 11, 0, 0, 0]
    session.run(cache, np.array([random_ids(9)]), first_slot=cache.claim())  # claimed later: starts empty
    assert cache.lengths.tolist() == [7, 8, 9, 10, 11, 9, 0, 0]


def test_a_slot_in_prefill_is_never_part_of_a_captured_batch(
    session: Session, graphs: ReplayedGraphs, plain: Session
) -> None:
    """Three rows decode while a long prompt is half read in the fourth slot, into which a graph of four would write."""
    rows = [request(random_ids(4 + i, i), 30) for i in range(3)]
    late, alone = request(random_ids(90), 5), request(random_ids(90), 5)
    engine = Engine(session, max_batch=4, max_length=128, prefill_chunk=16)
    for row in rows:
        engine.submit(row)
    while engine.arrivals or engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    engine.submit(late)
    engine.step()
    before = graphs.plain
    while engine.scheduler.prefilling:
        captured = sum(graphs.replays.values()) + len(graphs.captured)
        engine.step()
        assert sum(graphs.replays.values()) + len(graphs.captured) == captured
    assert graphs.plain > before
    while engine.all_sequences():
        engine.step()
    run(plain, alone)
    assert_same(late, alone)
    assert set(graphs.batches) >= {4}


def test_prompts_and_chunks_are_never_captured(session: Session, graphs: ReplayedGraphs) -> None:
    cache = session.new_cache(max_slots=2, max_length=64)
    for slot in range(2):
        cache.claim()
        session.run(cache, np.array([random_ids(5)]), first_slot=slot)
        session.run(cache, np.array([random_ids(4)]), first_slot=slot)
    session.run(cache, np.array([[1]]), first_slot=1)  # a decode step, but not of the first slots
    session.run(cache, np.array([[1], [2]]), np.array([1]))  # nor one of other rows of logits than its own
    assert graphs.captured == []


def test_the_upper_bound_of_the_lengths_gives_the_results_of_the_exact_one(
    session: Session, graphs: ReplayedGraphs, bundle: TinyBundle
) -> None:
    """total_sequence_length is the capacity in a captured step (contract of GroupQueryAttention's static cache)."""
    exact = open_session(bundle.folder)
    caches = [one.new_cache(max_slots=2, max_length=128) for one in (session, exact)]
    for length in (5, 1):
        for one, cache in zip((session, exact), caches, strict=True):
            one.run(cache, np.array([random_ids(length)]), first_slot=cache.claim())
    for token in range(20):
        steps = [
            one.step(cache, np.array([[token], [token + 1]])).copy()
            for one, cache in zip((session, exact), caches, strict=True)
        ]
        assert (steps[0] == steps[1]).all()
    assert int(session._decode_tensors[2, True]._total) == caches[0].capacity > caches[0].lengths.max()


@pytest.mark.parametrize("kind", ["head_dim_20", "window", "softcap_window", "learned"])
def test_exported_kinds_replay_as_they_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, with the capacity for a length: attention in the kernel and in its portable body, windows, positions."""
    monkeypatch.setattr(model_export, "find_target", lambda _: SAMPLING)
    model = tiny_model(tiny_configs()[kind])
    folder = model_export.export(model, tmp_path / "bundle", precision="fp32", verify=False).path
    plain, session = open_session(folder), open_session(folder)
    on_fake_device(session, monkeypatch)
    ReplayedGraphs(session, monkeypatch)
    logits = []
    for one in (plain, session):
        cache = one.new_cache(max_slots=4, max_length=32)
        for length in (6, 1, 3):
            one.run(cache, np.arange(length)[np.newaxis], first_slot=cache.claim())
        steps = [one.step(cache, np.array([[t], [t + 1], [t + 2]])).copy() for t in range(12)]
        logits.append(np.array(steps))
    assert np.abs(logits[0] - logits[1]).max() < TOLERANCES["reused cache", "float32"]


def test_a_replay_at_stale_addresses_would_be_noticed(
    session: Session, graphs: ReplayedGraphs, plain: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What acts out the graphs must be able to fail: here a graph is replayed though its cache has moved."""
    monkeypatch.setattr(DecodeGraphs, "id_for", lambda *_: 1)
    found, expected = request(random_ids(50), 60), request(random_ids(50), 60)
    run(session, found, max_batch=1)
    run(plain, expected, max_batch=1)
    assert found.token_ids[:14] == expected.token_ids[:14]
    assert found.token_ids != expected.token_ids


def test_ids_are_never_used_twice_and_end_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_graphs, "_MOST_GRAPHS", 3)
    graphs = DecodeGraphs()
    with caplog.at_level(logging.WARNING, logger="graphport"):
        assert [graphs.id_for(key) for key in ("a", "b", "a", "c", "d", "e", "b")] == [
            1,
            2,
            1,
            3,
            NO_GRAPH,
            NO_GRAPH,
            2,
        ]
    assert [record.getMessage()[:27] for record in caplog.records] == ["3 CUDA graphs are captured,"]


def test_b93_runs_stay_on_the_callers_thread_until_a_second_one_calls() -> None:
    on_one = RunThread()
    ran: list[int] = []

    def note() -> None:
        ran.append(threading.get_ident())

    on_one(note)
    on_one(note)
    assert set(ran) == {threading.get_ident()}
    other = threading.Thread(target=on_one, args=(note,))
    other.start()
    other.join()
    on_one(note)
    assert ran[2] == ran[3] not in (threading.get_ident(), other.ident)

    def run_in_turn() -> list[int]:
        """Threads one after the other, which may bear one number."""
        threads = [threading.Thread(target=on_one, args=(note,)) for _ in range(3)]
        for thread in threads:
            thread.start()
            thread.join()
        return [thread.ident or 0 for thread in threads]

    on_one, ran = RunThread(), []
    callers = run_in_turn()
    assert ran[0] == callers[0]
    assert ran[1] == ran[2] != callers[1]

    def fail() -> None:
        raise RuntimeError("kernel failed")

    with pytest.raises(RuntimeError, match="kernel failed"):
        on_one(fail)


@pytest.mark.parametrize("wish", [True, "auto", False])
def test_a_session_on_the_cpu_captures_nothing(wish: Any, tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    if wish is True:
        with pytest.raises(RuntimeError, match="cuda_graphs=True and stream need device cuda"):
            load(tmp_path, device="cpu", cuda_graphs=wish)
        return
    with load(tmp_path, device="cpu", cuda_graphs=wish) as lm:
        assert lm.cuda_graphs is False
        assert len(lm.generate([[1, 2]], SamplingParams(max_new_tokens=2, temperature=0.0))[0].token_ids) == 2

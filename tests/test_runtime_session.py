"""Steps of a session: right in every shape and order, bound once, refused where the graph cannot take them."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
from parity import TOLERANCES
from tiny_bundles import (
    VOCAB,
    TinyBundle,
    reference_logits,
    write_tiny_bundle,
)
from tiny_requests import random_ids
from tiny_sessions import all_logits, open_session

from graphport.runtime.kv_cache import KVCache
from graphport.runtime.session import Session
from graphport.runtime.step_tensors import StepTensors

TOLERANCE = TOLERANCES["tiny bundle", "float32"]
P8 = (1, 2, 3, 5, 8, 13, 21, 34)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("session") / "bundle")


@pytest.fixture(scope="module")
def session(bundle: TinyBundle) -> Session:
    return open_session(bundle.folder)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 100])
def test_b22_logits_equal_the_reference_in_one_piece_in_chunks_and_by_single_steps(
    session: Session, bundle: TinyBundle, chunk: int
) -> None:
    ids = random_ids(100)
    assert np.abs(all_logits(session, ids, chunk) - reference_logits(bundle.weights, ids)).max() < TOLERANCE


@pytest.mark.parametrize("length", [1, 5])
def test_b22_a_prompt_of_one_token_needs_no_past(session: Session, bundle: TinyBundle, length: int) -> None:
    ids = random_ids(length)
    assert np.abs(all_logits(session, ids, 5) - reference_logits(bundle.weights, ids)).max() < TOLERANCE


def test_b22_three_empty_rows_step_together(session: Session, bundle: TinyBundle) -> None:
    cache = session.new_cache(max_slots=3, max_length=64)
    rows = [random_ids(4, seed) for seed in range(3)]
    for _ in rows:
        cache.claim()
    for position in range(4):
        logits = session.step(cache, np.array([[row[position]] for row in rows])).copy()
    for row, got in zip(rows, logits, strict=True):
        assert np.abs(got - reference_logits(bundle.weights, row)[-1]).max() < TOLERANCE


@pytest.mark.parametrize("broken", [{"shift_from": 60}, {"hide_before": 1}, {"swap_kv_heads": True}])
def test_the_comparison_rejects_shifted_positions_a_zeroed_cache_and_swapped_heads(
    session: Session, bundle: TinyBundle, broken: dict[str, Any]
) -> None:
    ids = random_ids(100)
    difference = np.abs(all_logits(session, ids, 7) - reference_logits(bundle.weights, ids, **broken))
    assert difference[60:].max() > 1000 * TOLERANCE


def test_b09_b11_ragged_rows_decode_as_each_row_alone(
    session: Session, bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = session.new_cache(max_slots=8, max_length=128)
    rows = [random_ids(length) for length in P8]
    for row in rows:
        session.step(cache, np.array([row]), first_slot=cache.claim())
    seen: list[tuple[list[int], int]] = []
    run = session._session.run_with_iobinding

    def spy(binding: Any) -> None:
        tensors = session._decode_tensors[8, False]
        seen.append((tensors._seqlens.host.tolist(), int(tensors._total)))
        run(binding)

    monkeypatch.setattr(session._session, "run_with_iobinding", spy)
    for _ in range(20):
        for row in rows:
            row.append((row[-1] * 7 + len(row)) % VOCAB)
        logits = session.step(cache, np.array([[row[-1]] for row in rows])).copy()
    for row, got in zip(rows, logits, strict=True):
        assert np.abs(got - reference_logits(bundle.weights, row)[-1]).max() < TOLERANCE
    for step, (seqlens, total) in enumerate(seen):
        assert seqlens == [length + step for length in P8]  # tokens after the step, minus one
        assert total == max(P8) + step + 1


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_b11_every_row_sees_its_own_tokens_in_a_buffer_longer_than_them(
    session: Session, bundle: TinyBundle, batch: int
) -> None:
    cache = session.new_cache(max_slots=batch, max_length=32)
    rows = [random_ids(3, seed) for seed in range(batch)]
    for row in rows:
        session.step(cache, np.array([row[:2]]), first_slot=cache.claim())
    assert cache.capacity == 32
    logits = session.step(cache, np.array([row[2:] for row in rows]))
    for row, got in zip(rows, logits, strict=True):
        assert np.abs(got - reference_logits(bundle.weights, row)[-1]).max() < TOLERANCE


def test_a_new_cache_is_bound_even_where_a_dead_one_lay(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    bind = StepTensors._bind_cache

    def spy(tensors: StepTensors, cache: KVCache, first_slot: int, batch: int) -> None:
        bound.append(id(cache))
        bind(tensors, cache, first_slot, batch)

    monkeypatch.setattr(StepTensors, "_bind_cache", spy)
    for _ in range(20):
        all_logits(session, random_ids(4), 4)
    assert len(bound) == 20
    assert len(set(bound)) < 20  # addresses were used again, so they cannot tell caches apart


def test_only_the_rows_asked_for_are_returned(session: Session, bundle: TinyBundle) -> None:
    ids = random_ids(9)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    logits = session.step(cache, np.array([ids]), np.array([8, 2]))
    assert np.abs(logits - reference_logits(bundle.weights, ids)[[8, 2]]).max() < TOLERANCE
    cache.rewind(0, 0)
    assert session.step(cache, np.array([ids])).shape == (1, VOCAB)


def test_steps_that_the_graph_cannot_take_are_refused(session: Session) -> None:
    cache = session.new_cache(max_slots=2, max_length=4)
    with pytest.raises(ValueError, match="slots 0 to 0 are not active; 0 are"):
        session.step(cache, np.array([[1]]))
    cache.claim()
    cache.claim()
    with pytest.raises(ValueError, match="a step of 2 tokens takes one row at a time, got 2"):
        session.step(cache, np.array([[1, 2], [3, 4]]))
    with pytest.raises(ValueError, match="exceed the cache's limits of 2 rows and 4 tokens"):
        session.step(cache, np.array([[1, 2, 3, 4, 5]]))
    assert cache.lengths.tolist() == [0, 0]


def test_a_failed_step_leaves_the_row_as_it_was(
    session: Session, bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(6)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    session.step(cache, np.array([ids[:4]]))

    def fail(_: Any) -> None:
        raise RuntimeError("kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(session._session, "run_with_iobinding", fail)
        with pytest.raises(RuntimeError, match="kernel failed"):
            session.step(cache, np.array([ids[4:]]))
    assert cache.lengths[0] == 4
    logits = session.step(cache, np.array([ids[4:]]))
    assert np.abs(logits - reference_logits(bundle.weights, ids)[-1]).max() < TOLERANCE


def test_a_decode_step_binds_nothing_anew(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of a step beyond ONNX Runtime's own run would be binding (0.013 ms is left without it)."""
    cache = session.new_cache(max_slots=2, max_length=64)
    cache.claim()
    ids = np.array([[5]])
    session.step(cache, ids)
    bound: list[str] = []

    def counted(bind: Any) -> Any:
        def count(binding: Any, name: str, *place: Any) -> None:
            bound.append(name)
            bind(binding, name, *place)  # ONNX Runtime runs what is not bound, and corrupts its memory

        return count

    for kind in ("bind_input", "bind_output"):
        monkeypatch.setattr(onnxruntime.IOBinding, kind, counted(getattr(onnxruntime.IOBinding, kind)))
    for _ in range(20):
        session.step(cache, ids)
    assert bound == []
    cache.claim()
    session.step(cache, np.array([[5], [6]]))  # another batch is bound, so that the count can fail
    assert bound

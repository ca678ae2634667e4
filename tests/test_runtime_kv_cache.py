"""The KV cache: growth, limits, slots, and that nothing of an earlier sequence is visible to the next."""

from typing import Any

import numpy as np
import pytest
from fake_cuda import fake_cudart
from parity import TOLERANCES
from tiny_bundles import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, TinyBundle, reference_logits, write_tiny_bundle

from graphport.model_def.signature import TensorSpec
from graphport.runtime import cache_buffer
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.cache_buffer import NUMPY_DTYPES, CudaBuffer, HostBuffer
from graphport.runtime.cache_growth import FIRST_CAPACITY
from graphport.runtime.cuda_runtime import CudaError, CudaRuntime
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.memory import NotEnoughMemoryError
from graphport.runtime.session import Session

TOLERANCE = TOLERANCES["tiny bundle", "float32"]

SPECS = tuple(
    TensorSpec(name=f"past_key_values.{i}.key", dtype="float32", shape=("batch", 2, "capacity", 8)) for i in range(3)
)
TOKEN_BYTES = 3 * 2 * 8 * 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("cache") / "bundle")


@pytest.fixture(scope="module")
def session(bundle: TinyBundle) -> Session:
    return Session(open_bundle(bundle.folder), device="cpu", threads=1)


def _array(cache: KVCache, index: int) -> np.ndarray[Any, Any]:
    buffer = cache.buffers[index]
    assert isinstance(buffer, HostBuffer)
    return buffer.array


def _fill(cache: KVCache, slot: int, length: int, value: float) -> None:
    for index in range(len(cache.buffers)):
        _array(cache, index)[slot, :, :length] = value + index
    cache.lengths[slot] = length


def _holds(cache: KVCache, slot: int, length: int, value: float) -> bool:
    rows = [_array(cache, index)[slot, :, :length] == value + index for index in range(len(cache.buffers))]
    return int(cache.lengths[slot]) == length and all(row.all() for row in rows)


def test_nothing_is_allocated_before_it_is_needed() -> None:
    cache = KVCache(SPECS, max_slots=1000, max_length=10**9)
    assert cache.buffers == ()
    cache.claim()
    cache.reserve(1, 1)
    assert (cache.num_slots, cache.capacity) == (1, FIRST_CAPACITY)
    assert _array(cache, 0).shape == (1, 2, FIRST_CAPACITY, 8)
    assert cache.bytes_for(1, FIRST_CAPACITY) == sum(_array(cache, i).nbytes for i in range(3))


def test_the_cache_grows_by_doubling_keeps_its_rows_and_stops_at_its_limits() -> None:
    cache = KVCache(SPECS, max_slots=3, max_length=150)
    cache.claim()
    cache.reserve(1, 10)
    _fill(cache, 0, 10, 5.0)
    cache.claim()
    for slots, length, expected in ((2, 10, (2, 64)), (2, 65, (2, 128)), (3, 129, (3, 150)), (3, 150, (3, 150))):
        cache.reserve(slots, length)
        assert (cache.num_slots, cache.capacity) == expected
        assert _holds(cache, 0, 10, 5.0)
    generation = cache.generation
    for slots, length in ((4, 1), (1, 151)):
        with pytest.raises(ValueError, match=r"exceed the cache's limits of 3 rows and 150 tokens"):
            cache.reserve(slots, length)
    assert cache.generation == generation


def test_a_short_limit_is_the_first_capacity() -> None:
    cache = KVCache(SPECS, max_slots=1, max_length=5)
    cache.reserve(1, 1)
    assert cache.capacity == 5


def test_growth_beyond_free_memory_is_refused_before_anything_is_taken() -> None:
    free = [10**9]
    cache = KVCache(SPECS, max_slots=2, max_length=10_000, free=lambda: free[0])
    cache.claim()
    cache.reserve(1, 64)
    _fill(cache, 0, 64, 1.0)
    one_old = cache.bytes_for(1, 64) // 3
    free[0] = cache.bytes_for(1, 128) - cache.bytes_for(1, 64) + one_old - 1
    with pytest.raises(
        NotEnoughMemoryError, match=r"KV cache of 1 rows of 128 tokens needs .* MiB, .* are free; 127 tok"
    ):
        cache.reserve(1, 65)
    assert _holds(cache, 0, 64, 1.0)
    assert cache.capacity == 64
    free[0] += 1
    cache.reserve(1, 65)
    assert cache.capacity == 128
    assert _holds(cache, 0, 64, 1.0)


def test_a_failed_allocation_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(SPECS, max_slots=1, max_length=1000)
    cache.claim()
    cache.reserve(1, 64)
    _fill(cache, 0, 64, 1.0)

    def fail(*_: object) -> None:
        raise MemoryError("no pages")

    monkeypatch.setattr(cache_buffer.np, "empty", fail)
    with pytest.raises(MemoryError, match="no pages"):
        cache.reserve(1, 65)
    assert _holds(cache, 0, 64, 1.0)


def _touched(cache: KVCache, pieces: int) -> list[bool]:
    return [cache.reserve_part(2, 4 * FIRST_CAPACITY, slot=1, most_bytes=1) for _ in range(pieces)]


def test_a_cache_that_grows_in_parts_keeps_its_rows_and_writes_only_to_new_memory() -> None:
    cache = KVCache(SPECS, max_slots=4, max_length=1024)
    cache.claim()
    cache.reserve(1, 10)
    _fill(cache, 0, 10, 3.0)
    cache.claim()
    pieces = len(SPECS) * 2 * 2  # buffers, rows, heads
    assert _touched(cache, pieces) == [False] * pieces
    assert cache.capacity == FIRST_CAPACITY
    assert _holds(cache, 0, 10, 3.0)
    assert _touched(cache, 1) == [True]
    growth = cache._growth
    assert growth is not None
    cache.reserve(2, 3 * FIRST_CAPACITY)  # less than was asked for: a row left meanwhile
    assert cache.buffers == growth.buffers
    assert (cache.num_slots, cache.capacity) == (2, 4 * FIRST_CAPACITY)
    assert _holds(cache, 0, 10, 3.0)
    assert cache.reserve_part(2, 4 * FIRST_CAPACITY, slot=1, most_bytes=1)  # there is room


def test_what_was_taken_in_parts_is_given_back_when_more_is_needed_or_nobody_waits() -> None:
    cache = KVCache(SPECS, max_slots=4, max_length=1024)
    cache.claim()
    cache.reserve(1, 1)
    cache.claim()
    _touched(cache, 1)
    first = cache._growth
    assert not cache.reserve_part(2, 1024, slot=1, most_bytes=1)
    assert cache._growth is not first
    cache.stop_growing()
    assert cache._growth is None
    cache._free = lambda: 0
    with pytest.raises(NotEnoughMemoryError, match="a KV cache of"):
        cache.reserve_part(2, 1024, slot=1, most_bytes=1)


def test_releasing_a_slot_moves_the_last_row_into_it() -> None:
    cache = KVCache(SPECS, max_slots=3, max_length=64)
    for slot in range(3):
        assert cache.claim() == slot
    cache.reserve(3, 9)
    for slot, length in enumerate((9, 4, 6)):
        _fill(cache, slot, length, 10.0 * slot)
    with pytest.raises(RuntimeError, match="all 3 cache slots are taken"):
        cache.claim()
    cache.release(0)
    assert cache.num_active == 2
    assert _holds(cache, 0, 6, 20.0)
    assert _holds(cache, 1, 4, 10.0)
    cache.release(1)
    assert cache.num_active == 1
    assert cache.claim() == 1
    assert cache.lengths[1] == 0
    with pytest.raises(ValueError, match="slot 2 is not active; 2 slots are"):
        cache.release(2)


@pytest.mark.parametrize(("max_slots", "max_length", "name"), [(0, 5, "max_slots"), (2, 0, "max_length")])
def test_empty_limits_are_refused(max_slots: int, max_length: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        KVCache(SPECS, max_slots=max_slots, max_length=max_length)


@pytest.mark.parametrize("length", [0, 1, 11, 12])
def test_b101_rewind_then_append_equals_a_fresh_sequence(session: Session, bundle: TinyBundle, length: int) -> None:
    random = np.random.default_rng(length)
    first, other = random.integers(0, VOCAB, 12), random.integers(0, VOCAB, 7)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    session.step(cache, first[np.newaxis])
    cache.rewind(0, length)
    logits = session.step(cache, other[np.newaxis], np.arange(7))
    ids = [*first[:length].tolist(), *other.tolist()]
    assert np.abs(logits - reference_logits(bundle.weights, ids)[length:]).max() < TOLERANCE


@pytest.mark.parametrize("length", [13, -1])
def test_b101_rewind_beyond_what_is_cached_is_refused_and_changes_nothing(session: Session, length: int) -> None:
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    session.step(cache, np.arange(12)[np.newaxis])
    with pytest.raises(ValueError, match=f"cannot rewind slot 0 to {length} tokens; it holds 12, give 0 to 12"):
        cache.rewind(0, length)
    assert cache.lengths[0] == 12
    with pytest.raises(ValueError, match="slot 1 is not active"):
        cache.rewind(1, 0)


def _poisoned_logits(session: Session, ids: list[int], *, excess: int = 0) -> np.ndarray[Any, Any]:
    """Logits of `ids` on a slot whose buffers held NaN; `excess` pretends that many old rows were part of it."""
    cache = session.new_cache(max_slots=2, max_length=64)
    cache.claim()
    cache.claim()
    cache.reserve(2, 64)
    for index in range(2 * LAYERS):
        _array(cache, index)[:] = np.nan
    parts = [session.step(cache, np.array([ids[:5]]), np.arange(5), first_slot=1).copy()]
    cache.advance(1, 1, excess)
    parts += [session.step(cache, np.array([[i]]), first_slot=1).copy() for i in ids[5:]]
    return np.concatenate(parts)


def test_nothing_of_an_earlier_sequence_is_visible(session: Session, bundle: TinyBundle) -> None:
    ids = np.random.default_rng(3).integers(0, VOCAB, 11).tolist()
    difference = np.abs(_poisoned_logits(session, ids) - reference_logits(bundle.weights, ids))
    assert difference.max() < TOLERANCE
    assert np.isnan(_poisoned_logits(session, ids, excess=1)).any()  # the poison does show when a row is too long


def test_growth_in_the_middle_of_a_sequence_changes_nothing(session: Session, bundle: TinyBundle) -> None:
    ids = np.random.default_rng(4).integers(0, VOCAB, 100).tolist()
    cache = session.new_cache(max_slots=4, max_length=128)
    cache.claim()
    parts = [session.step(cache, np.array([ids[:60]]), np.arange(60)).copy()]
    cache.claim()  # slots grow as well as capacity
    session.step(cache, np.array([ids[:3]]), first_slot=1)
    parts += [session.step(cache, np.array([ids[i : i + 8]]), np.arange(8)).copy() for i in range(60, 100, 8)]
    assert cache.capacity == 128
    assert np.abs(np.concatenate(parts) - reference_logits(bundle.weights, ids)).max() < TOLERANCE


def test_the_cache_holds_the_heads_of_the_graph(session: Session) -> None:
    cache = session.new_cache(max_slots=2, max_length=64)
    cache.reserve(2, 1)
    assert [buffer.shape for buffer in cache.buffers] == [(2, KV_HEADS, 64, HEAD_DIM)] * (2 * LAYERS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_device_rows_are_copied_by_pitch(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    fake = fake_cudart(monkeypatch)
    cuda = CudaRuntime()
    small, large = CudaBuffer(cuda, (2, 3, 4, 5), dtype), CudaBuffer(cuda, (3, 3, 8, 5), dtype)
    kept, grown = (
        fake.blocks[buffer.address(0)].view(NUMPY_DTYPES[dtype]).reshape(buffer.shape) for buffer in (small, large)
    )
    kept[:] = np.arange(120).reshape(2, 3, 4, 5)
    untouched = grown.copy()
    large.copy_row(small, 1, 2, 3)
    assert (grown[2, :, :3] == kept[1, :, :3]).all()
    assert grown[2, :, 3:].tobytes() == untouched[2, :, 3:].tobytes()
    assert grown[:2].tobytes() == untouched[:2].tobytes()
    assert large.address(2) == grown[2:].ctypes.data
    fake.status = 1
    with pytest.raises(CudaError, match="cudaMemcpy2DAsync failed with CUDA error 1: fake error 1"):
        large.copy_row(small, 0, 0, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_device_rows_come_to_the_host_and_go_back_token_by_token(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    fake = fake_cudart(monkeypatch)
    buffer = CudaBuffer(CudaRuntime(), (2, 3, 8, 5), dtype)
    held = fake.blocks[buffer.address(0)].view(NUMPY_DTYPES[dtype]).reshape(buffer.shape)
    held[:] = (np.arange(240) % 120).reshape(2, 3, 8, 5)
    before = held.copy()
    tokens = buffer.read_tokens(1, 2, 5)
    assert tokens.tobytes() == before[1, :, 2:5].tobytes()
    buffer.write_tokens(0, 4, tokens[:, 1:])  # a view: its rows do not lie one behind the other
    assert held[0, :, 4:6].tobytes() == before[1, :, 3:5].tobytes()
    before[0, :, 4:6] = before[1, :, 3:5]
    assert held.tobytes() == before.tobytes()

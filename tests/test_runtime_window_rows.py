"""Layers with a window keep no more than that: results are those of whole caches, whatever is done with the rows."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from certificates import rehash
from numpy.typing import NDArray
from parity import TOLERANCES
from tiny_graphs import make_model
from tiny_sessions import open_session
from window_pairs import CONFIGS, CONTEXT, IDS, KINDS, Pair, make_pair

from graphport.export import export
from graphport.export.layout_parity import GrowingRunner, layout_check, masked_inputs
from graphport.export.layouts import OPTIMUM
from graphport.model_def.signature import GRAPH_FILE, WINDOW_SEQLENS_K, read_manifest
from graphport.model_def.window_rows import REWIND_ROOM, WindowRows, moving_layers, rows_of
from graphport.runtime.graph_checks import check_config
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.session import Session
from graphport.runtime.verification import verify

LIMIT = TOLERANCES["compiled", "float32"]
PIECES = (64, 64, *[1] * 75, 13, 9, 1, 1, 40, *[1] * 100)  # across several drops, long steps among them


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pair]:
    return {kind: make_pair(*kind, tmp_path_factory.mktemp(kind[0])) for kind in KINDS}


@pytest.fixture(scope="module")
def mixed(pairs: dict[tuple[str, str], Pair]) -> Pair:
    return pairs["mixed", "auto"]


def opened(session: Session, slots: int = 1) -> KVCache:
    cache = session.new_cache(max_slots=slots, max_length=CONTEXT)
    for _ in range(slots):
        cache.claim()
    return cache


def fed(session: Session, cache: KVCache, pieces: Sequence[int], begin: int = 0, slot: int = 0) -> NDArray[np.float32]:
    """Logits of all tokens of IDS from `begin` on, in pieces."""
    rows = []
    for size in pieces:
        ids = np.array([IDS[begin : begin + size]])
        rows.append(session.step(cache, ids, np.arange(size), first_slot=slot).copy())
        begin += size
    return np.concatenate(rows)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_b25_every_step_gives_what_whole_caches_give_to_the_last_bit(
    kind: tuple[str, str], pairs: dict[tuple[str, str], Pair]
) -> None:
    whole, kept = open_session(pairs[kind].whole), open_session(pairs[kind].kept)
    cache = opened(kept)
    assert np.array_equal(fed(kept, cache, PIECES), fed(whole, opened(whole), PIECES))
    rows = WindowRows(window=8 if kind[0] == "mixed" else 7)
    assert cache.firsts.tolist() == [rows.first(sum(PIECES) - 1)] == [320]
    sizes = {moves: buffer.shape[2] for moves, buffer in zip(cache.moving, cache.buffers, strict=True)}
    assert sizes[True] == rows.most(64)
    assert sizes.get(False, cache.capacity) == cache.capacity == CONTEXT


def test_steps_far_beyond_the_window_equal_eager(mixed: Pair) -> None:
    session = open_session(mixed.kept)
    found = fed(session, opened(session), PIECES)
    with torch.inference_mode():
        wanted = mixed.model(torch.tensor([IDS[: len(found)]]))[0].numpy()
    assert np.abs(found - wanted).max() <= LIMIT


def test_graphs_for_other_runtimes_over_the_same_weights_keep_all_tokens(mixed: Pair) -> None:
    config = read_manifest(mixed.kept).config
    assert layout_check(mixed.kept, OPTIMUM, config, max_length=CONTEXT, seed=0).measured == 0
    runner = GrowingRunner(mixed.kept / OPTIMUM.graph_file, config)
    past, rows = runner.empty_cache(1), []
    for begin, end in ((0, 90), *((at, at + 1) for at in range(90, 130))):
        logits, past = runner.run(masked_inputs(np.array(IDS[begin:end]), end), past)
        rows.append(logits[0])
    session = open_session(mixed.kept)
    found = fed(session, opened(session), (90, *[1] * 40))
    assert np.abs(found - np.concatenate(rows)).max() <= LIMIT


def _off_by_one(self: KVCache, first_slot: int, num_slots: int) -> NDArray[np.int32]:
    held = self.lengths[first_slot : first_slot + num_slots] - self.firsts[first_slot : first_slot + num_slots]
    return held - (held > 64).astype(np.int32)


def _one_too_few(self: WindowRows, past: int) -> int:
    return max(0, past - self.window + 2)


def _without_positions(bundle: Path, copy: Path) -> None:
    shutil.copytree(bundle, copy)
    model = onnx.load(copy / GRAPH_FILE, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention" and WINDOW_SEQLENS_K in node.input:
            node.input[9] = ""
    onnx.save(model, copy / GRAPH_FILE)
    rehash(copy, certificate=False)


@pytest.mark.parametrize("broken", ["count", "rows", "positions"])
def test_a_wrong_count_a_row_too_few_and_rotation_by_place_in_the_cache_are_told_apart(
    broken: str, mixed: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_session(mixed.whole)
    wanted = fed(whole, opened(whole), PIECES)
    folder = mixed.kept
    if broken == "count":
        monkeypatch.setattr(KVCache, "held", _off_by_one)
    elif broken == "rows":
        monkeypatch.setattr(WindowRows, "first", _one_too_few)
    else:
        folder = tmp_path / "local"
        _without_positions(mixed.kept, folder)
    session = open_session(folder)
    found = fed(session, opened(session), PIECES)
    gaps = np.nan_to_num(np.abs(found - wanted), nan=np.inf).max(axis=1)
    # before rows are dropped a cache has them all; a kept window that is too short shows as soon as it is full
    assert gaps[: 5 if broken == "rows" else 65].max() <= LIMIT < gaps.max()


def test_rows_of_different_lengths_decode_together(mixed: Pair) -> None:
    firsts = (3, 110, 250, 171)
    logits = []
    for session in (open_session(mixed.whole), open_session(mixed.kept)):
        cache = opened(session, len(firsts))
        for slot, first in enumerate(firsts):
            fed(session, cache, (first,), slot=slot)
        steps = [session.step(cache, np.array([[IDS[first + step]] for first in firsts])) for step in range(80)]
        logits.append(np.stack([step.copy() for step in steps]))
        if session.manifest.window_layers:
            assert cache.firsts.tolist() == [WindowRows(window=8).first(first + 79) for first in firsts]
    assert np.array_equal(*logits)


@pytest.mark.parametrize("back", [1, 16, REWIND_ROOM])
def test_b101_a_rewind_within_what_is_kept_equals_a_run_that_never_went_there(back: int, mixed: Pair) -> None:
    session = open_session(mixed.kept)
    for end in range(160, 232, 8):  # wherever the last drop was
        cache, plain = opened(session), opened(session)
        fed(session, cache, (64, 64, *[1] * (end - 128)))
        fed(session, plain, (64, 64, *[1] * (end - back - 128)))
        cache.rewind(0, end - back)
        found, wanted = (fed(session, one, (7, *[1] * 40), begin=end - back) for one in (cache, plain))
        assert np.abs(found - wanted).max() <= LIMIT


def test_a_rewind_beyond_what_is_kept_is_refused_and_one_to_the_start_is_not(mixed: Pair) -> None:
    session = open_session(mixed.kept)
    cache = opened(session)
    wanted = fed(session, cache, PIECES[:90])
    length, first = int(cache.lengths[0]), int(cache.firsts[0])
    assert first > 0
    with pytest.raises(
        ValueError,
        match=rf"to {first + 6} tokens; .* hold the tokens from {first} on: give {first + 7} to {length}, or 0",
    ):
        cache.rewind(0, first + 6)
    assert (int(cache.lengths[0]), int(cache.firsts[0])) == (length, first)
    cache.rewind(0, 0)
    assert np.array_equal(fed(session, cache, PIECES[:90]), wanted)


def test_a_copied_slot_goes_on_as_its_source_does(mixed: Pair) -> None:
    session = open_session(mixed.kept)
    cache = opened(session, 3)
    fed(session, cache, (64, 64, 64), slot=2)
    fed(session, cache, (30,), slot=1)
    cache.copy_slot(2, 0)
    cache.release(1)  # the last slot moves there
    assert cache.firsts.tolist()[:2] == [WindowRows(window=8).first(128)] * 2
    found = [fed(session, cache, [1] * 70, begin=192, slot=slot) for slot in (0, 1)]
    plain = opened(session)
    fed(session, plain, (64, 64, 64))
    wanted = fed(session, plain, [1] * 70, begin=192)
    assert np.array_equal(found[0], wanted)
    assert np.array_equal(found[1], wanted)


def test_a_longer_step_than_planned_makes_the_buffers_grow(mixed: Pair) -> None:
    session = open_session(mixed.kept)
    cache = session.new_cache(max_slots=2, max_length=CONTEXT, longest_step=16)
    cache.claim()
    fed(session, cache, [16] * 9)
    rows = WindowRows(window=8)
    assert cache.buffers[0].shape[2] == rows.most(16)
    taken = cache.bytes_for(cache.num_slots, cache.capacity)
    assert taken == sum(4 * int(np.prod(buffer.shape)) for buffer in cache.buffers)
    wanted = opened(session)
    fed(session, wanted, [16] * 9)
    assert np.array_equal(fed(session, cache, (90, 1), begin=144), fed(session, wanted, (90, 1), begin=144))
    assert cache.buffers[0].shape[2] == rows.most(90)


@pytest.mark.parametrize("window", [1, 5, 8, 512, 4096])
def test_what_is_kept_is_always_enough_and_bounded(window: int) -> None:
    rows = WindowRows(window=window)
    for past in range(0, 3 * rows.first_drop, 7):
        first = rows.first(past)
        assert first % rows.stride == 0
        assert all(rows.reaches(first, max(past - back, 0)) for back in range(REWIND_ROOM + 1))
        assert past - first + 3 <= rows.most(3)
    assert (rows.first(rows.first_drop - 1), rows.first(rows.first_drop)) == (0, rows.stride)


def test_layers_whose_window_is_not_much_shorter_than_the_context_keep_everything() -> None:
    drop = WindowRows(window=8).first_drop
    for length, layers in ((drop, (0,)), (drop + 1, (0, 2)), (drop - 3, ())):
        assert moving_layers(CONFIGS["mixed"], length) == layers
    assert rows_of(CONFIGS["mixed"], (0, 2)) == WindowRows(window=8)
    assert rows_of(CONFIGS["mixed"], ()) is None


def test_a_manifest_that_keeps_the_window_of_a_layer_without_one_is_refused(mixed: Pair) -> None:
    manifest = read_manifest(mixed.kept)
    check_config(manifest)
    blocks = tuple(
        dataclasses.replace(block, attention=dataclasses.replace(block.attention, window=None))
        for block in manifest.config.blocks
    )
    whole = dataclasses.replace(manifest, config=dataclasses.replace(manifest.config, blocks=blocks))
    with pytest.raises(ValueError, match="keeps a window of layer 0, whose configuration has none"):
        check_config(whole)


def test_b25_the_certificate_covers_the_drop_and_verify_finds_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = export(make_model(CONFIGS["mixed"]), tmp_path / "b", precision="fp32", context=112)
    assert any(check.name.startswith("rows beyond the window") for check in made.certificate)
    assert verify(made.path, device="cpu", threads=1).passed
    monkeypatch.setattr(KVCache, "held", _off_by_one)
    failed = {
        check.name.split(":")[0] for check in verify(made.path, device="cpu", threads=1).checks if not check.passed
    }
    assert "rows beyond the window" in failed

"""Logits of many positions, piece by piece: what they are, how much is held, what is refused."""

from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, reference_logits, write_tiny_bundle

import graphport.runtime.engine
from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.engine import Engine
from graphport.runtime.sequence import ScoringSequence
from graphport.runtime.session import Session

TOLERANCE = TOLERANCES["tiny bundle", "float32"]
ROWS = 8  # a piece, where a test makes pieces small


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("logits") / "bundle")


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphport.runtime.engine, "SCORING_BYTES", ROWS * VOCAB * 4)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("chunk", [1, 7, 20, 512])
@pytest.mark.parametrize("first_row", [0, 1, 19, 20, 69])
def test_pieces_are_the_rows_from_the_first_asked_for_on(bundle: TinyBundle, chunk: int, first_row: int) -> None:
    ids = random_ids(70)
    with load(bundle.folder, threads=1, prefill_chunk=chunk) as lm:
        pieces = list(lm.stream_logits(ids, first_row=first_row))  # kept: no step may overwrite an earlier piece
        assert lm.num_active == 0
    assert max(len(piece) for piece in pieces) <= min(chunk, ROWS)
    found = np.concatenate(pieces)
    assert found.dtype == np.float32
    assert found.shape == (70 - first_row, VOCAB)
    assert np.abs(found - reference_logits(bundle.weights, ids)[first_row:]).max() < TOLERANCE


@pytest.mark.usefixtures("small_pieces")
def test_a_step_makes_one_piece_and_tokens_before_the_first_row_cost_no_logits(
    bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(open_bundle(bundle.folder), device="cpu", threads=1)
    engine = Engine(session, max_batch=1, max_length=128, prefill_chunk=50)
    rows, run = [], session.run

    def counted(*arguments: Any, **options: Any) -> Any:
        outputs = run(*arguments, **options)
        rows.append(outputs.num_rows)
        return outputs

    monkeypatch.setattr(session, "run", counted)
    scoring = ScoringSequence(tuple(random_ids(100)), vocab_size=VOCAB, first_row=60)
    engine.submit(scoring)
    while not scoring.is_finished:
        before = len(scoring.pieces)
        engine.step()
        assert len(scoring.pieces) - before <= 1
    # 50 tokens of context: the one row that every step gives; then 10 more with the first 8 rows that are asked for
    assert rows == [1, 8, 8, 8, 8, 8]
    assert [len(piece) for piece in scoring.pieces] == [8] * 5


@pytest.mark.usefixtures("small_pieces")
def test_a_stream_of_logits_runs_as_it_is_read_and_leaves_its_place_when_closed(bundle: TinyBundle) -> None:
    with load(bundle.folder, threads=1, max_batch=1) as lm:
        assert lm._engine is not None
        stream = lm.stream_logits(random_ids(100))
        assert lm._engine.num_steps == 0
        next(stream)
        assert lm._engine.num_steps == 1
        assert lm.num_active == 1
        stream.close()  # type: ignore[attr-defined]
        assert lm.num_active == 0
        assert len(lm.generate([[1, 2]], SamplingParams(max_new_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_other_requests_go_on_while_a_stream_of_logits_is_read(bundle: TinyBundle, model: LanguageModel) -> None:
    ids, greedy = random_ids(60), SamplingParams(max_new_tokens=8, temperature=0.0)
    expected = model.generate([[5, 6]], greedy)
    with load(bundle.folder, threads=1, max_batch=2, prefill_chunk=16) as lm:
        stream = lm.stream_logits(ids)
        pieces = [next(stream)]
        assert lm.generate([[5, 6]], greedy) == expected
        pieces += stream
    assert np.abs(np.concatenate(pieces) - reference_logits(bundle.weights, ids)).max() < TOLERANCE


@pytest.mark.parametrize("first_row", [-1, 3, 100])
def test_a_first_row_outside_the_ids_is_refused(model: LanguageModel, first_row: int) -> None:
    with pytest.raises(ValueError, match=f"first_row must be 0 to 2, the last position; got {first_row}"):
        model.stream_logits([1, 2, 3], first_row=first_row)


def test_ids_of_a_stream_of_logits_are_checked_before_it_is_read(model: LanguageModel) -> None:
    for ids, match in (
        ([], "ids is empty"),
        ([VOCAB], f"ids has id {VOCAB}, outside"),
        ([1] * 129, "ids has 129 tokens"),
    ):
        with pytest.raises(ValueError, match=match):
            model.stream_logits(ids)

"""Compact rows of logits: an error anywhere in a row shows, figures are those of the whole row or bound them."""

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from graphport.export.parity import compare
from graphport.model_def.compact_rows import (
    NUM_TOP,
    CompactRows,
    RowErrors,
    compact_rows,
    compare_rows,
    join_errors,
    join_rows,
    measure_rows,
)

ROWS, VOCAB = 70, 997


def logits(seed: int = 0, rows: int = ROWS, vocab: int = VOCAB) -> NDArray[np.float32]:
    return (3 * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def compact(values: NDArray[np.float32], seed: int = 0) -> CompactRows:
    return compact_rows(measure_rows(values, seed=seed), range(len(values)))


def compared(reference: CompactRows, values: NDArray[np.float32]) -> RowErrors:
    return compare_rows(reference, measure_rows(values, seed=reference.seed))


def test_equal_rows_differ_by_what_float32_rounds() -> None:
    errors = compared(compact(logits()), logits())
    assert errors.figure("max_abs") == 0
    assert errors.figure("kl") == 0
    assert errors.figure("rms") < 1e-5
    assert errors.agrees.all()


@pytest.mark.parametrize("seed", range(5))
def test_an_error_of_one_logit_anywhere_shows_with_its_size(seed: int) -> None:
    random = np.random.default_rng(seed)
    row, token = int(random.integers(ROWS)), int(random.integers(VOCAB))
    wrong = logits()
    wrong[row, token] += 0.5
    errors = compared(compact(logits(), seed), wrong)
    assert errors.rms[row] * VOCAB**0.5 == pytest.approx(0.5, rel=1e-3)
    assert np.delete(errors.rms, row).max() < 1e-5


def test_the_estimate_of_an_error_over_the_whole_row_is_near_its_root_mean_square() -> None:
    noise = 0.01 * np.random.default_rng(1).standard_normal((ROWS, VOCAB)).astype(np.float32)
    wrong = logits() + noise
    estimate = compared(compact(logits()), wrong).rms
    true = np.sqrt(((wrong - logits()).astype(np.float64) ** 2).mean(axis=1))
    assert np.all(np.abs(estimate / true - 1) < 0.6)  # 32 projections: 12.5 % a standard deviation
    assert abs(float((estimate**2).mean() / (true**2).mean()) - 1) < 0.1


def test_divergence_is_a_lower_bound_of_the_whole_rows() -> None:
    wrong = logits() + 0.3 * logits(2)
    found, whole = compared(compact(logits()), wrong), compare(logits(), wrong)
    assert 0.3 * whole.kl < found.figure("kl") <= whole.kl + 1e-9
    assert found.agrees.mean() == whole.top1
    assert found.figure("max_abs") <= whole.max_abs + 1e-6


def test_a_vocabulary_of_fewer_than_the_largest_is_kept_whole() -> None:
    few = logits(vocab=7)
    assert compact(few).top_ids.shape == (ROWS, 7)
    wrong = few + 0.3 * logits(2, vocab=7)
    assert compared(compact(few), wrong).figure("kl") == pytest.approx(compare(few, wrong).kl, rel=1e-6)


def test_a_constant_added_to_a_row_shows_in_its_total() -> None:
    errors = compared(compact(logits()), logits() + 0.25)
    assert errors.figure("max_abs") == pytest.approx(0.25, rel=1e-5)
    assert errors.figure("kl") < 1e-9


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_an_infinite_error_and_no_reference(value: float) -> None:
    wrong = logits()
    wrong[66, 5] = value
    errors = compared(compact(logits()), wrong)
    assert errors.figure("rms") == errors.rms[66] == np.inf
    assert not errors.agrees[66]
    assert np.isfinite(np.delete(errors.rms, 66)).all()
    with pytest.raises(ValueError, match="not finite: they cannot serve as a reference"):
        compact(wrong)


def test_rows_are_found_by_position_and_joined_in_order() -> None:
    rows = compact(logits())
    some = rows.at([3, 68, 3])
    assert some.positions.tolist() == [3, 68, 3]
    assert compared(some, logits()[[3, 68, 3]]).figure("max_abs") == 0
    assert compared(some, logits()[[3, 67, 3]]).max_abs.argmax() == 1
    with pytest.raises(ValueError, match="no reference row at position 70; there are 70"):
        rows.at([70])
    joined = join_rows([rows.at([0, 1]), rows.at([2])])
    assert compared(joined, logits()[:3]).figure("rms") < 1e-5
    parts = [compared(rows.at([0, 1]), logits()[:2]), compared(rows.at([2]), logits()[:1])]
    assert join_errors(parts).positions.tolist() == [0, 1, 2]
    assert join_errors(parts).max_abs[2] > 1


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows are \(69, 997\) with seed 0, needed \(70, 997\)"):
        compared(compact(logits()), logits()[:69])


def test_they_survive_json_and_stay_small() -> None:
    rows = compact(logits(), seed=3)
    text = json.dumps(rows.to_dict())
    assert len(text) < ROWS * 4 / 3 * (8 * NUM_TOP + 4 * 32 + 16) + 400
    back = CompactRows.from_dict(json.loads(text))
    for name in ("positions", "top_ids", "top_values", "log_totals", "projections"):
        np.testing.assert_array_equal(getattr(back, name), getattr(rows, name))
    assert (back.seed, back.width) == (3, VOCAB)


@pytest.mark.parametrize("change", [{"top_ids": "AAA="}, {"rows": 3}, {"width": 20}, {"projections": "%"}])
def test_damaged_rows_are_refused(change: dict[str, object]) -> None:
    data = compact(logits()).to_dict() | change
    with pytest.raises(ValueError, match=r"reshape|must lie|base64|padding|buffer"):
        CompactRows.from_dict(data)


def test_signs_are_the_same_in_every_version() -> None:
    ones = np.ones((1, 64), np.float32)
    assert compact(ones, seed=7).projections[0, :8].tolist() == [-4, 8, -4, -4, 2, 0, 12, 10]

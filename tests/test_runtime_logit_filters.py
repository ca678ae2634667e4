"""The filters top_k, top_p and min_p against their documented meaning by whole sorts and against transformers."""

import itertools

import numpy as np
import pytest
import torch
from parity import RELATIVE_TOLERANCES
from tiny_logits import VOCAB, drawn, random_logits
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphport.runtime.logit_filters import highest, nucleus, scale_by_temperature, surviving


def support(logits: np.ndarray, *, top_k: int | None, top_p: float, min_p: float = 0.0) -> set[int]:
    ids, weights = surviving(scale_by_temperature(logits, 1.0), top_k=top_k or 0, top_p=top_p, min_p=min_p)
    return set(ids[weights > 0].tolist())


def reference_support(logits: np.ndarray, *, top_k: int | None, top_p: float, min_p: float = 0.0) -> set[int]:
    """The documented meaning, by whole sorts in float64: ties of the k-th stay, top_p takes lower ids first."""
    scores = logits.astype(np.float64)
    if top_k and top_k < len(scores):
        scores = np.where(scores >= np.sort(scores)[-top_k], scores, -np.inf)
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    kept = []
    for id_ in sorted(range(len(scores)), key=lambda i: (-probabilities[i], i)):
        if top_p < 1 and kept and probabilities[kept].sum() >= top_p - 1e-12:
            break
        kept.append(id_)
    return {i for i in kept if probabilities[i] > 0 and probabilities[i] >= min_p * probabilities.max()}


SHAPES = {
    "uniform": np.zeros(VOCAB, np.float32),
    "one-hot": np.where(np.arange(VOCAB) == 11, 50, -50).astype(np.float32),
    "tied": np.repeat(np.float32([3, 2, 2, 1, 0]), [2, 3, 5, 7, 20]),
    "random": random_logits(5),
    "with never": np.where(np.arange(VOCAB) % 3 == 0, -np.inf, random_logits(6)).astype(np.float32),
}
TOP_P = (0.0, 1e-8, 1e-3, 0.3, 0.5, 0.9, 1.0)
TOP_K = (0, 1, 2, 5, VOCAB, VOCAB + 1, None)


@pytest.mark.parametrize("shape", SHAPES)
def test_b110_some_id_survives_every_pair_of_filters_and_the_set_is_the_documented_one(shape: str) -> None:
    logits = SHAPES[shape]
    for top_k, top_p in itertools.product(TOP_K, TOP_P):
        kept = support(logits, top_k=top_k, top_p=top_p)
        assert kept, (top_k, top_p)
        assert kept == reference_support(logits, top_k=top_k, top_p=top_p), (top_k, top_p)
        assert set(drawn(logits, 20, top_k=top_k, top_p=top_p, seed=1)) <= kept


def test_b110_filters_over_a_large_vocabulary_equal_whole_sorts() -> None:
    for seed, scale in itertools.product(range(2), (0.01, 1.0, 4.0)):
        logits = random_logits(seed, 20000, scale).round(2)  # rounded: many ties
        for top_k, top_p in ((0, 0.1), (0, 0.9), (0, 0.99999), (700, 0.5), (700, 1.0)):
            weights = np.exp(logits.astype(np.float64) - logits.max())
            kept = np.arange(len(logits)) if not top_k else np.flatnonzero(logits >= np.sort(logits)[-top_k])
            if top_p < 1:
                order = kept[np.argsort(-weights[kept], kind="stable")]
                mass = np.cumsum(weights[order])
                kept = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
            assert abs(len(support(logits, top_k=top_k, top_p=top_p)) - len(kept)) <= 1
            assert len(support(logits, top_k=top_k, top_p=top_p) ^ set(kept.tolist())) <= 1


def test_b110_top_p_takes_the_lower_ids_of_equals() -> None:
    assert nucleus(np.ones(8, np.float32), 0.5).tolist() == [0, 1, 2, 3]
    assert nucleus(np.float32([1, 4, 1, 4]), 0.85).tolist() == [0, 1, 3]
    assert nucleus(np.float32([0, 0, 1]), 1.0 - 1e-16).tolist() == [2]


def test_b110_top_k_keeps_all_equal_to_the_last() -> None:
    assert highest(np.float32([1, 3, 2, 2, 0]), 2).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.1)]
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_b112_filters_in_their_order_equal_transformers(
    top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for seed in range(30):
        logits = random_logits(seed)
        scores = torch.from_numpy(logits)[None].double()
        for warper in warpers:
            scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
        expected = scores.softmax(-1)[0].numpy()
        scaled = scale_by_temperature(logits, temperature)
        ids, weights = surviving(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
        assert ids.tolist() == np.flatnonzero(expected).tolist()
        tolerance = RELATIVE_TOLERANCES["probability", "float32"]
        np.testing.assert_allclose(weights / weights.sum(), expected[ids], rtol=tolerance)


def test_b112_both_filters_apply_where_each_alone_gives_another_set() -> None:
    logits = np.log(np.float32([0.4, 0.3, 0.2, 0.06, 0.04]))
    assert support(logits, top_k=3, top_p=1.0) == {0, 1, 2}
    assert support(logits, top_k=0, top_p=0.95) == {0, 1, 2, 3}
    assert support(logits, top_k=3, top_p=0.75) == {0, 1}
    assert support(logits, top_k=0, top_p=0.75) == {0, 1, 2}
    for top_k in (None, 0):
        assert set(drawn(logits, 300, top_k=top_k, top_p=0.75, seed=0)) == {0, 1, 2}
    assert set(drawn(logits, 300, top_k=3, top_p=0.75, seed=0)) == {0, 1}
    assert set(drawn(logits, 300, seed=0)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("vocab", [5, 21])
def test_b111_top_k_off_or_above_the_vocabulary_keeps_all_of_it(vocab: int) -> None:
    logits = np.zeros(vocab, np.float32)
    for params in ({}, {"top_k": 0}, {"top_k": None}, {"top_k": vocab}, {"top_k": vocab + 1}, {"top_k": 1000}):
        assert set(drawn(logits, 600, seed=3, **params)) == set(range(vocab)), params
    assert drawn(random_logits(1, vocab), 5, top_k=1) == [int(random_logits(1, vocab).argmax())] * 5


def test_min_p_is_relative_to_the_most_likely_id() -> None:
    logits = np.log(np.float32([0.5, 0.26, 0.24]))
    assert support(logits, top_k=0, top_p=1.0, min_p=0.5) == {0, 1}
    assert support(logits, top_k=0, top_p=1.0, min_p=1.0) == {0}

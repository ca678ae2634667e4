"""Sampling from a row's highest logits alone: the ids of the whole row, or the whole row is asked for."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_logits import random_logits

from graphport.model_def.signature import NUM_CANDIDATES
from graphport.runtime.logits_row import Candidates, LogitsRow, ReducedRow
from graphport.runtime.sampling import NonFiniteLogitsError, Sampler
from graphport.runtime.sampling_params import SamplingParams

VOCAB = 700
TOLERANCE = TOLERANCES["log probability", "float32"]
DRAWS = 6

FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 63},
    {"top_k": 1},
    {"top_k": 7, "temperature": 0.6, "logprobs": 2},
    {"top_k": 63, "temperature": 1.3},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 20, "min_p": 0.3, "temperature": 2.0},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.95, "temperature": 1.5, "logprobs": 1},
    {"top_p": 0.9, "min_p": 0.1},
    {"min_p": 0.2},
    {"min_p": 0.05, "temperature": 0.5},
    {"min_p": 1.0},
)
WHOLE_ROW: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"top_k": 64},
    {"temperature": 0.0, "logprobs": 64},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"top_k": 5, "presence_penalty": 0.5},
)

# Spread of the logits; text: few likely ids and a long tail; tied: rounded so that many are equal; masked: mostly -inf.
ROWS = ("flat", "usual", "peaked", "steep", "text", "tied", "coarsely tied", "all equal", "masked")


def row(kind: str, seed: int) -> np.ndarray[Any, Any]:
    scales = {"flat": 0.2, "usual": 3.0, "peaked": 8.0, "steep": 200.0, "masked": 3.0}
    logits = random_logits(seed, VOCAB, scales.get(kind, 3.0)) + np.float32(40 * (seed % 3 - 1))
    if kind == "text":
        ranks = 1 + np.random.default_rng(seed).permutation(VOCAB)
        return (logits / 6 - 1.5 * np.log(ranks)).astype(np.float32)
    if kind == "tied":
        return np.round(logits).astype(np.float32)
    if kind == "coarsely tied":
        return np.float32(4) * np.round(logits / 4).astype(np.float32)
    if kind == "all equal":
        return np.full_like(logits, 1.5)
    if kind == "masked":
        logits[np.random.default_rng(seed).permutation(VOCAB)[: VOCAB - 5 - 30 * (seed % 4)]] = -np.inf
    return logits


def reduced(logits: np.ndarray[Any, Any], asked: Counter[str], *, seed: int = 0) -> LogitsRow:
    """What the graph makes of a row, as far from it as a device may be: its sum off by 1e-5, equal logits shuffled."""
    random = np.random.default_rng(seed)
    shuffled = random.permutation(len(logits))
    order = shuffled[np.argsort(-logits[shuffled], kind="stable")][:NUM_CANDIDATES]
    total = float(np.exp(logits.astype(np.float64) - logits.max()).sum()) * (1 + 1e-5 * random.uniform(-1, 1))

    def candidates() -> Candidates:
        asked["candidates"] += 1
        return Candidates(ids=order, logits=logits[order], vocab_size=len(logits))

    def full() -> np.ndarray[Any, Any]:
        asked["row"] += 1
        return logits

    least = ReducedRow(
        greedy_id=int(logits.argmax()), log_total=float(np.float32(np.log(total))), candidates=candidates
    )
    return LogitsRow(full=full, reduced=least)


def assert_same(params: dict[str, Any], logits: np.ndarray[Any, Any], asked: Counter[str], seed: int) -> None:
    samplers = [Sampler(SamplingParams(seed=seed, **params), (3, 5), vocab_size=VOCAB) for _ in range(2)]
    for draw in range(DRAWS):
        found = samplers[0].sample_row(reduced(logits, asked, seed=seed + draw))
        expected = samplers[1].sample(logits)
        assert found.token_id == expected.token_id
        assert abs(found.logprob - expected.logprob) < 2 * TOLERANCE
        assert [id_ for id_, _ in found.top_logprobs] == [id_ for id_, _ in expected.top_logprobs]
        for (_, one), (_, other) in zip(found.top_logprobs, expected.top_logprobs, strict=True):
            assert abs(one - other) < 2 * TOLERANCE


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_candidates_give_the_ids_of_the_whole_row(params: dict[str, Any], kind: str) -> None:
    asked: Counter[str] = Counter()
    for seed in range(12):
        assert_same(params, row(kind, seed), asked, seed)
    if kind == "steep" or (kind == "text" and params.get("temperature", 1.0) <= 1):  # a light tail
        assert asked["row"] <= 12 * DRAWS * 0.4


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_candidates_give_the_ids_of_rows_of_every_shape(params: dict[str, Any]) -> None:
    """Temperatures and spreads from the harmless to the absurd."""
    asked: Counter[str] = Counter()
    for seed in range(30):
        random = np.random.default_rng(seed)
        logits = random_logits(seed, VOCAB, float(10 ** random.uniform(-2, 3)))
        if seed % 3 == 0:
            logits = np.round(logits, int(random.integers(0, 3))).astype(np.float32)
        temperature = float(10 ** random.uniform(-6, 3)) if params.get("temperature", 1.0) else 0.0
        assert_same({**params, "temperature": temperature}, logits, asked, seed)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9, 1e9, 1e300])
def test_candidates_survive_absurd_temperatures(temperature: float) -> None:
    for params in ({"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9}, {"top_p": 0.5, "min_p": 0.01}):
        for kind in ROWS:
            assert_same({**params, "temperature": temperature}, row(kind, 1), Counter(), 1)


@pytest.mark.parametrize("params", WHOLE_ROW, ids=str)
def test_what_candidates_cannot_settle_takes_the_row_and_nothing_else(params: dict[str, Any]) -> None:
    asked: Counter[str] = Counter()
    for seed in range(10):
        assert_same(params, row("usual", seed), asked, seed)
    assert asked == {"row": 10 * DRAWS}


def test_a_greedy_id_needs_neither_row_nor_candidates() -> None:
    asked: Counter[str] = Counter()
    for kind in ROWS:
        assert_same({"temperature": 0.0}, row(kind, 2), asked, 2)
    assert asked == {}


def test_a_tie_across_the_last_candidate_takes_the_row() -> None:
    """The 5th and the 70th are equal: top_k keeps all of them, and the lower ids among them may lie outside."""
    logits = np.full(VOCAB, -9, np.float32)
    logits[600:670] = 2
    logits[:4] = (5, 4, 3, 6)
    asked: Counter[str] = Counter()
    assert_same({"top_k": 5}, logits, asked, 0)
    assert_same({"top_p": 0.9}, logits, asked, 0)
    assert asked["row"] == 2 * DRAWS
    asked.clear()
    assert_same({"top_k": 4}, logits, asked, 0)
    assert_same({"top_p": 0.3}, logits, asked, 0)
    assert asked["row"] == 0


def test_a_total_that_is_wrong_is_noticed_by_these_tests() -> None:
    """The comparison must be able to fail: a sum beyond the error allowed for changes what top_p keeps."""
    logits = row("text", 3)
    wrong = 0
    for seed in range(200):
        sampler, expected = (Sampler(SamplingParams(seed=seed, top_p=0.7), (), vocab_size=VOCAB) for _ in range(2))
        right = reduced(logits, Counter())
        assert right.reduced is not None
        off = dataclasses.replace(right.reduced, log_total=right.reduced.log_total - 0.3)
        wrong += (
            sampler.sample_row(LogitsRow(full=right.full, reduced=off)).token_id != expected.sample(logits).token_id
        )
    assert wrong > 10


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", FILTERS[:8], ids=str)
def test_b50_a_log_total_that_is_not_finite_takes_the_row_which_says_why(params: dict[str, Any], number: float) -> None:
    logits = np.full(VOCAB, -np.inf, np.float32) if number == -np.inf else row("usual", 0)
    logits[7] = number
    order = np.arange(NUM_CANDIDATES)
    least = ReducedRow(
        greedy_id=0,
        log_total=float("nan"),
        candidates=lambda: Candidates(ids=order, logits=logits[order], vocab_size=VOCAB),
    )
    sampler = Sampler(SamplingParams(seed=0, **params), (), vocab_size=VOCAB)
    with pytest.raises(NonFiniteLogitsError, match=f"of {VOCAB} logits are not finite"):
        sampler.sample_row(LogitsRow(full=lambda: logits, reduced=least))


def test_a_failed_choice_takes_no_random_number() -> None:
    """A row that needs its whole length draws from the same point of the stream as one that does not."""
    sampler, expected = (Sampler(SamplingParams(seed=9, top_p=0.99), (), vocab_size=VOCAB) for _ in range(2))
    for seed, kind in enumerate(("flat", "peaked", "flat", "peaked", "peaked", "flat") * 3):
        logits = row(kind, seed)
        assert sampler.sample_row(reduced(logits, Counter())).token_id == expected.sample(logits).token_id


def test_a_row_no_longer_than_its_candidates_is_taken_whole() -> None:
    logits = random_logits(0, 37)
    sampler, expected = (Sampler(SamplingParams(seed=9, top_k=5), (), vocab_size=37) for _ in range(2))
    least = ReducedRow(greedy_id=int(logits.argmax()), log_total=0.5, candidates=None)
    assert sampler.sample_row(LogitsRow(full=lambda: logits, reduced=least)) == expected.sample(logits)

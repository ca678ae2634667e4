"""Sampling: penalties, temperature, streams of random numbers, log probabilities, logits that are none."""

import math
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from parity import RELATIVE_TOLERANCES, assert_parity
from tiny_logits import VOCAB, drawn, log_softmax, random_logits, sampler
from transformers import (
    RepetitionPenaltyLogitsProcessor,
)

from graphport.runtime.logit_filters import scale_by_temperature, surviving
from graphport.runtime.sampling import NonFiniteLogitsError, draw

# Penalties


def test_b108_repetition_penalty_multiplies_negative_logits() -> None:
    logits = np.float32([-2, -1, 3])
    edits = sampler((0, 0, 0, 1), vocab=3, repetition_penalty=2.0)._edits
    penalised = edits.edited(logits)
    assert penalised.tolist() == [-4, -2, 3]
    assert (logits == np.float32([-2, -1, 3])).all()


@pytest.mark.parametrize("penalty", [0.3, 0.9, 1.1, 1.3, 2.0, 50.0])
def test_b108_repetition_penalty_equals_transformers_over_prompt_and_output(penalty: float) -> None:
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    rng = np.random.default_rng(8)
    for seed in range(20):
        logits = random_logits(seed)
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 30)).tolist())
        one = sampler(prompt, repetition_penalty=penalty, seed=seed)
        seen = [*prompt, *(one.sample(logits).token_id for _ in range(10))]
        expected = reference(torch.tensor([seen]), torch.from_numpy(logits)[None])[0].numpy()
        np.testing.assert_allclose(one._edits.edited(logits), expected, rtol=RELATIVE_TOLERANCES["penalty", "float32"])
    divided = np.where(np.isin(np.arange(VOCAB), seen), logits / penalty, logits)
    assert not np.allclose(divided, expected)  # dividing whatever the sign is the fault this row is about


def test_presence_and_frequency_penalty_count_generated_ids_only() -> None:
    logits = np.zeros(5, np.float32)
    one = sampler((0, 0, 1), vocab=5, presence_penalty=0.5, frequency_penalty=0.25)
    for id_ in (1, 3, 3, 3):
        one._edits.add_generated(id_)
    assert one._edits.edited(logits).tolist() == [0, -0.75, 0, -1.25, 0]


def test_a_frequency_penalty_makes_greedy_ids_take_turns() -> None:
    assert drawn(np.float32([1, 1.5, 0]), 4, temperature=0, frequency_penalty=1.0) == [1, 0, 1, 0]


@pytest.mark.parametrize("penalty", [1e-3, 1e3])
def test_a_penalty_beyond_float32_stays_a_distribution(penalty: float) -> None:
    for logits in (np.float32([3e38, -3e38, 2, -1]), np.float32([-3e38, -3e38, -2e38, -3e38])):
        penalised = np.where(logits > 0, logits.astype(float) / penalty, logits.astype(float) * penalty)
        assert drawn(logits, 3, (0, 1, 2, 3), repetition_penalty=penalty) == [int(penalised.argmax())] * 3


# Temperature


def test_b113_temperature_zero_is_greedy_whatever_the_filters() -> None:
    for seed in range(20):
        logits = random_logits(seed)
        for params in ({}, {"top_k": 3}, {"top_p": 0.1}, {"top_k": 5, "top_p": 0.0, "min_p": 0.9}):
            assert drawn(logits, 2, temperature=0, **params) == [int(logits.argmax())] * 2
    assert drawn(np.float32([1, 3, 3]), 1, temperature=0) == [1]
    assert drawn(np.float32([2, 3]), 2, (1,), temperature=0, repetition_penalty=3.0) == [0, 1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-8, 1e-3])
def test_b113_tiny_temperatures_are_stable_and_greedy(temperature: float) -> None:
    for scale in (1e-3, 1.0, 1e30):
        logits = random_logits(4, scale=scale)
        if temperature < 1e-3 or scale >= 1:
            assert drawn(logits, 5, temperature=temperature, top_p=0.9, top_k=7) == [int(logits.argmax())] * 5
            assert (
                drawn(logits, 5, (1, 2), temperature=temperature, repetition_penalty=1.0) == [int(logits.argmax())] * 5
            )


def test_b113_a_high_temperature_flattens() -> None:
    logits = np.float32([0, 5, 10, 15])
    assert set(drawn(logits, 400, temperature=100.0, seed=0)) == {0, 1, 2, 3}
    assert set(drawn(logits, 400, temperature=0.2, seed=0)) == {3}


# Random streams


def test_b114_a_seed_gives_the_same_ids_alone_beside_others_and_after_other_calls() -> None:
    rows = [random_logits(seed) for seed in range(12)]
    alone = [sampler(seed=42).sample(row).token_id for row in rows[:1]]
    one = sampler(seed=42)
    alone = [one.sample(row).token_id for row in rows]
    neighbours = [sampler(), sampler(seed=7), sampler(seed=42)]
    interleaved = []
    for row in rows:
        neighbours[0].sample(row)
        neighbours[1].sample(row[::-1].copy())
        interleaved.append(neighbours[2].sample(row).token_id)
    assert interleaved == alone
    drawn(rows[0], 10)
    again = sampler(seed=42)
    assert [again.sample(row).token_id for row in rows] == alone
    other = sampler(seed=43)
    assert [other.sample(row).token_id for row in rows] != alone


def test_b114_a_seed_gives_the_same_ids_in_another_thread_and_another_process() -> None:
    expected = drawn(random_logits(1), 20, seed=42)
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(drawn(random_logits(1), 20, seed=42))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
    assert fresh_processes("seed=42", 1) == [expected]


def test_b114_sampling_leaves_numpys_and_torchs_global_streams_alone() -> None:
    np.random.seed(5)
    torch.manual_seed(5)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    drawn(random_logits(1), 20, seed=42, top_p=0.9)
    drawn(random_logits(1), 20)
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def fresh_processes(params: str, count: int) -> list[list[int]]:
    code = (
        "import numpy as np; from graphport.runtime.sampling import Sampler, SamplingParams; "
        "x = np.random.default_rng(1).normal(0, 3, 37).astype(np.float32); "
        f"s = Sampler(SamplingParams({params}), (), vocab_size=37); "
        "print([s.sample(x).token_id for _ in range(20)])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(count)
    ]
    return [[int(part) for part in run.stdout.strip(" []\n").split(",")] for run in runs]


def test_b115_without_a_seed_processes_differ_and_seeds_differ() -> None:
    assert len({tuple(ids) for ids in fresh_processes("", 3)}) > 1
    flat = np.zeros(VOCAB, np.float32)
    assert len({tuple(drawn(flat, 20)) for _ in range(5)}) > 1
    assert len({tuple(drawn(flat, 20, seed=seed)) for seed in range(1, 6)}) == 5


def chi_square(ids: list[int], probabilities: np.ndarray) -> float:
    """The statistic over ids with expectation >= 5, in standard deviations above its mean."""
    expected = probabilities * len(ids)
    counts = np.bincount(ids, minlength=len(expected))
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    kept = wanted > 1e-9
    freedom = kept.sum() - 1
    return float((((observed - wanted) ** 2 / np.maximum(wanted, 1e-9))[kept].sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 12},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
    ],
)
def test_b115_sampled_frequencies_match_softmax(params: dict[str, Any]) -> None:
    logits = random_logits(9, scale=1.5)
    ids = drawn(logits, 20000, seed=115, **params)
    scaled = scale_by_temperature(logits, params.get("temperature", 1.0))
    kept, weights = surviving(
        scaled, top_k=params.get("top_k", 0), top_p=params.get("top_p", 1.0), min_p=params.get("min_p", 0.0)
    )
    probabilities = np.zeros(VOCAB)
    probabilities[kept] = weights / weights.sum(dtype=np.float64)
    if not params:
        tolerance = RELATIVE_TOLERANCES["probability", "float32"]
        np.testing.assert_allclose(probabilities, np.exp(log_softmax(logits)), rtol=tolerance)
    assert chi_square(ids, probabilities) < 5
    assert chi_square(ids, np.roll(probabilities, 1) + 1e-4) > 5
    assert chi_square(ids, np.exp(log_softmax(logits / np.float32(1.1)))) > 5


@pytest.mark.parametrize("weights", [[1, 0, 0], [0, 1, 0, 2, 0], [0.1] * 10, [1e-30, 1e-38]])
def test_a_draw_never_takes_weight_zero_not_even_at_the_ends_of_the_unit_interval(weights: list[float]) -> None:
    weights = np.float32(weights)
    for uniform in (0.0, 0.3, 0.999999, 1 - 2**-53):
        place = draw(weights, uniform)
        assert weights[place] > 0
        shares = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
        assert shares[place] >= uniform - 1e-12


# Numbers that are no logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({3: np.nan, 9: np.nan}, r"2 of 37 logits are not finite \(2 NaN, 0 \+inf, 0 -inf\)"),
        ({3: np.inf}, r"1 of 37 logits are not finite \(0 NaN, 1 \+inf, 0 -inf\)"),
        ({3: -np.inf, 36: np.nan}, r"2 of 37 logits are not finite \(1 NaN, 0 \+inf, 1 -inf\)"),
        (dict.fromkeys(range(VOCAB), -np.inf), r"37 of 37 logits are not finite"),
        (dict.fromkeys(range(VOCAB), np.nan), r"37 of 37 logits.*export it with --precision fp32"),
    ],
)
def test_b50_non_finite_logits_raise_instead_of_giving_id_0(
    temperature: float, places: dict[int, float], message: str
) -> None:
    logits = random_logits(2)
    for place, value in places.items():
        logits[place] = value
    one = sampler(temperature=temperature, repetition_penalty=1.5)
    with pytest.raises(NonFiniteLogitsError, match=message):
        one.sample(logits)
    assert issubclass(NonFiniteLogitsError, FloatingPointError)


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 3, "repetition_penalty": 2.0}, {"top_p": 0.5}])
def test_b50_minus_infinity_alone_means_never(params: dict[str, Any]) -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[4, 8]] = 1.0, 2.0
    ids = drawn(logits, 100, (1, 4), seed=0, logprobs=5, **params)
    assert set(ids) <= {4, 8}
    sample = sampler(logprobs=5).sample(logits)
    assert [id_ for id_, _ in sample.top_logprobs] == [8, 4]


# Log probabilities


def test_logprobs_are_those_of_the_raw_distribution_whatever_the_filters() -> None:
    logits = random_logits(3)
    expected = log_softmax(logits)
    params = {"temperature": 0.5, "top_k": 4, "repetition_penalty": 1.7, "logprobs": 5}
    sample = sampler((1, 2), seed=1, **params).sample(logits)
    assert_parity(sample.logprob, expected[sample.token_id], "log probability")
    order = np.argsort(-expected, kind="stable")[:5]
    assert [id_ for id_, _ in sample.top_logprobs] == order.tolist()
    assert_parity([value for _, value in sample.top_logprobs], expected[order], "log probability")
    assert sampler(seed=1).sample(logits).top_logprobs == ()
    assert sampler(seed=1, logprobs=0).sample(logits).top_logprobs == ()


def test_top_logprobs_put_the_lower_id_first_among_equals() -> None:
    sample = sampler(vocab=4, logprobs=2, temperature=0).sample(np.float32([0, 1, 1, 1]))
    assert [id_ for id_, _ in sample.top_logprobs] == [1, 2]


def test_the_logits_given_are_never_changed() -> None:
    logits = random_logits(1)
    logits.flags.writeable = False
    drawn(logits, 3, (1, 2), repetition_penalty=2.0, presence_penalty=1.0, top_k=4, top_p=0.5, min_p=0.1, logprobs=3)

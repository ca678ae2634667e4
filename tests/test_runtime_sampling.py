"""Sampling: filters and penalties against transformers and whole sorts, random streams, refused parameters."""

import dataclasses
import itertools
import math
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from parity import RELATIVE_TOLERANCES, assert_parity
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphport.runtime.logit_filters import highest, nucleus, scale_by_temperature, surviving
from graphport.runtime.sampling import NonFiniteLogitsError, Sampler, SamplingParams, draw

VOCAB = 37


def random_logits(seed: int, size: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def sampler(prompt: tuple[int, ...] = (), vocab: int = VOCAB, **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), prompt, vocab_size=vocab)


def drawn(logits: np.ndarray, count: int, prompt: tuple[int, ...] = (), **params: object) -> list[int]:
    one = sampler(prompt, vocab=len(logits), **params)
    return [one.sample(logits).token_id for _ in range(count)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).double().log_softmax(0).numpy()


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


# Penalties


def test_b108_repetition_penalty_multiplies_negative_logits() -> None:
    logits = np.float32([-2, -1, 3])
    history = sampler((0, 0, 0, 1), vocab=3, repetition_penalty=2.0)._history
    penalised = history.penalise(logits, SamplingParams(repetition_penalty=2.0))
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
        np.testing.assert_allclose(
            one._history.penalise(logits, one._params), expected, rtol=RELATIVE_TOLERANCES["penalty", "float32"]
        )
    divided = np.where(np.isin(np.arange(VOCAB), seen), logits / penalty, logits)
    assert not np.allclose(divided, expected)  # dividing whatever the sign is the fault this row is about


def test_presence_and_frequency_penalty_count_generated_ids_only() -> None:
    logits = np.zeros(5, np.float32)
    one = sampler((0, 0, 1), vocab=5, presence_penalty=0.5, frequency_penalty=0.25)
    for id_ in (1, 3, 3, 3):
        one._history.add_generated(id_)
    assert one._history.penalise(logits, one._params).tolist() == [0, -0.75, 0, -1.25, 0]


def test_a_frequency_penalty_makes_greedy_ids_take_turns() -> None:
    assert drawn(np.float32([1, 1.5, 0]), 4, temperature=0, frequency_penalty=1.0) == [1, 0, 1, 0]


@pytest.mark.parametrize("penalty", [1e-3, 1e3])
def test_a_penalty_beyond_float32_stays_a_distribution(penalty: float) -> None:
    for logits in (np.float32([3e38, -3e38, 2, -1]), np.float32([-3e38, -3e38, -2e38, -3e38])):
        penalised = np.where(logits > 0, logits.astype(float) / penalty, logits.astype(float) * penalty)
        assert drawn(logits, 3, (0, 1, 2, 3), repetition_penalty=penalty) == [int(penalised.argmax())] * 3


# Filters


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


# What is refused


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"temperature": -1}, ValueError, r"temperature=-1\.0 must be 0 \(greedy\) or a finite positive"),
        ({"temperature": math.nan}, ValueError, "temperature=nan must be"),
        ({"temperature": math.inf}, ValueError, "temperature=inf must be"),
        ({"temperature": True}, TypeError, "temperature=True must be .*not bool"),
        ({"temperature": "1"}, TypeError, "temperature='1' must be .*not str"),
        ({"top_p": -0.1}, ValueError, r"top_p=-0\.1 must be a number from 0"),
        ({"top_p": 1.1}, ValueError, r"top_p=1\.1 must be"),
        ({"top_p": math.nan}, ValueError, "top_p=nan must be"),
        ({"top_p": None}, TypeError, "top_p=None must be"),
        ({"min_p": 2}, ValueError, r"min_p=2\.0 must be"),
        ({"top_k": -1}, ValueError, r"top_k=-1 must be 0 or None \(off\)"),
        ({"top_k": 1.5}, TypeError, r"top_k=1\.5 must be .*not float"),
        ({"top_k": False}, TypeError, "top_k=False must be .*not bool"),
        ({"repetition_penalty": 0}, ValueError, r"repetition_penalty=0\.0 must be a number from 0\.001 to 1000"),
        ({"repetition_penalty": -1}, ValueError, r"repetition_penalty=-1\.0 must be"),
        ({"presence_penalty": 2.5}, ValueError, r"presence_penalty=2\.5 must be a number from -2 to 2"),
        ({"frequency_penalty": math.nan}, ValueError, "frequency_penalty=nan must be"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens=-1 must be None"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens=True must be .*not bool"),
        ({"seed": -1}, ValueError, "seed=-1 must be None or an integer from 0"),
        ({"seed": 2**63}, ValueError, "seed=9223372036854775808 must be"),
        ({"seed": 1.0}, TypeError, r"seed=1\.0 must be"),
        ({"logprobs": -1}, ValueError, "logprobs=-1 must be"),
        ({"stop": ""}, ValueError, r"stop='' holds an empty string"),
        ({"stop": ("a", "")}, ValueError, "holds an empty string"),
        ({"stop": ("a", 1)}, TypeError, "must be a string or a sequence of strings"),
        ({"stop": None}, TypeError, "stop=None must be"),
        ({"stop_token_ids": (1, -1)}, ValueError, r"stop_token_ids\[1\]=-1 must be a token id"),
        ({"stop_token_ids": 5}, TypeError, "stop_token_ids=5 must be a sequence"),
        ({"stop_token_ids": "ab"}, TypeError, "stop_token_ids='ab' must be a sequence"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos=1 must be True or False"),
        ({"n": 2}, ValueError, "n=2 is not built yet"),
        ({"n": 0}, ValueError, "n=0 must be 1"),
        ({"prompt_logprobs": 1}, ValueError, "prompt_logprobs=1 is not built yet"),
        ({"logit_bias": {1: 2.0}}, ValueError, "logit_bias=.* is not built yet"),
        ({"bad_words": ("x",)}, ValueError, "bad_words=.* is not built yet"),
        ({"json_schema": {}}, ValueError, "json_schema=.* is not built yet"),
        ({"regex": "a"}, ValueError, "regex='a' is not built yet"),
        ({"grammar": "a"}, ValueError, "grammar='a' is not built yet"),
        ({"top_q": 1}, TypeError, "unexpected keyword argument 'top_q'"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(
    params: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**params)


def test_parameters_are_normalised_and_frozen() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[np.int64(3)], top_k=None, temperature=0, seed=np.int32(4))
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3,)
    assert params.top_k == 0
    assert isinstance(params.temperature, float)
    assert type(params.seed) is int
    assert params.is_greedy
    assert SamplingParams(stop=["a", "b"], max_new_tokens=0).stop == ("a", "b")
    assert dataclasses.replace(params, temperature=0.5).stop == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


@pytest.mark.parametrize(
    ("params", "prompt", "message"),
    [
        ({}, (1, VOCAB), "prompt_ids holds 37, outside the vocabulary: ids are 0 to 36"),
        ({}, (-1,), "prompt_ids holds -1"),
        ({"stop_token_ids": (99,)}, (), "stop_token_ids holds 99"),
        ({"logprobs": 38}, (), "logprobs=38 must be at most the vocabulary's size, 37"),
    ],
)
def test_what_depends_on_the_vocabulary_is_checked_where_they_meet(
    params: dict[str, Any], prompt: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(prompt, **params)


@pytest.mark.parametrize(
    "logits", [np.zeros((1, VOCAB), np.float32), np.zeros(36, np.float32), np.zeros(VOCAB), np.zeros(VOCAB, np.float16)]
)
def test_logits_of_another_shape_or_dtype_are_refused(logits: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"a sampler needs one row, float32 \[37\]"):
        sampler().sample(logits)

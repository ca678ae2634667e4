"""logit_bias, bad_words, prompt_logprobs: what each does to a request, and what it leaves alone."""

from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_bundles import TinyBundle, reference_logits, tiny_weights, write_tiny_bundle
from tiny_logits import random_logits, sampler
from tiny_requests import greedy, num_steps, random_ids, seeded

from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.sampling import NonFiniteLogitsError, Sampler

TOLERANCE = TOLERANCES["tiny bundle", "float32"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("fields") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


def log_probabilities(bundle: TinyBundle, ids: list[int]) -> np.ndarray:
    logits = reference_logits(bundle.weights, ids)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_a_bias_is_added_to_the_raw_logits_before_penalties() -> None:
    logits = np.float32([1, -1, 2, 0])
    one = sampler((1,), vocab=4, logit_bias={0: 3.5, 1: -2}, repetition_penalty=2.0)
    assert one._edits is not None
    assert one._edits.edited(logits).tolist() == [4.5, -6, 2, 0]
    assert logits.tolist() == [1, -1, 2, 0]


def test_a_bias_forbids_or_forces_a_token_and_logprobs_stay_the_models(model: LanguageModel) -> None:
    (free,) = model.generate([[5]], greedy(1, logprobs=3))
    assert free.logprobs is not None
    best = free.token_ids[0]
    second, logprob = free.logprobs[0].top_logprobs[1]
    (output,) = model.generate([[5]], greedy(1, logit_bias={best: -100}, logprobs=3))
    assert output.token_ids == (second,)
    assert output.logprobs is not None
    assert output.logprobs[0].logprob == logprob
    assert output.logprobs[0].top_logprobs == free.logprobs[0].top_logprobs
    for seed in range(5):
        (output,) = model.generate([[5]], SamplingParams(max_new_tokens=4, seed=seed, logit_bias={17: 100}))
        assert output.token_ids == (17,) * 4


def test_bad_ids_are_never_completed_and_their_parts_stay_allowed() -> None:
    params = SamplingParams(temperature=0)
    logits = np.float32([0, 1, 2, 3])
    assert Sampler(params, (), vocab_size=4, bad_ids=[(3,)]).sample(logits).token_id == 2
    one = Sampler(params, (3,), vocab_size=4, bad_ids=[(3, 3), (2, 3, 3)])
    assert [one.sample(logits).token_id for _ in range(4)] == [3, 2, 3, 2]  # the prompt's own 3 does not count
    assert Sampler(params, (), vocab_size=4).sample(logits).token_id == 3


def test_a_step_looks_up_bad_ids_and_does_not_go_through_them() -> None:
    words = [(first, second, 3) for first in range(60) for second in range(60)]
    one = Sampler(SamplingParams(temperature=0), (), vocab_size=60, bad_ids=words)
    assert one._edits is not None
    assert {length: len(begun) for length, begun in one._edits._bad_ends.items()} == {2: 3600}
    logits = np.arange(60, dtype=np.float32)[::-1].copy()
    logits[3] = 99
    assert [one.sample(logits).token_id for _ in range(6)] == [3, 3, 0, 0, 0, 0]


def test_bad_words_do_not_stand_at_the_beginning_or_after_a_space(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    for word in ("the", " cat", "s"):
        bare, spaced = (model.tokenizer.encode(text) for text in (word.strip(), " " + word.strip()))
        for ids in (bare, spaced):
            bias = dict.fromkeys(ids, 90.0)  # nothing else would come
            (free,) = model.generate([[5]], greedy(12, logit_bias=bias))
            assert word.strip() in free.text or len(ids) > 1
            (output,) = model.generate([[5]], greedy(12, logit_bias=bias, bad_words=[word]))
            for begin in range(len(output.token_ids) - len(bare) + 1):
                assert list(output.token_ids[begin : begin + len(bare)]) != bare
    (plain,) = model.generate([[5]], seeded(1))
    params = SamplingParams(max_new_tokens=10, temperature=1.5, seed=1, bad_words=["\u4f60\u597d\u4f60"])
    assert model.generate([[5]], params)[0].token_ids == plain.token_ids


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_are_those_of_each_id_after_those_before_it(bundle: TinyBundle, chunk: int, count: int) -> None:
    ids = random_ids(30)
    expected = log_probabilities(bundle, ids)
    with load(bundle.folder, threads=1, prefill_chunk=chunk, prefix_cache_bytes=1 << 20) as lm:
        plain = lm.generate([ids], greedy(5))[0]
        (output,) = lm.generate([ids], greedy(5, prompt_logprobs=count))
    assert output.token_ids == plain.token_ids
    assert plain.prompt_logprobs is None
    assert output.prompt_logprobs is not None
    first, *samples = output.prompt_logprobs
    assert first is None
    assert [sample.token_id for sample in samples if sample is not None] == ids[1:]
    for position, sample in enumerate(samples):
        assert sample is not None
        assert abs(sample.logprob - expected[position, ids[position + 1]]) < TOLERANCE
        assert [id_ for id_, _ in sample.top_logprobs] == np.argsort(-expected[position])[:count].tolist()
    shifted = [abs(s.logprob - expected[i + 1, ids[i + 1]]) for i, s in enumerate(samples) if s is not None]
    assert max(shifted) > 1000 * TOLERANCE  # one position off would be noticed


def test_prompt_logprobs_of_a_request_that_generates_nothing(model: LanguageModel, bundle: TinyBundle) -> None:
    for ids in (random_ids(9), random_ids(128), [3]):
        before = num_steps(model)
        (output,) = model.generate([ids], greedy(0, prompt_logprobs=0))
        assert num_steps(model) - before == -(-len(ids) // 64)
        assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(ids)
        expected = log_probabilities(bundle, ids)
        for position, sample in enumerate(output.prompt_logprobs[1:]):
            assert sample is not None
            assert abs(sample.logprob - expected[position, ids[position + 1]]) < TOLERANCE
        (event,) = model.stream(ids, greedy(0, prompt_logprobs=0))
        assert (event.token_id, event.finish_reason) == (None, "length")


def test_of_several_samples_the_first_has_the_prompts_logprobs(model: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=3, n=2, seed=1, prompt_logprobs=1)
    (output,) = model.generate([[1, 2, 3]], params)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 3
    assert output.others[0].prompt_logprobs is None
    assert len(output.others[0].token_ids) == 3


def test_rows_beside_a_scored_prompt_are_not_changed(model: LanguageModel) -> None:
    prompts = [random_ids(20, seed) for seed in range(3)]
    params = [greedy(9), greedy(5, prompt_logprobs=2), seeded(4, 9)]
    alone = [model.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    for got, expected in zip(model.generate(prompts, params), alone, strict=True):
        assert got.token_ids == expected.token_ids


def test_prompt_positions_that_are_not_finite_are_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    weights = tiny_weights()
    weights["embedding"][7] = np.inf
    with load(write_tiny_bundle(tmp_path_factory.mktemp("inf"), weights=weights).folder, threads=1) as lm:
        with pytest.raises(NonFiniteLogitsError, match="not finite"):
            lm.generate([[1, 7, 2]], greedy(0, prompt_logprobs=0))
        assert lm.num_active == 0


def test_every_field_of_the_parameters_has_an_effect_or_is_refused(model: LanguageModel) -> None:
    """Set one at a time, against a request that leaves it out (DESIGN: none is silently ignored)."""
    base: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.2, "seed": 5}
    plain = model.generate([[5, 6]], SamplingParams(**base))[0]
    tokenizer = model.tokenizer
    assert tokenizer is not None
    words = [(id_, tokenizer.decode([id_])) for id_ in plain.token_ids if id_ < tokenizer.vocab_size]
    word = next(text for id_, text in words if tokenizer.encode(text) == [id_] and text.strip() == text)
    changes: dict[str, Any] = {
        "n": 2,
        "max_new_tokens": 3,
        "temperature": 0.3,
        "top_k": 1,
        "top_p": 0.01,
        "min_p": 0.9,
        "repetition_penalty": 5.0,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "seed": 6,
        "stop": plain.text[3:5],
        "stop_token_ids": [plain.token_ids[4]],
        "logprobs": 2,
        "prompt_logprobs": 2,
        "logit_bias": {plain.token_ids[0]: -100},
        "bad_words": [word],
        "json_schema": {"type": "boolean"},
        "regex": "[ab]{3}",
        "grammar": 'start: "yes"',
    }
    # ignore_eos needs an end id: test_b105_...; a search draws nothing: test_runtime_*_beams.py, ..._search.py
    elsewhere = {"ignore_eos", "num_beams", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"}
    fields = set(SamplingParams.__dataclass_fields__) - elsewhere
    assert set(changes) == fields
    penalised = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    for name, value in changes.items():
        # penalties need a text that repeats itself
        common = {**base, "logit_bias": {9: 8.0, 10: 7.0}} if name in penalised else base
        (before,) = model.generate([[5, 6]], SamplingParams(**common))
        (after,) = model.generate([[5, 6]], SamplingParams(**{**common, name: value}))
        assert after != before, name


def test_equal_logits_with_a_bias_draw_as_the_shifted_logits_do() -> None:
    logits = random_logits(1)
    shifted = logits.copy()
    shifted[3] += np.float32(2)
    for seed in range(50):
        biased = sampler(seed=seed, logit_bias={3: 2.0}).sample(logits).token_id
        assert biased == sampler(seed=seed).sample(shifted).token_id

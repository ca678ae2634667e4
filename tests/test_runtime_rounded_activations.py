"""Bundles that round activations to 8 bits: results to the last bit, whatever else runs and whatever is cached.

There a difference in the last bit of an activation becomes another rounding of it, so "nearly the same" is not enough.
"""

from pathlib import Path

import pytest
from tiny_models import tiny_configs, tiny_model, token_ids

from graphport.export.model_export import export
from graphport.runtime import GenerationOutput, LanguageModel, SamplingParams, load

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
OPTIONS = {"max_batch": 3, "prefill_chunk": 16, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rounded") / "bundle"
    return export(tiny_model(tiny_configs()["grouped_query"]), out, precision="int8", verify=False).path


@pytest.fixture(scope="module")
def alone(folder: Path) -> LanguageModel:
    return load(folder, **OPTIONS)  # type: ignore[arg-type]


def prompts(lm: LanguageModel) -> list[list[int]]:
    longest = lm.max_length - 10
    return [token_ids(min(length, longest), seed=length).tolist() for length in (5, 37, 3, 50, 20)]


def one_by_one(lm: LanguageModel) -> list[GenerationOutput]:
    return [lm.generate([prompt], GREEDY)[0] for prompt in prompts(lm)]


def test_results_depend_on_cuts_here(folder: Path, alone: LanguageModel) -> None:
    """Cut elsewhere, logprobs differ: the tests below can fail."""
    with load(folder, max_batch=1, prefill_chunk=7, threads=1) as other:
        assert one_by_one(other) != one_by_one(alone)


def test_neighbours_do_not_change_a_bit(folder: Path, alone: LanguageModel) -> None:
    with load(folder, **OPTIONS) as lm:  # type: ignore[arg-type]
        assert lm.generate(prompts(lm), GREEDY) == one_by_one(alone)


def test_b102_what_is_cached_does_not_change_a_bit(folder: Path, alone: LanguageModel) -> None:
    expected = one_by_one(alone)
    with load(folder, **OPTIONS, prefix_cache_bytes=1 << 22) as lm:  # type: ignore[arg-type]
        for _ in range(2):
            assert one_by_one(lm) == expected
        found = lm.statistics.prefix_cache
        assert found is not None
        assert found.num_reused_tokens > 80
        for prompt, output in zip(prompts(lm), expected, strict=True):
            state = lm.prefill(prompt)
            assert lm.generate([prompt], GREEDY, state=state) == [output]
            turn = [*prompt, *output.token_ids][: lm.max_length - 10]
            (first,) = lm.generate([turn], GREEDY, state=state)
            assert [first] == alone.generate([turn], GREEDY)

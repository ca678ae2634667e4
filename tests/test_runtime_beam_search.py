"""Beam search by itself and over a decoder's cache: rows that become copies of others give what recomputing gives."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from evaluation_texts import log_softmax
from parity import RELATIVE_TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, reference_logits, write_tiny_bundle
from tiny_requests import random_ids

from graphport.runtime import SamplingParams, load
from graphport.runtime.beam_search import BeamSearch, Hypothesis


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("beams") / "bundle", tokenizer=True)


def recomputed(bundle: TinyBundle, prompt: list[int], search: BeamSearch, count: int) -> list[Hypothesis]:
    """The same search over whole texts, without a cache."""
    while not search.is_over:
        rows = [reference_logits(bundle.weights, np.array([*prompt, *beam]))[-1] for beam in search.beams]
        search.advance(log_softmax(np.stack(rows)).astype(np.float32))
    return search.best(count)


@pytest.mark.parametrize("seed", range(4))
def test_a_decoder_searches_as_if_every_text_were_recomputed(bundle: TinyBundle, seed: int) -> None:
    prompt = random_ids(3 + 2 * seed, seed)
    params = SamplingParams(max_new_tokens=9, temperature=0.0, num_beams=4, n=3, ignore_eos=True)
    with load(bundle.folder, max_batch=5, threads=1, prefill_chunk=2, prefix_cache_bytes=1 << 20) as lm:
        (output,) = lm.generate([prompt], params)
        assert lm.generate([prompt], params)[0].samples == output.samples  # rows of the first are not used again
    search = BeamSearch(
        num_beams=4, length_penalty=1.0, early_stopping=False, end_ids=frozenset(), num_end_ids=0, most=9
    )
    expected = recomputed(bundle, prompt, search, 3)
    assert [sample.token_ids for sample in output.samples] == [text.token_ids for text in expected]
    tolerance = RELATIVE_TOLERANCES["search score", "float32"]
    scores = [text.score for text in expected]
    assert [sample.score for sample in output.samples] == pytest.approx(scores, rel=tolerance)
    assert {sample.finish_reason for sample in output.samples} == {"length"}


def test_enough_beams_find_the_likeliest_of_all_texts() -> None:
    rng = np.random.default_rng(5)
    table = log_softmax(rng.normal(size=(4, 4, 4)).astype(np.float32) * 2)  # of the id after two others
    search = BeamSearch(
        num_beams=2, length_penalty=0.0, early_stopping="never", end_ids=frozenset(), num_end_ids=0, most=2
    )
    while not search.is_over:
        search.advance(np.stack([table[(0, 0, *beam)[-2:]] for beam in search.beams]).astype(np.float32))
    best = max(itertools.product(range(4), repeat=2), key=lambda ids: table[0, 0, ids[0]] + table[0, ids[0], ids[1]])
    narrow = int(table[0, 0].argmax())
    assert search.best(1)[0].token_ids in {best, (narrow, int(table[0, narrow].argmax()))}
    assert search.best(1)[0].score == pytest.approx(
        float(table[0, 0, search.best(1)[0].token_ids[0]] + table[(0, *search.best(1)[0].token_ids)]), rel=1e-6
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 2}, "num_beams=2 needs temperature=0, got 1.0"),
        ({"num_beams": 0}, "num_beams=0 must be an integer from 1"),
        ({"num_beams": 2, "temperature": 0, "n": 3}, "n=3 texts of num_beams=2 beams"),
        ({"num_beams": 2, "temperature": 0, "stop": "x"}, "stop cannot be heeded by beam search"),
        ({"num_beams": 2, "temperature": 0, "logprobs": 1}, "logprobs cannot be heeded by beam search"),
        ({"num_beams": 2, "temperature": 0, "regex": "a"}, "regex cannot be heeded by beam search"),
        ({"length_penalty": 2.0}, "length_penalty and early_stopping are of beam search"),
        ({"num_beams": 2, "temperature": 0, "early_stopping": "soon"}, "early_stopping='soon' must be True, False or"),
        ({"num_beams": 2, "temperature": 0, "length_penalty": 1e9}, "length_penalty=1000000000.0 must be a number"),
    ],
)
def test_parameters_that_exclude_beam_search_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]  # wrong on purpose


def test_more_beams_than_a_vocabulary_has_candidates_for_are_refused(bundle: TinyBundle, tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=2, temperature=0.0, num_beams=VOCAB)
    with (
        load(bundle.folder, max_batch=VOCAB, threads=1) as lm,
        pytest.raises(ValueError, match="is more than a vocabulary"),
    ):
        lm.generate([[1, 2]], params)

"""Diverse beam search: equal to the paper's own recursion over whole texts, and one group's is beam search."""

import numpy as np
import pytest
from evaluation_texts import log_softmax
from parity import RELATIVE_TOLERANCES
from tiny_bundles import TinyBundle, reference_logits, write_tiny_bundle
from tiny_requests import random_ids

from graphport.runtime import SamplingParams, load
from graphport.runtime.beam_search import BeamSearch
from graphport.runtime.diverse_beams import DiverseBeamSearch

STEPS, BEAMS, GROUPS = 6, 6, 3
Texts = list[tuple[tuple[int, ...], float]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("diverse") / "bundle", tokenizer=True)


def _by_the_paper(bundle: TinyBundle, prompt: list[int], penalty: float) -> Texts:
    """Equation 5 with Hamming diversity, group after group, step after step; scores are divided by the length."""
    groups: list[Texts] = [[((), 0.0)] for _ in range(GROUPS)]
    width = BEAMS // GROUPS
    for _ in range(STEPS):
        before: list[int] = []
        for number, group in enumerate(groups):
            candidates: Texts = []
            for ids, score in group:
                shares = log_softmax(reference_logits(bundle.weights, np.array([*prompt, *ids]))[-1])
                candidates += [
                    ((*ids, token), score + float(share) - penalty * before.count(token))
                    for token, share in enumerate(shares)
                ]
            groups[number] = sorted(candidates, key=lambda candidate: -candidate[1])[:width]
            before += [ids[-1] for ids, _ in groups[number]]
    every = [(ids, score / STEPS) for group in groups for ids, score in group]
    return sorted(every, key=lambda text: -text[1])


@pytest.mark.parametrize("penalty", [0.3, 2.5])
def test_groups_search_as_the_paper_says(bundle: TinyBundle, penalty: float) -> None:
    prompt = random_ids(5, 3)
    params = SamplingParams(
        max_new_tokens=STEPS,
        temperature=0.0,
        num_beams=BEAMS,
        num_beam_groups=GROUPS,
        diversity_penalty=penalty,
        early_stopping="never",
        n=BEAMS,
        ignore_eos=True,
    )
    with load(bundle.folder, max_batch=BEAMS, threads=1) as lm:
        (output,) = lm.generate([prompt], params)
        plain = SamplingParams(max_new_tokens=STEPS, temperature=0.0, num_beams=BEAMS, n=BEAMS, ignore_eos=True)
        (undiverse,) = lm.generate([prompt], plain)
    wanted = _by_the_paper(bundle, prompt, penalty)
    assert [sample.token_ids for sample in output.samples] == [ids for ids, _ in wanted]
    tolerance = RELATIVE_TOLERANCES["search score", "float32"]
    assert [sample.score for sample in output.samples] == pytest.approx([score for _, score in wanted], rel=tolerance)
    assert [s.token_ids for s in output.samples] != [s.token_ids for s in undiverse.samples]


def test_a_group_that_is_over_waits_for_the_others() -> None:
    """The first group ends with its first id, after which nothing better can come; the second goes on alone."""
    searches = [
        BeamSearch(num_beams=1, length_penalty=0.0, early_stopping=True, end_ids=frozenset({0}), num_end_ids=1, most=4)
        for _ in range(2)
    ]
    search = DiverseBeamSearch(searches, penalty=5.0)
    rows = log_softmax(np.array([[4.0, 1.0, 0.0], [0.0, 1.0, 4.0]], np.float32)).astype(np.float32)
    assert search.advance(rows) == [0, 1]
    assert searches[0].is_over
    assert not search.is_over
    first = searches[0].beams
    while not search.is_over:
        assert search.advance(rows)[0] == 0
    assert search.beams[0] == first[0]
    assert [text.token_ids for text in search.best(2)] == [(0,), (2, 2, 2, 2)]


def test_one_group_is_beam_search() -> None:
    rng = np.random.default_rng(2)
    settings = {"num_beams": 3, "length_penalty": 0.7, "end_ids": frozenset({0}), "num_end_ids": 1, "most": 7}
    plain, group = (BeamSearch(early_stopping=False, **settings) for _ in range(2))  # type: ignore[arg-type]  # by name
    search = DiverseBeamSearch([group], penalty=9.0)
    while not plain.is_over:
        rows = log_softmax(rng.normal(size=(3, 20)) * 2).astype(np.float32)
        assert search.advance(rows) == plain.advance(rows)
        assert search.beams == plain.beams
    assert search.is_over
    assert search.best(3) == plain.best(3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0},
            "num_beams=4 must be a multiple of num_beam_g",
        ),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups=2 and diversity_penalty=0.0 belong together"),
        ({"num_beams": 4, "diversity_penalty": 1.0}, "num_beam_groups=1 and diversity_penalty=1.0 belong together"),
        ({"num_beam_groups": 2, "diversity_penalty": 1.0}, "num_beams=1 must be a multiple of num_beam_groups=2"),
        ({"num_beams": 4, "num_beam_groups": 0}, "num_beam_groups=0 must be an integer from 1"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": -1.0},
            "diversity_penalty=-1.0 must be a number fr",
        ),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1e9},
            "diversity_penalty=1000000000.0 must be a nu",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]  # by name


def test_a_search_is_checked_against_places(bundle: TinyBundle) -> None:
    params = SamplingParams(temperature=0.0, num_beams=4, num_beam_groups=2, diversity_penalty=1.0)
    with load(bundle.folder, max_batch=3) as lm, pytest.raises(ValueError, match="asks for num_beams=4, which need as"):
        lm.generate([[1, 2]], params)

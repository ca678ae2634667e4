"""Drafts that the model checks: no result changes, whatever is drafted, and fewer steps where the drafts are right."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES, top2_gap
from tiny_bundles import VOCAB, TinyBundle, reference_logits, tiny_weights, write_tiny_bundle
from tiny_requests import greedy, num_steps, random_ids, seeded

from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.cache_growth import FIRST_CAPACITY
from graphport.runtime.engine import Engine
from graphport.runtime.sequence import Sequence
from graphport.runtime.speculation import FIRST_DRAFT, LONGEST_DRAFT, LONGEST_PAUSE, PromptLookup, Speculation

TOLERANCE = TOLERANCES["tiny bundle", "float32"]


class Scripted:
    """Drafts what a test wants: given the ids so far and how many."""

    def __init__(self, guess: Any) -> None:
        self.guess = guess
        self.drafts: list[list[int]] = []

    def propose(self, ids: Any, most: int) -> list[int]:
        self.drafts.append(list(self.guess(list(ids), most)))
        return self.drafts[-1]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("speculation") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def plain(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


@pytest.fixture(scope="module")
def lookup(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1, prompt_lookup=True)


@pytest.fixture(scope="module")
def same_draft(bundle: TinyBundle) -> LanguageModel:
    """A model that drafts for itself, and so is always right when greedy."""
    return load(bundle.folder, threads=1, draft=bundle.folder)


@pytest.fixture(scope="module")
def other_draft(bundle: TinyBundle, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    other = write_tiny_bundle(tmp_path_factory.mktemp("other") / "bundle", weights=tiny_weights(5), tokenizer=True)
    return load(bundle.folder, threads=1, draft=other.folder)


def engine_of(model: LanguageModel) -> Engine:
    assert model._engine is not None
    return model._engine


def run_scripted(model: LanguageModel, ids: list[int], params: SamplingParams, guess: Any) -> tuple[Sequence, Scripted]:
    """One request on the engine of `model`, with drafts from a script."""
    drafter = Scripted(guess)
    new = params.max_new_tokens or 0
    sequence = Sequence(
        tuple(ids),
        params,
        vocab_size=VOCAB,
        max_total=min(128, len(ids) + new),
        end_ids=frozenset(params.stop_token_ids),
        speculation=Speculation(drafter, longest=LONGEST_DRAFT),
    )
    engine = engine_of(model)
    engine.submit(sequence)
    while not sequence.is_finished:
        engine.step()
    assert sequence.error is None
    return sequence, drafter


def test_the_choices_of_these_tests_are_clear(plain: LanguageModel, bundle: TinyBundle) -> None:
    """Steps of several tokens may differ in the last bits: greedy ids are compared where they are no ties."""
    gaps = []
    for seed in range(8):
        ids = random_ids(10, seed)
        (output,) = plain.generate([ids], greedy(30))
        whole = [*ids, *output.token_ids]
        gaps.append(top2_gap(reference_logits(bundle.weights, whole)[len(ids) - 1 : -1]).min())
    assert min(gaps) > TOLERANCE


@pytest.mark.parametrize("kind", ["lookup", "same_draft", "other_draft"])
def test_greedy_and_seeded_ids_are_those_without_drafts(
    kind: str, plain: LanguageModel, request: pytest.FixtureRequest
) -> None:
    model: LanguageModel = request.getfixturevalue(kind)
    for seed in range(8):
        ids = random_ids(10, seed)
        for params in (
            greedy(30),
            seeded(seed, 30),
            SamplingParams(max_new_tokens=30, temperature=0.8, top_k=3, seed=seed, repetition_penalty=1.2, logprobs=2),
        ):
            (got,), (expected,) = model.generate([ids], params), plain.generate([ids], params)
            assert got.token_ids == expected.token_ids
            assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
            for one, other in zip(got.logprobs or (), expected.logprobs or (), strict=True):
                assert abs(one.logprob - other.logprob) < TOLERANCE
    assert engine_of(model).num_drafted > 0


def test_right_drafts_save_steps(same_draft: LanguageModel) -> None:
    before, engine = num_steps(same_draft), engine_of(same_draft)
    drafted, right = engine.num_drafted, engine.num_drafted_right
    (output,) = same_draft.generate([random_ids(10)], greedy(50))
    assert len(output.token_ids) == 50
    assert engine.num_drafted - drafted == engine.num_drafted_right - right
    # the prompt gives one token, drafts of 4, 8 and 16 give one more each, the rest is as long as what is missing
    assert num_steps(same_draft) - before == 1 + 3 + 1 + 1


def test_a_text_that_repeats_itself_is_drafted_from_itself(lookup: LanguageModel, plain: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=60, temperature=0.0, repetition_penalty=0.2)  # it repeats what it can
    ids = random_ids(6) * 4
    (expected,) = plain.generate([ids], params)
    before = num_steps(lookup)
    assert lookup.generate([ids], params)[0].token_ids == expected.token_ids
    assert num_steps(lookup) - before < 30


@pytest.mark.parametrize("wrong_at", [0, 1, 2, None])
@pytest.mark.parametrize("end", ["length", "end id"])
def test_any_draft_gives_the_same_ids_and_leaves_the_cache_as_single_steps_do(
    plain: LanguageModel, wrong_at: int | None, end: str
) -> None:
    ids = random_ids(9)
    (free,) = plain.generate([ids], greedy(25))
    params = greedy(25) if end == "length" else greedy(25, stop_token_ids=[free.token_ids[17]])
    (expected,) = plain.generate([ids], params, keep_state=True)
    whole = [*ids, *free.token_ids]

    def guess(so_far: list[int], most: int) -> list[int]:
        draft = whole[len(so_far) : len(so_far) + most]
        if wrong_at is not None and wrong_at < len(draft):
            draft[wrong_at] = (draft[wrong_at] + 1) % VOCAB
        return draft

    sequence, drafter = run_scripted(plain, ids, params, guess)
    assert tuple(sequence.token_ids) == expected.token_ids
    assert sequence.finish_reason == expected.finish_reason
    assert any(drafter.drafts)
    assert engine_of(plain).cache.num_active == 0


def test_rows_of_drafts_that_were_wrong_do_not_stay_in_the_state(bundle: TinyBundle) -> None:
    with load(bundle.folder, threads=1, prompt_lookup=True, prefix_cache_bytes=1 << 20) as lm:
        ids = [*([1, 2, 3] * 10), *random_ids(30)]
        (output,) = lm.generate([ids], seeded(3, 40), keep_state=True)
        assert output.state is not None
        assert output.state.token_ids == (*ids, *output.token_ids[:-1])
        prompt = [*ids, *output.token_ids, 5]
        (warm,) = lm.generate([prompt], greedy(8))
        assert lm.statistics.prefix_cache is not None
        assert lm.statistics.prefix_cache.num_reused_tokens >= 80
        with load(bundle.folder, threads=1) as cold:
            assert warm == cold.generate([prompt], greedy(8))[0]
            assert lm.generate([prompt], greedy(8), state=output.state) == cold.generate([prompt], greedy(8))


def test_a_stop_string_within_a_draft_ends_the_text_there(plain: LanguageModel, same_draft: LanguageModel) -> None:
    for seed in range(6):
        ids = random_ids(7, seed)
        text = plain.generate([ids], greedy(30))[0].text
        params = greedy(30, stop=text[len(text) // 2 :][:2])
        expected = plain.generate([ids], params)[0]
        assert same_draft.generate([ids], params)[0] == expected
        assert "".join(event.text for event in same_draft.stream(ids, params)) == expected.text


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_no_more_is_drafted_than_may_still_come(same_draft: LanguageModel, plain: LanguageModel, new: int) -> None:
    for ids in (random_ids(10), random_ids(128 - new)):
        assert same_draft.generate([ids], greedy(new)) == plain.generate([ids], greedy(new))


def test_where_a_draft_has_no_room_single_tokens_go_on(bundle: TinyBundle, plain: LanguageModel) -> None:
    ids, params = random_ids(FIRST_CAPACITY - 4), greedy(40)
    (free,) = plain.generate([ids], params)
    params = dataclasses.replace(params, stop_token_ids=(free.token_ids[3],))
    (expected,) = plain.generate([ids], params)
    with load(bundle.folder, threads=1, draft=bundle.folder) as lm:
        events = lm.stream(ids, params)
        given = [next(events).token_id]
        engine_of(lm).cache._free = lambda: 0
        given += [event.token_id for event in events]
        assert engine_of(lm).num_drafted == 0
    assert tuple(token for token in given if token is not None) == expected.token_ids


def test_rows_that_decode_together_are_not_drafted(same_draft: LanguageModel, plain: LanguageModel) -> None:
    prompts = [random_ids(5, seed) for seed in range(3)]
    before = engine_of(same_draft).num_drafted
    assert same_draft.generate(prompts, greedy(12)) == plain.generate(prompts, greedy(12))
    assert engine_of(same_draft).num_drafted == before
    params = [greedy(4), greedy(30), greedy(6)]  # the second one stays alone and catches up
    assert same_draft.generate(prompts, params) == plain.generate(prompts, params)
    assert engine_of(same_draft).num_drafted > before


def test_a_request_may_do_without_drafts(same_draft: LanguageModel, plain: LanguageModel) -> None:
    before = engine_of(same_draft).num_drafted
    assert same_draft.generate([[7]], greedy(12), speculate=False) == plain.generate([[7]], greedy(12))
    assert engine_of(same_draft).num_drafted == before
    with pytest.raises(TypeError, match="speculate must be True or False; got 0"):
        same_draft.generate([[7]], greedy(12), speculate=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", [False, True])
def test_the_distribution_after_a_draft_is_the_models_own(
    plain: LanguageModel, bundle: TinyBundle, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of second tokens where the first was the one drafted, and of all first ones; p > 1e-4."""
    ids, temperature = random_ids(4, 3), 0.6
    first_logits = reference_logits(bundle.weights, ids)[-1]
    likely = int(first_logits.argmax())
    second_logits = reference_logits(bundle.weights, [*ids, likely])[-1]
    drafted = np.argsort(-second_logits)[:2].tolist()
    if broken:  # a draft that is taken whatever the model says

        def taken(self: Sequence, outputs: Any, draft: list[int]) -> int:
            self.accept(outputs, 0)
            self.token_ids[-1] = draft[0]
            return 0

        monkeypatch.setattr(Sequence, "accept_draft", taken)
    seconds: Counter[int] = Counter()
    for seed in range(3000):
        params = SamplingParams(max_new_tokens=3, temperature=temperature, seed=seed)
        sequence, _ = run_scripted(plain, ids, params, lambda _, most: drafted[:1][:most])
        if sequence.token_ids[0] == likely:
            seconds[sequence.token_ids[1]] += 1
    chances = np.exp((second_logits - second_logits.max()) / temperature)
    chances /= chances.sum()
    assert (_chi_square_z(seconds, chances) < 3.7) is not broken


def _chi_square_z(counts: Counter[int], chances: np.ndarray) -> float:
    """How many standard deviations chi-square lies above its mean (Wilson and Hilferty 1931); rare ids as one."""
    total = sum(counts.values())
    common = np.flatnonzero(chances * total >= 5)
    observed = np.array([counts[int(i)] for i in common] + [0], float)
    expected = np.append(chances[common], 1 - chances[common].sum()) * total
    observed[-1] = total - observed.sum()
    assert total > 500
    degrees = len(common)
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def test_a_failure_of_the_draft_model_ends_its_request_alone(
    bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> list[int]:
        raise RuntimeError("draft failed")

    with load(bundle.folder, threads=1, draft=bundle.folder) as lm:
        with monkeypatch.context() as patch:
            patch.setattr("graphport.runtime.draft_model.ModelDrafter.propose", fail)
            with pytest.raises(RuntimeError, match="draft failed"):
                lm.generate([[1, 2]], greedy(5))
        assert lm.num_active == 0
        assert len(lm.generate([[1, 2]], greedy(5))[0].token_ids) == 5


def test_draft_bundles_of_other_ids_are_refused(bundle: TinyBundle, tmp_path: Path) -> None:
    other = write_tiny_bundle(tmp_path / "other", tokenizer=True)
    path = other.folder / "tokenizer.json"
    changed = path.read_text(encoding="utf-8").replace('"<s>"', '"<t>"')
    size = len(path.read_bytes())
    path.write_text(changed, encoding="utf-8")
    assert path.stat().st_size == size
    with pytest.raises(
        ValueError, match=r"other tokens than the model \(for example '<s>'\); a draft needs the same ids"
    ):
        load(bundle.folder, threads=1, draft=other.folder)
    with pytest.raises(ValueError, match="prompt_lookup=True and a draft bundle exclude each other"):
        load(bundle.folder, threads=1, draft=other.folder, prompt_lookup=True)
    with pytest.raises(TypeError, match="prompt_lookup must be True or False; got 'yes'"):
        load(bundle.folder, threads=1, prompt_lookup="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "most", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 3, [4, 5, 1]),
        ([1, 2, 3, 4, 5, 1, 2, 3], 9, [4, 5, 1, 2, 3, 4, 5, 1, 2]),  # beyond the end it goes on in itself
        ([1, 2, 3, 4, 9, 1, 2, 3, 7, 8, 1, 2, 3], 2, [7, 8]),  # the latest place
        ([1, 2, 3, 4], 4, []),
        ([3], 4, []),
        ([5, 5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 9, 4, 2], 4, []),  # one id is not enough
    ],
)
def test_prompt_lookup_continues_what_stood_there_before(ids: list[int], most: int, draft: list[int]) -> None:
    assert PromptLookup().propose(ids, most) == draft
    growing = PromptLookup()
    for end in range(1, len(ids)):
        growing.propose(ids[:end], most)
    assert growing.propose(ids, most) == draft


def test_drafts_grow_while_they_are_right_and_pause_when_they_are_not() -> None:
    speculation = Speculation(Scripted(lambda _, most: [0] * most), longest=LONGEST_DRAFT)
    ids = [0] * 10

    def step(share: float) -> int:
        draft = speculation.propose(ids, 100)
        right = int(share * len(draft))
        if draft:
            speculation.note(num_drafted=len(draft), num_right=right, num_ids=len(ids) + right + 1)
        ids.extend([0] * (right + 1))
        return len(draft)

    assert [step(1) for _ in range(4)] == [FIRST_DRAFT, 8, 16, LONGEST_DRAFT]
    assert [step(0.5), step(1), step(1)] == [16, 8, 16]
    lengths = [step(0) for _ in range(200)]
    places = np.flatnonzero(lengths)
    assert np.diff(places).tolist()[:6] == [2, 4, 8, 16, 32, 33]
    assert np.diff(places).max() == LONGEST_PAUSE + 1
    assert lengths[places[-1]] == 1

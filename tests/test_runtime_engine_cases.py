"""Rows of reported faults that end, filter and write text, through the engine: each in a batch with busy neighbours."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bundles import VOCAB, TinyBundle, reference_logits, write_manifest, write_tiny_bundle
from tiny_requests import greedy, random_ids, seeded

from graphport.model_def.signature import CHAT_TEMPLATE_FILE
from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.chat_template_error import ChatTemplateError
from graphport.runtime.generation_output import GenerationOutput

PROMPT = [5, 60, 200, 17]
NEIGHBOURS = (random_ids(21), random_ids(8))
NUM_DRAWN = 240


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("cases") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1, max_batch=8, prefix_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def probabilities(bundle: TinyBundle) -> np.ndarray:
    """Of the id after PROMPT, at temperature 1, float64 [VOCAB]."""
    logits = reference_logits(bundle.weights, PROMPT)[-1]
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def beside(model: LanguageModel, *params: SamplingParams) -> list[GenerationOutput]:
    """What PROMPT gives with each of `params`, all at once and between others."""
    others = [seeded(3, 40), greedy(40)]
    outputs = model.generate([NEIGHBOURS[0], *[PROMPT] * len(params), NEIGHBOURS[1]], [others[0], *params, others[1]])
    assert len(outputs[0].token_ids) == len(outputs[-1].token_ids) == 40
    return outputs[1:-1]


def first_ids(model: LanguageModel, **options: Any) -> list[int]:
    """First ids of NUM_DRAWN requests, one a seed."""
    params = [SamplingParams(max_new_tokens=1, seed=seed, **options) for seed in range(NUM_DRAWN)]
    return [output.token_ids[0] for output in beside(model, *params)]


def test_b106_stops_cut_each_row_of_a_batch_at_its_own_place(model: LanguageModel) -> None:
    cases: tuple[tuple[str, str | list[str], str], ...] = (
        ('ab","c', '",', "ab"),
        ("a😀b", "😀", "a"),
        ("aaab", ["aab", "ab"], "a"),
        ("abc", "a", ""),
        ("abcab", "abx", "abcab"),
    )
    params = [SamplingParams(temperature=0.0, regex=text, stop=stop) for text, stop, _ in cases]
    found = [(output.text, output.finish_reason) for output in beside(model, *params)]
    assert found == [(expected, "stop") for *_, expected in cases]


def test_b108_a_repetition_penalty_counts_each_id_of_its_own_row_once(bundle: TinyBundle, model: LanguageModel) -> None:
    penalty, ids = 1.9, list(PROMPT)
    for _ in range(12):
        logits = reference_logits(bundle.weights, ids)[-1]
        seen = sorted(set(ids))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        ids.append(int(logits.argmax()))
    penalised, plain = beside(model, greedy(12, repetition_penalty=penalty), greedy(12))
    assert list(penalised.token_ids) == ids[len(PROMPT) :]
    assert penalised.token_ids != plain.token_ids


def test_b110_b111_b113_filters_at_their_bounds_in_a_batch(model: LanguageModel) -> None:
    best = [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-8}, {"min_p": 1.0}, {"temperature": 1e-8}, {"temperature": 0.0}]
    everything = [{}, {"top_k": 0}, {"top_k": None}, {"top_k": VOCAB}, {"top_k": VOCAB + 5}, {"top_p": 1.0}]
    base: dict[str, Any] = {"temperature": 1.5, "seed": 4, "max_new_tokens": 12}
    outputs = [output.token_ids for output in beside(model, *(SamplingParams(**base | each) for each in best))]
    assert set(outputs) == {model.generate([PROMPT], greedy(12))[0].token_ids}
    outputs = [output.token_ids for output in beside(model, *(SamplingParams(**base | each) for each in everything))]
    assert set(outputs) == {model.generate([PROMPT], SamplingParams(**base))[0].token_ids}


def test_b112_both_filters_apply_in_a_batch(model: LanguageModel, probabilities: np.ndarray) -> None:
    order = np.argsort(-probabilities, kind="stable")
    by_k = set(order[:6].tolist())
    by_p = set(order[: int(np.searchsorted(probabilities[order].cumsum(), 0.5)) + 1].tolist())
    kept = probabilities[order[:6]] / probabilities[order[:6]].sum()
    by_both = set(order[: int(np.searchsorted(kept.cumsum(), 0.5)) + 1].tolist())
    assert len({len(by_k), len(by_p), len(by_both)}) == 3
    for options, support in (({"top_k": 6}, by_k), ({"top_p": 0.5}, by_p), ({"top_k": 6, "top_p": 0.5}, by_both)):
        assert set(first_ids(model, **options)) <= support, options
    assert set(first_ids(model, top_k=6, top_p=0.5)) == by_both


def test_b115_rows_of_a_batch_draw_from_the_models_own_distribution(
    model: LanguageModel, probabilities: np.ndarray
) -> None:
    counts = np.bincount(first_ids(model), minlength=VOCAB)
    likely = np.flatnonzero(probabilities * NUM_DRAWN >= 5)
    assert len(likely) >= 4

    def distance(wanted: np.ndarray) -> float:
        """Chi-square of the likely ids, in standard deviations above its mean."""
        expected = wanted[likely] * NUM_DRAWN
        statistic = float(((counts[likely] - expected) ** 2 / expected).sum())
        return (statistic - len(likely)) / (2 * len(likely)) ** 0.5

    assert distance(probabilities) < 5
    assert distance(np.full(VOCAB, 1 / VOCAB)) > 5
    unseeded = {beside(model, SamplingParams(max_new_tokens=12, temperature=1.5))[0].token_ids for _ in range(4)}
    assert len(unseeded) > 1


def test_b118_b120_streams_in_a_batch_join_to_the_text(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    for text in ("é👨‍👩‍👧🇫🇷한नम", " the cat  sat", "\n\n the\n"):
        neighbour = model.stream(NEIGHBOURS[0], seeded(3, 40))
        next(neighbour)
        events = list(model.stream(PROMPT, greedy(None, regex=text.replace("\n", "\\n"))))
        assert "".join(event.text for event in events) == text
        assert not any("\ufffd" in event.text for event in events)
        ids = [event.token_id for event in events if event.token_id is not None]
        assert model.tokenizer.decode(ids) == text
        assert len(list(neighbour)) == 39


def test_b121_b123_a_chat_in_a_batch_is_its_templates_ids_and_a_bad_template_fails_alone(
    model: LanguageModel, tmp_path: Path
) -> None:
    assert model.tokenizer is not None
    messages = [{"role": "user", "content": "<s>the cat {{ 7 * 7 }}"}]
    neighbour = model.stream(NEIGHBOURS[0], seeded(3, 40))
    next(neighbour)
    answer = [event.token_id for event in model.chat(messages, greedy(12))]
    (expected,) = model.generate([model.tokenizer.apply_chat_template(messages)], greedy(12))
    assert tuple(answer) == expected.token_ids
    bad = write_tiny_bundle(tmp_path / "bad", tokenizer=True).folder
    (bad / CHAT_TEMPLATE_FILE).write_text("{{ messages.__class__.__mro__ }}", encoding="utf-8")
    write_manifest(bad)
    with load(bad, threads=1) as other:
        running = other.stream(PROMPT, greedy(12))
        next(running)
        with pytest.raises(ChatTemplateError, match="the chat template failed"):
            other.chat(messages)
        assert len(list(running)) == 11
    assert len(list(neighbour)) == 39

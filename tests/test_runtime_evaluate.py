"""Figures of a text: against NumPy in double precision, of a bundle against itself and against broken ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_texts import log_softmax, random_text
from numpy.typing import NDArray
from parity import RELATIVE_TOLERANCES
from tiny_bundles import (
    VOCAB,
    TinyBundle,
    Weights,
    reference_logits,
    tiny_weights,
    write_tiny_bundle,
)

from graphport.runtime import LanguageModel, load
from graphport.runtime.evaluate import Evaluation, evaluate
from graphport.runtime.evaluation_text import EvaluationText, evaluation_text
from graphport.runtime.token_scores import score_rows

FIGURES = RELATIVE_TOLERANCES["evaluation", "float32"]
TEXT = "the cat sat on the mat, and the dog lay at the end of the story. " * 6


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("eval") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1, max_batch=1)


@pytest.fixture(scope="module")
def text(model: LanguageModel) -> EvaluationText:
    return evaluation_text(TEXT, model.tokenizer, vocab_size=VOCAB, name="text.txt")


def nudged(weights: Weights, scale: float) -> Weights:
    random = np.random.default_rng(1)
    return {
        name: (w + scale * random.standard_normal(w.shape) * w.std()).astype(np.float32) for name, w in weights.items()
    }


def by_hand(weights: Weights, text: EvaluationText, size: int, stride: int) -> NDArray[np.float64]:
    """Logits [scored, V] in float64 that predict each token after the first of all, by windows of `size` tokens."""
    ids, rows, done = text.ids.tolist(), [], 1
    for begin in range(0, len(ids), stride):
        window = ids[begin : begin + size]
        logits = reference_logits(weights, window)
        rows += [logits[token - begin - 1] for token in range(done, begin + len(window))]
        done = begin + len(window)
        if done == len(ids):
            return np.array(rows)
    raise AssertionError("the windows do not reach the end")


@pytest.mark.parametrize(("context", "stride"), [(50, 20), (50, 49), (128, 7)])
def test_figures_are_those_of_numpy_in_double_precision(
    model: LanguageModel, bundle: TinyBundle, text: EvaluationText, tmp_path: Path, context: int, stride: int
) -> None:
    other = write_tiny_bundle(tmp_path, weights=nudged(bundle.weights, 0.05))
    with load(other.folder, threads=1) as candidate:
        found = evaluate(candidate, text, reference=model, context=context, stride=stride)
    q, p = (log_softmax(by_hand(w, text, context, stride)) for w in (other.weights, bundle.weights))
    targets = text.ids[1:]
    each = np.arange(len(targets))
    kl = (np.exp(p) * (p - q)).sum(-1)
    change = np.exp(q[each, targets]) - np.exp(p[each, targets])
    agrees = p.argmax(-1) == q.argmax(-1)
    expected = {
        "negative_log_likelihood": -p[each, targets].mean(),
        "perplexity": np.exp(-p[each, targets].mean()),
        "kl_mean": kl.mean(),
        "kl_median": np.median(kl),
        "kl_p99": np.quantile(kl, 0.99),
        "kl_max": kl.max(),
        "top1_agreement": agrees.mean(),
        "widest_flip": (p.max(-1) - p[each, q.argmax(-1)]).max(),
        "probability_difference_mean": change.mean(),
        "probability_difference_rms": np.sqrt((change**2).mean()),
    }
    assert found.fidelity is not None
    for name, value in expected.items():
        assert getattr(found.fidelity, name) == pytest.approx(value, rel=FIGURES), name
    assert 0.5 < found.fidelity.top1_agreement < 1
    nll = -q[each, targets]
    assert found.negative_log_likelihood == pytest.approx(nll.mean(), rel=FIGURES)
    assert found.perplexity == pytest.approx(np.exp(nll.mean()), rel=FIGURES)
    first = TEXT[: text.spans[0][1]]  # type: ignore[index]
    num_bytes = len(TEXT.encode()) - len(first.encode())
    assert found.bits_per_byte == pytest.approx(nll.sum() / np.log(2) / num_bytes, rel=FIGURES)
    assert (found.tokens, found.scored, found.not_scored) == (len(text.ids), len(targets), 1)
    assert [place.index - 1 for place in found.worst] == np.argsort(-kl, kind="stable")[:5].tolist()
    worst = found.worst[0]
    assert worst.kl == pytest.approx(kl.max(), rel=FIGURES)
    assert worst.negative_log_likelihood == pytest.approx(nll[worst.index - 1], rel=FIGURES)
    assert worst.excerpt == text.excerpt(worst.index)


def test_the_largest_difference_of_logits_is_over_the_whole_vocabulary() -> None:
    random = np.random.default_rng(0)
    reference = random.standard_normal((40, VOCAB)).astype(np.float32)
    logits = reference.copy()
    logits[17, 99] += 3
    scores = score_rows(logits, np.zeros(40, np.int64), reference)
    assert scores["max_abs"].argmax() == 17
    assert scores["max_abs"].max() == pytest.approx(3, rel=FIGURES)
    assert np.count_nonzero(scores["max_abs"]) == np.count_nonzero(scores["kl"]) == 1


def test_without_a_reference_the_worst_are_the_least_likely(model: LanguageModel, bundle: TinyBundle) -> None:
    text = random_text(100)
    found = evaluate(model, text)
    rows = log_softmax(reference_logits(bundle.weights, text.ids.tolist()))
    nll = -rows[np.arange(99), text.ids[1:]]
    assert [place.index - 1 for place in found.worst] == np.argsort(-nll, kind="stable")[:5].tolist()
    assert [place.token_id for place in found.worst] == [text.ids[place.index] for place in found.worst]
    assert {(place.kl, place.reference_negative_log_likelihood, place.excerpt) for place in found.worst} == {
        (None,) * 3
    }
    assert found.fidelity is None


def test_a_bundle_against_itself_differs_by_exactly_nothing(
    model: LanguageModel, bundle: TinyBundle, text: Any
) -> None:
    with load(bundle.folder, threads=1) as other:
        found = evaluate(model, text, reference=other, context=40, stride=13)
    fidelity = found.fidelity
    assert fidelity is not None
    assert (fidelity.kl_mean, fidelity.kl_max, fidelity.max_abs_logit_difference) == (0.0, 0.0, 0.0)
    assert (fidelity.top1_agreement, fidelity.widest_flip) == (1.0, 0.0)
    assert (fidelity.probability_difference_mean, fidelity.probability_difference_rms) == (0.0, 0.0)
    assert fidelity.perplexity == found.perplexity
    assert found.worst == ()


def _flipped(weights: Weights, name: str) -> Weights:
    return {**weights, name: np.ascontiguousarray(-weights[name])}


def _swapped(weights: Weights, name: str) -> Weights:
    changed = weights[name].copy()
    changed[:, :16], changed[:, 16:32] = weights[name][:, 16:32], weights[name][:, :16]
    return {**weights, name: changed}


def _zeroed(weights: Weights, name: str) -> Weights:
    return {**weights, name: np.zeros_like(weights[name])}


@pytest.mark.parametrize(
    ("change", "name"), [(_flipped, "1.output"), (_swapped, "0.qkv"), (_zeroed, "1.down"), (_flipped, "head")]
)
def test_a_broken_bundle_is_seen(
    bundle: TinyBundle, model: LanguageModel, text: Any, tmp_path: Path, change: Callable[..., Weights], name: str
) -> None:
    sound = write_tiny_bundle(tmp_path / "sound", weights=nudged(bundle.weights, 1e-4))
    broken = write_tiny_bundle(tmp_path / "broken", weights=change(bundle.weights, name))
    with load(sound.folder, threads=1) as good, load(broken.folder, threads=1) as bad:
        expected = evaluate(good, text, reference=model).fidelity
        found = evaluate(bad, text, reference=model).fidelity
    assert expected is not None
    assert found is not None
    assert found.kl_mean > 1000 * expected.kl_mean
    assert found.top1_agreement < expected.top1_agreement
    assert found.widest_flip > 100 * expected.max_abs_logit_difference


def test_b15_a_flip_is_told_from_a_near_tie_by_its_width(
    model: LanguageModel, bundle: TinyBundle, tmp_path: Path
) -> None:
    near = write_tiny_bundle(tmp_path, weights=nudged(bundle.weights, 1e-3))
    with load(near.folder, threads=1) as other:
        fidelity = evaluate(other, random_text(2000), reference=model, context=64).fidelity
    assert fidelity is not None
    assert fidelity.top1_agreement < 1  # it does happen
    assert 0 < fidelity.widest_flip <= 2 * fidelity.max_abs_logit_difference


def test_figures_beyond_float64_are_null_in_json(tmp_path: Path, bundle: TinyBundle) -> None:
    weights = {**bundle.weights, "head": bundle.weights["head"] * np.float32(1e4)}
    with load(write_tiny_bundle(tmp_path, weights=weights).folder, threads=1) as sure:
        found = evaluate(sure, random_text(60))
    assert found.perplexity == np.inf
    data = found.to_dict()
    assert data["perplexity"] is None
    assert data["negative_log_likelihood"] == found.negative_log_likelihood > 709
    assert data["worst"][0]["index"] == found.worst[0].index
    assert isinstance(found, Evaluation)


def test_a_uniform_model_has_the_vocabularys_perplexity(tmp_path: Path, bundle: TinyBundle) -> None:
    weights = {**bundle.weights, "head": np.zeros_like(tiny_weights()["head"])}
    with load(write_tiny_bundle(tmp_path, weights=weights).folder, threads=1) as uniform:
        assert evaluate(uniform, random_text(60)).perplexity == pytest.approx(VOCAB, rel=1e-12)

"""Figures of a text: against NumPy in double precision, of a bundle against itself and against broken ones."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
from numpy.typing import NDArray
from parity import RELATIVE_TOLERANCES
from tiny_bundles import (
    MAX_LENGTH,
    VOCAB,
    TinyBundle,
    Weights,
    reference_logits,
    tiny_tokenizer,
    tiny_weights,
    write_manifest,
    write_tiny_bundle,
)

import graphport.runtime.engine
from graphport.runtime import LanguageModel, load
from graphport.runtime.evaluate import Evaluation, evaluate
from graphport.runtime.evaluation_text import EvaluationText, evaluation_text
from graphport.runtime.sampling import NonFiniteLogitsError
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


def ids_text(*ids: int, prefix: tuple[int, ...] = ()) -> EvaluationText:
    return EvaluationText(ids=np.array(ids, np.int64), prefix_ids=prefix)


def random_text(length: int) -> EvaluationText:
    return ids_text(*np.random.default_rng(length).integers(0, VOCAB, length).tolist())


def nudged(weights: Weights, scale: float) -> Weights:
    random = np.random.default_rng(1)
    return {
        name: (w + scale * random.standard_normal(w.shape) * w.std()).astype(np.float32) for name, w in weights.items()
    }


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    top = logits.max(-1, keepdims=True)
    normal: NDArray[np.float64] = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return normal


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


@pytest.mark.parametrize("prefix", [(), (7,), (7, 9)])
@pytest.mark.parametrize("context", [5, 16])
def test_what_a_tokenizer_puts_before_a_text_stands_before_every_window(
    model: LanguageModel, bundle: TinyBundle, prefix: tuple[int, ...], context: int
) -> None:
    ids = random_text(37).ids.tolist()
    found = evaluate(model, ids_text(*ids, prefix=prefix), context=context)
    size = context - len(prefix)
    nll = []
    for begin in range(0, len(ids), size):
        window = [*prefix, *ids[begin : begin + size]]
        rows = log_softmax(reference_logits(bundle.weights, window))
        nll += [-rows[i - 1, window[i]] for i in range(max(1, len(prefix)), len(window))]
    assert found.stride == size
    assert found.scored == len(nll)
    assert found.not_scored == (0 if prefix else -(-37 // context))
    assert found.negative_log_likelihood == pytest.approx(np.mean(nll), rel=FIGURES)


def test_a_bundle_with_bos_is_scored_as_it_serves(bundle: TinyBundle, tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path, weights=bundle.weights).folder
    tiny_tokenizers.with_bos(tiny_tokenizer()).save(str(folder / "tokenizer.json"))
    write_manifest(folder)
    with load(folder, threads=1) as lm:
        assert lm.tokenizer is not None
        text = evaluation_text("the cat", lm.tokenizer, vocab_size=VOCAB, name="t")
        ids = lm.tokenizer.encode("the cat")
        found = evaluate(lm, text)
    rows = log_softmax(reference_logits(bundle.weights, ids))
    assert found.scored == len(ids) - 1 == len(text.ids)
    nll = [-rows[i - 1, ids[i]] for i in range(1, len(ids))]
    assert found.negative_log_likelihood == pytest.approx(np.mean(nll), rel=FIGURES)


class _Counted:
    """A model whose pieces of logits are counted while they are alive."""

    def __init__(self, model: LanguageModel) -> None:
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.most_rows = self.num_rows = 0
        self._model = model

    def stream_logits(self, ids: Sequence[int], *, first_row: int = 0) -> Iterator[NDArray[np.float32]]:
        for piece in self._model.stream_logits(ids, first_row=first_row):
            self.alive[self.num_rows] = piece
            self.num_rows += len(piece)
            self.most_rows = max(self.most_rows, sum(len(piece) for piece in self.alive.values()))
            yield piece
            del piece


def test_only_pieces_of_the_logits_are_held(bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 8
    monkeypatch.setattr(graphport.runtime.engine, "_SCORING_BYTES", rows * VOCAB * 4)
    with load(bundle.folder, threads=1, prefill_chunk=64) as lm, load(bundle.folder, threads=1) as other:
        model, reference = _Counted(lm), _Counted(other)
        gc.collect()
        found = evaluate(model, random_text(400), reference=reference, context=100)
    assert model.num_rows == reference.num_rows == found.scored == 400 - 4
    assert 0 < model.most_rows <= 2 * rows
    assert 0 < reference.most_rows <= 2 * rows


def test_rows_of_context_are_not_computed_for_the_whole_vocabulary(model: LanguageModel) -> None:
    counted = _Counted(model)
    found = evaluate(counted, random_text(120), context=64, stride=8)
    assert found.windows == 8
    assert counted.num_rows == found.scored == 119


def test_progress_reaches_the_end(model: LanguageModel, text: EvaluationText) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(model, text, context=50, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (len(text.ids), len(text.ids))
    assert len(seen) > 2


def test_the_default_context_is_what_both_models_hold(bundle: TinyBundle, model: LanguageModel, text: Any) -> None:
    assert evaluate(model, text).context == MAX_LENGTH
    with load(bundle.folder, threads=1, max_length=32) as short:
        assert evaluate(model, text, reference=short).context == 32
        assert evaluate(short, text, reference=model).context == 32
        with pytest.raises(ValueError, match="context must be 1 to 32, the reference's limit; got 33"):
            evaluate(model, text, reference=short, context=33)
        with pytest.raises(ValueError, match="context must be 1 to 32, the bundle's own limit; got 33"):
            evaluate(short, text, reference=model, context=33)


@pytest.mark.parametrize(
    ("prefix", "sizes", "error", "match"),
    [
        ((), {"context": 129}, ValueError, "context must be 1 to 128, the bundle's own limit; got 129"),
        ((), {"context": 1}, ValueError, "context must be at least 2, a token and what it is predicted from; got 1"),
        ((1,), {"context": 1}, ValueError, "context must be at least 2"),
        ((1, 2), {"context": 2}, ValueError, "context must be at least 3"),
        ((), {"context": 2.5}, TypeError, "context must be a whole number"),
        ((), {"stride": 0}, ValueError, "stride must be 1 to 128, the text that a window holds; got 0"),
        ((), {"context": 16, "stride": 17}, ValueError, "stride must be 1 to 16, the text that a window holds; got 17"),
        ((1,), {"context": 16, "stride": 16}, ValueError, "holds: of 16 tokens 1 stand before every window; got 16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    model: LanguageModel, prefix: tuple[int, ...], sizes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        evaluate(model, ids_text(1, 2, 3, prefix=prefix), **sizes)


def test_models_with_other_vocabularies_are_refused(model: LanguageModel, text: EvaluationText) -> None:
    other = _Counted(model)
    other.vocab_size = VOCAB + 1
    with pytest.raises(ValueError, match=f"the reference has a vocabulary of {VOCAB + 1}, the bundle one of {VOCAB}"):
        evaluate(model, text, reference=other)


def test_logits_that_are_not_finite_end_the_evaluation(tmp_path: Path, bundle: TinyBundle) -> None:
    weights = {**bundle.weights, "embedding": bundle.weights["embedding"].copy()}
    weights["embedding"][7] = np.inf
    with load(write_tiny_bundle(tmp_path, weights=weights).folder, threads=1) as bad:
        with pytest.raises(NonFiniteLogitsError, match=r"the logits at position \d are not finite"):
            evaluate(bad, ids_text(1, 7, 3))
        assert evaluate(bad, ids_text(1, 8, 3)).scored == 2
        assert bad.num_active == 0


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

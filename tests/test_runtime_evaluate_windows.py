"""What of a text is run and held: prefixes, pieces of logits, sizes that do not fit."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
from evaluation_texts import ids_text, log_softmax, random_text
from numpy.typing import NDArray
from parity import RELATIVE_TOLERANCES
from tiny_bundles import (
    MAX_LENGTH,
    VOCAB,
    TinyBundle,
    reference_logits,
    tiny_tokenizer,
    write_manifest,
    write_tiny_bundle,
)

import graphport.runtime.engine
from graphport.runtime import LanguageModel, load
from graphport.runtime.evaluate import evaluate
from graphport.runtime.evaluation_text import EvaluationText, evaluation_text
from graphport.runtime.sampling import NonFiniteLogitsError

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
    monkeypatch.setattr(graphport.runtime.engine, "SCORING_BYTES", rows * VOCAB * 4)
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

"""How well a bundle predicts a text, and how far it is from a reference: the figures of `graphport eval`.

In: an open LanguageModel, a text's ids, a second model or none. Out: perplexity, KL divergence, top-1 agreement, the
worst positions. Logits come from the session that serves, window by window and piece by piece, never all at once. It
reads no files (see `evaluation_text.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.evaluation_text import EvaluationText, Excerpt
from graphport.runtime.limits import checked_count
from graphport.runtime.token_scores import TOKEN_SCORE, score_rows
from graphport.runtime.windows import Window, scoring_windows

DEFAULT_CONTEXT = 2048
NUM_WORST = 5

Logits = NDArray[np.float32]


class ScoringModel(Protocol):
    """What can be evaluated or serve as a reference: a LanguageModel, or eager PyTorch."""

    vocab_size: int
    max_length: int

    def stream_logits(self, ids: Sequence[int], *, first_row: int = 0) -> Iterator[Logits]:
        """Logits [n, vocab] of the positions from `first_row` on, in pieces."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Bundle against reference over the scored tokens.

    kl_*: KL(reference || bundle) a token, in nats. top1_agreement: share of tokens where both have the same best.
    widest_flip: the most logits by which the reference preferred its own best token where the bundle has another (0
    when it never has): small is a near-tie. probability_difference_*: of the text's own token, bundle's less
    reference's, mean and root mean square. max_abs_logit_difference: over the whole vocabulary.
    """

    negative_log_likelihood: float
    perplexity: float
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    widest_flip: float
    probability_difference_mean: float
    probability_difference_rms: float
    max_abs_logit_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One token of the text: its index and id, -log of the probability it was given (nats), what is written there."""

    index: int
    token_id: int
    negative_log_likelihood: float
    reference_negative_log_likelihood: float | None
    kl: float | None
    excerpt: Excerpt | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures of one text, means over its scored tokens.

    tokens: of the text, without what stands before every window; scored and not_scored are their parts. context and
    stride: as used, in tokens. negative_log_likelihood: nats a token; perplexity is its exponential. bits_per_byte: of
    UTF-8, None for ids without text. worst: by KL, or by likelihood without a reference; worst first.
    """

    tokens: int
    scored: int
    not_scored: int
    windows: int
    context: int
    stride: int
    negative_log_likelihood: float
    perplexity: float
    bits_per_byte: float | None
    worst: tuple[Position, ...]
    fidelity: Fidelity | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; a figure beyond float64's range is None."""
        data: dict[str, Any] = _finite(asdict(self))
        return data


def evaluate(
    model: ScoringModel,
    text: EvaluationText,
    *,
    reference: ScoringModel | None = None,
    context: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Evaluation:
    """Score `text` in windows of `context` tokens that begin every `stride` tokens (see `scoring_windows`).

    context: tokens of a window, what stands before it included; by default what both models hold, at most 2048.
    stride: by default a whole window, so that windows do not overlap. progress: called with tokens done and in all.
    Raises ValueError when the sizes do not fit the models or the vocabularies differ, NonFiniteLogitsError.
    """
    if reference is not None and reference.vocab_size != model.vocab_size:
        raise ValueError(
            f"the reference has a vocabulary of {reference.vocab_size}, the bundle one of {model.vocab_size}; logits "
            "can be compared between models of one vocabulary only"
        )
    context = _checked_context(context, model, reference)
    least = max(1, len(text.prefix_ids)) + 1
    if context < least:
        raise ValueError(f"context must be at least {least}, a token and what it is predicted from; got {context}")
    size = context - len(text.prefix_ids)
    stride = size if stride is None else _checked_stride(stride, size, context)
    windows = list(scoring_windows(len(text.ids), size=size, stride=stride, has_prefix=len(text.prefix_ids) > 0))
    scores = np.zeros(len(text.ids), TOKEN_SCORE)
    for window in windows:
        at = window.first
        for piece in _window_scores(model, reference, text, window):
            scores[at : at + len(piece)] = piece
            at += len(piece)
            progress(at, len(text.ids))
    return _summary(
        scores, text, num_windows=len(windows), context=context, stride=stride, compared=reference is not None
    )


def _checked_context(context: int | None, model: ScoringModel, reference: ScoringModel | None) -> int:
    longest = model.max_length if reference is None else min(model.max_length, reference.max_length)
    if context is None:
        return min(longest, DEFAULT_CONTEXT)
    whose = "the bundle's own" if longest == model.max_length else "the reference's"
    return checked_count("context", context, most=longest, reason=f", {whose} limit")


def _checked_stride(stride: int, size: int, context: int) -> int:
    left = "" if size == context else f": of {context} tokens {context - size} stand before every window"
    return checked_count("stride", stride, most=size, reason=f", the text that a window holds{left}")


def _window_scores(
    model: ScoringModel, reference: ScoringModel | None, text: EvaluationText, window: Window
) -> Iterator[NDArray[np.void]]:
    """Records of the tokens that `window` scores, in pieces."""
    ids = [*text.prefix_ids, *text.ids[window.begin : window.end].tolist()]
    first_row = len(text.prefix_ids) + window.first - window.begin - 1  # the row before a token predicts it
    pieces = model.stream_logits(ids[:-1], first_row=first_row)
    pairs: Iterator[tuple[Logits, Logits | None]]
    if reference is None:
        pairs = ((piece, None) for piece in pieces)
    else:
        pairs = _side_by_side(pieces, reference.stream_logits(ids[:-1], first_row=first_row))
    at = window.first
    for logits, reference_logits in pairs:
        yield score_rows(logits, text.ids[at : at + len(logits)], reference_logits)
        at += len(logits)
    assert at == window.end


def _side_by_side(first: Iterator[Logits], second: Iterator[Logits]) -> Iterator[tuple[Logits, Logits]]:
    """The same rows of two streams, in pieces as long as both have."""
    rest: Logits = np.empty((0, 0), np.float32)
    for piece in first:
        begin = 0
        while begin < len(piece):
            if not len(rest):
                rest = next(second)
            end = min(len(piece), begin + len(rest))
            yield piece[begin:end], rest[: end - begin]
            begin, rest = end, rest[end - begin :]


def _summary(
    scores: NDArray[np.void], text: EvaluationText, *, num_windows: int, context: int, stride: int, compared: bool
) -> Evaluation:
    is_scored = scores["is_scored"]
    scored = scores[is_scored]
    num_bytes = text.num_bytes(is_scored)
    nll = float(scored["nll"].mean())
    return Evaluation(
        tokens=len(scores),
        scored=len(scored),
        not_scored=len(scores) - len(scored),
        windows=num_windows,
        context=context,
        stride=stride,
        negative_log_likelihood=nll,
        perplexity=_exponential(nll),
        bits_per_byte=float(scored["nll"].sum()) / math.log(2) / num_bytes if num_bytes else None,
        worst=_worst(scores, text, compared=compared),
        fidelity=_fidelity(scored) if compared else None,
    )


def _fidelity(scored: NDArray[np.void]) -> Fidelity:
    kl, difference, flipped = scored["kl"], scored["probability_difference"], scored[~scored["agrees"]]
    nll = float(scored["reference_nll"].mean())
    return Fidelity(
        negative_log_likelihood=nll,
        perplexity=_exponential(nll),
        kl_mean=float(kl.mean()),
        kl_median=float(np.median(kl)),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        top1_agreement=float(scored["agrees"].mean()),
        widest_flip=float(flipped["lead"].max(initial=0.0)),
        probability_difference_mean=float(difference.mean()),
        probability_difference_rms=float(np.sqrt((difference**2).mean())),
        max_abs_logit_difference=float(scored["max_abs"].max()),
    )


def _worst(scores: NDArray[np.void], text: EvaluationText, *, compared: bool) -> tuple[Position, ...]:
    badness = scores["kl" if compared else "nll"]  # zero where not scored
    order = [index for index in np.argsort(-badness, kind="stable")[:NUM_WORST].tolist() if badness[index] > 0]
    return tuple(
        Position(
            index=index,
            token_id=int(text.ids[index]),
            negative_log_likelihood=float(scores["nll"][index]),
            reference_negative_log_likelihood=float(scores["reference_nll"][index]) if compared else None,
            kl=float(scores["kl"][index]) if compared else None,
            excerpt=text.excerpt(index),
        )
        for index in order
    )


def _exponential(nll: float) -> float:
    with np.errstate(over="ignore"):  # infinite, for a model whose every token is as good as impossible
        return float(np.exp(nll))


def _finite(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

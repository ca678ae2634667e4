"""What a row of logits says about the token that follows, and how far it is from a reference's row.

In: logits of two models of the same positions. Out: one record a position, computed in float64. It runs no model and
averages nothing (see `evaluate.py`). Legend: n positions, V vocabulary.
"""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

_Number = TypeVar("_Number", bound=np.floating[Any])

# One position. nll, reference_nll: -log of the probability given to the text's token, in nats. kl: the Kullback-Leibler
# divergence KL(reference || model) in nats. probability_difference: of the text's token, model's less reference's.
# max_abs: largest absolute difference of two logits. agrees: both have the same best token. lead: by how many logits
# the reference prefers its own best token to the model's.
TOKEN_SCORE = np.dtype(
    [
        ("is_scored", np.bool_),
        ("nll", np.float64),
        ("reference_nll", np.float64),
        ("kl", np.float64),
        ("probability_difference", np.float64),
        ("max_abs", np.float64),
        ("agrees", np.bool_),
        ("lead", np.float64),
    ]
)

# float64 copies of logits are made of so many bytes at a time: they stay in a processor's cache
_BLOCK_BYTES = 1 << 22


def score_rows(logits: Logits, targets: NDArray[np.int64], reference: Logits | None = None) -> NDArray[np.void]:
    """Records TOKEN_SCORE [n] of logits [n, V] that `targets` [n] follow; what needs a reference is 0 without one."""
    scores = np.zeros(len(targets), TOKEN_SCORE)
    scores["is_scored"] = True
    step = max(1, _BLOCK_BYTES // (8 * logits.shape[1]))
    for start in range(0, len(targets), step):
        rows = slice(start, start + step)
        log_probabilities = log_softmax(logits[rows])
        scores["nll"][rows] = -_chosen(log_probabilities, targets[rows])
        if reference is not None:
            _compare(scores[rows], logits[rows], log_probabilities, targets[rows], reference[rows])
    return scores


def _compare(
    scores: NDArray[np.void],
    logits: Logits,
    log_probabilities: NDArray[np.float64],
    targets: NDArray[np.int64],
    reference: Logits,
) -> None:
    """Fill in what needs the reference: KL is sum p (log p - log q) over the softmax of both rows."""
    reference_log_probabilities = log_softmax(reference)
    scores["reference_nll"] = -_chosen(reference_log_probabilities, targets)
    divergence = (np.exp(reference_log_probabilities) * (reference_log_probabilities - log_probabilities)).sum(axis=-1)
    scores["kl"] = np.maximum(divergence, 0.0)  # rounding may end below zero
    scores["probability_difference"] = np.exp(-scores["nll"]) - np.exp(-scores["reference_nll"])
    scores["max_abs"] = np.abs(reference.astype(np.float64) - logits).max(axis=-1)
    best, reference_best = logits.argmax(axis=-1), reference.argmax(axis=-1)
    scores["agrees"] = best == reference_best
    scores["lead"] = _chosen(reference, reference_best).astype(np.float64) - _chosen(reference, best)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Log-probabilities [n, V] float64 of rows of logits [n, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _chosen(rows: NDArray[_Number], columns: NDArray[np.int64]) -> NDArray[_Number]:
    """One entry [n] of each row [n, V]."""
    return rows[np.arange(len(rows)), columns]

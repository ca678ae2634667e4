"""The filters between raw logits and the distribution that an id is drawn from, each with its reference's meaning.

In: one row of logits or scores over the vocabulary. Out: a new row, or the ids that survive and their weights.
It draws nothing and keeps no state (see `sampling.py`). V: vocabulary; C: surviving candidates, at least one.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]

# Sizes of the head of the distribution tried before top_p sorts everything: sorting 49152 weights takes 4.6 ms,
# partitioning them 0.25 ms. Real distributions nearly always end inside the first.
_NUCLEUS_HEADS = (512, 4096)


def penalise_repetition(scores: NDArray[np.float64], ids: Ids, penalty: float) -> None:
    """Divide the positive and multiply the other scores of `ids` (distinct) by `penalty`, in place.

    Keskar et al. 2019 (CTRL), with the sign rule of `transformers` and vLLM.
    """
    chosen = scores[ids]
    scores[ids] = np.where(chosen > 0, chosen / penalty, chosen * penalty)


def penalise_generated(
    scores: NDArray[np.float64], ids: Ids, counts: NDArray[np.int64], *, presence: float, frequency: float
) -> None:
    """Take `presence + frequency * count` from the scores of the generated `ids` (distinct), in place.

    The formula of the OpenAI API as vLLM applies it: generated ids only, never the prompt's.
    """
    scores[ids] -= presence + frequency * counts[ids]


def scale_by_temperature(scores: NDArray[np.float32] | NDArray[np.float64], temperature: float) -> Scores:
    """(scores - max) / temperature as float32 [V]; the largest is exactly 0.

    The maximum is taken off first, so that no temperature overflows upwards; what falls below float32 becomes -inf.
    """
    with np.errstate(over="ignore"):
        shifted = scores.astype(np.float64) - np.float64(scores.max())
        return (shifted / temperature).astype(np.float32)


def surviving(scaled: Scores, *, top_k: int, top_p: float, min_p: float) -> tuple[Ids, Scores]:
    """Ids int64 [C], ascending, and weights float32 [C] (probabilities up to a factor; the largest is 1).

    `scaled` [V] has maximum 0. top_k, then top_p of what is left, then min_p. Equal scores: top_k keeps every id equal
    to the k-th (as `transformers` and vLLM do); top_p takes the lower ids first; min_p keeps all at the border.
    """
    ids = np.arange(len(scaled))
    if 0 < top_k < len(scaled):
        ids = highest(scaled, top_k)
        scaled = scaled[ids]
    return narrowed(ids, scaled, top_p=top_p, min_p=min_p)


def narrowed(ids: Ids, scaled: Scores, *, top_p: float, min_p: float) -> tuple[Ids, Scores]:
    """The part of `surviving` after top_k: of `ids`, ascending, with scores `scaled` of which the largest is 0."""
    weights: Scores = np.exp(scaled)
    if top_p < 1:
        kept = nucleus(weights, top_p)
        ids, weights = ids[kept], weights[kept]
    if min_p > 0:
        kept = np.flatnonzero(weights >= min_p)  # the largest weight is 1, so this is min_p * max
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def highest(scores: Scores, k: int) -> Ids:
    """Places of the k highest scores and of all equal to the k-th, ascending; `0 < k <= len(scores)`."""
    border = np.partition(scores, len(scores) - k)[len(scores) - k]
    return np.flatnonzero(scores >= border)


def nucleus(weights: Scores, top_p: float) -> Ids:
    """Places, ascending, of the smallest set of largest weights whose sum reaches `top_p` of all; never empty.

    Holtzman et al. 2019. Among equal weights the lower places come first. Sums are float64.
    """
    wanted = top_p * weights.sum(dtype=np.float64)
    for size in (*(head for head in _NUCLEUS_HEADS if head < len(weights)), len(weights)):
        head = highest(weights, size)
        order = head[np.argsort(-weights[head], kind="stable")]
        reached = int(np.searchsorted(np.cumsum(weights[order], dtype=np.float64), wanted)) + 1
        if reached <= len(order):
            return np.sort(order[:reached])
    return np.sort(order)  # rounding left the full sum a hair below `wanted`

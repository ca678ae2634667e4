"""The filters of `logit_filters.py` on a row's highest logits alone, where these settle what the whole row would give.

In: Candidates and what is known of the rest of the row. Out: exactly what the whole row gives, or None: then the caller
fetches the row. It draws nothing. K: candidates; V: vocabulary; C: survivors.
"""

import math

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.logit_filters import Ids, Scores, narrowed, scale_by_temperature
from graphport.runtime.logits_row import Candidates
from graphport.runtime.sampling_params import SamplingParams

# Relative error allowed for a sum that the device took in float32. ONNX Runtime's CUDA kernels add at most some dozen
# numbers in a row before they go on as a tree, so 1e-5 would do for the largest vocabularies.
_SUM_ERROR = 1e-4


def can_settle(params: SamplingParams, num_candidates: int) -> bool:
    """Whether candidates may be enough at all: a filter cuts the row off, and nothing asks for more of it."""
    if params.logprobs is not None and params.logprobs >= num_candidates:
        return False
    return params.is_greedy or 0 < (params.top_k or 0) < num_candidates or params.top_p < 1 or params.min_p > 0


def surviving_candidates(candidates: Candidates, log_total: float, params: SamplingParams) -> tuple[Ids, Scores] | None:
    """What `logit_filters.surviving` keeps of the whole row: ids int64 [C], ascending, and weights float32 [C]."""
    scaled = scale_by_temperature(candidates.logits, params.temperature)  # descending; the row's highest is the first
    top_k = params.top_k or 0
    if 0 < top_k < candidates.vocab_size:
        if top_k >= len(scaled) or scaled[-1] == scaled[top_k - 1]:
            return None  # an equal of the k-th may lie outside
        kept = np.flatnonzero(scaled >= scaled[top_k - 1])
        order = kept[np.argsort(candidates.ids[kept])]
        return narrowed(candidates.ids[order], scaled[order], top_p=params.top_p, min_p=params.min_p)
    return _largest(candidates, np.exp(scaled), _total_bounds(candidates, log_total, params.temperature), params)


def most_likely_candidates(candidates: Candidates, count: int) -> NDArray[np.int64] | None:
    """Places of the `count` highest logits of the row, highest first, the lower id first among equals."""
    logits = candidates.logits
    if count and (count >= len(logits) or logits[count - 1] == logits[-1]):
        return None
    return np.lexsort((candidates.ids, -logits))[:count]


def _largest(
    candidates: Candidates, weights: Scores, total: tuple[float, float], params: SamplingParams
) -> tuple[Ids, Scores] | None:
    """top_p, then min_p, of a row of which the sum of weights is known to lie within `total`."""
    order = np.lexsort((candidates.ids, -weights))
    sorted_weights = weights[order]
    likely = int(np.count_nonzero(sorted_weights >= params.min_p)) if params.min_p > 0 else len(weights)
    count, most = (min(likely, _nucleus_size(sorted_weights, params.top_p, bound)) for bound in total)
    is_cut_by_min_p = count == likely < len(weights)
    if count != most or count == len(weights):
        return None
    if not is_cut_by_min_p and sorted_weights[count - 1] == sorted_weights[-1]:
        return None  # equals outside may come first, or may be one more
    kept = order[:count][np.argsort(candidates.ids[order[:count]])]
    return candidates.ids[kept], weights[kept]


def _nucleus_size(sorted_weights: Scores, top_p: float, total: float) -> int:
    """How many weights reach top_p of `total`; all of them where they do not, or where top_p is off."""
    if top_p == 1:
        return len(sorted_weights)
    reached = int(np.searchsorted(np.cumsum(sorted_weights, dtype=np.float64), top_p * total)) + 1
    return min(reached, len(sorted_weights))


def _total_bounds(candidates: Candidates, log_total: float, temperature: float) -> tuple[float, float]:
    """Bounds of the sum over the row of exp((logit - highest) / temperature).

    At temperature 1 the sum is exp(log_total). Otherwise, with x = exp(logit - highest) and a = 1 / temperature: the n
    logits outside have 0 <= x <= last and a known sum r, so their x**a sum to last**(a - 1) * r on one side, and to
    n**(1 - a) * r**a (the power mean inequality) on the other. Nor can they exceed n times the last.
    """
    shifted = candidates.logits.astype(np.float64) - float(candidates.logits[0])
    with np.errstate(over="ignore"):  # what falls below every number weighs nothing
        shares, scaled = np.exp(shifted), np.exp(shifted / temperature)
    num_outside = candidates.vocab_size - len(shifted)
    total, inside, power = math.exp(log_total), float(shares.sum()), 1 / temperature
    least, most = total * (1 - _SUM_ERROR) - inside, total * (1 + _SUM_ERROR) - inside
    low, high = (
        (_by_mean(num_outside, least, power), _by_last(float(shifted[-1]), most, power))
        if power > 1
        else (_by_last(float(shifted[-1]), least, power), _by_mean(num_outside, most, power))
    )
    inside = float(scaled.sum())
    ceiling = min(num_outside * float(scaled[-1]), high)
    return (inside + min(low, ceiling)) * (1 - _SUM_ERROR), (inside + ceiling) * (1 + _SUM_ERROR)


def _by_mean(count: int, rest: float, power: float) -> float:
    """count**(1 - power) * rest**power."""
    return 0.0 if rest <= 0 else _exp((1 - power) * math.log(count) + power * math.log(rest))


def _by_last(log_last: float, rest: float, power: float) -> float:
    """last**(power - 1) * rest."""
    return 0.0 if rest <= 0 else _exp((power - 1) * log_last + math.log(rest))


def _exp(logarithm: float) -> float:
    """exp, or infinity where that or its argument is no number: bounds that say nothing."""
    return math.exp(logarithm) if logarithm < 700 else math.inf

"""One row of logits in, one token id out: greedy or drawn, with its log probability.

In: `SamplingParams`, the prompt's ids, and float32 logits [V] or a LogitsRow each step. Out: `Sample`. It does not
decide when a sequence ends (the engine does), and it never changes the logits given: they may be a reused buffer.

Order of the filters: logit bias, then repetition, presence and frequency penalty on the raw logits -> what may not come
(bad words, a grammar) -> temperature -> top_k -> top_p -> min_p -> softmax -> draw. This is the order of
`transformers`; vLLM applies min_p before top_k and top_p.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import NUM_CANDIDATES
from graphport.runtime.candidate_filters import can_settle, most_likely_candidates, surviving_candidates
from graphport.runtime.constraints import Constraint, ConstraintError
from graphport.runtime.field_error import FieldError
from graphport.runtime.forced_ids import ForcedIds
from graphport.runtime.logit_edits import new_edits
from graphport.runtime.logit_filters import highest, scale_by_temperature, surviving
from graphport.runtime.logits_row import Candidates, LogitsRow, ReducedRow
from graphport.runtime.sampling_params import SamplingParams

__all__ = ["NonFiniteLogitsError", "Sample", "Sampler", "SamplingParams"]


class NonFiniteLogitsError(FloatingPointError):
    """Logits with NaN or +inf, or with nothing but -inf: the model's numbers have overflowed, no id may be chosen."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One chosen id.

    `logprob` is the id's log probability under the model's own distribution: the log-softmax of the raw logits, before
    any penalty, temperature or filter (vLLM's default). `top_logprobs` holds the `SamplingParams.logprobs` most likely
    ids of that distribution, most likely first, the lower id first among equals, ids of probability 0 left out.
    """

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the ids of one sequence. It owns that sequence's history and stream of random numbers.

    Each drawn id takes exactly one number from the stream, so what a sequence gets depends on its seed and its logits
    alone: not on its neighbours, the order of calls, or NumPy's global state, which is not touched. Of the
    `SamplingParams.n` samples of a prompt, number 0 has the stream that it would have alone, and number `index` the
    child of the seed with that spawn key (`numpy.random.SeedSequence`).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        index: int = 0,
        bad_ids: Sequence[tuple[int, ...]] = (),
        constraint: Constraint | None = None,
        forced: ForcedIds | None = None,
    ) -> None:
        """`bad_ids`: the ids of each of `SamplingParams.bad_words`. `constraint`: what the text must follow.

        `forced`: what the model's generation config forces and forbids.
        """
        self._params = params
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(np.random.SeedSequence(params.seed, spawn_key=(index,) if index else ()))
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", np.asarray(params.stop_token_ids, dtype=np.int64))
        self._check_ids("logit_bias", np.array(list(params.logit_bias or ()), dtype=np.int64))
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > vocab_size:
                raise FieldError(f"{name}={count} must be at most the vocabulary's size, {vocab_size}", field=name)
        self._edits = new_edits(params, prompt, vocab_size=vocab_size, bad_ids=bad_ids, forced=forced)
        self._constraint = constraint

    def note_prompt(self, token_id: int) -> None:
        """Count an id among those of the prompt, which had another in its place."""
        if self._edits is not None:
            self._edits.add_prompt(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow what was chosen, because of the constraint."""
        return self._constraint is not None and self._constraint.is_complete

    def _check_ids(self, name: str, ids: NDArray[np.int64]) -> None:
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise FieldError(
                f"{name} holds {outside[0]}, outside the vocabulary: ids are 0 to {self._vocab_size - 1}", field=name
            )

    def sample(self, logits: NDArray[np.float32]) -> Sample:
        """Choose an id from float32 `logits` [V] and add it to the history.

        Raises NonFiniteLogitsError for NaN or +inf, or if every entry is -inf (single -inf entries mean "never"),
        ConstraintError when no id may come, and ValueError for another shape or dtype.
        """
        if logits.shape != (self._vocab_size,) or logits.dtype != np.float32:
            raise ValueError(
                f"logits are {logits.dtype} {list(logits.shape)}; a sampler needs one row, float32 [{self._vocab_size}]"
            )
        best = _checked_best(logits)
        token_id = self._choose(logits, best)
        self._remember(token_id)
        return _scored(logits, best, token_id, self._params.logprobs or 0)

    def sample_row(self, row: LogitsRow) -> Sample:
        """Choose an id from a row of which no more is fetched than the parameters need; the id is that of `sample`.

        Reduced rows are enough for a greedy id, for top_k, and for top_p and min_p unless the distribution is so flat
        that ids beyond the candidates could survive. Penalties, plain sampling and long logprobs take the whole row.
        """
        sample = None if row.reduced is None or self._edits is not None else self._sample_reduced(row.reduced)
        if sample is None:
            return self.sample(row.full())
        self._remember(sample.token_id)
        return sample

    def _sample_reduced(self, row: ReducedRow) -> Sample | None:
        """The choice if what the row was reduced to settles it, else None, and then no random number is taken."""
        if not math.isfinite(row.log_total):  # the whole row says what is wrong with it
            return None
        if self._constraint is not None and not (
            self._params.is_greedy and not self._params.logprobs and self._constraint.allowed()[row.greedy_id]
        ):
            return None
        if self._params.is_greedy and not self._params.logprobs:
            return Sample(token_id=row.greedy_id, logprob=-row.log_total)
        if row.candidates is None or not can_settle(self._params, NUM_CANDIDATES):
            return None
        candidates = row.candidates()
        likely = most_likely_candidates(candidates, self._params.logprobs or 0)
        token_id = None if likely is None else self._choose_reduced(candidates, row)
        if likely is None or token_id is None:
            return None
        highest_logit = float(candidates.logits[0])
        logprobs = {
            int(id_): float(logit) - highest_logit - row.log_total
            for id_, logit in zip(candidates.ids, candidates.logits, strict=True)
        }
        likely_ids = [int(candidates.ids[place]) for place in likely]
        return Sample(
            token_id=token_id,
            logprob=logprobs[token_id],
            top_logprobs=tuple((id_, logprobs[id_]) for id_ in likely_ids if logprobs[id_] != -math.inf),
        )

    def _choose_reduced(self, candidates: Candidates, row: ReducedRow) -> int | None:
        if self._params.is_greedy:
            return row.greedy_id
        survivors = surviving_candidates(candidates, row.log_total, self._params)
        if survivors is None:
            return None
        ids, weights = survivors
        return int(ids[draw(weights, float(self._random.random()))])

    def _remember(self, token_id: int) -> None:
        if self._edits is not None:
            self._edits.add_generated(token_id)
        if self._constraint is not None:
            self._constraint.accept(token_id)

    def _choose(self, logits: NDArray[np.float32], best: int) -> int:
        scores: NDArray[np.float32] | NDArray[np.float64] = logits
        if self._edits is not None:
            scores = self._edits.edited(logits)
        if self._constraint is not None:
            scores = np.where(self._constraint.allowed(), scores, -np.inf)
        if scores is not logits:
            best = int(scores.argmax())
            if scores[best] == -np.inf:
                raise ConstraintError("no token may come next: bad_words, logit_bias and the grammar leave none")
        if self._params.is_greedy:
            return best
        scaled = scale_by_temperature(scores, self._params.temperature)
        ids, weights = surviving(
            scaled, top_k=self._params.top_k or 0, top_p=self._params.top_p, min_p=self._params.min_p
        )
        return int(ids[draw(weights, float(self._random.random()))])


def require_finite(logits: NDArray[np.float32]) -> None:
    """Raise NonFiniteLogitsError for logits [V] of which no id may be chosen."""
    _checked_best(logits)


def draw(weights: NDArray[np.float32], uniform: float) -> int:
    """The place whose share of the weights holds `uniform` in [0, 1); never one of weight 0.

    Inverse transform sampling: the first place whose cumulative sum (float64) exceeds `uniform * total`.
    """
    cumulative = np.cumsum(weights.astype(np.float64))
    total = cumulative[-1]
    point = min(uniform * total, np.nextafter(total, 0.0))  # the product may round up to the total
    return int(np.searchsorted(cumulative, point, side="right"))


def scored(logits: NDArray[np.float32], token_id: int, count: int) -> Sample:
    """The Sample of an id that was not chosen but given, from its row [V]. Raises NonFiniteLogitsError."""
    return _scored(logits, _checked_best(logits), token_id, count)


def _checked_best(logits: NDArray[np.float32]) -> int:
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):  # argmax finds NaN first, then +inf, and -inf only if there is nothing else
        raise NonFiniteLogitsError(_non_finite_message(logits))
    return best


def _scored(logits: NDArray[np.float32], best: int, token_id: int, count: int) -> Sample:
    with np.errstate(over="ignore"):  # a difference beyond float32 is -inf, and its share 0
        log_total = float(logits[best]) + float(np.log(np.exp(logits - logits[best]).sum()))
    return Sample(
        token_id=token_id,
        logprob=float(logits[token_id]) - log_total,
        top_logprobs=_most_likely(logits, log_total, count),
    )


def _most_likely(logits: NDArray[np.float32], log_total: float, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    ids = highest(logits, count)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    return tuple((int(id_), float(logits[id_]) - log_total) for id_ in ids if logits[id_] != -np.inf)


def _non_finite_message(logits: NDArray[np.float32]) -> str:
    nan, plus, minus = (int(np.count_nonzero(x)) for x in (np.isnan(logits), logits == np.inf, logits == -np.inf))
    return (
        f"{nan + plus + minus} of {len(logits)} logits are not finite ({nan} NaN, {plus} +inf, {minus} -inf), so no id "
        "can be chosen: the model overflowed at this step; export it with --precision fp32 or bf16"
    )

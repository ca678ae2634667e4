"""Whether a bundle answers alike whatever surrounds a request: the checks of `graphport verify --invariance`.

In: a checked bundle, the ids of a text. Out: named checks. What is measured is a difference of log-probabilities, in
nats; where another token was chosen, half the lead that the first answer gave its own. It changes nothing on disk.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certificate import Check
from graphport.model_def.signature import Manifest
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import DeviceWish, default_threads
from graphport.runtime.generation_output import GenerationOutput
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.language_model import LanguageModel
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.session import Session
from graphport.runtime.token_scores import log_softmax

# Largest difference of a log-probability in nats. Beside each what SmolLM2-135M measures (fp32; int8).
SAME_KERNELS = 1e-4  # 0; 0: the same steps, in other places
OTHER_SHAPES = 1e-3  # 1.9e-5; -: sums in another order, because rows or tokens run together otherwise
ROUNDED = (
    1.0  # -; 0.21 (tokens one by one): the same, with activations or a cache rounded to 8 bits or less, or floats of 16
)

NUM_NEW = 16
MOST_TOKENS = 512  # of the text

_TOP = 8
_SHARES = (0.02, 0.2, 0.07, 0.4)  # of the room, for prompts that follow one another in the text

Rows = NDArray[np.float32]


def check_invariance(
    bundle: BundleFiles,
    ids: Sequence[int],
    *,
    device: DeviceWish = "auto",
    threads: int | None = None,
    observe: Callable[[str], None] = lambda _: None,
) -> tuple[Check, ...]:
    """Answer prompts cut from `ids` alone, then in other surroundings, and compare.

    Raises ValueError when the bundle has room for fewer than 16 tokens, and what opening it raises.
    """
    ids = ids[: min(MOST_TOKENS, bundle.manifest.max_length)]
    if len(ids) < 16:
        raise ValueError(f"invariance needs room for 16 tokens, got {len(ids)}; export with a larger --context")
    return _Comparison(bundle, ids, device=device, threads=threads, observe=observe).checks()


class _Comparison:
    """One bundle's prompts, how they are answered alone, and the checks that compare with that."""

    def __init__(
        self,
        bundle: BundleFiles,
        ids: Sequence[int],
        *,
        device: DeviceWish,
        threads: int | None,
        observe: Callable[[str], None],
    ) -> None:
        self._bundle = bundle
        self._ids = ids
        self._options: dict[str, Any] = {"device": device, "threads": threads}
        self._observe = observe
        self._new = min(NUM_NEW, len(ids) // 4)
        self._params = SamplingParams(max_new_tokens=self._new, temperature=0.0, ignore_eos=True, logprobs=_TOP)
        room = len(ids) - self._new
        ends = [int(share * room) for share in accumulate(_SHARES)]
        self._prompts = [list(ids[begin : max(end, begin + 2)]) for begin, end in pairwise([0, *ends])]
        self._other_shapes = OTHER_SHAPES if is_exact(bundle.manifest) else ROUNDED

    def checks(self) -> tuple[Check, ...]:
        """All checks, each opened anew so that no earlier one shows."""
        with self._open(max_batch=1) as lm:
            first = self._answers(lm, self._prompts[-1:])
        with self._open(max_batch=1) as lm:
            alone = self._answers(lm, self._prompts)
            observed = [self._after_earlier_requests(lm, alone, first)]
            threads = lm.threads
        together = {"max_batch": len(self._prompts)}
        with self._open(**together) as lm:
            rows = self._answers(lm, self._prompts)
            observed.append(self._check("batch neighbours", "each alone, then all together", alone, rows))
            reverse = self._answers(lm, self._prompts[::-1])[::-1]
            observed.append(self._check("row order", "together, in order and in reverse", rows, reverse))
            short, long = self._prompts[0], self._prompts[-1]
            padded = self._answers(lm, [long, short])[1:]
            words = f"{len(short)} tokens alone, and beside {len(long)}"
            observed.append(self._check("padding", words, alone[:1], padded))
        for size in (1, 7):
            with self._open(max_batch=1, prefill_chunk=size) as lm:
                answers = self._answers(lm, self._prompts[:3])
            observed.append(self._check(f"chunk size {size}", "prompts in one piece and in chunks", alone[:3], answers))
        length = len(self._prompts[1]) + self._new
        with self._open(max_batch=1, max_length=length) as lm:
            answers = self._answers(lm, self._prompts[1:2])
        words = f"{self._bundle.manifest.max_length} and {length}, with nothing left over"
        observed.append(self._check("max_length", words, alone[1:2], answers, same_kernels=True))
        others = [count for count in (1, 2, default_threads()) if count != threads]
        with self._open(max_batch=1, threads=others[0]) as lm:
            answers = self._answers(lm, self._prompts)
        words = f"{threads} and {others[0]} threads"
        observed.append(self._check("thread count", words, alone, answers, same_kernels=True))
        return (*observed, *self._cache_checks())

    def _after_earlier_requests(
        self, lm: LanguageModel, alone: list[GenerationOutput], first: list[GenerationOutput]
    ) -> Check:
        stream = lm.stream(self._prompts[2], self._params)
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]  # a generator: cancelled in the middle
        answers = self._answers(lm, self._prompts)
        words = "on a model just opened, and after other requests, one of them cancelled"
        wanted, found = [*alone, *first], [*answers, answers[-1]]
        return self._check("earlier requests", words, wanted, found, same_kernels=True)

    def _cache_checks(self) -> list[Check]:
        """What the engine does with its cache, step by step on one session."""
        self._observe("invariance: the cache")
        session = Session(self._bundle, **self._options)
        first, end = len(self._ids) // 2, min(len(self._ids), len(self._ids) // 2 + self._new)
        text = np.array(self._ids, np.int64)[None]

        def opened(slots: int = 1) -> KVCache:
            cache = session.new_cache(max_slots=slots, max_length=len(self._ids))
            for _ in range(slots):
                cache.claim()
            return cache

        def steps(cache: KVCache, slot: int = 0) -> Rows:
            rows = [session.step(cache, text[:, at : at + 1], first_slot=slot).copy() for at in range(first, end)]
            return np.concatenate(rows)

        plain = opened()
        session.step(plain, text[:, :first])
        wanted = steps(plain)
        plain.rewind(0, first)
        replayed = steps(plain)
        other = opened()
        session.step(other, text[:, :first])
        session.step(other, text[:, :7])
        other.rewind(0, first - 2)
        session.step(other, text[:, first - 2 : first])
        rewound = steps(other)
        roomy = opened()
        roomy.reserve(1, len(self._ids))
        session.step(roomy, text[:, :first])
        shared = opened(slots=2)
        session.step(shared, text[:, :first])
        session.step(shared, text[:, :5], first_slot=1)
        shared.copy_slot(0, 1)
        return [
            self._check_rows("replay", "back to the prompt, and the same tokens again", wanted, replayed, exact=True),
            self._check_rows("rewind", "back beyond other tokens and into the prompt", wanted, rewound, exact=False),
            self._check_rows("cache growth", "grown in steps, and whole at once", wanted, steps(roomy), exact=True),
            self._check_rows("prefix reuse", "a prefix copied from another row", wanted, steps(shared, 1), exact=True),
        ]

    @contextmanager
    def _open(self, **changes: Any) -> Iterator[LanguageModel]:  # noqa: ANN401 - options of LanguageModel
        options = {"max_length": len(self._ids), **self._options, **changes}
        with LanguageModel(self._bundle, **options) as lm:
            yield lm

    def _answers(self, lm: LanguageModel, prompts: Sequence[list[int]]) -> list[GenerationOutput]:
        return lm.generate(prompts, self._params)

    def _check(
        self,
        name: str,
        words: str,
        wanted: Sequence[GenerationOutput],
        found: Sequence[GenerationOutput],
        *,
        same_kernels: bool = False,
    ) -> Check:
        self._observe(f"invariance: {name}")
        gaps = [answer_difference(one, other) for one, other in zip(wanted, found, strict=True)]
        flips = sum(one.token_ids != other.token_ids for one, other in zip(wanted, found, strict=True))
        return Check(
            name=f"invariance: {name}",
            measured=max(gaps),
            tolerance=SAME_KERNELS if same_kernels else self._other_shapes,
            detail=f"{len(gaps)} answers of {self._new} tokens; {flips} with another token somewhere",
            inputs=words,
        )

    def _check_rows(self, name: str, words: str, wanted: Rows, found: Rows, *, exact: bool) -> Check:
        return rows_check(name, words, wanted, found, tolerance=SAME_KERNELS if exact else self._other_shapes)


def rows_check(name: str, words: str, wanted: Rows, found: Rows, *, tolerance: float) -> Check:
    """A check of logits [S, V] of the same tokens: the largest difference of a log-probability that matters."""
    gap = np.abs(log_softmax(wanted) - log_softmax(found))
    places = np.arange(len(wanted)), wanted.argmax(axis=1)
    likely = gap[log_softmax(wanted) > np.log(1e-4)]
    return Check(
        name=f"invariance: {name}",
        measured=float(likely.max()) if np.isfinite(gap).all() else float("inf"),
        tolerance=tolerance,
        detail=f"{len(wanted)} rows, ids above 1e-4; best id {float(gap[places].max()):.3g}",
        inputs=words,
    )


def answer_difference(wanted: GenerationOutput, found: GenerationOutput) -> float:
    """Largest difference of log-probabilities up to the first other token, with half the lead of the wanted there."""
    assert wanted.logprobs is not None
    assert found.logprobs is not None
    largest = 0.0
    for one, other in zip(wanted.logprobs, found.logprobs, strict=True):
        ours, theirs = dict(one.top_logprobs), dict(other.top_logprobs)
        gaps = [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
        largest = max([largest, *gaps])
        if one.token_id != other.token_id:
            unseen = min(ours.values())
            return max(largest, (one.logprob - ours.get(other.token_id, unseen)) / 2)
    return largest


def is_exact(manifest: Manifest) -> bool:
    """Whether activations and cache are float32, so that only the order of sums can matter."""
    return manifest.precision == "fp32" and manifest.cache_dtype == "float32"

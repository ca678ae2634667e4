"""Whether an encoder-decoder's bundle goes on alike whatever surrounds a source: `graphport verify --invariance`.

In: a checked bundle, what its certificate feeds. Out: named checks. What is measured is a difference of
log-probabilities of the same tokens, in nats. It changes nothing on disk.
"""

from collections.abc import Callable, Sequence

import numpy as np

from graphport.model_def.certificate import Check
from graphport.model_def.certified_inputs import SourceInputs
from graphport.model_def.seeded_sources import certified_sources
from graphport.model_def.source_runs import MOST_SLOTS, words_of
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import DeviceWish, default_threads
from graphport.runtime.invariance import OTHER_SHAPES, ROUNDED, SAME_KERNELS, Rows, is_exact, rows_check
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.session import Session

LEAST_TOKENS = 8  # of the text
_FIRST = 10  # tokens in one piece, at most
_STEPS = 16  # after them, at most


def check_source_invariance(
    bundle: BundleFiles,
    inputs: SourceInputs,
    *,
    device: DeviceWish = "auto",
    threads: int | None = None,
    observe: Callable[[str], None] = lambda _: None,
) -> tuple[Check, ...]:
    """Feed the text after each source alone, then in other surroundings, and compare.

    Raises ValueError when the certificate's text has fewer than 8 tokens, and what opening the bundle raises.
    """
    if len(inputs.ids) < LEAST_TOKENS:
        raise ValueError(
            f"invariance needs a text of {LEAST_TOKENS} tokens, got {len(inputs.ids)}; export with a larger --context"
        )
    return _Comparison(bundle, inputs, device=device, threads=threads, observe=observe).checks()


class _Comparison:
    """One bundle's sources, how the text goes on after each alone, and the checks that compare with that."""

    def __init__(
        self,
        bundle: BundleFiles,
        inputs: SourceInputs,
        *,
        device: DeviceWish,
        threads: int | None,
        observe: Callable[[str], None],
    ) -> None:
        manifest = bundle.manifest
        self._bundle = bundle
        self._sources = certified_sources(manifest.config, inputs)[:MOST_SLOTS]
        self._first = min(_FIRST, len(inputs.ids) // 2)
        self._ids = np.array(inputs.ids[: self._first + _STEPS], np.int64)
        self._vocab_size = manifest.config.vocab_size
        self._device: DeviceWish = device
        self._observe = observe
        self._other_shapes = OTHER_SHAPES if is_exact(manifest) else ROUNDED
        self._session = self._opened(threads)

    def checks(self) -> tuple[Check, ...]:
        """All checks; what is compared with is run on a session just opened."""
        every = list(range(len(self._sources)))
        short, long = every[1 % len(every)], every[0]
        self._observe("invariance: each source alone")
        alone = {index: self._rows([index])[0] for index in every}
        together = self._rows(every)
        reverse = self._rows(every[::-1])[::-1]
        beside, pair = self._rows([long, short])[1], [self._sources[long], self._sources[short]]
        wanted, whole = np.concatenate(list(alone.values())), np.concatenate(together)
        return (
            self._check("batch neighbours", "each source alone, then all together", wanted, whole),
            self._check("row order", "together, in order and in reverse", whole, np.concatenate(reverse)),
            self._check("padding", f"{words_of(pair)} together, the second also alone", alone[short], beside),
            *(
                self._check(f"chunk size {size}", "the text in one piece and in chunks", alone[long], found)
                for size, found in ((size, self._rows([long], chunk=size)[0]) for size in (1, 7))
            ),
            self._check("rewind", "back beyond other tokens", alone[long], self._rewound(long)),
            self._check(
                "another source", "a slot just opened, and one that had another", alone[short], self._replaced()
            ),
            self._check(
                "beams", "rows copied from another slot with its source", alone[long], self._copied(), exact=True
            ),
            self._check("cache growth", "grown in steps, and whole at once", alone[long], self._roomy(), exact=True),
            self._check("max_length", "with nothing left over", alone[long], self._tight(), exact=True),
            self._earlier(every, wanted),
            self._threads(every, wanted),
        )

    def _earlier(self, every: Sequence[int], wanted: Rows) -> Check:
        again = np.concatenate([self._rows([index])[0] for index in every])
        words = "on a model just opened, and after other sources"
        return self._check("earlier requests", words, wanted, again, exact=True)

    def _threads(self, every: Sequence[int], wanted: Rows) -> Check:
        here = self._session.threads
        other = next(count for count in (1, 2, default_threads()) if count != here)
        self._session = self._opened(other)
        found = np.concatenate([self._rows([index])[0] for index in every])
        return self._check("thread count", f"{here} and {other} threads", wanted, found, exact=True)

    def _opened(self, threads: int | None) -> Session:
        length = len(self._ids)
        limits = RunLimits(max_batch=MOST_SLOTS, max_length=length, prefill_chunk=length)
        return Session(self._bundle, device=self._device, limits=limits, threads=threads)

    def _cache(self, order: Sequence[int], *, max_length: int | None = None) -> KVCache:
        """A cache whose slots have the sources of these numbers."""
        most = self._bundle.manifest.max_length if max_length is None else max_length
        cache = self._session.new_cache(max_slots=MOST_SLOTS, max_length=most)
        for index in order:
            self._session.encode(cache, cache.claim(), self._sources[index])
        return cache

    def _rows(self, order: Sequence[int], *, chunk: int = _FIRST) -> list[Rows]:
        """Logits [S, V] of the steps after each of the sources, which are one batch."""
        cache = self._cache(order)
        for slot in range(len(order)):
            self._prefill(cache, slot, chunk=chunk)
        return self._steps(cache, 0, len(order))

    def _prefill(self, cache: KVCache, slot: int, *, chunk: int = _FIRST) -> None:
        for begin in range(0, self._first, chunk):
            self._session.step(cache, self._ids[None, begin : min(begin + chunk, self._first)], first_slot=slot)

    def _steps(self, cache: KVCache, slot: int, count: int) -> list[Rows]:
        steps = []
        for token in self._ids[self._first :]:
            steps.append(self._session.step(cache, np.full((count, 1), token), first_slot=slot).copy())
        return list(np.stack(steps, axis=1))

    def _rewound(self, index: int) -> Rows:
        cache = self._cache([index])
        self._prefill(cache, 0)
        self._session.step(cache, (self._ids[None, :7] + 1) % self._vocab_size)
        cache.rewind(0, self._first - 2)
        self._session.step(cache, self._ids[None, self._first - 2 : self._first])
        return self._steps(cache, 0, 1)[0]

    def _replaced(self) -> Rows:
        cache = self._cache([0])
        self._prefill(cache, 0)
        cache.rewind(0, 0)
        self._session.encode(cache, 0, self._sources[1 % len(self._sources)])
        self._prefill(cache, 0)
        return self._steps(cache, 0, 1)[0]

    def _copied(self) -> Rows:
        cache = self._cache([0, len(self._sources) - 1])
        self._prefill(cache, 0)
        self._prefill(cache, 1)
        cache.copy_slot(0, 1)
        return self._steps(cache, 1, 1)[0]

    def _roomy(self) -> Rows:
        cache = self._cache([0])
        cache.reserve(1, len(self._ids))
        self._prefill(cache, 0)
        return self._steps(cache, 0, 1)[0]

    def _tight(self) -> Rows:
        cache = self._cache([0], max_length=len(self._ids))
        self._prefill(cache, 0)
        return self._steps(cache, 0, 1)[0]

    def _check(self, name: str, words: str, wanted: Rows, found: Rows, *, exact: bool = False) -> Check:
        self._observe(f"invariance: {name}")
        return rows_check(name, words, wanted, found, tolerance=SAME_KERNELS if exact else self._other_shapes)

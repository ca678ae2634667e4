"""A smaller model that guesses the next tokens of a larger one.

In: a bundle whose token ids are those of the larger one, and ids. Out: its greedy continuation. What is right is
decided elsewhere (see `speculation.py`).
"""

from collections.abc import Sequence as Many

import numpy as np

from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import DeviceWish
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.row_reuse import shared_length
from graphport.runtime.session import Session
from graphport.runtime.tokenizer import Tokenizer

# Tokens that the draft model reads in one step of the engine while it catches up with a sequence.
_CATCH_UP = 256


class DraftModel:
    """An open draft bundle. Raises ValueError if its ids are not those of the model that it is to draft for."""

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        max_length: int,
        device: DeviceWish,
        device_id: int,
        threads: int | None,
    ) -> None:
        _check_ids(bundle, vocab_size, tokenizer)
        self.max_length = min(max_length, bundle.manifest.max_length)
        limits = RunLimits(max_batch=1, max_length=self.max_length, prefill_chunk=_CATCH_UP)
        # Captured graphs hold a cache's addresses for good, and every sequence has a cache of its own here.
        self.session = Session(
            bundle, device=device, device_id=device_id, limits=limits, threads=threads, cuda_graphs=False
        )

    def drafter(self) -> "ModelDrafter":
        """A drafter for one sequence."""
        return ModelDrafter(self)


class ModelDrafter:
    """Continues one sequence greedily on the draft model, in a cache that is freed with it."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._cache: KVCache | None = None
        self._run_ids: list[int] = []

    def propose(self, ids: Many[int], most: int) -> list[int]:
        """See Drafter. Reads at most 256 tokens a call; there is no guess until it has caught up."""
        most = min(most, self._model.max_length - len(ids))
        if most < 1:
            return []
        cache = self._rewound(ids)
        behind = list(ids[len(self._run_ids) :])
        if len(behind) > _CATCH_UP:
            self._next_id(cache, behind[:_CATCH_UP])
            return []
        draft = [self._next_id(cache, behind)]
        while len(draft) < most:
            draft.append(self._next_id(cache, draft[-1:]))
        return draft

    def _rewound(self, ids: Many[int]) -> KVCache:
        """The cache, holding what it has of the beginning of `ids`; the last id is left to run."""
        if self._cache is None:
            self._cache = self._model.session.new_cache(max_slots=1, max_length=self._model.max_length)
            self._cache.claim()
        shared = shared_length(self._run_ids, np.array(ids[:-1], np.int64))
        if not self._cache.can_rewind(0, shared):  # beyond what layers with a window keep: it catches up from 0
            shared = 0
        self._cache.rewind(0, shared)
        del self._run_ids[shared:]
        return self._cache

    def _next_id(self, cache: KVCache, ids: list[int]) -> int:
        outputs = self._model.session.run(cache, np.array([ids], np.int64))
        self._run_ids += ids
        row = outputs.row(0)
        return int(row.full().argmax()) if row.reduced is None else row.reduced.greedy_id


def _check_ids(bundle: BundleFiles, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Same ids mean the same tokens: by the sizes of the heads, and by the vocabularies where both have a tokenizer."""
    own = bundle.manifest.config.vocab_size
    if own != vocab_size:
        raise ValueError(
            f"the draft bundle {bundle.folder} has {own} token ids, the model {vocab_size}; a draft needs the same ids"
        )
    if tokenizer is not None and bundle.has_tokenizer:
        theirs = Tokenizer.load(bundle.folder).vocabulary()
        differing = tokenizer.vocabulary().items() ^ theirs.items()
        if differing:
            token = min(differing)[0]
            raise ValueError(
                f"the draft bundle {bundle.folder} has other tokens than the model (for example {token!r}); a draft "
                "needs the same ids"
            )

"""The session and cache that serve, as the decoder that a certificate's runs feed.

In: an open session. Out: logits, through the serving code alone. It compares nothing (see `played_runs.py`).
"""

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.seeded_sources import Source
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.session import Session


class ServedModel:
    """A `CachedModel` over a Session, a `SourceModel` where that has an encoder.

    Every `open_cache` makes a new cache, which grows as it would in service.
    """

    def __init__(self, session: Session, *, max_length: int) -> None:
        self._session = session
        self._max_length = max_length
        self._cache: KVCache | None = None

    def open_cache(self, num_slots: int) -> None:
        """See CachedModel."""
        self._cache = None  # the old one's memory goes before the new one's comes
        cache = self._session.new_cache(max_slots=num_slots, max_length=self._max_length)
        for _ in range(num_slots):
            cache.claim()
        self._cache = cache

    def encode(self, slot: int, source: Source) -> None:
        """See SourceModel."""
        self._session.encode(self._need_cache(), slot, source)

    def step(
        self, ids: NDArray[np.int64], rows: NDArray[np.int64] | None = None, *, first_slot: int = 0
    ) -> NDArray[np.float32]:
        """See CachedModel; a buffer that the next step overwrites."""
        return self._session.step(self._need_cache(), ids, rows, first_slot=first_slot)

    def rewind(self, slot: int, length: int) -> None:
        """See CachedModel."""
        self._need_cache().rewind(slot, length)

    def _need_cache(self) -> KVCache:
        assert self._cache is not None, "open_cache comes first"
        return self._cache

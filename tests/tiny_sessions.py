"""Sessions of tiny bundles on the CPU, and the logits of a text by their steps.

In: a bundle folder, ids. Out: sessions, logits. It checks nothing.
"""

from pathlib import Path
from typing import Any

import numpy as np

from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.session import Session


def open_session(folder: Path, **options: Any) -> Session:
    return Session(open_bundle(folder), **{"device": "cpu", "threads": 1, **options})


def all_logits(session: Session, ids: list[int], chunk: int) -> np.ndarray[Any, Any]:
    cache = session.new_cache(max_slots=1, max_length=128)
    cache.claim()
    parts = []
    for begin in range(0, len(ids), chunk):
        piece = np.array([ids[begin : begin + chunk]])
        parts.append(session.step(cache, piece, np.arange(piece.size)).copy())
    return np.concatenate(parts)

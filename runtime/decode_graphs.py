"""Which decode steps are replayed as one CUDA graph: at which batch size, and under which number.

In: batch sizes and the addresses that a graph would hold. Out: padded batch sizes and ids for ONNX Runtime's run option
`gpu_graph_id`. It captures nothing itself: ONNX Runtime 1.31 does, in the first run with a new id, which executes the
step three times (twice as it is, to warm up, then the captured graph), and then replays it in every further run.
"""

import logging
from collections.abc import Hashable

NO_GRAPH = -1  # ONNX Runtime's id for a run that is neither captured nor replayed

# ONNX Runtime 1.31 releases a CUDA graph only with its session (`release_captured_graph` does nothing on CUDA), so ids
# are never used twice and their number is bounded. A cache that grows to 2**16 tokens and 256 rows needs 135.
_MOST_GRAPHS = 256

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """Ids of captured graphs by what they are bound to: a graph replays on the very addresses of its capture."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}

    def id_for(self, key: Hashable) -> int:
        """The id of the graph whose addresses, shapes and constants are `key`; NO_GRAPH when there are too many."""
        known = self._ids.get(key)
        if known is not None:
            return known
        if len(self._ids) >= _MOST_GRAPHS:
            return NO_GRAPH
        self._ids[key] = len(self._ids) + 1
        if len(self._ids) == _MOST_GRAPHS:
            _log.warning(
                "%d CUDA graphs are captured, as many as a session keeps: steps on further caches run without; use one "
                "cache for longer, or open a new session",
                _MOST_GRAPHS,
            )
        return self._ids[key]


def padded_batch(batch: int, max_batch: int) -> int:
    """The batch size whose graph runs `batch` rows: the next power of two, `max_batch` at most."""
    return min(1 << (batch - 1).bit_length(), max_batch)

"""Run a decoder graph as it lies on disk, for parity: prefill, chunks and single steps over a cache.

In: a graph file and token ids. Out: logits of every position. Plain and slow on purpose: no shared buffers, ONNX
Runtime's optimiser off unless asked for; the runtime proper is `graphport.runtime`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from graphport.export.targets import CPU
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import (
    INPUT_IDS,
    LOGITS_ROWS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    past_key,
    past_value,
)

_ERRORS_ONLY = 3


class GraphRunner:
    """One session over a decoder graph on the CPU."""

    def __init__(self, path: Path, config: TransformerConfig, *, optimize: bool = False) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        self._session = ort.InferenceSession(str(path.resolve()), options, providers=[CPU.provider])
        self._config = config

    def logits(self, ids: Sequence[int], *, chunks: Sequence[int] = ()) -> NDArray[np.float32]:
        """Logits [S, V] float32 of `ids` [S], fed in pieces of the given sizes, the rest in one piece."""
        past = self._empty_cache(len(ids))
        pieces: list[NDArray[np.float32]] = []
        start = 0
        for size in (*chunks, len(ids) - sum(chunks)):
            if size <= 0:
                continue
            piece, past = self._step(ids[start : start + size], start, past)
            pieces.append(piece)
            start += size
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _step(
        self, ids: Sequence[int], start: int, past: list[NDArray[np.float32]]
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        total = start + len(ids)
        feed = {
            INPUT_IDS: np.array([ids], np.int64),
            SEQLENS_K: np.array([total - 1], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(total, np.int32),
            LOGITS_ROWS: np.arange(len(ids), dtype=np.int64),
        }
        for layer in range(self._config.num_layers):
            feed[past_key(layer)], feed[past_value(layer)] = past[2 * layer : 2 * layer + 2]
        logits, *present = self._session.run(None, feed)
        return logits, present

    def _empty_cache(self, capacity: int) -> list[NDArray[np.float32]]:
        # NaN, so that a graph that reads what it never wrote shows
        shapes = [(1, b.attention.num_kv_heads, capacity, b.attention.head_dim) for b in self._config.blocks]
        return [np.full(shape, np.nan, np.float32) for shape in shapes for _ in range(2)]

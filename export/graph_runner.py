"""Run a decoder graph as it lies on disk, for parity: prefill, chunks and single steps over a cache.

In: a graph file and token ids. Out: logits of every position. Plain and slow on purpose: no shared buffers, ONNX
Runtime's optimiser off unless asked for; the runtime proper is `graphport.runtime`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
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
    unmoved_windows,
)

_ERRORS_ONLY = 3

# What a cache holds where nothing was written: values that show in the logits of a graph that reads them.
UNWRITTEN: dict[str, tuple[type[np.generic], float]] = {
    "tensor(float)": (np.float32, np.nan),
    "tensor(int8)": (np.int8, -128),
    "tensor(uint8)": (np.uint8, 255),
}

Caches = list[NDArray[Any]]


class GraphRunner:
    """One session over a decoder graph on the CPU; a `portable` one has functions of many small nodes."""

    def __init__(
        self, path: Path, config: TransformerConfig, *, optimize: bool = False, portable: bool = False
    ) -> None:
        self._take(open_portable(path) if portable else open_on_cpu(path, optimize=optimize), config)

    @classmethod
    def over(cls, session: ort.InferenceSession, config: TransformerConfig) -> "GraphRunner":
        """A runner over a session that is open already."""
        runner = cls.__new__(cls)
        runner._take(session, config)
        return runner

    def _take(self, session: ort.InferenceSession, config: TransformerConfig) -> None:
        self._session = session
        layers = range(config.num_layers)
        self._inputs = {node.name: node for node in self._session.get_inputs()}
        self._cache_names = [name for layer in layers for name in (past_key(layer), past_value(layer))]

    def logits(
        self,
        ids: Sequence[int],
        *,
        chunks: Sequence[int] = (),
        store: Callable[[int, NDArray[Any]], NDArray[Any]] | None = None,
        beside: Mapping[str, NDArray[Any]] | None = None,
    ) -> NDArray[np.float32]:
        """Logits [S, V] float32 of `ids` [S], fed in pieces of the given sizes, the rest in one piece.

        After each piece `store(index, rows)` may change the new rows [1, K, S, H] of the cache tensors, which are
        numbered keys and values of layer 0, 1, ... `beside`: inputs of every piece that a decoder alone has not.
        """
        past = self._empty_cache(len(ids))
        pieces: list[NDArray[np.float32]] = []
        start = 0
        for size in (*chunks, len(ids) - sum(chunks)):
            if size <= 0:
                continue
            piece, past = self._step(ids[start : start + size], start, past, beside)
            if store is not None:
                for index, cache in enumerate(past):
                    cache[:, :, start : start + size] = store(index, cache[:, :, start : start + size])
            pieces.append(piece)
            start += size
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def caches(self, ids: Sequence[int]) -> Caches:
        """Keys and values [1, K, S, H] of layer 0, 1, ... after `ids` [S] in one piece."""
        return self._step(ids, 0, self._empty_cache(len(ids)))[1]

    def _step(
        self, ids: Sequence[int], start: int, past: Caches, beside: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[NDArray[np.float32], Caches]:
        total = start + len(ids)
        feed = {
            INPUT_IDS: np.array([ids], np.int64),
            SEQLENS_K: np.array([total - 1], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(total, np.int32),
            LOGITS_ROWS: np.arange(len(ids), dtype=np.int64),
            **(beside or {}),
        }
        feed |= unmoved_windows(self._inputs, feed[SEQLENS_K], feed[TOTAL_SEQUENCE_LENGTH])
        logits, *present = self._session.run(None, feed | dict(zip(self._cache_names, past, strict=True)))
        return logits, present

    def _empty_cache(self, capacity: int) -> Caches:
        caches = []
        for name in self._cache_names:
            _, heads, _, width = self._inputs[name].shape
            dtype, unwritten = UNWRITTEN[self._inputs[name].type]
            caches.append(np.full((1, heads, capacity, width), unwritten, dtype))
        return caches


def open_on_cpu(path: Path, *, optimize: bool) -> ort.InferenceSession:
    """A session over the graph at `path`, with ONNX Runtime's optimiser or without."""
    return ort.InferenceSession(str(path.resolve()), parity_options(optimize=optimize), providers=[CPU.provider])


def open_portable(path: Path) -> ort.InferenceSession:
    """A session over the portable graph at `path`, with the optimiser off, that opens soon: it runs a few times only.

    ONNX's own inliner replaces the functions, in a tenth of the time that ONNX Runtime 1.31 takes for it; weights are
    not packed; and every value has its own memory, because planning which may share it takes time with the square of
    the nodes, 20 seconds for the 10,000 of 30 layers.
    """
    options = parity_options(optimize=False)
    options.enable_mem_reuse = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent.resolve()))
    model = onnx.inliner.inline_local_functions(onnx.load(path, load_external_data=False))
    return ort.InferenceSession(model.SerializeToString(), options, providers=[CPU.provider])


def parity_options(*, optimize: bool) -> ort.SessionOptions:
    """Options of a session whose numbers are compared and which nobody waits for step by step.

    Threads without work sleep: spinning between steps doubled the CPU time of SmolLM2's (2 threads).
    """
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    return options

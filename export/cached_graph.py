"""A decoder graph on the CPU as a certificate's runs feed it: past and present are one buffer, as where it serves.

In: a graph file. Out: logits. Only as much of a cache as the runs need (see `decoder_runs.CachedModel`); layers that
keep no more than their window lose their oldest rows here too. The runtime proper is `graphport.runtime`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from graphport.export.graph_runner import UNWRITTEN, open_on_cpu
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import (
    INPUT_IDS,
    LOGITS,
    LOGITS_ROWS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    WINDOW_SEQLENS_K,
    WINDOW_TOTAL_SEQUENCE_LENGTH,
    past_key,
    past_value,
    present_key,
    present_value,
)
from graphport.model_def.window_rows import rows_of


class CachedGraph:
    """A `CachedModel` over the graph at `path`, for texts of at most `capacity` tokens.

    `window_layers`: as in `signature.decoder_signature`. `beside`: of slots, inputs that a decoder alone has not.
    """

    def __init__(
        self,
        path: Path,
        config: TransformerConfig,
        *,
        capacity: int,
        window_layers: tuple[int, ...] = (),
        beside: Callable[[slice], Mapping[str, NDArray[Any]]] = lambda _: {},
    ) -> None:
        self._session = open_on_cpu(path, optimize=True)
        self._capacity = capacity
        self._beside = beside
        self._inputs = {node.name: node for node in self._session.get_inputs()}
        layers = range(config.num_layers)
        self._names = [(past_key(i), present_key(i)) for i in layers]
        self._names += [(past_value(i), present_value(i)) for i in layers]
        self._window = rows_of(config, window_layers)
        self._moving = {make(layer) for layer in window_layers for make in (past_key, past_value)}
        self._caches: list[NDArray[np.generic]] = []
        self._lengths = np.zeros(0, np.int32)
        self._firsts = np.zeros(0, np.int32)

    def open_cache(self, num_slots: int) -> None:
        """See CachedModel; what was never written would show in the logits."""
        self._lengths, self._firsts = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
        self._caches = []
        for past, _ in self._names:
            _, heads, _, width = self._inputs[past].shape
            dtype, unwritten = UNWRITTEN[self._inputs[past].type]
            self._caches.append(np.full((num_slots, heads, self._capacity, width), unwritten, dtype))

    def step(
        self, ids: NDArray[np.int64], rows: NDArray[np.int64] | None = None, *, first_slot: int = 0
    ) -> NDArray[np.float32]:
        """See CachedModel."""
        batch, length = ids.shape
        slots = slice(first_slot, first_slot + batch)
        self._drop_rows(range(first_slot, first_slot + batch))
        after = self._lengths[slots] + length
        held = after - self._firsts[slots]
        wanted = np.arange(length - 1, batch * length, length) if rows is None else rows
        binding = self._session.io_binding()
        for name, value in (
            (INPUT_IDS, np.ascontiguousarray(ids)),
            (SEQLENS_K, (after - 1).astype(np.int32)),
            (TOTAL_SEQUENCE_LENGTH, np.array(after.max(), np.int32)),
            (LOGITS_ROWS, wanted.astype(np.int64)),
            (WINDOW_SEQLENS_K, (held - 1).astype(np.int32)),
            (WINDOW_TOTAL_SEQUENCE_LENGTH, np.array(held.max(), np.int32)),
            *self._beside(slots).items(),
        ):
            if name in self._inputs:
                binding.bind_cpu_input(name, value)
        for (past, present), cache in zip(self._names, self._caches, strict=True):
            shared = ort.OrtValue.ortvalue_from_numpy(cache[slots])  # a view of whole slots: no copy
            binding.bind_ortvalue_input(past, shared)
            binding.bind_ortvalue_output(present, shared)
        binding.bind_output(LOGITS)
        self._session.run_with_iobinding(binding)
        self._lengths[slots] = after
        logits: NDArray[np.float32] = binding.get_outputs()[-1].numpy()
        return logits

    def rewind(self, slot: int, length: int) -> None:
        """See CachedModel."""
        assert self._window is None or self._window.reaches(int(self._firsts[slot]), length)
        self._lengths[slot] = length

    def _drop_rows(self, slots: range) -> None:
        """Move the rows that window layers keep to the front of their caches."""
        if self._window is None:
            return
        moving = [cache for (past, _), cache in zip(self._names, self._caches, strict=True) if past in self._moving]
        for slot in slots:
            length, old = int(self._lengths[slot]), int(self._firsts[slot])
            first = max(old, self._window.first(length))
            for cache in moving if first > old else ():
                cache[slot, :, : length - first] = cache[slot, :, first - old : length - old].copy()
            self._firsts[slot] = first

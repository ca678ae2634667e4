"""Run the two graphs of an encoder-decoder as they lie on disk, for parity and as a certificate's runs feed them.

In: a folder, sources, decoder ids. Out: logits. Plain and slow on purpose, as `graph_runner.py` and `cached_graph.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.export.cached_graph import CachedGraph
from graphport.export.graph_runner import GraphRunner, open_on_cpu
from graphport.model_def.config import TransformerConfig
from graphport.model_def.seeded_sources import Source
from graphport.model_def.signature import (
    ENCODER_GRAPH_FILE,
    GRAPH_FILE,
    INPUT_FEATURES,
    INPUT_IDS,
    LENGTHS,
    SOURCE_CAPACITY_STEP,
    SOURCE_LENGTHS,
    source_specs,
)

Logits = NDArray[np.float32]


class SourceRunner:
    """A session over each graph in `folder`, on the CPU."""

    def __init__(self, folder: Path, config: TransformerConfig, *, optimize: bool = False) -> None:
        self._encoder = open_on_cpu(folder / ENCODER_GRAPH_FILE, optimize=optimize)
        self._decoder = GraphRunner(folder / GRAPH_FILE, config, optimize=optimize)
        self._names = [spec.name for spec in source_specs(config, "float32")]

    def logits(
        self,
        sources: Sequence[Source],
        ids: Sequence[int],
        *,
        chunks: Sequence[int] = (),
        pad_id: int = 0,
        extra: int = 0,
    ) -> list[Logits]:
        """Logits [S, V] of `ids` after each source; the sources are one batch, padded by `extra` beyond the longest.

        Of recordings, which are all as long, keys and values are padded.
        """
        found, lengths = self._encoded(sources, pad_id=pad_id, extra=extra)
        rows = []
        for index, length in enumerate(lengths):
            beside = {name: states[index : index + 1] for name, states in zip(self._names, found, strict=True)}
            beside[SOURCE_LENGTHS] = np.array([length], np.int32)
            rows.append(self._decoder.logits(ids, chunks=chunks, beside=beside))
        return rows

    def _encoded(
        self, sources: Sequence[Source], *, pad_id: int, extra: int
    ) -> tuple[list[NDArray[np.float32]], NDArray[np.int32]]:
        """Keys and values [B, N, T, H] of every layer, and how many of the T are real."""
        recordings = [source for source in sources if isinstance(source, np.ndarray)]
        if recordings:
            found = self._encoder.run(self._names, {INPUT_FEATURES: np.stack(recordings)})
            padding = [(0, 0), (0, 0), (0, extra), (0, 0)]
            lengths = np.full(len(sources), found[0].shape[2], np.int32)
            return [np.pad(states, padding, constant_values=pad_id) for states in found], lengths
        lengths = np.array([len(source) for source in sources], np.int32)
        padded = np.full((len(sources), int(lengths.max()) + extra), pad_id, np.int64)
        for row, source in zip(padded, sources, strict=True):
            row[: len(source)] = source
        return self._encoder.run(self._names, {INPUT_IDS: padded, LENGTHS: lengths}), lengths


class CachedPair:
    """A `SourceModel` over the graphs in `folder`, for texts of at most `capacity` tokens.

    Sources run one by one, and their keys and values are padded to the capacity that they have where they serve.
    """

    def __init__(self, folder: Path, config: TransformerConfig, *, capacity: int) -> None:
        assert config.encoder is not None
        self._encoder = open_on_cpu(folder / ENCODER_GRAPH_FILE, optimize=True)
        self._names = [spec.name for spec in source_specs(config, "float32")]
        self._most = config.encoder.max_positions
        self._decoder = CachedGraph(folder / GRAPH_FILE, config, capacity=capacity, beside=self._beside)
        self._sources: list[list[NDArray[np.float32]]] = []

    def open_cache(self, num_slots: int) -> None:
        """See CachedModel."""
        self._sources = [[] for _ in range(num_slots)]
        self._decoder.open_cache(num_slots)

    def encode(self, slot: int, source: Source) -> None:
        """See SourceModel."""
        feed: dict[str, NDArray[Any]] = {}
        if isinstance(source, np.ndarray):
            feed = {INPUT_FEATURES: source[np.newaxis]}
        else:
            feed = {INPUT_IDS: np.array([source], np.int64), LENGTHS: np.array([len(source)], np.int32)}
        self._sources[slot] = [rows[0] for rows in self._encoder.run(self._names, feed)]

    def step(
        self, ids: NDArray[np.int64], rows: NDArray[np.int64] | None = None, *, first_slot: int = 0
    ) -> NDArray[np.float32]:
        """See CachedModel."""
        return self._decoder.step(ids, rows, first_slot=first_slot)

    def rewind(self, slot: int, length: int) -> None:
        """See CachedModel."""
        self._decoder.rewind(slot, length)

    def _beside(self, slots: slice) -> dict[str, NDArray[Any]]:
        """Keys and values [B, N, T, H] of the slots' sources, ones beyond the tokens of each, and how many are real."""
        lengths = [rows[0].shape[1] for rows in self._sources[slots]]
        longest = max(rows[0].shape[1] for rows in self._sources if rows)
        capacity = min(-(-longest // SOURCE_CAPACITY_STEP) * SOURCE_CAPACITY_STEP, self._most)
        found: dict[str, NDArray[Any]] = {SOURCE_LENGTHS: np.array(lengths, np.int32)}
        for index, name in enumerate(self._names):
            parts = [rows[index] for rows in self._sources[slots]]
            padding = [[(0, 0), (0, capacity - part.shape[1]), (0, 0)] for part in parts]
            padded = [np.pad(part, pads, constant_values=1.0) for part, pads in zip(parts, padding, strict=True)]
            found[name] = np.stack(padded)
        return found

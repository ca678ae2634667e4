"""Run the two graphs of an encoder-decoder as they lie on disk, for parity.

In: a folder, sources, decoder ids. Out: logits of every position of the decoder's texts. Plain and slow on purpose,
as `graph_runner.py`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graphport.export.graph_runner import GraphRunner, open_on_cpu
from graphport.export.source_examples import Source
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import (
    ENCODER_GRAPH_FILE,
    GRAPH_FILE,
    INPUT_FEATURES,
    INPUT_IDS,
    LENGTHS,
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

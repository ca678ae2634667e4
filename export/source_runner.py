"""Run the two graphs of an encoder-decoder as they lie on disk, for parity.

In: a folder, source ids, decoder ids. Out: logits of every position of the decoder's texts. Plain and slow on purpose,
as `graph_runner.py`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graphport.export.graph_runner import GraphRunner, open_on_cpu
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import (
    ENCODER_GRAPH_FILE,
    GRAPH_FILE,
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
        sources: Sequence[Sequence[int]],
        ids: Sequence[int],
        *,
        chunks: Sequence[int] = (),
        pad_id: int = 0,
        extra: int = 0,
    ) -> list[Logits]:
        """Logits [S, V] of `ids` after each source; the sources are one batch, padded by `extra` beyond the longest."""
        lengths = np.array([len(source) for source in sources], np.int32)
        padded = np.full((len(sources), int(lengths.max()) + extra), pad_id, np.int64)
        for row, source in zip(padded, sources, strict=True):
            row[: len(source)] = source
        found = self._encoder.run(self._names, {INPUT_IDS: padded, LENGTHS: lengths})
        rows = []
        for index, length in enumerate(lengths):
            beside = {name: states[index : index + 1] for name, states in zip(self._names, found, strict=True)}
            beside[SOURCE_LENGTHS] = np.array([length], np.int32)
            rows.append(self._decoder.logits(ids, chunks=chunks, beside=beside))
        return rows

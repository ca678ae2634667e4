"""Run an encoder graph as it lies on disk, for parity: padded batches on the CPU.

In: a graph file, rows of ids, their token types. Out: hidden states of the real tokens, and what is read out of them.
ONNX Runtime's optimiser is off unless asked for; the runtime proper is `graphport.runtime`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphport.export.graph_runner import open_on_cpu
from graphport.model_def.certified_inputs import Row
from graphport.model_def.seeded_conditions import seeded_conditions
from graphport.model_def.signature import (
    CONDITIONING,
    EMBEDDINGS,
    HIDDEN_STATES,
    INPUT_IDS,
    LENGTHS,
    LOGITS,
    LOGITS_ROWS,
    TOKEN_TYPE_IDS,
)


class States(NamedTuple):
    """What an encoder gives for some texts: hidden states [S, W] of each, and what it reads out of them, if anything.

    `read_out`: of each text its embedding [W], or its logits [L], or those of its tokens [S, L].
    """

    hidden: list[NDArray[np.float32]]
    read_out: list[NDArray[np.float32]] | None


class EncoderRunner:
    """One session over an encoder graph on the CPU."""

    def __init__(self, path: Path, *, optimize: bool = False) -> None:
        self._session = open_on_cpu(path, optimize=optimize)
        self._inputs = {node.name: node for node in self._session.get_inputs()}
        self._outputs = [node.name for node in self._session.get_outputs()]

    def states(self, rows: Sequence[Row], *, pad_id: int = 0, length: int = 0) -> States:
        """The states of `rows` as one batch, padded with `pad_id` to the longest row or to `length`."""
        feed = self._feed(rows, pad_id=pad_id, length=length)
        lengths = feed[LENGTHS]
        found = dict(zip(self._outputs, self._session.run(None, feed), strict=True))
        hidden = [states[:count] for states, count in zip(found[HIDDEN_STATES], lengths, strict=True)]
        if EMBEDDINGS in found:
            return States(hidden, list(found[EMBEDDINGS]))
        if LOGITS not in found:
            return States(hidden, None)
        logits = self._by_text(found[LOGITS], feed)
        pairs = zip(logits, lengths, strict=True)
        per_token = logits.ndim == 3
        return States(hidden, [row[:count] if per_token else row for row, count in pairs])

    def run_rows(self, rows: Sequence[Row], output: str) -> NDArray[np.float32]:
        """See `encoder_runs.TextModel`."""
        feed = self._feed(rows, pad_id=0, length=0)
        (found,) = self._session.run([output], feed)
        values: NDArray[np.float32] = self._by_text(found, feed) if output == LOGITS else found
        return values

    @staticmethod
    def _by_text(logits: NDArray[np.float32], feed: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Logits of all tokens, where they were asked for one by one, as [B, S, V]."""
        return logits.reshape(*feed[INPUT_IDS].shape, -1) if LOGITS_ROWS in feed else logits

    def _feed(self, rows: Sequence[Row], *, pad_id: int, length: int) -> dict[str, NDArray[Any]]:
        lengths = np.array([len(row.ids) for row in rows], np.int32)
        shape = (len(rows), max(length, *lengths.tolist()))
        feed: dict[str, NDArray[Any]] = {
            INPUT_IDS: np.full(shape, pad_id, np.int64),
            TOKEN_TYPE_IDS: np.zeros(shape, np.int64),
        }
        for index, row in enumerate(rows):
            feed[INPUT_IDS][index, : len(row.ids)] = row.ids
            feed[TOKEN_TYPE_IDS][index, : len(row.ids)] = row.types
        if CONDITIONING in self._inputs:
            feed[CONDITIONING] = seeded_conditions([row.ids for row in rows], self._inputs[CONDITIONING].shape[1])
        feed[LOGITS_ROWS] = np.arange(feed[INPUT_IDS].size)
        return {name: array for name, array in feed.items() if name in self._inputs} | {LENGTHS: lengths}

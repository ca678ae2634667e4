"""The texts that a recurrent decoder is compared on, and how the eager module and graphs are run on them.

In: a configuration, a tokenizer. Out: `RecurrentFeed`, a `Feed` of `encoder_evidence.py`. It compares nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from graphport.export.encoder_runner import States
from graphport.export.graph_runner import open_on_cpu
from graphport.export.text_feed import TextFeed
from graphport.model_def.certified_inputs import Inputs, Row
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder_runs import recurrent_runs
from graphport.model_def.played_runs import Evidence, References, play_runs
from graphport.model_def.recurrent_signature import NUM_PAST
from graphport.model_def.signature import INPUT_IDS
from graphport.model_def.transformer import Transformer

_PIECES = (1, 1, 7, 1)  # then the rest


class RecurrentFeed(TextFeed):
    """Texts of different lengths, in pieces and whole; see `Feed`."""

    alone = "each text in one piece"

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer_json: str | None,
        *,
        max_length: int,
        seed: int,
        inputs: Inputs | None = None,
    ) -> None:
        super().__init__(config, tokenizer_json, max_length=max_length, seed=seed, inputs=inputs)
        self.words = "each text in pieces"

    def eager(self, model: Transformer) -> States:
        """See Feed."""
        with torch.inference_mode():
            return States([model(torch.tensor([list(row.ids)]))[0].numpy() for row in self._rows], None)

    def batches(self, graph: Path, *, optimize: bool, pad_id: int = 0) -> States:
        """See Feed: in pieces, one over the states of the other; there is no padding."""
        del pad_id
        return self._states(graph, _PIECES, optimize=optimize)

    def each_alone(self, graph: Path, *, optimize: bool) -> States:
        """See Feed."""
        return self._states(graph, (), optimize=optimize)

    def _states(self, graph: Path, pieces: Sequence[int], *, optimize: bool) -> States:
        runner = RecurrentRunner(graph, optimize=optimize)
        return States([runner.run_pieces(row, pieces)[0] for row in self._rows], None)

    def play(self, graph: Path, references: References, *, observe: Callable[[str], None]) -> Evidence:
        """See Feed."""
        runs = recurrent_runs(self._rows)
        return play_runs(RecurrentRunner(graph, optimize=True), runs, references, observe=observe)


class RecurrentRunner:
    """One session over a recurrent decoder's graph on the CPU: a `RecurrentTexts`."""

    def __init__(self, path: Path, *, optimize: bool) -> None:
        self._session = open_on_cpu(path, optimize=optimize)
        self._states = [node for node in self._session.get_inputs() if node.name not in (INPUT_IDS, NUM_PAST)]

    def run_pieces(self, row: Row, pieces: Sequence[int]) -> NDArray[np.float32]:
        """See RecurrentTexts."""
        states = [np.zeros((1, *node.shape[1:]), np.float32) for node in self._states]
        found, begin, ids = [], 0, np.array([row.ids], np.int64)
        for size in (*pieces, ids.shape[1]):
            piece = ids[:, begin : begin + size]
            if piece.size:
                feed = {INPUT_IDS: piece, NUM_PAST: np.array([begin])}
                feed |= {node.name: state for node, state in zip(self._states, states, strict=True)}
                logits, *states = self._session.run(None, feed)
                found.append(logits)
                begin += size
        return np.concatenate(found, axis=1)

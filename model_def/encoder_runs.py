"""The ways to feed an encoder texts or images that a certificate records and `verify` repeats.

In: texts or images, the outputs of the model. Out: runs for `played_runs.py`. It opens no graph.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certified_inputs import Row
from graphport.model_def.compact_rows import CompactRows, compact_rows, measure_rows
from graphport.model_def.config import TransformerConfig
from graphport.model_def.played_runs import Emit, Rows, Run, listed, spread
from graphport.model_def.signature import EMBEDDINGS, HIDDEN_STATES, LOGITS

MOST_ROWS = 1024  # of hidden states, over all inputs: what is read out of them is compared whole

_WORDS = {HIDDEN_STATES: "hidden states", EMBEDDINGS: "embeddings", LOGITS: "logits"}

Pixels = NDArray[np.float32]


class TextModel(Protocol):
    """An encoder of texts."""

    def run_rows(self, rows: Sequence[Row], output: str) -> Rows:
        """`output` of texts padded to the longest: [B, S, W], or [B, W] of what is read out of a whole text."""
        ...


class ImageModel(Protocol):
    """An encoder of images."""

    def run_images(self, pixels: Pixels, output: str) -> Rows:
        """`output` of images of one size: [B, S, W], or [B, W] of what is read out of a whole image."""
        ...


class RecurrentTexts(Protocol):
    """A recurrent decoder."""

    def run_pieces(self, row: Row, pieces: Sequence[int]) -> Rows:
        """Logits [1, S, V] of a text fed in pieces of these sizes, then the rest, over the states of those before."""
        ...


def outputs_of(config: TransformerConfig) -> tuple[str, ...]:
    """The outputs of an encoder: the hidden states, and what it reads out of them, if anything."""
    if config.is_recurrent:
        return (LOGITS,)
    readout = None if config.image is None else config.image.readout
    if config.classifier is not None or config.masked_head is not None or (readout is not None and readout.labels):
        return HIDDEN_STATES, LOGITS
    return (HIDDEN_STATES, EMBEDDINGS) if config.pooling is not None or readout is not None else (HIDDEN_STATES,)


def kept_places(lengths: Sequence[int]) -> list[NDArray[np.int64]]:
    """The tokens of each input whose hidden states are compared: all, or so many that MOST_ROWS suffice."""
    return [spread(length, max(1, MOST_ROWS // len(lengths))) for length in lengths]


def text_runs(config: TransformerConfig, rows: Sequence[Row]) -> tuple[Run[TextModel], ...]:
    """All texts in one padded batch, and each alone."""
    lengths = [len(row.ids) for row in rows]
    everything = list(range(len(rows)))
    ways = (("padded batch", [everything]), ("each text alone", [[index] for index in everything]))

    def run(name: str, batches: list[list[int]], output: str) -> Run[TextModel]:
        def play(model: TextModel, emit: Emit) -> None:
            for batch in batches:
                found = model.run_rows([rows[index] for index in batch], output)
                _emit_all(batch, lengths, found, emit)

        words = f"texts of {listed(lengths)} tokens"
        return Run(name=f"{name}, {_WORDS[output]}", inputs=words, output=output, play=play)

    return tuple(run(name, batches, output) for name, batches in ways for output in outputs_of(config))


def recurrent_runs(rows: Sequence[Row]) -> tuple[Run[RecurrentTexts], ...]:
    """Each text in one piece, in pieces, and token by token: the parallel, the chunked and the recurrent form."""
    lengths = [len(row.ids) for row in rows]
    ways = (("one piece", ()), ("pieces", (1, 7, 16)), ("token by token", (1,) * max(lengths)))

    def run(name: str, pieces: tuple[int, ...]) -> Run[RecurrentTexts]:
        def play(model: RecurrentTexts, emit: Emit) -> None:
            for index, row in enumerate(rows):
                _emit_all([index], lengths, model.run_pieces(row, pieces), emit)

        return Run(name=name, inputs=f"texts of {listed(lengths)} tokens", output=LOGITS, play=play)

    return tuple(run(name, pieces) for name, pieces in ways)


def image_runs(config: TransformerConfig, batches: Sequence[Pixels]) -> tuple[Run[ImageModel], ...]:
    """All images of a size together, and each alone."""
    image = config.image
    assert image is not None
    images = [pixels for batch in batches for pixels in batch]
    lengths = [image.num_tokens(*pixels.shape[1:]) for pixels in images]
    starts = accumulate((len(batch) for batch in batches), initial=0)
    together = [list(range(start, start + len(batch))) for start, batch in zip(starts, batches, strict=False)]
    ways = (("batches", together), ("each image alone", [[index] for index in range(len(images))]))
    words = f"{len(images)} images of " + ", ".join(f"{batch.shape[2]} x {batch.shape[3]}" for batch in batches)

    def run(name: str, groups: list[list[int]], output: str) -> Run[ImageModel]:
        def play(model: ImageModel, emit: Emit) -> None:
            for group in groups:
                found = model.run_images(np.stack([images[index] for index in group]), output)
                _emit_all(group, lengths, found, emit)

        return Run(name=f"{name}, {_WORDS[output]}", inputs=words, output=output, play=play)

    return tuple(run(name, groups, output) for name, groups in ways for output in outputs_of(config))


def reference_rows(values: Sequence[Rows], *, seed: int) -> CompactRows:
    """What the runs are compared with: of each input its states [S, W] in the places kept, or its vector [W]."""
    if values[0].ndim == 1:
        return compact_rows(measure_rows(np.stack(values), seed=seed), range(len(values)))
    lengths = [len(states) for states in values]
    places = kept_places(lengths)
    numbers = [start + kept for start, kept in zip(accumulate(lengths, initial=0), places, strict=False)]
    rows = np.concatenate([states[kept] for states, kept in zip(values, places, strict=True)])
    return compact_rows(measure_rows(rows, seed=seed), np.concatenate(numbers))


def _emit_all(indices: Sequence[int], lengths: Sequence[int], found: Rows, emit: Emit) -> None:
    """Rows of the inputs `indices`: a token's are numbered over all inputs, one after the other."""
    if found.ndim == 2:
        emit(list(indices), found)
        return
    starts = list(accumulate(lengths, initial=0))
    places = kept_places(lengths)
    for index, states in zip(indices, found, strict=True):
        kept = places[index]
        emit((starts[index] + kept).tolist(), states[kept])

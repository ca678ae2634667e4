"""The ways to feed an encoder-decoder that a certificate records and `verify` repeats: a decoder's, after sources.

In: a configuration, sources, the ids of a text. Out: runs for `played_runs.py`. It opens no graph. Legend: L tokens of
the text; row `i * L + p` is that of the text's token p after source i.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from graphport.model_def.config import TransformerConfig
from graphport.model_def.decoder_runs import CachedModel, Ids, Logits, planned_runs, uncovered
from graphport.model_def.played_runs import Emit, Run, listed
from graphport.model_def.seeded_sources import Source
from graphport.model_def.signature import LOGITS

MOST_SLOTS = 3  # of a batch

_BATCH_STEPS = 24
_AFTER = 8  # tokens after another source


class SourceModel(CachedModel, Protocol):
    """An encoder-decoder over a cache of slots."""

    def encode(self, slot: int, source: Source) -> None:
        """Make `source` the source of a slot, in place of the one that it had."""
        ...


def planned_source_runs(
    config: TransformerConfig, sources: Sequence[Source], text: Sequence[int]
) -> tuple[Run[SourceModel], ...]:
    """The runs of a decoder, in one piece after each source, else after the first; batches; a source after another."""
    alone = [run for run in planned_runs(config, text) if run.name != "ragged batch"]
    others = [_after_sources(run, sources[:1], len(text)) for run in alone[1:]]
    runs = [_after_sources(alone[0], sources, len(text)), *others]
    ids = np.array(text, np.int64)
    if len(text) >= 4 and len(sources) > 1:
        runs += [_ragged(ids, sources), _another(ids, sources)]
    return tuple(runs)


def uncovered_of_sources(
    config: TransformerConfig, max_length: int, sources: Sequence[Source], length: int
) -> tuple[str, ...]:
    """What runs over `length` tokens after `sources` do not reach, in words."""
    words = uncovered(config, max_length, length)
    assert config.encoder is not None
    longest, most = max(len(source) for source in sources), config.encoder.max_positions
    if config.encoder.audio is not None or longest >= most:  # recordings are all as long as the model reads
        return words
    return (
        *words,
        f"sources of {longest + 1} to {most} tokens: eager PyTorch would take longer on them than the export",
    )


def words_of(sources: Sequence[Source]) -> str:
    """Sources in words."""
    if any(isinstance(source, np.ndarray) for source in sources):
        return "a recording" if len(sources) == 1 else f"{len(sources)} recordings"
    lengths = listed([len(source) for source in sources])
    return f"a source of {lengths} tokens" if len(sources) == 1 else f"sources of {lengths} tokens"


def _after_sources(run: Run[CachedModel], sources: Sequence[Source], length: int) -> Run[SourceModel]:
    """A decoder's run of one slot, once after each source."""

    def play(model: SourceModel, emit: Emit) -> None:
        for index, source in enumerate(sources):
            start = index * length

            def emit_after(positions: Sequence[int], rows: Logits, start: int = start) -> None:
                emit([start + position for position in positions], rows)

            run.play(_AfterSource(model, source), emit_after)

    return Run(name=run.name, inputs=f"{words_of(sources)}; {run.inputs}", output=run.output, play=play)


class _AfterSource:
    """A decoder after one source, which is encoded once; only one slot is ever asked for."""

    def __init__(self, model: SourceModel, source: Source) -> None:
        self._model = model
        self._source = source
        self._is_open = False

    def open_cache(self, num_slots: int) -> None:
        """See CachedModel: the first time opens one, then the slot is emptied of its text."""
        assert num_slots == 1
        if self._is_open:
            self._model.rewind(0, 0)
            return
        self._model.open_cache(1)
        self._model.encode(0, self._source)
        self._is_open = True

    def step(self, ids: Ids, rows: Ids | None = None, *, first_slot: int = 0) -> Logits:
        """See CachedModel."""
        return self._model.step(ids, rows, first_slot=first_slot)

    def rewind(self, slot: int, length: int) -> None:
        """See CachedModel."""
        self._model.rewind(slot, length)


def _ragged(ids: Ids, sources: Sequence[Source]) -> Run[SourceModel]:
    """Slots with other sources and texts of other lengths, the shortest text after the longest source."""
    length, some = len(ids), sources[:MOST_SLOTS]
    steps = min(_BATCH_STEPS, length // 4)
    room = length - steps
    firsts = [max(1, room // 25), max(1, room // 4), room][: len(some)]
    starts = [index * length for index in range(len(some))]

    def play(model: SourceModel, emit: Emit) -> None:
        model.open_cache(len(some))
        for slot, source in enumerate(some):
            model.encode(slot, source)
        for slot, first in enumerate(firsts):
            emit([starts[slot] + first - 1], model.step(ids[None, :first], first_slot=slot))
        for step in range(steps):
            places = [first + step for first in firsts]
            rows = model.step(ids[places][:, None])
            emit([start + place for start, place in zip(starts, places, strict=True)], rows)

    words = f"{words_of(some)}, rows that hold {listed(firsts)} tokens, {steps} steps together"
    return Run(name="ragged batch", inputs=words, output=LOGITS, play=play)


def _another(ids: Ids, sources: Sequence[Source]) -> Run[SourceModel]:
    """A slot whose source was another, longer one: of that nothing may be read."""
    length = len(ids)
    first = min(3, length - 1)
    end = min(length, first + _AFTER)

    def play(model: SourceModel, emit: Emit) -> None:
        model.open_cache(1)
        model.encode(0, sources[0])
        model.step(ids[None, :first])
        for index, source in enumerate(sources[1:], start=1):
            model.rewind(0, 0)
            model.encode(0, source)
            emit([index * length + first - 1], model.step(ids[None, :first]))
            for position in range(first, end):
                emit([index * length + position], model.step(ids[None, position : position + 1]))

    words = f"one slot: {words_of(sources)}, one after the other, {first} tokens and steps to {end - 1} after each"
    return Run(name="another source", inputs=words, output=LOGITS, play=play)

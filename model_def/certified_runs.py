"""The runs that a certificate records and `verify` repeats: ways to feed a text over a KV cache, compared row by row.

In: a decoder over a cache (`CachedModel`), the ids of a text, reference rows. Out: checks, errors a row. It opens no
graph: the exporter and the runtime bring their own. Legend: L tokens of the text, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certificate import Against, Check, Limit
from graphport.model_def.compact_logits import (
    CompactRows,
    RowErrors,
    compact_rows,
    compare_rows,
    join_errors,
    join_rows,
)
from graphport.model_def.config import TransformerConfig
from graphport.model_def.window_rows import moving_layers, rows_of

NUM_IDS = 512  # of the text, where no switch lies beyond
LONGEST = 2048  # a switch beyond is not reached
NUM_STEPS = 128  # decoded one by one

_BEYOND = 16  # tokens after the last switch
_LENGTHS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 65)
_CHUNKS = (1, 7, 64, 128)
_ROW_BYTES = 1 << 26
_MOST_ROWS = 128  # of the text in pieces: what was cached wrongly shows in all rows after it
_BATCH_STEPS = 24
_WORDS: dict[Against, str] = {"original": "eager PyTorch", "shipped": "itself as exported"}

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]
Emit = Callable[[Sequence[int], Logits], None]  # positions of the text and the logits of these rows


class CachedModel(Protocol):
    """A decoder over a cache of slots."""

    def open_cache(self, num_slots: int) -> None:
        """Forget everything and open `num_slots` empty slots."""
        ...

    def step(self, ids: Ids, rows: Ids | None = None, *, first_slot: int = 0) -> Logits:
        """Append `ids` [B, S] to slots from `first_slot` on; logits [R, V] of `rows` [R], None: each row's last."""
        ...

    def rewind(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens of a slot."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to feed a text: its name in checks, what is fed in words, and the feeding."""

    name: str
    inputs: str
    play: Callable[[CachedModel, Ids, Emit], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What runs showed: checks, and by run the errors against the original and the rows themselves."""

    checks: tuple[Check, ...]
    errors: Mapping[str, RowErrors]
    rows: Mapping[str, CompactRows]


def switches(config: TransformerConfig) -> dict[int, str]:
    """Lengths at which the computation changes, and what changes: sliding windows, rotary scalings."""
    found: dict[int, str] = {}
    for block in config.blocks:
        attention = block.attention
        scaling = None if attention.rotary is None else attention.rotary.scaling
        original = getattr(scaling, "original_max_positions", None)
        if original is not None:
            found.setdefault(original, f"rotary scaling at {original}")
        if attention.window is not None:
            found[attention.window] = f"window of {attention.window}"
    return dict(sorted(found.items()))


def text_length(config: TransformerConfig, max_length: int) -> int:
    """Tokens of text to certify on: 512, or beyond the last switch that lies below 2048, if there is room.

    As far too as the first step that drops rows of layers with a window.
    """
    drop = first_drop(config, max_length)
    beyond = 0 if drop is None or drop + _BEYOND > LONGEST else drop + _BEYOND
    return min(max_length, max(num_reaching(config, NUM_IDS), beyond))


def first_drop(config: TransformerConfig, max_length: int) -> int | None:
    """Tokens before the first step that drops rows of layers with a window (`window_rows.py`), None without one."""
    rows = rows_of(config, moving_layers(config, max_length))
    return None if rows is None else rows.first_drop


def num_reaching(config: TransformerConfig, least: int) -> int:
    """Tokens, at least `least`, that go beyond the last switch that lies below 2048."""
    return max([least, *(at + _BEYOND for at in switches(config) if at + _BEYOND <= LONGEST)])


def uncovered(config: TransformerConfig, max_length: int, length: int) -> tuple[str, ...]:
    """What runs over `length` tokens do not reach, in words."""
    beyond = [f"{what}: it lies beyond the text" for at, what in switches(config).items() if length < at < max_length]
    drop = first_drop(config, max_length)
    if drop is not None and drop > length - 3:
        beyond.append(f"a cache without the rows beyond the window: its first step lies {drop} tokens into a text")
    lengths = [f"lengths from {length + 1} to {max_length}"] if length < max_length else []
    return (*lengths, *beyond)


def planned_runs(config: TransformerConfig, length: int) -> tuple[Run, ...]:
    """The runs over a text of `length` tokens; those that a very short text has no room for are left out."""
    most = max(1, _ROW_BYTES // (4 * config.vocab_size))
    runs = [_prefill(length, most)]
    if length >= 4:
        runs += [_decode(length), _chunks(length, min(most, _MOST_ROWS))]
    if length >= 24:
        runs += [_ragged(length), _rewind(length, config.vocab_size)]
    runs += [_switch(at, what) for at, what in switches(config).items() if 3 <= at <= length - 3]
    drop = first_drop(config, length)
    if drop is not None and drop <= length - 3:
        runs.append(_drop(drop))
    return tuple(runs)


def play_runs(
    model: CachedModel,
    runs: Sequence[Run],
    ids: Sequence[int],
    *,
    original: CompactRows,
    shipped: Mapping[str, CompactRows],
    limits: Sequence[Limit],
    observe: Callable[[str], None] = lambda _: None,
    keep_rows: bool = False,
) -> Evidence:
    """Play `runs` over `ids` [L] and hold them to `limits`; limits against shipped rows apply where there are any.

    `keep_rows` makes the bundle's own rows, to ship. Raises ValueError when references and runs do not fit.
    """
    checks: list[Check] = []
    errors: dict[str, RowErrors] = {}
    kept: dict[str, CompactRows] = {}
    text = np.array(ids, np.int64)
    for run in runs:
        observe(run.name)
        references = _References(original=original, shipped=shipped.get(run.name), keep_rows=keep_rows)
        run.play(model, text, references.take)
        found = references.results()
        errors[run.name] = found["original"]
        if keep_rows:
            kept[run.name] = references.rows()
        checks += [_check(run, found[limit.against], limit) for limit in limits if limit.against in found]
    return Evidence(checks=tuple(checks), errors=errors, rows=kept)


def _check(run: Run, errors: RowErrors, limit: Limit) -> Check:
    return Check(
        name=f"{run.name}: {limit.figure} against {_WORDS[limit.against]}",
        measured=errors.figure(limit.figure),
        tolerance=limit.tolerance,
        detail=errors.detail(),
        inputs=run.inputs,
    )


@dataclass(slots=True, kw_only=True)
class _References:
    """Compares rows as they come, some at a time: signs are drawn anew for each comparison."""

    original: CompactRows
    shipped: CompactRows | None
    keep_rows: bool
    _positions: list[int] = field(default_factory=list)
    _logits: list[Logits] = field(default_factory=list)
    _errors: dict[Against, list[RowErrors]] = field(default_factory=lambda: {"original": [], "shipped": []})
    _rows: list[CompactRows] = field(default_factory=list)
    _num_done: int = 0

    def take(self, positions: Sequence[int], logits: Logits) -> None:
        self._positions += positions
        self._logits.append(logits.copy())
        if sum(part.nbytes for part in self._logits) >= _ROW_BYTES:
            self._flush()

    def results(self) -> dict[Against, RowErrors]:
        self._flush()
        if self.shipped is not None and len(self.shipped.positions) != self._num_done:
            raise ValueError(f"{len(self.shipped.positions)} rows were shipped for a run of {self._num_done}")
        return {against: join_errors(parts) for against, parts in self._errors.items() if parts}

    def rows(self) -> CompactRows:
        return join_rows(self._rows)

    def _flush(self) -> None:
        if not self._logits:
            return
        logits = np.concatenate(self._logits)
        self._errors["original"].append(compare_rows(self.original.at(self._positions), logits))
        if self.shipped is not None:
            self._errors["shipped"].append(compare_rows(self._next_shipped(self.shipped), logits))
        if self.keep_rows:
            self._rows.append(compact_rows(logits, self._positions, seed=self.original.seed))
        self._num_done += len(self._positions)
        self._positions, self._logits = [], []

    def _next_shipped(self, shipped: CompactRows) -> CompactRows:
        rows = slice(self._num_done, self._num_done + len(self._positions))
        if shipped.positions[rows].tolist() != self._positions:
            raise ValueError("the rows that were shipped are those of another run")
        return shipped.slice(rows)


def _prefill(length: int, budget: int) -> Run:
    lengths = [n for n in _LENGTHS if n < length] + [length]

    def play(model: CachedModel, ids: Ids, emit: Emit) -> None:
        for n in lengths:
            model.open_cache(1)
            wanted = _spread(n, budget) if n == length else np.array([n - 1])
            emit(wanted.tolist(), model.step(ids[None, :n], wanted))

    return Run(name="prefill", inputs=f"the text's first {_listed(lengths)} tokens, each in one piece", play=play)


def _decode(length: int) -> Run:
    first = max(1, min(64, length - NUM_STEPS))
    last = min(length, first + NUM_STEPS)

    def play(model: CachedModel, ids: Ids, emit: Emit) -> None:
        model.open_cache(1)
        emit([first - 1], model.step(ids[None, :first]))
        _steps(model, ids, first, last, emit)

    return Run(name="decode", inputs=f"tokens {first} to {last - 1} one by one after {first} in one piece", play=play)


def _chunks(length: int, budget: int) -> Run:
    sizes, left = [], length
    for size in (*_CHUNKS, *[_CHUNKS[-1]] * (length // _CHUNKS[-1])):
        if size <= left:
            sizes.append(size)
            left -= size
    sizes += [left] if left else []

    def play(model: CachedModel, ids: Ids, emit: Emit) -> None:
        model.open_cache(1)
        begin = 0
        for size in sizes:
            wanted = _spread(size, max(1, size * budget // length))
            emit((begin + wanted).tolist(), model.step(ids[None, begin : begin + size], wanted))
            begin += size

    return Run(name="chunked prefill", inputs=f"{length} tokens in pieces of {_listed(sizes)}", play=play)


def _ragged(length: int) -> Run:
    steps = min(_BATCH_STEPS, length // 4)
    room = min(length - steps, 128)
    firsts = [max(1, room // 25), room // 4, room]

    def play(model: CachedModel, ids: Ids, emit: Emit) -> None:
        model.open_cache(len(firsts))
        for slot, first in enumerate(firsts):
            emit([first - 1], model.step(ids[None, :first], first_slot=slot))
        for step in range(steps):
            places = [first + step for first in firsts]
            emit(places, model.step(ids[places][:, None]))

    words = f"three rows that hold {_listed(firsts)} tokens, {steps} steps together"
    return Run(name="ragged batch", inputs=words, play=play)


def _rewind(length: int, vocab_size: int) -> Run:
    first = min(length // 2, 48)
    back, wrong, chunk, end = first - 3, 7, 5, min(length, first + 10)

    def play(model: CachedModel, ids: Ids, emit: Emit) -> None:
        model.open_cache(1)
        model.step(ids[None, :first])
        model.step((ids[None, first : first + wrong] + 1) % vocab_size)
        model.rewind(0, back)
        rows = np.arange(chunk)
        emit((back + rows).tolist(), model.step(ids[None, back : back + chunk], rows))
        _steps(model, ids, back + chunk, end, emit)

    words = f"{first} tokens, {wrong} others, back to {back}, then the text's tokens to {end - 1}"
    return Run(name="rewind", inputs=words, play=play)


def _switch(at: int, what: str) -> Run:
    lengths = range(at - 1, at + 3)

    def play(model: CachedModel, ids: Ids, emit: Emit) -> None:
        for n in lengths:
            model.open_cache(1)
            emit([n - 1], model.step(ids[None, :n]))
        model.open_cache(1)
        emit([at - 3], model.step(ids[None, : at - 2]))
        _steps(model, ids, at - 2, at + 3, emit)

    words = f"lengths {at - 1} to {at + 2} in one piece, and one token at a time across {at}"
    return Run(name=what, inputs=words, play=play)


def _drop(at: int) -> Run:
    back, chunk = at - 4, 7

    def play(model: CachedModel, ids: Ids, emit: Emit) -> None:
        model.open_cache(1)
        emit([at - 3], model.step(ids[None, : at - 2]))
        _steps(model, ids, at - 2, at + 3, emit)
        model.rewind(0, back)
        rows = np.arange(chunk)
        emit((back + rows).tolist(), model.step(ids[None, back : back + chunk], rows))

    words = f"one token at a time across {at}, where rows that no window reaches may go, and again from {back}"
    return Run(name="rows beyond the window", inputs=words, play=play)


def _steps(model: CachedModel, ids: Ids, begin: int, end: int, emit: Emit) -> None:
    for position in range(begin, end):
        emit([position], model.step(ids[None, position : position + 1]))


def _spread(length: int, budget: int) -> NDArray[np.int64]:
    """At most `budget` positions below `length`, evenly spread, the last among them."""
    if length <= budget:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, budget).astype(np.int64))


def _listed(numbers: Sequence[int]) -> str:
    """`1, 7 and 64`; equal neighbours are counted."""
    groups = [[numbers[0], 1]]
    for before, number in pairwise(numbers):
        if number == before:
            groups[-1][1] += 1
        else:
            groups.append([number, 1])
    words = [f"{number}" if count == 1 else f"{count} x {number}" for number, count in groups]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

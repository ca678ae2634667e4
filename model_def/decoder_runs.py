"""The ways to feed a decoder a text over its KV cache that a certificate records and `verify` repeats.

In: a configuration, the ids of a text. Out: runs for `played_runs.py`, and what they do not reach, in words. It opens
no graph. Legend: L tokens of the text, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.config import TransformerConfig
from graphport.model_def.played_runs import ROW_BYTES, Emit, Run, listed, spread
from graphport.model_def.position_config import trained_length
from graphport.model_def.signature import LOGITS
from graphport.model_def.window_rows import moving_layers, rows_of

NUM_IDS = 512  # of the text, where the model is large and no switch lies beyond
LONGEST = 2048  # of the text; a switch beyond is not reached
NUM_STEPS = 128  # decoded one by one
NUM_CHUNKED_IDS = 256  # in pieces, or as far as the last switch

_PRODUCTS = 6e10  # of numbers, that a forward pass over the text may take: a second or two
_BEYOND = 16  # tokens after the last switch
_LENGTHS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 65)
_CHUNKS = (1, 7, 64, 128)
_MOST_ROWS = 128  # of the text in pieces: what was cached wrongly shows in all rows after it
_BATCH_STEPS = 24

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]
_Play = Callable[["CachedModel", Emit], None]


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


def switches(config: TransformerConfig) -> dict[int, str]:
    """Lengths at which the computation changes, and what changes: sliding windows, rotary scalings."""
    found: dict[int, str] = {}
    for block in config.blocks:
        attention = block.attention
        original = None if attention.rotary is None else trained_length(attention.rotary)
        if original is not None:
            found.setdefault(original, f"rotary scaling at {original}")
        if attention.window is not None:
            found[attention.window] = f"window of {attention.window}"
    return dict(sorted(found.items()))


def text_length(config: TransformerConfig, max_length: int) -> int:
    """Tokens of text to certify on, if there is room: 2048 of a small model, 512 of a large one, and switches below.

    As far too as the first step that drops rows of layers with a window.
    """
    size = 12 * len(config.blocks) * config.hidden_size**2 + config.vocab_size * config.hidden_size
    affordable = min(int(_PRODUCTS / size), LONGEST)
    drop = first_drop(config, max_length)
    beyond = 0 if drop is None or drop + _BEYOND > LONGEST else drop + _BEYOND
    return min(max_length, max(num_reaching(config, max(NUM_IDS, affordable)), beyond))


def first_drop(config: TransformerConfig, max_length: int) -> int | None:
    """Tokens before the first step that drops rows of layers with a window (`window_rows.py`), None without one."""
    rows = rows_of(config, moving_layers(config, max_length))
    return None if rows is None else rows.first_drop


def num_reaching(config: TransformerConfig, least: int) -> int:
    """Tokens, at least `least`, that go beyond the last switch that lies below 2048."""
    return max([least, *(at + _BEYOND for at in switches(config) if at + _BEYOND <= LONGEST)])


def uncovered(config: TransformerConfig, max_length: int, length: int) -> tuple[str, ...]:
    """What runs over `length` tokens do not reach, and why, in words."""
    if length >= max_length:
        return ()
    beyond = [f"{what}: it lies beyond the text" for at, what in switches(config).items() if length < at < max_length]
    drop = first_drop(config, max_length)
    if drop is not None and drop > length - 3:
        beyond.append(f"a cache without the rows beyond the window: its first step lies {drop} tokens into a text")
    why = "eager PyTorch would take longer on them than the export"
    return (f"lengths from {length + 1} to {max_length}: {why}", *beyond)


def planned_runs(config: TransformerConfig, text: Sequence[int]) -> tuple[Run[CachedModel], ...]:
    """The runs over the ids of a text; those that a very short text has no room for are left out."""
    ids, length = np.array(text, np.int64), len(text)
    most = max(1, ROW_BYTES // (4 * config.vocab_size))
    runs = [_prefill(ids, length, most)]
    if length >= 4:
        runs += [
            _decode(ids, length),
            _chunks(ids, min(length, num_reaching(config, NUM_CHUNKED_IDS)), min(most, _MOST_ROWS)),
        ]
    if length >= 24:
        runs += [_ragged(ids, length), _rewind(ids, length, config.vocab_size)]
    runs += [_switch(ids, at, what) for at, what in switches(config).items() if 3 <= at <= length - 3]
    drop = first_drop(config, length)
    if drop is not None and drop <= length - 3:
        runs.append(_drop(ids, drop))
    return tuple(runs)


def _prefill(ids: Ids, length: int, budget: int) -> Run[CachedModel]:
    lengths = [n for n in _LENGTHS if n < length] + [length]

    def play(model: CachedModel, emit: Emit) -> None:
        for n in lengths:
            model.open_cache(1)
            wanted = spread(n, budget) if n == length else np.array([n - 1])
            emit(wanted.tolist(), model.step(ids[None, :n], wanted))

    return _run("prefill", f"the text's first {listed(lengths)} tokens, each in one piece", play)


def _decode(ids: Ids, length: int) -> Run[CachedModel]:
    first = max(1, min(64, length - NUM_STEPS))
    last = min(length, first + NUM_STEPS)

    def play(model: CachedModel, emit: Emit) -> None:
        model.open_cache(1)
        emit([first - 1], model.step(ids[None, :first]))
        _steps(model, ids, first, last, emit)

    return _run("decode", f"tokens {first} to {last - 1} one by one after {first} in one piece", play)


def _chunks(ids: Ids, length: int, budget: int) -> Run[CachedModel]:
    sizes, left = [], length
    for size in (*_CHUNKS, *[_CHUNKS[-1]] * (length // _CHUNKS[-1])):
        if size <= left:
            sizes.append(size)
            left -= size
    sizes += [left] if left else []

    def play(model: CachedModel, emit: Emit) -> None:
        model.open_cache(1)
        begin = 0
        for size in sizes:
            wanted = spread(size, max(1, size * budget // length))
            emit((begin + wanted).tolist(), model.step(ids[None, begin : begin + size], wanted))
            begin += size

    return _run("chunked prefill", f"{length} tokens in pieces of {listed(sizes)}", play)


def _ragged(ids: Ids, length: int) -> Run[CachedModel]:
    steps = min(_BATCH_STEPS, length // 4)
    room = min(length - steps, 128)
    firsts = [max(1, room // 25), room // 4, room]

    def play(model: CachedModel, emit: Emit) -> None:
        model.open_cache(len(firsts))
        for slot, first in enumerate(firsts):
            emit([first - 1], model.step(ids[None, :first], first_slot=slot))
        for step in range(steps):
            places = [first + step for first in firsts]
            emit(places, model.step(ids[places][:, None]))

    words = f"three rows that hold {listed(firsts)} tokens, {steps} steps together"
    return _run("ragged batch", words, play)


def _rewind(ids: Ids, length: int, vocab_size: int) -> Run[CachedModel]:
    first = min(length // 2, 48)
    back, wrong, chunk, end = first - 3, 7, 5, min(length, first + 10)

    def play(model: CachedModel, emit: Emit) -> None:
        model.open_cache(1)
        model.step(ids[None, :first])
        model.step((ids[None, first : first + wrong] + 1) % vocab_size)
        model.rewind(0, back)
        rows = np.arange(chunk)
        emit((back + rows).tolist(), model.step(ids[None, back : back + chunk], rows))
        _steps(model, ids, back + chunk, end, emit)

    words = f"{first} tokens, {wrong} others, back to {back}, then the text's tokens to {end - 1}"
    return _run("rewind", words, play)


def _switch(ids: Ids, at: int, what: str) -> Run[CachedModel]:
    lengths = range(at - 1, at + 3)

    def play(model: CachedModel, emit: Emit) -> None:
        for n in lengths:
            model.open_cache(1)
            emit([n - 1], model.step(ids[None, :n]))
        model.open_cache(1)
        emit([at - 3], model.step(ids[None, : at - 2]))
        _steps(model, ids, at - 2, at + 3, emit)

    words = f"lengths {at - 1} to {at + 2} in one piece, and one token at a time across {at}"
    return _run(what, words, play)


def _run(name: str, inputs: str, play: _Play) -> Run[CachedModel]:
    return Run(name=name, inputs=inputs, output=LOGITS, play=play)


def _drop(ids: Ids, at: int) -> Run[CachedModel]:
    back, chunk = at - 4, 7

    def play(model: CachedModel, emit: Emit) -> None:
        model.open_cache(1)
        emit([at - 3], model.step(ids[None, : at - 2]))
        _steps(model, ids, at - 2, at + 3, emit)
        model.rewind(0, back)
        rows = np.arange(chunk)
        emit((back + rows).tolist(), model.step(ids[None, back : back + chunk], rows))

    words = f"one token at a time across {at}, where rows that no window reaches may go, and again from {back}"
    return _run("rows beyond the window", words, play)


def _steps(model: CachedModel, ids: Ids, begin: int, end: int, emit: Emit) -> None:
    for position in range(begin, end):
        emit([position], model.step(ids[None, position : position + 1]))

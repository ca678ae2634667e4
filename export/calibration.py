"""The token ids that quantisation is calibrated on, and those on which its result is measured.

In: a source, and a text of the user's or the one that ships. Out: windows of ids. It runs no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphport.export.calibration_text import CALIBRATION_TEXT
from graphport.export.plain_tokenizer import plain_tokenizer
from graphport.export.source import SourceModel
from graphport.model_def.text_file import read_text

WINDOW = 512  # tokens read at once
MOST_IDS = 8192  # of a text: 16 windows
MOST_WINDOWS = 256  # where a short context cuts them smaller
FEWEST_IDS = 256  # of the user's text
HELD_OUT = 4  # one token in so many is kept for measuring, at most a window

_RANDOM_IDS = 512  # where there is no text


class CalibrationError(ValueError):
    """A calibration text that cannot be used; the message says what it has and what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Windows of ids to calibrate on, the window `held_out` from them to measure on, and notes for the user."""

    windows: tuple[tuple[int, ...], ...]
    held_out: tuple[int, ...]
    notes: tuple[str, ...] = ()


def read_calibration(path: str | Path | None) -> str | None:
    """The text of the user's file, None for none; raises CalibrationError when it is missing, empty or no UTF-8."""
    if path is None:
        return None
    try:
        text = read_text(Path(path), argument="--calibration")
    except (ValueError, OSError) as error:
        raise CalibrationError(str(error)) from error
    if not text.strip():
        raise CalibrationError(f"calibration text {path} is empty; needed are at least {FEWEST_IDS} tokens of UTF-8")
    return text


def calibration_ids(
    opened: SourceModel, text: str | None = None, *, max_length: int, seed: int, name: str = "the calibration text"
) -> Calibration:
    """Ids of `text`, None: of the one that ships, in windows of at most `max_length` that begin as texts do.

    Without a tokenizer that fits the model the ids are random. Raises CalibrationError when the user's text is too
    short or has no tokenizer to read it.
    """
    vocab_size = opened.model.config.vocab_size
    if opened.tokenizer_json is None:
        if text is not None:
            raise CalibrationError(f"{name} needs a tokenizer, which this source lacks; leave --calibration out")
        return _cut(_random_ids(vocab_size, seed), (), max_length=max_length)
    tokenizer = plain_tokenizer(opened.tokenizer_json)
    encoded = tokenizer.encode(CALIBRATION_TEXT if text is None else text)
    is_added = encoded.special_tokens_mask
    prefix = encoded.ids[: next((i for i, added in enumerate(is_added) if not added), 0)]
    ids = [i for i, added in zip(encoded.ids, is_added, strict=True) if not added]
    fits = max(encoded.ids, default=0) < vocab_size
    if text is None:
        return _cut(ids if fits else _random_ids(vocab_size, seed), prefix if fits else (), max_length=max_length)
    if not fits:
        raise CalibrationError(
            f"{name}: the tokenizer makes id {max(encoded.ids)}, the model's vocabulary has {vocab_size}; "
            "leave --calibration out"
        )
    if len(ids) < FEWEST_IDS:
        raise CalibrationError(f"{name} has {len(ids)} tokens; needed are at least {FEWEST_IDS}: give a longer text")
    return _cut(ids, prefix, max_length=max_length, name=name)


def _random_ids(vocab_size: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(vocab_size, size=_RANDOM_IDS)]


def _cut(ids: Sequence[int], prefix: Sequence[int], *, max_length: int, name: str | None = None) -> Calibration:
    """Windows of `ids`, the last of them held out; each begins with `prefix` where that leaves room.

    A text that has a `name` is the user's: what is not read of it is noted.
    """
    prefix = tuple(prefix) if len(prefix) < max_length else ()
    size = min(WINDOW, max_length - len(prefix))
    read = ids[: min(MOST_IDS, MOST_WINDOWS * size)]
    start = len(read) - min(size, len(read) // HELD_OUT)
    note = f"calibrated on the first {len(read)} of {len(ids)} tokens of {name}"
    return Calibration(
        windows=tuple(prefix + tuple(read[i : min(i + size, start)]) for i in range(0, start, size)),
        held_out=prefix + tuple(read[start:]),
        notes=() if name is None or len(read) == len(ids) else (note,),
    )

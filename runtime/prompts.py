"""Token ids of a prompt, checked before anything runs.

In: what a caller gave as ids. Out: a tuple of int within the vocabulary and the length limit. It encodes no text.
"""

from collections.abc import Sequence

import numpy as np


def checked_prompt_ids(ids: object, name: str, *, vocab_size: int, max_length: int) -> tuple[int, ...]:
    """Token ids as a tuple of int, from a list, tuple or one-dimensional integer array of any layout.

    Raises TypeError for anything else (bools and floats are refused even where they equal an integer), and ValueError
    when there are none, more than `max_length`, or one outside 0 .. vocab_size - 1.
    """
    checked = _integers(ids, name)
    if not checked:
        raise ValueError(f"{name} is empty; give at least one token (for instance the begin-of-text id)")
    if len(checked) > max_length:
        raise ValueError(
            f"{name} has {len(checked)} tokens, more than max_length ({max_length}); shorten it or load the bundle "
            "with a larger max_length"
        )
    outside = [value for value in checked if not 0 <= value < vocab_size]
    if outside:
        raise ValueError(f"{name} has id {outside[0]}, outside the vocabulary: ids are 0 to {vocab_size - 1}")
    return checked


def _integers(ids: object, name: str) -> tuple[int, ...]:
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(f"{name} is a {ids.dtype} array of shape {list(ids.shape)}; give one row of integer ids")
        return tuple(ids.tolist())
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise TypeError(f"{name} is of type {type(ids).__name__}; give a str or a list of ids")
    for value in ids:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            shown = (
                f"{value!r} ({type(value).__name__})"
                if value is None or np.isscalar(value)
                else f"a {type(value).__name__}"
            )
            raise TypeError(f"{name} holds {shown}; ids are integers")
    return tuple(int(value) for value in ids)

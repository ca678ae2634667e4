"""Whole numbers that a caller chooses for an open model, checked before anything is opened.

In: a name, a value, its bounds. Out: the value as int, or an error in one line. It knows no model.
"""

import numbers

MOST_ROWS = 65_536  # of a batch: more than any machine decodes, and few enough to keep count of


def checked_count(name: str, value: object, *, most: int | None = None, reason: str = "") -> int:
    """`value` as int from 1 to `most` (None: unbounded); `reason` says where `most` comes from.

    Raises TypeError for anything but an integer (bools are none), ValueError outside the bounds.
    """
    allowed = "at least 1" if most is None else f"1 to {most}{reason}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, {allowed}; got {value!r} ({type(value).__name__})")
    number = int(value)
    if number < 1 or (most is not None and number > most):
        raise ValueError(f"{name} must be {allowed}; got {number}")
    return number

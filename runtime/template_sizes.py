"""How large a template's next operation could make a text or a list, estimated before it runs.

In: the operation's name and its values, of any kind. Out: nothing, or `TemplateLimitError`. It computes no result and
counts no steps (see `template_sandbox.py`). Sizes are characters; an element of a list counts as one at least.
"""

import re
from collections.abc import Sequence

from jinja2.exceptions import SecurityError

MAX_TEXT = 1 << 24  # characters of the rendered prompt and of any text on the way

# Filters that only pass elements on; all others may turn a whole list into text.
_STRUCTURAL_FILTERS = (
    *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list"),
    *("map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort"),
    "unique",
)
_LARGE_WIDTH = re.compile(r"\d{6}|\{[^{}]*\{|%[^a-zA-Z%]*\*")


class TemplateLimitError(SecurityError):
    """A template that takes more time or memory than a prompt can need."""


def require_size(characters: int) -> None:
    """Refuse more than MAX_TEXT characters."""
    if characters > MAX_TEXT:
        raise TemplateLimitError(f"the template makes a text of more than {MAX_TEXT} characters")


def require_operation(operator: str, left: object, right: object) -> None:
    """Refuse `left operator right` for `*`, `**`, `+`, `%` if its result could be too large."""
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        require_size(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        require_format(left, (right,))
    elif operator == "**":
        require_size(_bits(left) * _int(right))
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple):
                require_size(len(sequence) * _int(count))
        require_size(_bits(left) + _bits(right))


def require_call(name: str, value: object, others: Sequence[object]) -> None:
    """Refuse the filter or text method `name` on `value` with the arguments `others` if it could make too much."""
    if name in ("batch", "slice", "center", "ljust", "rjust", "zfill"):
        require_size(sum(map(_int, others)))
    elif name in ("indent", "expandtabs"):
        places = 1 + str(value).count("\n") + str(value).count("\t")
        require_size(size_of(value) + places * sum(_int(other) + size_of(other) for other in others))
    elif name in ("tojson", "translate"):
        require_size(size_of(value) * sum((_int(other) + size_of(other) for other in others), start=1))
    elif name == "wordwrap":
        require_size(size_of(value) * sum((size_of(other) for other in others), start=1))
    elif name == "replace" and len(others) >= 2:
        text, old, new = str(value), str(others[0]), str(others[1])
        require_size(len(text) + text.count(old) * len(new))
    elif name == "join":
        separator, items = (value, others[0]) if isinstance(value, str) and others else (others and others[0], value)
        require_size(size_of(items) + size_of(separator) * (len(items) if isinstance(items, Sequence) else 1))
    elif name == "format":
        require_format(str(value), others)
    elif name not in _STRUCTURAL_FILTERS:
        require_size(size_of(value))


def require_format(text: str, values: Sequence[object]) -> None:
    """Refuse to format `values` by `text` with an enormous or a computed width, or into an enormous text."""
    if _LARGE_WIDTH.search(text):
        raise TemplateLimitError(f"the template formats with a width of six digits or a computed one: {text[:40]!r}")
    require_size(len(text) + (text.count("%") + text.count("{")) * size_of(tuple(values)))


def size_of(value: object) -> int:
    """Characters of a text, or of everything inside a list or mapping; counting ends once it is more than MAX_TEXT."""
    if isinstance(value, str):
        return len(value)
    size = 0
    stack: list[object] = [value]
    while stack and size <= MAX_TEXT:
        item = stack.pop()
        size += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return size


def _int(value: object) -> int:
    return abs(int(value)) if isinstance(value, int) else 1


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 1

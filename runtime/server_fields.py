"""A JSON body, read and taken apart field by field; a field of a wrong type is refused by name.

In: the bytes of a request. Out: a record whose fields are asked for by name and type, and an error for those that
nobody asked for. It knows no fields itself.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from graphport.runtime.server_errors import ApiError

_MAX_DEPTH = 64
_MOST_DIGITS = 640  # of a whole number; Python itself can be set to refuse more from there on, and does from 4,300


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError (400) for anything else, and for nesting beyond 64."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"the body is no UTF-8 (byte {error.start}); send JSON in UTF-8", code="bad_body"
        ) from error
    try:
        record = json.loads(text, parse_int=_integer, parse_constant=_no_constant, object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="bad_body") from error
    if not isinstance(record, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(record)}", code="bad_body")
    if body.count(b"[") + body.count(b"{") > _MAX_DEPTH:
        _require_shallow(record)
    return record


class _LongInteger(str):
    """The digits of a whole number that are too many for Python to read."""

    __slots__ = ()


def _integer(digits: str) -> "int | _LongInteger":
    return int(digits) if len(digits) <= _MOST_DIGITS else _LongInteger(digits)


def _is_long(value: object) -> bool:
    return any(map(_is_long, value)) if isinstance(value, list) else isinstance(value, _LongInteger)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`; of two values of one field JSON does not say which holds.

    Raises ApiError for them, and for whole numbers that are too long.
    """
    record = dict(pairs)
    long = next((name for name, value in pairs if _is_long(value)), None)
    if long is not None:
        raise ApiError(
            400,
            f"{long} holds a whole number of more than {_MOST_DIGITS} digits; give a smaller one",
            param=long,
            code="bad_body",
        )
    if len(record) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ApiError(400, f"the body has the field {name!r} twice in one object; give it once", code="bad_body")
    return record


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {_MAX_DEPTH} deep; flatten it", code="bad_body")


def _require_shallow(record: object) -> None:
    level = [record]
    for _ in range(_MAX_DEPTH + 1):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


class Fields:
    """The fields of one record, at `place` of the body. null stands for a field that was left out, as OpenAI has it."""

    def __init__(self, record: object, place: str = "") -> None:
        if not isinstance(record, dict):
            raise ApiError(400, f"{place} must be an object, not {_kind(record)}", param=place, code="invalid_type")
        self._left: dict[str, Any] = dict(record)
        self._place = place

    def name(self, field: str) -> str:
        """The field's whole name, as errors give it."""
        return f"{self._place}.{field}" if self._place else field

    def names(self) -> list[str]:
        """Names of the fields that nobody has taken."""
        return list(self._left)

    def take(self, field: str) -> Any:  # noqa: ANN401 - a JSON value, whose type the caller checks
        """The value of a field; None where there is none."""
        return self._left.pop(field, None)

    def text(self, field: str) -> str | None:
        """A string."""
        value = self.take(field)
        if value is not None and not isinstance(value, str):
            self.refuse(field, f"must be a string, not {_kind(value)}", code="invalid_type")
        return value

    def needed_text(self, field: str) -> str:
        """A string that must be there."""
        value = self.text(field)
        return self.refuse(field, "is needed: a string", code="missing") if value is None else value

    def flag(self, field: str) -> bool:
        """A boolean; False where there is none."""
        value = self.take(field)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.refuse(field, f"must be true or false, not {_kind(value)}", code="invalid_type")
        return value

    def count(self, field: str, *, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self.take(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            self.refuse(field, f"must be a whole number from {low} to {high}, not {_kind(value)}", code="invalid_type")
        if value is not None and not low <= value <= high:
            self.refuse(field, f"must be a whole number from {low} to {high}; got {value}")
        return value

    def items(self, field: str) -> list[Any] | None:
        """A list."""
        value = self.take(field)
        if value is not None and not isinstance(value, list):
            self.refuse(field, f"must be a list, not {_kind(value)}", code="invalid_type")
        return value

    def record(self, field: str) -> "Fields | None":
        """An object."""
        value = self.take(field)
        return None if value is None else Fields(value, self.name(field))

    def choice(self, field: str, allowed: Mapping[str, Any] | tuple[str, ...]) -> str | None:
        """One of the words `allowed`."""
        value = self.text(field)
        if value is not None and value not in allowed:
            self.refuse(field, f"must be one of {', '.join(allowed)}; got {value!r}")
        return value

    def refuse(self, field: str, why: str, *, code: str = "invalid_value") -> NoReturn:
        """Raise the refusal of a field."""
        name = self.name(field)
        raise ApiError(400, f"{name} {why}", param=name, code=code)

    def leave_out(self, fields: Mapping[str, Any]) -> None:
        """Refuse fields that would change the answer and cannot be heeded; `fields` has the values that change none."""
        for field, neutral in fields.items():
            value = self.take(field)
            if value is not None and (value != neutral or isinstance(value, bool) != isinstance(neutral, bool)):
                allowed = "be left out" if neutral is None else f"be left out or {json.dumps(neutral)}"
                self.refuse(field, f"is not supported here: it must {allowed}", code="unsupported")

    def ignore(self, fields: tuple[str, ...]) -> tuple[str, ...]:
        """Take fields that change no answer; those that were there."""
        return tuple(field for field in fields if self.take(field) is not None)

    def finish(self) -> None:
        """Refuse what is left, which is no field at all."""
        for field, value in self._left.items():
            if value is not None:
                name = self.name(field)
                raise ApiError(
                    400, f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
                )

"""Ends a text at the first stop string, and shows nothing that may still become part of one.

In: decoded text in pieces of any length (never token by token ids: a stop may begin inside one token and end inside
another). Out: the text that may be shown. It does not decode, and it knows nothing of end ids.
"""

from collections.abc import Sequence


class StopStrings:
    """Watches one text. Which stop wins depends on the text alone, not on how it was cut into pieces.

    The stop that is complete first wins, and of two complete at the same character the longer one; the text ends just
    before it. Each stop is followed by its own automaton (Knuth, Morris, Pratt 1977), so a character costs a constant
    on average, and exactly the longest ending that is a beginning of some stop is held back.
    Characters are code points: an emoji stop also ends a text in which the emoji begins a longer joined sequence.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or "" in stops:
            raise ValueError(f"stops={stops!r} must be a sequence of non-empty strings")
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._is_over = False

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Returns what may be shown now, and whether a stop is complete, after which nothing may follow."""
        if self._is_over:
            raise ValueError("the text has ended: push nothing after a stop or after flush")
        if not self._stops:
            return text, False
        waiting = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            length = self._advance(character)
            if length:
                self._is_over, self._held = True, ""
                return waiting[: end - length], True
        shown = len(waiting) - max(self._matched)
        self._held = waiting[shown:]
        return waiting[:shown], False

    def flush(self) -> str:
        """The text still held back, once generation has ended for another reason; empty after a stop."""
        held, self._held, self._is_over = self._held, "", True
        return held

    def _advance(self, character: str) -> int:
        """Follow every stop by one character; the length of the longest one complete now, or 0."""
        complete = 0
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[i] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete


def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = borders[matched - 1]
        matched += stop[i] == stop[matched]
        borders[i] = matched
    return tuple(borders)

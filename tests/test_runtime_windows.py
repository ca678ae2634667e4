"""Windows over a text: every token is scored once, and with enough before it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphport.runtime.windows import Window, scoring_windows


@st.composite
def _plans(draw: st.DrawFn) -> tuple[int, int, int, bool]:
    has_prefix = draw(st.booleans())
    size = draw(st.integers(1 if has_prefix else 2, 40))
    return draw(st.integers(1, 200)), size, draw(st.integers(1, size)), has_prefix


@settings(max_examples=500, deadline=None)
@given(_plans())
def test_every_token_is_scored_once_but_the_first_of_a_window_that_has_nothing_before_it(
    plan: tuple[int, int, int, bool],
) -> None:
    num_tokens, size, stride, has_prefix = plan
    windows = list(scoring_windows(num_tokens, size=size, stride=stride, has_prefix=has_prefix))
    scored = [token for window in windows for token in range(window.first, window.end)]
    step = size if stride == size else num_tokens  # without overlap every window has a first token, else the text
    unscored = set() if has_prefix else set(range(0, num_tokens, step))
    assert scored == [token for token in range(num_tokens) if token not in unscored]
    for window in windows:
        assert window.begin % stride == 0
        assert window.begin <= window.first < window.end <= window.begin + size
        assert window.first > window.begin or has_prefix
        # all but the first window's tokens have what does not move on before them
        assert window.begin == 0 or window.first - window.begin >= min(size - stride, window.first)


@pytest.mark.parametrize(
    ("stride", "has_prefix", "expected"),
    [
        (4, False, [(0, 4, 1), (4, 8, 5), (8, 10, 9)]),
        (4, True, [(0, 4, 0), (4, 8, 4), (8, 10, 8)]),
        (2, False, [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)]),
        (3, True, [(0, 4, 0), (3, 7, 4), (6, 10, 7)]),
    ],
)
def test_windows_are_those_of_the_guide(stride: int, has_prefix: bool, expected: list[tuple[int, int, int]]) -> None:
    windows = list(scoring_windows(10, size=4, stride=stride, has_prefix=has_prefix))
    assert windows == [Window(begin=begin, end=end, first=first) for begin, end, first in expected]


def test_a_last_token_alone_in_its_window_is_not_scored_without_a_prefix() -> None:
    assert [w.end for w in scoring_windows(9, size=4, stride=4, has_prefix=False)] == [4, 8]
    assert [w.end for w in scoring_windows(9, size=4, stride=4, has_prefix=True)] == [4, 8, 9]

"""Which windows of a text are run, and which tokens each of them scores.

In: the number of tokens and sizes. Out: windows, in order; together they score each token at most once. It runs
nothing. The scheme is the sliding window of transformers' guide "Perplexity of fixed-length models".
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Tokens begin .. end-1 of a text are run; first .. end-1 of them are scored, the others are context."""

    begin: int
    end: int
    first: int


def scoring_windows(num_tokens: int, *, size: int, stride: int, has_prefix: bool) -> Iterator[Window]:
    """Windows of `size` tokens that begin every `stride` tokens; each scores what those before it did not reach.

    A token that is the first of its window has nothing before it to be predicted from, unless a prefix of special
    tokens stands before every window: without one it is not scored. So stride < size leaves out the first token of
    the text alone, and stride = size the first token of every window. Needs 1 <= stride <= size.
    """
    begin = end = 0
    while end < num_tokens:
        scored, end = end, min(begin + size, num_tokens)
        first = max(scored, begin if has_prefix else begin + 1)
        if first < end:
            yield Window(begin=begin, end=end, first=first)
        begin += stride

"""What a caller waits for: the samples of one prompt, or the logits of its positions, and what they have brought.

In: sequences and the queue that they fill. Out: whether there is something to read, or nothing more to come. It runs
nothing and checks no arguments.
"""

from collections import deque
from collections.abc import Sequence as Many
from typing import Generic, TypeVar

from graphport.runtime.sequence import Sequence

Result = TypeVar("Result")


class Request(Generic[Result]):
    """Sequences of one prompt that fill one queue of `results`."""

    def __init__(self, sequences: Many[Sequence], results: deque[Result], *, num_outputs: int | None = None) -> None:
        """`num_outputs`: how many of the sequences, the first ones, are results; all by default."""
        self.sequences = tuple(sequences)
        self.outputs = self.sequences[:num_outputs]
        self.results = results

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended, for any reason or by an error."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def error(self) -> Exception | None:
        """The error of the first sequence that has one."""
        return next((sequence.error for sequence in self.sequences if sequence.error is not None), None)

    def raise_error(self) -> None:
        """Raise `error` if there is one."""
        if self.error is not None:
            raise self.error

"""How a request is served, beside what is sampled: how urgent it is, and for how long it may run.

In: what a caller gave by name. Out: `RequestOptions`, checked before anything runs. It orders and stops nothing.
"""

import numbers
import time
from dataclasses import dataclass
from typing import TypedDict

from graphport.model_def.flags import require_flags, require_optional_flags
from graphport.runtime.sequence_state import SequenceState


class RequestArguments(TypedDict, total=False):
    """The keyword arguments of a request; see RequestOptions."""

    priority: int
    timeout: float | None
    state: SequenceState | None
    keep_state: bool
    speculate: bool
    language: str | None
    source_language: str | None
    task: str | None
    timestamps: bool | None


_LONGEST_TIMEOUT = 1e9  # seconds, 31 years


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of one request.

    priority: requests of a lower number are taken up first (vLLM's rule), those of the same in the order in which they
    came. timeout: seconds from the call after which a request that has not ended does so, with reason "cancelled" and
    what it has. state: rows that need not be computed again, as far as its ids and the prompt's are the same.
    keep_state: whether the output has a state (in `generate`). speculate: whether drafts are checked, if the model was
    loaded with a source of drafts. language, source_language: codes of the languages to translate to and from, of a
    model that has such. task: transcribe or translate, and timestamps: whether times are marked in the text, of a model
    that hears; by default what the checkpoint says. Raises TypeError and ValueError by name.
    """

    priority: int = 0
    timeout: float | None = None
    state: SequenceState | None = None
    keep_state: bool = False
    speculate: bool = True
    language: str | None = None
    source_language: str | None = None
    task: str | None = None
    timestamps: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, numbers.Integral):
            raise TypeError(f"priority must be a whole number, the lower the sooner; got {self.priority!r}")
        require_flags(keep_state=self.keep_state, speculate=self.speculate)
        require_optional_flags(timestamps=self.timestamps)
        for name, what in (
            ("language", "a language's code"),
            ("source_language", "a language's code"),
            ("task", "a name"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be None or {what}; got {value!r}")
        if self.timeout is None:
            return
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, numbers.Real):
            raise TypeError(f"timeout must be None or a number of seconds above 0; got {self.timeout!r}")
        if not 0 < self.timeout <= _LONGEST_TIMEOUT:
            raise ValueError(
                f"timeout must be None or a number of seconds above 0, up to {_LONGEST_TIMEOUT:g}; got {self.timeout}"
            )

    @property
    def deadline(self) -> float | None:
        """The end of the time-out if it begins now, in seconds of `time.monotonic`."""
        return None if self.timeout is None else time.monotonic() + self.timeout

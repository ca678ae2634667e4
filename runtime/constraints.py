"""Text that must follow a JSON schema, a regular expression or a grammar: which tokens may come next.

In: SamplingParams and a tokenizer. Out: a `Constraint` a sequence, from which its sampler reads a mask before each
choice. Grammars are parsed and masks computed by llguidance; some microseconds a token, and only for the rows that ask
for it.
"""

import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.field_error import FieldError
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# One way to write each value, that of json.dumps: models that may write white space anywhere tend to loop in it.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# what llguidance 1.9 calls NoExtensionBias, in words
_DEAD_END = "no text completes it, as its rules name each other without an end"


class ConstraintError(RuntimeError):
    """A grammar that cannot be followed any further: llguidance gave up on its size, or no token is allowed.

    `field`: the field of SamplingParams that holds the grammar, None if no single one is to blame.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Constraint:
    """Follows one sequence. `is_complete` once nothing but the end may follow. `field`: see ConstraintError."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, *, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._vocab_size = vocab_size
        self.is_complete = False

    def allowed(self) -> NDArray[np.bool_]:
        """Whether each id [V] may come next. Raises ConstraintError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Go on after `token_id`, which was allowed. Raises ConstraintError."""
        self._matcher.consume_token(token_id)
        self._check()
        self.is_complete = self._matcher.is_stopped()

    def copy(self) -> "Constraint":
        """The same constraint, for another sequence that begins here."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size, field=self._field)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(
                f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}", field=self._field
            )


class Grammars:
    """Makes constraints for one tokenizer; it is read when the first is asked for, which takes half a second.

    `vocab_size`: of the model's head, which may be padded beyond the tokenizer. `end_ids`: those that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = [end for end in end_ids if end < tokenizer.vocab_size]
        self._reading = threading.Lock()
        self._tokens: LLTokenizer | None = None

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """The constraint of `params`, None if they have none.

        Raises FieldError for what llguidance cannot follow, RuntimeError if it is not installed.
        """
        name = params.constraint
        if name is None:
            return None
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise RuntimeError(
                f"{name} needs llguidance, which is not installed; do: pip install 'graphport[constrained]'"
            ) from error
        text = getattr(params, name)
        try:
            if name == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE)  # type: ignore[arg-type]  # a record
            elif name == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            else:
                grammar = LLMatcher.grammar_from_lark(text)
        except ValueError as error:  # of the text itself, a lone surrogate for instance
            raise FieldError(f"{name} cannot be read: {error}; change it", field=name) from error
        matcher = LLMatcher(self._read_tokens(), grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that no text ends is noticed here
        if matcher.is_error():
            raise FieldError(f"{name} cannot be followed: {_first_line(matcher.get_error())}; change it", field=name)
        return Constraint(matcher, self._vocab_size, field=name)

    def _read_tokens(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        with self._reading:
            if self._tokens is None:
                ends = self._end_ids or None
                self._tokens = LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=ends)
            return self._tokens


def _first_line(message: str) -> str:
    """A message of llguidance in one line, without the state of its parser, which follows."""
    line = " ".join(message.split("<state>", maxsplit=1)[0].split())
    return _DEAD_END if line == "NoExtensionBias" else line

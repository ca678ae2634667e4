"""What a caller asks of generation: one frozen record with vLLM's names, checked completely at construction.

In: keyword arguments. Out: `SamplingParams` with every field normalised (tuples, ints, floats). It draws nothing
(see `sampling.py`), and it knows no vocabulary: what depends on one is checked where the two meet, by `Sampler`.
"""

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_CONSTRAINTS = ("json_schema", "regex", "grammar")
_LARGEST_SEED = 2**63 - 1
_LARGEST_ID = 2**31 - 1
_LARGEST_PENALTY = 100.0
_PENALTIES = f"a number from {-_LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g} (0 is off)"
_LARGEST_BIAS = 100  # OpenAI's bound


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the ids of one sequence, and when to end it.

    n: samples of the prompt, which is run once for all of them; each needs a place in the batch.
    max_new_tokens: None generates up to the length limit; 0 generates nothing.
    temperature: divides the logits; 0 is greedy: the highest logit, the lowest id among equals, and no filter.
    top_k: keep the k highest; 0 and None turn it off, more than the vocabulary keeps all of it.
    top_p: keep the smallest set of most likely ids whose probability reaches top_p; 0 keeps one id, 1 is off.
    min_p: drop ids less likely than min_p times the most likely one; 0 is off.
    repetition_penalty: ids of prompt and output, once each: positive logits are divided, negative multiplied; 1 is off.
    presence_penalty, frequency_penalty: taken from the logits of generated ids, once, and once an occurrence.
    seed: the sequence's own stream of random numbers; None takes fresh entropy from the operating system. Of n samples,
    the first has the stream of n=1, and the others have streams derived from the seed and their number.
    stop, stop_token_ids: text and ids that end generation, besides the model's own end ids (unless `ignore_eos`).
    logprobs: number of most likely alternatives to report for each id; None reports none.

    prompt_logprobs: the same for each id of the prompt, given those before it; 0 reports the id's own alone.
    logit_bias: numbers from -100 to 100 that are added to the logits of ids, before anything else. bad_words: words
    that are not generated: the last token of each is never chosen where it would complete the word's own tokens, at the
    beginning of a text or after a space (vLLM's rule). json_schema, regex, grammar: what the text must follow, at most
    one of them: a JSON schema as text or record, a regular expression, or a grammar in llguidance's Lark syntax. It
    ends where nothing more may follow.
    num_beams: above 1, the texts are those of beam search, the n best of them best first; each beam needs a place in
    the batch. It needs temperature 0, and neither samples nor streams. length_penalty: the power of its length that a
    text's log probability is divided by (above 0 favours long texts). early_stopping: True ends the search with
    num_beams texts done, False where no better one is likely, "never" where none is possible. num_beam_groups: above 1,
    the beams search in so many groups of one size, and diversity_penalty is what a group pays for each time that a
    group before it has chosen the same id at the same step (diverse beam search).

    Raises TypeError for a value of a wrong type and ValueError for one out of range, naming both.
    """

    n: int = 1
    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, low=1, allowed="an integer from 1"))
        self._set_integers()
        self._set_floats()
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))
        self._set("bad_words", _bad_words(self.bad_words))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("json_schema", _json_schema(self.json_schema))
        self._check_constraints()
        self._check_beams()
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos={self.ignore_eos!r} must be True or False")

    def _set_integers(self) -> None:
        top_k = 0 if self.top_k is None else self.top_k
        self._set("top_k", _integer("top_k", top_k, low=0, allowed="0 or None (off) or a positive integer"))
        for name, allowed, high in (
            ("max_new_tokens", "None (up to the length limit) or an integer from 0", None),
            ("seed", f"None or an integer from 0 to {_LARGEST_SEED}", _LARGEST_SEED),
            ("logprobs", "None or an integer from 0", None),
            ("prompt_logprobs", "None or an integer from 0", None),
        ):
            value = getattr(self, name)
            if value is not None:
                self._set(name, _integer(name, value, low=0, high=high, allowed=allowed))

    def _set_floats(self) -> None:
        for name, low, high, allowed in (
            ("temperature", 0.0, math.inf, "0 (greedy) or a finite positive number"),
            ("top_p", 0.0, 1.0, "a number from 0 (the most likely id only) to 1 (off)"),
            ("min_p", 0.0, 1.0, "a number from 0 (off) to 1"),
            ("repetition_penalty", 1e-3, 1e3, "a number from 0.001 to 1000 (1 is off)"),
            ("presence_penalty", -2.0, 2.0, "a number from -2 to 2 (0 is off)"),
            ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2 (0 is off)"),
        ):
            value = _finite(name, getattr(self, name), allowed)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be {allowed}")
            self._set(name, value)

    def _check_constraints(self) -> None:
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name}={value!r} must be None or a string")
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: a text follows one of them")

    def _check_beams(self) -> None:
        self._set("num_beams", _integer("num_beams", self.num_beams, low=1, allowed="an integer from 1 (1 is off)"))
        penalty = _finite("length_penalty", self.length_penalty, _PENALTIES)
        if not -_LARGEST_PENALTY <= penalty <= _LARGEST_PENALTY:
            raise ValueError(f"length_penalty={penalty} must be {_PENALTIES}")
        self._set("length_penalty", penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping={self.early_stopping!r} must be True, False or 'never'")
        self._check_groups()
        if self.num_beams == 1:
            if penalty != 1 or self.early_stopping is not False:
                raise ValueError("length_penalty and early_stopping are of beam search: give num_beams above 1")
            return
        if not self.is_greedy:
            raise ValueError(
                f"num_beams={self.num_beams} needs temperature=0, got {self.temperature}: nothing is drawn"
            )
        if self.n > self.num_beams:
            raise ValueError(f"n={self.n} texts of num_beams={self.num_beams} beams; n must be at most num_beams")
        unread = {
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": self.logprobs is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
            str(self.constraint): self.constraint,
        }
        given = [name for name, value in unread.items() if value]
        if given:
            raise ValueError(f"{' and '.join(given)} cannot be heeded by beam search; leave it out, or num_beams")

    def _check_groups(self) -> None:
        groups = _integer("num_beam_groups", self.num_beam_groups, low=1, allowed="an integer from 1 (1 is off)")
        self._set("num_beam_groups", groups)
        allowed = f"a number from 0 to {_LARGEST_PENALTY:g}"
        penalty = _finite("diversity_penalty", self.diversity_penalty, allowed)
        if not 0 <= penalty <= _LARGEST_PENALTY:
            raise ValueError(f"diversity_penalty={penalty} must be {allowed}")
        self._set("diversity_penalty", penalty)
        if self.num_beams % groups:
            raise ValueError(f"num_beams={self.num_beams} must be a multiple of num_beam_groups={groups}")
        if (groups > 1) != (penalty > 0):
            raise ValueError(
                f"num_beam_groups={groups} and diversity_penalty={penalty} belong together: give groups above 1 and a "
                "penalty above 0, or neither"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def constraint(self) -> str | None:
        """Name of the field that says what the text must follow, if one does."""
        return next((name for name in _CONSTRAINTS if getattr(self, name) is not None), None)

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is taken and nothing is drawn."""
        return self.temperature == 0


def _integer(name: str, value: object, *, low: int, allowed: str, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be {allowed}, not {type(value).__name__}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}={number} must be {allowed}")
    return number


def _finite(name: str, value: object, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be {allowed}, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is a number beyond every float; it must be {allowed}") from error
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} must be {allowed}")
    return number


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise TypeError(f"stop={stop!r} must be a string or a sequence of strings")
    if "" in strings:
        raise ValueError(f"stop={stop!r} holds an empty string, which would end every text at once: remove it")
    return tuple(strings)


def _stop_ids(stop_token_ids: object) -> tuple[int, ...]:
    if isinstance(stop_token_ids, str | bytes) or not isinstance(stop_token_ids, Sequence):
        raise TypeError(f"stop_token_ids={stop_token_ids!r} must be a sequence of token ids")
    allowed = f"a token id (an integer from 0 to {_LARGEST_ID})"
    return tuple(
        _integer(f"stop_token_ids[{i}]", id_, low=0, high=_LARGEST_ID, allowed=allowed)
        for i, id_ in enumerate(stop_token_ids)
    )


def _bad_words(words: object) -> tuple[str, ...]:
    if isinstance(words, str) or not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"bad_words={words!r} must be a sequence of strings")
    if not all(word.strip() for word in words):
        raise ValueError(f"bad_words={words!r} holds a word without a character: remove it")
    return tuple(words)


def _logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias={bias!r} must be None or a mapping of token ids to numbers")
    checked = {}
    for id_, value in bias.items():
        key = _integer("a key of logit_bias", id_, low=0, high=_LARGEST_ID, allowed="a token id")
        allowed = f"a number from -{_LARGEST_BIAS} to {_LARGEST_BIAS}"
        number = _finite(f"logit_bias[{key}]", value, allowed)
        if abs(number) > _LARGEST_BIAS:
            raise ValueError(f"logit_bias[{key}]={number} must be {allowed}")
        checked[key] = number
    return checked


def _json_schema(schema: object) -> str | None:
    """The schema as JSON text."""
    if schema is None:
        return None
    try:
        record = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(record)
    except (ValueError, TypeError) as error:
        raise ValueError(f"json_schema is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("json_schema is nested too deeply to be read; flatten it") from error
    if not isinstance(record, Mapping):
        raise TypeError(f"json_schema must be a JSON object, as text or as a record; got {type(record).__name__}")
    return text

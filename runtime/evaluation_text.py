"""A text as the ids that are scored, with the way back to its characters.

In: the content of a file, and a tokenizer. Out: ids within the vocabulary, what stands before every window, excerpts.
What a tokenizer puts before a text (BOS) stands before every window, as before every prompt that is served; what it
puts after a text is left out. It runs no model.
"""

import json
import sys
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.prompts import checked_prompt_ids
from graphport.runtime.tokenizer import Tokenizer

_EXCERPT = 40  # characters before a token, and half as many after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A token of a text as it is written, and what stands around it."""

    before: str
    token: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationText:
    """Token ids [N] to be scored.

    `prefix_ids` stand before every window and are not scored. `spans` [N, 2] are the characters of `text` that each id
    stands for; both are None for ids without text.
    """

    ids: NDArray[np.int64]
    prefix_ids: tuple[int, ...] = ()
    text: str | None = None
    spans: NDArray[np.int64] | None = None

    def excerpt(self, index: int) -> Excerpt | None:
        """What is written at token `index`; None for ids without text."""
        if self.text is None or self.spans is None:
            return None
        begin, end = self.spans[index].tolist()
        before, after = self.text[max(0, begin - _EXCERPT) : begin], self.text[end : end + _EXCERPT // 2]
        return Excerpt(before=before, token=self.text[begin:end], after=after)

    def num_bytes(self, is_scored: NDArray[np.bool_]) -> int | None:
        """UTF-8 bytes of the text, less the characters that only tokens stand for which are not scored (bool [N])."""
        if self.text is None or self.spans is None:
            return None
        unread = self._is_written(~is_scored) & ~self._is_written(is_scored)
        left_out = "".join(self.text[place] for place in np.flatnonzero(unread).tolist())
        return len(self.text.encode()) - len(left_out.encode())

    def _is_written(self, tokens: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which characters of the text the chosen tokens (bool [N]) stand for."""
        assert self.text is not None
        assert self.spans is not None
        depth = np.zeros(len(self.text) + 1, np.int64)
        np.add.at(depth, self.spans[tokens, 0], 1)
        np.add.at(depth, self.spans[tokens, 1], -1)
        return depth.cumsum()[:-1] > 0


def evaluation_text(content: str, tokenizer: Tokenizer | None, *, vocab_size: int, name: str) -> EvaluationText:
    """What `content` of the file `name` holds: text, or without a tokenizer a JSON list of ids.

    Raises ValueError when it has fewer than two tokens (counting the tokenizer's prefix), or an id that the model's
    vocabulary lacks.
    """
    text = (
        _from_ids(content, vocab_size, name) if tokenizer is None else _from_text(content, tokenizer, vocab_size, name)
    )
    if len(text.prefix_ids) + len(text.ids) < 2 or not len(text.ids):
        raise ValueError(
            f"{name} has {len(text.ids)} tokens; at least two are needed, because a token is scored by what stands "
            "before it"
        )
    return text


def _from_text(content: str, tokenizer: Tokenizer, vocab_size: int, name: str) -> EvaluationText:
    if not content:
        raise ValueError(f"{name} is empty; give a text of at least two tokens")
    ids, spans = tokenizer.encode_with_spans(content)
    text = EvaluationText(
        ids=np.array(ids, np.int64),
        prefix_ids=tokenizer.prefix_ids(),
        text=content,
        spans=np.array(spans, np.int64).reshape(-1, 2),
    )
    outside = np.flatnonzero(text.ids >= vocab_size)
    if len(outside):
        begin, end = spans[outside[0]]
        raise ValueError(
            f"{name} holds {content[begin:end]!r} (id {ids[outside[0]]}, character {begin}), outside the model's "
            f"vocabulary: ids are 0 to {vocab_size - 1}; leave it out"
        )
    return text


def _from_ids(content: str, vocab_size: int, name: str) -> EvaluationText:
    needed = "this bundle has no tokenizer, so TEXTFILE must hold a JSON list of token ids, such as [1, 2, 3]"
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{name}: {needed}; it is no JSON ({error})") from error
    if not isinstance(values, list):
        raise ValueError(f"{name}: {needed}; it holds a {type(values).__name__}")
    try:
        ids = checked_prompt_ids(values, name, vocab_size=vocab_size, max_length=sys.maxsize)
    except TypeError as error:
        raise ValueError(f"{error}; {needed}") from error
    return EvaluationText(ids=np.array(ids, np.int64))


def require_same_tokens(
    text: EvaluationText, tokenizer: Tokenizer | None, reference: Tokenizer | None, *, name: str
) -> None:
    """Raise ValueError unless the reference `name` has the same vocabulary and reads `text` as the same ids."""
    if tokenizer is None and reference is None:
        return
    if tokenizer is None or reference is None:
        has = ("no tokenizer", "the bundle has one") if reference is None else ("a tokenizer", "the bundle has none")
        raise ValueError(f"{name} has {has[0]} and {has[1]}: whether their ids mean the same cannot be checked")
    ours, theirs = tokenizer.vocabulary(), reference.vocabulary()
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if different:
        token = different[0]
        raise ValueError(
            f"{name} has another vocabulary: {len(different)} tokens differ, {token!r} is id {ours.get(token)} in the "
            f"bundle and {theirs.get(token)} there; logits can be compared between models of one vocabulary only"
        )
    if reference.prefix_ids() != text.prefix_ids:
        raise ValueError(
            f"{name} puts ids {list(reference.prefix_ids())} before a text, the bundle {list(text.prefix_ids)}; export "
            "both from one source"
        )
    if text.text is not None and (ids := reference.encode_with_spans(text.text)[0]) != (own := text.ids.tolist()):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, own, strict=False))
        place = sum(1 for _ in same)
        raise ValueError(
            f"{name} splits the text into other tokens, first at token {place}; export both from one source"
        )

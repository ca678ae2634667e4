"""Text to ids and back, by the model's `tokenizer.json`; chat messages to ids by its `chat_template.jinja`.

In: a folder, then text, ids or messages. Out: ids or text. It trains nothing, and knows no end ids (the manifest
does). Special tokens written out in a text are read as special tokens, as in the reference tokenizers.
"""

import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers

from graphport.model_def.flags import require_flags
from graphport.model_def.signature import CHAT_TEMPLATE_FILE, SPECIAL_TOKEN_NAMES, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from graphport.model_def.vocabulary_evidence import VocabularyEvidence, vocabulary_evidence
from graphport.runtime.chat_template_error import ChatTemplateError
from graphport.runtime.text_stream import TextStream, bytes_of_token

if TYPE_CHECKING:
    from graphport.runtime.chat_template import ChatTemplate


class _TemplateSource(NamedTuple):
    path: Path
    text: str
    special_tokens: dict[str, str] | None


class Tokenizer:
    """A `tokenizers.Tokenizer` without truncation or padding, and the model's chat template if it has one."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat_template: _TemplateSource | None = None) -> None:
        tokenizer.no_truncation()  # a tokenizer.json may ask for both; they would change texts silently
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template_source = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._vocab_size = _one_past_the_highest(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and, if they are there, `chat_template.jinja` and `tokenizer_config.json`.

        Raises ValueError naming the file that is missing or damaged.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ValueError(f"{folder} has no {TOKENIZER_FILE}: without it there are ids, but no text")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise ValueError(f"{path} is damaged ({error}); export the bundle again") from error
        return cls(tokenizer, _read_chat_template(folder))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token; a model's head may be padded beyond it."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return self._template_source is not None

    def compile_chat_template(self) -> None:
        """Do now what the first chat would do: the template is compiled. Raises ChatTemplateError when it cannot be."""
        _ = self._chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, by default with the special tokens (such as BOS) that the tokenizer puts around a text.

        Raises TypeError for anything but str, and ValueError for lone surrogates, which are no Unicode text.
        """
        _check_text(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_at_most(self, text: str, length: int) -> tuple[list[int], int]:
        """Ids of `text`, special tokens included, cut to `length` by leaving out the end of the text; and the ids cut.

        Raises as `encode` does, and ValueError when the special tokens alone are more than `length`.
        """
        _check_text(text)
        room = length - self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if room < 0:
            raise ValueError(f"{length} tokens have no room for the {length - room} special tokens around a text")
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        num_cut = max(len(encoding.ids) - room, 0)
        encoding.truncate(room)
        return self._tokenizer.post_process(encoding).ids, num_cut

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text` with no special tokens around it, and the characters [begin, end) that each stands for.

        Tokens of one character's bytes have its span. Raises as `encode` does.
        """
        _check_text(text)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def prefix_ids(self) -> tuple[int, ...]:
        """The special tokens that `encode` puts before a text, such as BOS."""
        encoding = self._tokenizer.encode("a")
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(token_id for token_id, _ in takewhile(lambda pair: pair[1], marked))

    def to_json(self) -> str:
        """The text of a `tokenizer.json` of this tokenizer, without truncation or padding."""
        return self._tokenizer.to_str()

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id, added and special ones included."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def vocabulary_evidence(self) -> VocabularyEvidence:
        """What a certificate holds a tokenizer to, beside texts."""
        return vocabulary_evidence(self._tokenizer)

    def token(self, token_id: int) -> str | None:
        """How the vocabulary spells an id; None for an id without a token."""
        return self._tokenizer.id_to_token(token_id)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, by default without special tokens. Raises ValueError for an id that has no token."""
        checked = [self._checked(id_) for id_ in ids]
        return self._tokenizer.decode(checked, skip_special_tokens=skip_special_tokens)

    def bytes_of_part(self, token: str) -> bytes | None:
        """The bytes of a token, as the vocabulary spells it, that is a part of a character; None if that is unknown."""
        return bytes_of_token(token, self._tokenizer.decoder)

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for ids that come one by one; what it gives in sum equals `decode`."""
        return TextStream(self._tokenizer, self._special, skip_special_tokens=skip_special_tokens)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises ChatTemplateError; see `ChatTemplate.render`."""
        require_flags(add_generation_prompt=add_generation_prompt)
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    @cached_property
    def _chat_template(self) -> "ChatTemplate":
        if self._template_source is None:
            raise ChatTemplateError(f"this model has no {CHAT_TEMPLATE_FILE}: give it plain text instead of messages")
        from graphport.runtime.chat_template import ChatTemplate  # Jinja is 7 MiB that texts without a chat do not need

        path, text, special_tokens = self._template_source
        try:
            return ChatTemplate(text, special_tokens=special_tokens)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{path}: {error}") from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The prompt ids of a chat. The template writes all special tokens, so the tokenizer adds none of its own."""
        text = self.render_chat_template(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self.encode(text, add_special_tokens=False)

    def _checked(self, token_id: int) -> int:
        if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
            raise TypeError(f"a token id must be an integer, not {token_id!r}")
        if not 0 <= token_id < self._vocab_size or self._tokenizer.id_to_token(int(token_id)) is None:
            raise ValueError(f"token id {token_id} is not in the tokenizer's vocabulary (0 to {self._vocab_size - 1})")
        return int(token_id)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text must be str, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), "
            "which is no Unicode character: decode its source as UTF-8, or replace it"
        ) from error


def _one_past_the_highest(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the highest id. Ids without gaps, as nearly all are, are counted without copying the vocabulary."""
    size = int(tokenizer.get_vocab_size(with_added_tokens=True))
    if all(tokenizer.id_to_token(id_) is not None for id_ in range(size)):
        return size  # as many different ids as tokens, so that there is none above
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _read_chat_template(folder: Path) -> _TemplateSource | None:
    path = folder / CHAT_TEMPLATE_FILE
    if not path.is_file():
        return None
    special_tokens = _read_special_tokens(folder / TOKENIZER_CONFIG_FILE)
    try:
        return _TemplateSource(path, path.read_text(encoding="utf-8"), special_tokens)
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{path}: {error}") from error


def _read_special_tokens(path: Path) -> dict[str, str] | None:
    """Names and texts of special tokens; None without the file. An entry is a string or a record with `content`."""
    if not path.is_file():
        return None
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        tokens = {name: entries[name] for name in SPECIAL_TOKEN_NAMES if entries.get(name) is not None}
        return {name: token if isinstance(token, str) else token["content"] for name, token in tokens.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); export the bundle again") from error

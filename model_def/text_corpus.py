"""Texts and chats on which tokenizers and chat templates are compared, and what the reference made of them.

In: functions that encode and render, a tokenizer. Out: `TextEvidence`, and which texts others answer otherwise. It
reads no files.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.vocabulary_evidence import VocabularyEvidence, vocabulary_evidence

TEXTS = (
    "The capital of France is Paris.",
    "  two leading spaces, a tab\tand\n\nblank lines\r\n",
    "def add(a: int, b: int) -> int:\n    return a + b  # 3.14159, 1,000,000, 0x1F",
    "Größe, naïve café, e\u0301 combining, señor Ångström",
    "敏捷的棕色狐狸 今日は良い天気 한국어 مرحبا שלום Привет नमस्ते",
    "👋🌍 family 👨‍👩‍👧‍👦, flags 🇫🇷🇯🇵, ∑ x² ≤ ∫ f(x) dx",
    "tokens, tokenizer, tokenized, tokenization; the the of of and and",
    "<|im_start|>user\nhi<|im_end|> <s> </s> <bos> [INST] <start_of_turn>",
    "",
    PARITY_TEXT,
)

Message = Mapping[str, str]
CHATS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "What is the capital of France?"},),
    ({"role": "system", "content": "Answer in one word."}, {"role": "user", "content": " 2 + 2? \n"}),
    (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! {{ 1 + 1 }}"},
        {"role": "user", "content": "Größe?"},
    ),
)

Encode = Callable[[str], Sequence[int]]
Render = Callable[[Sequence[Message]], str | None]  # None: the template refuses the chat


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvidence:
    """Reference ids [texts][...] of TEXTS, and hashes of the rendered CHATS; None where the template refuses.

    `corpus` is the hash of both, `chats` None without a template or where its text depends on the date.
    """

    corpus: str
    vocabulary: VocabularyEvidence
    ids: tuple[tuple[int, ...], ...]
    chats: tuple[str | None, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "corpus": self.corpus,
            "vocabulary": self.vocabulary.to_dict(),
            "ids": [list(ids) for ids in self.ids],
            "chats": self.chats,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TextEvidence":
        """What `to_dict` wrote. Raises ValueError for another corpus than this version's."""
        if data["corpus"] != corpus_hash():
            raise ValueError("the texts are those of another version of graphport")
        chats = None if data["chats"] is None else tuple(data["chats"])
        ids = tuple(tuple(int(token) for token in ids) for ids in data["ids"])
        if len(ids) != len(TEXTS) or (chats is not None and len(chats) != len(CHATS)):
            raise ValueError(f"needed are ids of {len(TEXTS)} texts and {len(CHATS)} chats")
        vocabulary = VocabularyEvidence.from_dict(data["vocabulary"])
        return cls(corpus=corpus_hash(), vocabulary=vocabulary, ids=ids, chats=chats)

    def wrong_texts(self, encode: Encode) -> list[str]:
        """The texts that `encode` turns into other ids."""
        return [text for text, ids in zip(TEXTS, self.ids, strict=True) if tuple(encode(text)) != ids]

    def wrong_chats(self, render: Render) -> list[int]:
        """Which chats `render` writes otherwise, or refuses where the reference does not."""
        hashes = [chat_hash(render(chat)) for chat in CHATS]
        return [i for i, (found, wanted) in enumerate(zip(hashes, self.chats or (), strict=True)) if found != wanted]


def text_evidence(tokenizer: tokenizers.Tokenizer, render: Render | None) -> TextEvidence:
    """What the reference, a tokenizer without truncation or padding, makes of the corpus."""
    chats = None if render is None else tuple(chat_hash(render(chat)) for chat in CHATS)
    ids = tuple(tuple(tokenizer.encode(text).ids) for text in TEXTS)
    return TextEvidence(corpus=corpus_hash(), vocabulary=vocabulary_evidence(tokenizer), ids=ids, chats=chats)


def chat_hash(text: str | None) -> str | None:
    """SHA-256 (hex) of a rendered chat."""
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def corpus_hash() -> str:
    """SHA-256 (hex) of TEXTS and CHATS."""
    return hashlib.sha256(repr((TEXTS, CHATS)).encode()).hexdigest()

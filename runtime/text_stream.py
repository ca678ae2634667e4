"""Token ids in one by one, text out as soon as it is certain: always valid Unicode, and in sum the one-shot decode.

In: ids, and the decoder of a `tokenizers.Tokenizer`. Out: pieces of text. It keeps only what is undecided, so a token
costs the same at any length. It does not look for stop strings (see `stop_strings.py`).

A decoder is a chain of stages; each is followed here incrementally. `tokenizers.decoders.DecodeStream` (0.23.3) is not
used: it raises "Invalid prefix" when a byte-fallback run that looked valid turns out not to be, decodes an ever longer
window while text ends in U+FFFD, and cannot be flushed, so that text which ends in an incomplete character is lost.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders

Config = Mapping[str, Any]  # a decoder's own JSON

_BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")


# GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68, in order, for U+0100 and what follows.
_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted(frozenset(range(0x100)) - _PRINTABLE))
}


class Stage(Protocol):
    """One step of the decoder chain: token texts in, token texts (or pieces of the one fused text) out."""

    def push(self, token: str) -> list[str]:
        """Take one token text; return what is certain now."""
        ...

    def finish(self) -> list[str]:
        """Return what was still held back."""
        ...


class TextStream:
    """Decodes one sequence. Raises ValueError for a decoder that cannot be followed piece by piece.

    All `push` results and one `flush` joined equal `Tokenizer.decode` of all ids. A character that spans tokens is held
    back until it is complete; a run of byte-fallback tokens (`<0xE2>`) until it ends, because one invalid byte turns
    the whole run into U+FFFD. U+FFFD appears only where the ids really are invalid.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: frozenset[str], *, skip_special_tokens: bool) -> None:
        self._id_to_token = tokenizer.id_to_token
        self._skipped = special if skip_special_tokens else frozenset()
        self._stages = decoder_stages(tokenizer.decoder)
        self._is_over = False

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is certain now, which may be empty.

        Raises ValueError for an id without a token, and after `flush`.
        """
        if self._is_over:
            raise ValueError("the text has ended: push nothing after flush; open a new stream")
        token = self._id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise ValueError(f"token id {token_id} is not in the tokenizer's vocabulary, so it has no text")
        if token in self._skipped:
            return ""
        return self._run([token], first_stage=0)

    def flush(self) -> str:
        """Return the text still held back, now that no id follows; an incomplete character becomes U+FFFD."""
        if self._is_over:
            return ""
        self._is_over = True
        return "".join(self._run(stage.finish(), first_stage=i + 1) for i, stage in enumerate(self._stages))

    def _run(self, pieces: list[str], *, first_stage: int) -> str:
        for stage in self._stages[first_stage:]:
            pieces = [out for piece in pieces for out in stage.push(piece)]
        return "".join(pieces)


def decoder_stages(decoder: "decoders.Decoder | None") -> list[Stage]:
    """The incremental stages of a decoder; None joins the tokens by spaces, as `tokenizers` does.

    Raises ValueError for a decoder (or a combination) that is not built or needs the whole text.
    """
    if decoder is None:
        return [_JoinBySpaces()]
    config = json.loads(decoder.__getstate__())
    chain = _flatten(config)
    stages: list[Stage] = []
    is_fused = False
    for part in chain:
        kind = part["type"]
        build = (_FUSED_STAGES if is_fused else _TOKEN_STAGES).get(kind)
        stage = None if build is None else build(part)
        if stage is None:
            names = " -> ".join(each["type"] for each in chain)
            where = " after the tokens were fused" if is_fused else ""
            raise ValueError(
                f"the tokenizer's decoder ({names}) cannot be streamed: {json.dumps(part)}{where} is not supported; "
                f"supported are {', '.join(_TOKEN_STAGES)}, and then {', '.join(_FUSED_STAGES)}"
            )
        stages.append(stage)
        is_fused = is_fused or kind in _FUSING
    return stages


def bytes_of_token(token: str, decoder: "decoders.Decoder | None") -> bytes | None:
    """The bytes of a token that is no text of its own, a part of a character; None if its spelling does not tell."""
    kinds = {part["type"] for part in _flatten(json.loads(decoder.__getstate__()))} if decoder is not None else set()
    if "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(match[1], 16)])
    if "ByteLevel" in kinds and all(character in _BYTE_OF_CHARACTER for character in token):
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    return None


def _flatten(config: Config) -> list[Config]:
    if config["type"] != "Sequence":
        return [config]
    return [part for child in config["decoders"] for part in _flatten(child)]


class _EachToken:
    """Decoders that treat tokens one by one, and the first one differently at most: the library's own code."""

    def __init__(self, config: Config) -> None:
        self._decoder = decoders.Fuse()
        self._decoder.__setstate__(json.dumps(config).encode())  # the binding has no other way from JSON
        self._is_first = True

    def push(self, token: str) -> list[str]:
        tokens = [token] if self._is_first else ["", token]  # all of them make "" of ""
        self._is_first = False
        return [self._decoder.decode(tokens)]

    def finish(self) -> list[str]:
        return []


class _PassOn:
    """Fuse: from here on, pieces belong to one text."""

    def push(self, token: str) -> list[str]:
        return [token]

    def finish(self) -> list[str]:
        return []


class _ByteLevel:
    """GPT-2's byte alphabet: every character of a token is a byte; other tokens (added ones) are their UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: str) -> list[str]:
        try:
            data = bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # a token outside the alphabet: `tokenizers` takes it as it is
            data = token.encode("utf-8")
        return [self._utf8.decode(data)]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _ByteFallback:
    """`<0x..>` tokens: a whole run is UTF-8 or, if it is not, one U+FFFD a byte."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> list[str]:
        match = _BYTE_TOKEN.fullmatch(token)
        if match is None:
            return [*self.finish(), token]
        self._run.append(int(match[1], 16))
        return []

    def finish(self) -> list[str]:
        run, self._run = self._run, bytearray()
        if not run:
            return []
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _SuffixToSpace:
    """BPEDecoder: the end-of-word suffix is a space, except in the last token, where it is nothing."""

    def __init__(self, config: Config) -> None:
        self._suffix: str = config["suffix"]
        self._last: list[str] = []

    def push(self, token: str) -> list[str]:
        ready = [last.replace(self._suffix, " ") for last in self._last]
        self._last = [token]
        return ready

    def finish(self) -> list[str]:
        return [last.replace(self._suffix, "") for last in self._last]


class _JoinBySpaces:
    """No decoder: the tokens with spaces between."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, token: str) -> list[str]:
        piece, self._separator = self._separator + token, " "
        return [piece]

    def finish(self) -> list[str]:
        return []


class _ReplaceCharacter:
    """Replace one character of the fused text."""

    def __init__(self, config: Config) -> None:
        self._old: str = config["pattern"]["String"]
        self._new: str = config["content"]

    def push(self, token: str) -> list[str]:
        return [token.replace(self._old, self._new)]

    def finish(self) -> list[str]:
        return []


class _StripText:
    """Up to `start` leading and `stop` trailing characters `content` of the fused text."""

    def __init__(self, config: Config) -> None:
        self._content: str = config["content"]
        self._start: int = config["start"]
        self._stop: int = config["stop"]
        self._held = ""

    def push(self, token: str) -> list[str]:
        while self._start and token:
            if token[0] != self._content:
                self._start = 0
            else:
                token = token[1:]
                self._start -= 1
        waiting = self._held + token
        trailing = len(waiting) - len(waiting.rstrip(self._content))
        held = min(trailing, self._stop)
        self._held = waiting[len(waiting) - held :]
        return [waiting[: len(waiting) - held]]

    def finish(self) -> list[str]:
        self._held = ""
        return []


def _replace_in_text(config: Config) -> Stage | None:
    return _ReplaceCharacter(config) if len(config["pattern"].get("String", "")) == 1 else None


_FUSING = ("ByteLevel", "Fuse")

_TOKEN_STAGES: dict[str, Callable[[Config], Stage | None]] = {
    "ByteLevel": lambda _: _ByteLevel(),
    "ByteFallback": lambda _: _ByteFallback(),
    "Fuse": lambda _: _PassOn(),
    "Replace": _EachToken,
    "Strip": _EachToken,
    "Metaspace": _EachToken,
    "WordPiece": _EachToken,
    "BPEDecoder": _SuffixToSpace,
}

_FUSED_STAGES: dict[str, Callable[[Config], Stage | None]] = {
    "Fuse": lambda _: _PassOn(),
    "Replace": _replace_in_text,
    "Strip": _StripText,
}

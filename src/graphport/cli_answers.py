"""Answers of a loaded model for the command line: prompt to ids, timed streaming, the turns of a chat.

In: a model from `graphport.runtime.load` and text. Out: `Answer` records, and text handed to `write` as it comes.
It neither parses arguments nor prints; torch-free, and it imports the runtime for types only.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphport.runtime import LanguageModel, SamplingParams
    from graphport.runtime.request_options import RequestArguments
    from graphport.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer and its timing; times in seconds, `tokens_per_s` over the tokens after the first.

    A time is None when there is nothing to time: no token, or no second one.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int
    new_tokens: int
    time_to_first_token_s: float | None
    tokens_per_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def hears(lm: "LanguageModel") -> bool:
    """Whether the model takes recordings."""
    if lm.manifest.kind != "encoder_decoder":
        return False
    encoder = lm.manifest.config.encoder
    return encoder is not None and encoder.audio is not None


def prompt_of(lm: "LanguageModel", text: str, *, chat: bool | None) -> str | list[int]:
    """Token ids of `text`, through the chat template unless `chat` is False; None means "if there is one".

    What an encoder-decoder reads is the text itself. Raises ValueError when `chat` is True and the bundle has no
    template, when it has no tokenizer at all, and for a model that hears.
    """
    if hears(lm):
        raise ValueError("this model hears, and reads no text; use `graphport transcribe BUNDLE FILE`")
    tokenizer = _need_tokenizer(lm)
    if lm.manifest.kind == "encoder_decoder" and not chat:
        return text
    if chat and not tokenizer.has_chat_template:
        raise ValueError("--chat needs a chat template and this bundle has none; use --raw")
    if tokenizer.has_chat_template if chat is None else chat:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(text)


def answer(
    lm: "LanguageModel",
    prompt: str | list[int] | Path,
    sampling: "SamplingParams",
    *,
    write: Callable[[str], None] | None,
    options: "RequestArguments | None" = None,
) -> Answer:
    """Stream the answer to `prompt`, handing each piece of text to `write`."""
    start = time.perf_counter()
    times: list[float] = []
    pieces: list[str] = []
    token_ids: list[int] = []
    finish_reason = None
    for event in lm.stream(prompt, sampling, **(options or {})):
        if event.token_id is not None:  # the last event may carry only text that was held back
            times.append(time.perf_counter())
            token_ids.append(event.token_id)
        if event.text:
            pieces.append(event.text)
            if write is not None:
                write(event.text)
        finish_reason = event.finish_reason
    return Answer(
        text="".join(pieces),
        token_ids=token_ids,
        finish_reason=finish_reason,
        prompt_tokens=_count(lm, prompt),
        new_tokens=len(token_ids),
        time_to_first_token_s=times[0] - start if times else None,
        tokens_per_s=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
    )


def search(
    lm: "LanguageModel",
    prompt: str | list[int] | Path,
    sampling: "SamplingParams",
    *,
    write: Callable[[str], None] | None,
    options: "RequestArguments | None" = None,
) -> Answer:
    """The answer of beam search, which is known at its end; see `answer`."""
    (output,) = lm.generate([prompt], sampling, **(options or {}))
    if write is not None:
        write(output.text)
    return Answer(
        text=output.text,
        token_ids=list(output.token_ids),
        finish_reason=output.finish_reason,
        prompt_tokens=_count(lm, prompt),
        new_tokens=len(output.token_ids),
        time_to_first_token_s=None,
        tokens_per_s=None,
    )


def _count(lm: "LanguageModel", prompt: str | list[int] | Path) -> int:
    """Tokens that the model reads; of a recording, the frames that its encoder gives."""
    if isinstance(prompt, Path):
        return 0 if lm.manifest.config.encoder is None else lm.manifest.config.encoder.max_positions
    return len(_need_tokenizer(lm).encode(prompt) if isinstance(prompt, str) else prompt)


def timing_line(result: Answer) -> str:
    """`3 prompt tokens, 7 new (stop), first token after 0.012 s, then 51.3 tokens/s`."""
    parts = [f"{result.prompt_tokens} prompt tokens", f"{result.new_tokens} new ({result.finish_reason})"]
    if result.time_to_first_token_s is not None:
        parts.append(f"first token after {result.time_to_first_token_s:.3f} s")
    if result.tokens_per_s is not None:
        parts.append(f"then {result.tokens_per_s:.1f} tokens/s")
    return ", ".join(parts)


def chat_turns(
    lm: "LanguageModel",
    sampling: "SamplingParams",
    *,
    lines: Iterable[str],
    write: Callable[[str], None],
    note: Callable[[str], None],
) -> int:
    """Answer each line with the conversation so far as context; returns how many turns were refused.

    A refused turn (the conversation no longer fits, for example) is reported by `note` and taken back, so that
    /reset or a shorter line can follow. Raises ValueError when the bundle has no tokenizer or no chat template.
    """
    tokenizer = _need_tokenizer(lm)
    if not tokenizer.has_chat_template:
        raise ValueError("chat needs a chat template and this bundle has none; use `graphport generate --raw`")
    tokenizer.compile_chat_template()
    messages: list[dict[str, str]] = []
    refused = 0
    for line in lines:
        command = line.strip()
        if command == "/exit":
            break
        if command == "/reset":
            messages.clear()
            note("(new conversation)")
        elif command.startswith("/"):
            note(f"(unknown command {command}; there are /reset and /exit)")
        elif command:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                result = answer(lm, tokenizer.apply_chat_template(asked), sampling, write=write)
            except ValueError as error:
                refused += 1
                note(f"graphport: error: {error} (this turn was dropped; /reset starts again)")
                continue
            write("\n")
            note(timing_line(result))
            messages = [*asked, {"role": "assistant", "content": result.text}]
    return refused


def _need_tokenizer(lm: "LanguageModel") -> "Tokenizer":
    if lm.tokenizer is None:
        raise ValueError("text needs a tokenizer and this bundle has none; use `graphport.runtime` with token ids")
    return lm.tokenizer

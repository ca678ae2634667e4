"""Prompts of an encoder-decoder: the ids of a source, the ids that its decoder's text begins with, and languages.

In: a text or ids, and the codes of languages. Out: checked ids, or an error in one line before anything runs. It
encodes and runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.forced_tokens import ForcedTokens
from graphport.model_def.signature import Manifest
from graphport.runtime.forced_ids import ForcedIds
from graphport.runtime.prompts import checked_prompt_ids
from graphport.runtime.request_options import RequestOptions
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.timestamps import TimestampRule


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePrompt:
    """What the encoder reads, what the decoder begins with, and the first id that it must say.

    `source` are ids, or features [M, F] of a recording. Where `languages` are given, `decoder_ids[1]` stands for the
    one of them that the model finds likeliest. `timestamps`: where marks of time are wanted.
    """

    source: tuple[int, ...] | NDArray[np.float32]
    decoder_ids: tuple[int, ...]
    first: int | None
    languages: tuple[int, ...] = ()
    timestamps: TimestampRule | None = None


def need_forced(manifest: Manifest) -> ForcedTokens:
    """What an encoder-decoder forces. Raises ValueError when its bundle does not say how a text begins."""
    if manifest.generation.forced is None:
        raise ValueError(
            "this bundle does not say with which id the decoder's text begins; export a checkpoint whose "
            "generation_config.json has decoder_start_token_id"
        )
    return manifest.generation.forced


def rules_of(prompt: SourcePrompt, forced: ForcedTokens, params: SamplingParams, *, most: int) -> ForcedIds | None:
    """What is forced and forbidden in a text of at most `most` new ids, None when nothing is."""
    is_free = prompt.first is None and forced.last is None and prompt.timestamps is None
    if is_free and not (forced.never or forced.never_first or forced.bad):
        return None
    return ForcedIds(forced, first=prompt.first, most=most, ignore_end=params.ignore_eos, timestamps=prompt.timestamps)


class SourcePrompts:
    """Makes the prompts of one encoder-decoder that reads text. Raises ValueError as `need_forced` does."""

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.config.encoder is not None
        self._config = manifest.config.encoder
        self._forced = need_forced(manifest)

    def prompt(self, ids: object, options: RequestOptions, name: str, *, is_empty: bool) -> SourcePrompt:
        """`ids` as a source, which errors call `name`; `is_empty`: they are those of a text without a character."""
        if options.task is not None or options.timestamps is not None:
            raise ValueError("task and timestamps are for models that hear; this one reads text")
        language, source_language = options.language, options.source_language
        if is_empty:
            raise ValueError(f"{name} is empty: there is nothing to read; give a text")
        checked = checked_prompt_ids(
            ids,
            f"{name} (a source)",
            vocab_size=self._config.vocab_size,
            max_length=self._config.max_positions,
        )
        source = checked if source_language is None else self._from_language(checked, source_language, name)
        start, first = self._forced.start, self._forced.first
        if language is not None:
            target = self._language("language", language)
            if self._forced.names_target == "start":
                start = (*start[:-1], target)
            else:
                first = target
        elif self._forced.needs_language:
            raise ValueError(f"{name} names no language to translate to; give language, {self._known()}")
        return SourcePrompt(source=source, decoder_ids=start, first=first)

    def _from_language(self, ids: Sequence[int], code: str, name: str) -> tuple[int, ...]:
        """`ids` with the language that the tokenizer put there replaced."""
        source, known = self._language("source_language", code), set(self._forced.languages.values())
        if not known & set(ids):
            raise ValueError(f"{name} has no language among its ids that source_language could replace; put it there")
        return tuple(source if id_ in known else id_ for id_ in ids)

    def _language(self, option: str, code: str) -> int:
        if code not in self._forced.languages:
            raise ValueError(f"{option} {code!r} is unknown: {self._known()}")
        return self._forced.languages[code]

    def _known(self) -> str:
        codes = sorted(self._forced.languages)
        return f"one of {', '.join(codes)}" if codes else "this model names no languages; leave it out"

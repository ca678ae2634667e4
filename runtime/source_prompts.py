"""Prompts of an encoder-decoder: the ids of a source, the ids that its decoder's text begins with, and languages.

In: a text or ids, and the codes of languages. Out: checked ids, or an error in one line before anything runs. It
encodes and runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graphport.model_def.forced_tokens import ForcedTokens
from graphport.model_def.signature import Manifest
from graphport.runtime.forced_ids import ForcedIds
from graphport.runtime.prompts import checked_prompt_ids
from graphport.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePrompt:
    """What the encoder reads, what the decoder begins with, and the first id that it must say."""

    source_ids: tuple[int, ...]
    decoder_ids: tuple[int, ...]
    first: int | None


class SourcePrompts:
    """Makes the prompts of one encoder-decoder. Raises ValueError when its bundle does not say how a text begins."""

    def __init__(self, manifest: Manifest) -> None:
        config, forced = manifest.config.encoder, manifest.generation.forced
        assert config is not None
        if forced is None:
            raise ValueError(
                "this bundle does not say with which id the decoder's text begins; export a checkpoint whose "
                "generation_config.json has decoder_start_token_id"
            )
        self._config = config
        self._forced: ForcedTokens = forced

    def prompt(
        self, ids: object, name: str, *, is_empty: bool, language: str | None, source_language: str | None
    ) -> SourcePrompt:
        """`ids` as a source, which errors call `name`; `is_empty`: they are those of a text without a character."""
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
        return SourcePrompt(source_ids=source, decoder_ids=start, first=first)

    def rules(self, prompt: SourcePrompt, params: SamplingParams, *, most: int) -> ForcedIds | None:
        """What is forced and forbidden in a text of at most `most` new ids, None when nothing is."""
        forced = self._forced
        if prompt.first is None and not (forced.last is not None or forced.never or forced.never_first or forced.bad):
            return None
        return ForcedIds(forced, first=prompt.first, most=most, ignore_end=params.ignore_eos)

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

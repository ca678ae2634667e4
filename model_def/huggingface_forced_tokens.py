"""What a Hugging Face encoder-decoder forces and forbids: generation_config.json, else config.json, and languages.

In: a folder, its config, the tokenizer's text. Out: `ForcedTokens` and notes. It tokenises nothing.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphport.model_def.checkpoint_record import CheckpointError, read_json
from graphport.model_def.encoder_decoder_family import EncoderDecoderFamily
from graphport.model_def.forced_tokens import ForcedTokens
from graphport.model_def.huggingface_speech import read_speech_tokens

Values = Mapping[str, Any]

# what a folder may ask of generation that a caller must ask for here: named in a note with the value
_ASKED_OF_CALLERS = (
    *("num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size", "min_length", "max_length"),
    *("repetition_penalty", "encoder_no_repeat_ngram_size", "do_sample", "temperature", "top_k", "top_p"),
)
_OFF: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "do_sample": (False,),
}


def read_forced_tokens(
    folder: Path, config: Values, tokenizer_json: str | None, family: EncoderDecoderFamily, *, vocab_size: int
) -> tuple[ForcedTokens, list[str]]:
    """Start, forced and suppressed ids. Raises CheckpointError for ids outside the vocabulary and a missing start."""
    generation = read_json(folder / "generation_config.json")

    def value(key: str) -> Any:  # noqa: ANN401 - JSON
        return generation[key] if generation.get(key) is not None else config.get(key)

    notes = [
        f"generation config asks for {key} {value(key)!r}: give it with each request, it is no default here"
        for key in _ASKED_OF_CALLERS
        if value(key) is not None and value(key) not in _OFF.get(key, ())
    ]
    languages = _languages(tokenizer_json, family, vocab_size)
    speech = None
    if family.reads_sound:
        speech, languages, speech_notes = read_speech_tokens(generation, config, vocab_size=vocab_size)
        notes += speech_notes
    stated = start = value("decoder_start_token_id")
    start = _default_start(config, family, languages) if start is None else start
    if start is None:
        raise CheckpointError(
            f"{folder}: decoder_start_token_id is missing; the decoder's text begins with it: add it to config.json"
        )
    first = _one(value("forced_bos_token_id"), "forced_bos_token_id")
    last = _one(value("forced_eos_token_id"), "forced_eos_token_id")
    bad = value("bad_words_ids") or []
    starts: list[Any] = start if isinstance(start, list) else [start]
    try:
        forced = ForcedTokens(
            start=tuple(starts),
            first=first,
            last=last,
            never=tuple(value("suppress_tokens") or ()),
            never_first=tuple(value("begin_suppress_tokens") or ()),
            bad=tuple(tuple(ids) for ids in bad),
            languages=languages,
            names_target=None if family.reads_sound else _names_target(languages, start, first),
            needs_language=stated is None and bool(languages),
            speech=speech,
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: generation config: {error}") from error
    _require_known(folder, forced, vocab_size)
    return forced, notes


def _default_start(config: Values, family: EncoderDecoderFamily, languages: Mapping[str, int]) -> object:
    """Where transformers begins without the key: mBART's first language stands for the one that a request names."""
    if languages:
        return min(languages.values())
    return config.get("pad_token_id") if family.positions == "relative" else config.get("bos_token_id")


def _names_target(languages: Mapping[str, int], start: object, first: int | None) -> str | None:
    """Where the target's language stands: mBART-25 starts with it, mBART-50 says it first."""
    if not languages:
        return None
    return "start" if start in languages.values() and first is None else "first"


def _one(value: object, key: str) -> int | None:
    """An id, of which transformers may have a list."""
    if isinstance(value, list):
        if len(value) > 1:
            raise CheckpointError(f"generation config: {key} {value!r} names several ids; one can be forced")
        value = value[0] if value else None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise CheckpointError(f"generation config: {key} must be an id, got {value!r}")
    return value


def _languages(tokenizer_json: str | None, family: EncoderDecoderFamily, vocab_size: int) -> dict[str, int]:
    """Ids of the tokenizer's language tokens by their codes."""
    if family.languages is None or tokenizer_json is None:
        return {}
    added = json.loads(tokenizer_json).get("added_tokens", [])
    named = {entry["content"]: int(entry["id"]) for entry in added if re.fullmatch(family.languages, entry["content"])}
    return {code: id_ for code, id_ in named.items() if id_ < vocab_size}


def _require_known(folder: Path, forced: ForcedTokens, vocab_size: int) -> None:
    ids = [*forced.start, *forced.never, *forced.never_first, *(i for bad in forced.bad for i in bad)]
    for id_ in [*ids, *(i for i in (forced.first, forced.last) if i is not None)]:
        if id_ >= vocab_size:
            raise CheckpointError(f"{folder}: generation config names id {id_}, beyond a vocabulary of {vocab_size}")

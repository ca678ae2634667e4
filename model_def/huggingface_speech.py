"""What a Hugging Face folder says of hearing: the features that its preprocessor makes, the ids of its texts.

In: parsed JSON. Out: notes, and `SpeechTokens` with the codes of its languages. Features of another kind than the one
that is computed here are refused by name.
"""

from collections.abc import Mapping
from typing import Any

from graphport.model_def.audio_config import HOP_LENGTH, SAMPLING_RATE, WINDOW_LENGTH, num_samples
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.huggingface_values import Values, check_keys, read_flag
from graphport.model_def.speech_tokens import SpeechTokens

# what transformers heeds in recordings longer than the model reads, or by trying again at another temperature
_NOT_HEEDED = (
    *("no_speech_threshold", "logprob_threshold", "compression_ratio_threshold", "condition_on_prev_tokens"),
    "prompt_condition_type",
)


def check_features(values: Values, encoder: TransformerConfig) -> list[str]:
    """Notes on preprocessor_config.json; raises CheckpointError for other features than `encoder` was made for."""
    if not values:
        return ["no preprocessor_config.json: features are those of the family"]
    assert encoder.audio is not None
    seconds = num_samples(encoder.max_positions) / SAMPLING_RATE
    only: dict[str, tuple[object, ...]] = {
        "feature_extractor_type": ("WhisperFeatureExtractor",),
        "feature_size": (encoder.audio.mel_bins,),
        "sampling_rate": (SAMPLING_RATE,),
        "hop_length": (HOP_LENGTH,),
        "n_fft": (WINDOW_LENGTH,),
        "chunk_length": (seconds,),
        "n_samples": (num_samples(encoder.max_positions),),
        "nb_max_frames": (num_samples(encoder.max_positions) // HOP_LENGTH,),
        "padding_value": (0, None),
        "padding_side": ("right",),
        "dither": (0, None),
        "do_normalize": (False, None),
    }
    ignored = ("processor_class", "return_attention_mask", "mel_filters", "return_tensors")
    try:
        check_keys(values, "whisper", read=(), neutral=only, ignored=ignored)
    except CheckpointError as error:
        reason = str(error).removeprefix("config.json: ")
        raise CheckpointError(f"preprocessor_config.json: {reason}") from error
    return []


def read_speech_tokens(
    generation: Values, config: Values, *, vocab_size: int
) -> tuple[SpeechTokens, dict[str, int], list[str]]:
    """Ids, languages by their codes, and notes. Raises CheckpointError."""
    try:
        languages = {str(text).strip("<|>"): int(id_) for text, id_ in (generation.get("lang_to_id") or {}).items()}
        tokens = SpeechTokens(
            tasks=dict(generation.get("task_to_id") or {}),
            language=_language(generation.get("language"), languages),
            task=generation.get("task"),
            forced=_forced(generation.get("forced_decoder_ids") or config.get("forced_decoder_ids") or []),
            no_timestamps=generation.get("no_timestamps_token_id"),
            timestamps=read_flag(generation, "return_timestamps"),
            latest_first=generation.get("max_initial_timestamp_index"),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"generation_config.json: {str(error).removeprefix('config.json: ')}") from error
    ids = [*languages.values(), *tokens.tasks.values(), *tokens.forced, tokens.no_timestamps]
    beyond = [id_ for id_ in ids if id_ is not None and id_ >= vocab_size]
    if beyond:
        raise CheckpointError(f"generation_config.json names id {beyond[0]}, beyond a vocabulary of {vocab_size}")
    asked = [key for key in _NOT_HEEDED if generation.get(key) is not None]
    notes = [f"generation_config.json: not heeded: {', '.join(asked)}"] if asked else []
    return tokens, languages, notes


def _language(value: object, languages: Mapping[str, int]) -> str | None:
    if value is None:
        return None
    code = str(value).strip("<|>")
    if code not in languages:
        raise ValueError(f"language {value!r} is none of lang_to_id; write its code, as en")
    return code


def _forced(pairs: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - JSON
    """The ids of [[1, id], [2, id], ...]."""
    places = [place for place, _ in pairs]
    if places != list(range(1, len(places) + 1)):
        raise ValueError(f"forced_decoder_ids must name the places 1, 2, ... in order, got {pairs!r}")
    return tuple(id_ for _, id_ in pairs)

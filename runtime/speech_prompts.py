"""Prompts of a model that hears: the features of a recording, and the ids that its text begins with.

In: a recording or features, language and task. Out: checked features and ids, or an error in one line before anything
runs. It runs nothing.
"""

import numpy as np

from graphport.model_def.audio_config import num_frames, num_samples
from graphport.model_def.signature import Manifest
from graphport.model_def.speech_tokens import SpeechTokens
from graphport.runtime.audio_features import Features, log_mel_features
from graphport.runtime.recordings import read_recording
from graphport.runtime.request_options import RequestOptions
from graphport.runtime.source_prompts import SourcePrompt, need_forced
from graphport.runtime.timestamps import TimestampRule


class SpeechPrompts:
    """Makes the prompts of one model that hears. Raises ValueError as `need_forced` does."""

    def __init__(self, manifest: Manifest) -> None:
        encoder = manifest.config.encoder
        assert encoder is not None
        assert encoder.audio is not None
        self._mel_bins, self._positions = encoder.audio.mel_bins, encoder.max_positions
        self._forced = need_forced(manifest)
        self._speech = self._forced.speech or SpeechTokens()
        self._ends = manifest.generation.eos_token_ids

    def prompt(self, given: object, options: RequestOptions, name: str) -> SourcePrompt:
        """`given` is a recording or features, which errors call `name`."""
        if options.source_language is not None:
            raise ValueError("source_language is for models that translate text; this one hears: give language")
        for option, value, known in (
            ("language", options.language, self._forced.languages),
            ("task", options.task, self._speech.tasks),
        ):
            if value is not None and value not in known:
                choice = (
                    f"one of {', '.join(sorted(known))}" if known else f"this model knows no {option}; leave it out"
                )
                raise ValueError(f"{option} {value!r} is unknown: {choice}")
        timestamps = self._marks_time(options)
        beginning = self._speech.beginning(
            self._forced.start[0],
            self._forced.languages,
            language=options.language,
            task=options.task,
            timestamps=timestamps,
        )
        return SourcePrompt(
            source=self._features(given, name),
            decoder_ids=tuple(self._forced.start[0] if id_ is None else id_ for id_ in beginning),
            first=self._forced.first,
            languages=tuple(sorted(self._forced.languages.values())) if None in beginning else (),
            timestamps=self._rule() if timestamps else None,
        )

    def _marks_time(self, options: RequestOptions) -> bool:
        wish = self._speech.timestamps if options.timestamps is None else options.timestamps
        if wish and self._speech.no_timestamps is None:
            raise ValueError(
                "timestamps cannot be marked: the checkpoint's generation_config.json has no no_timestamps_token_id"
            )
        return wish

    def _rule(self) -> TimestampRule:
        before = self._speech.no_timestamps
        assert before is not None
        end = min(self._ends, default=before)
        return TimestampRule(first=before + 1, end=end, latest_first=self._speech.latest_first)

    def _features(self, given: object, name: str) -> Features:
        if not isinstance(given, np.ndarray):
            samples = read_recording(given, name, longest=num_samples(self._positions))
            return log_mel_features(samples, mel_bins=self._mel_bins, max_positions=self._positions)
        shape = (self._mel_bins, num_frames(self._positions))
        if given.dtype != np.float32 or given.shape != shape:
            raise ValueError(
                f"{name} is an array of {given.dtype} {list(given.shape)}; features are float32 {list(shape)}, and "
                "samples are given with their sampling rate: (samples, rate)"
            )
        if not np.isfinite(given).all():
            raise ValueError(f"{name} holds features that are not finite")
        return given

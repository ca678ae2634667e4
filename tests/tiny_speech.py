"""A tiny random model that hears, as a folder with all that belongs to it, and recordings for it.

In: a path. Out: files; recordings of less than a second, which is what it hears. Seeded, nothing is fetched.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tiny_encoder_decoders import NO_TIMESTAMPS, make_encoder_decoder
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import WhisperFeatureExtractor

RATE = 16_000
VOCAB = 80


def save_speech_folder(folder: Path) -> None:
    """The model, its features and a tokenizer of words and marks of time."""
    make_encoder_decoder("whisper").save_pretrained(folder)
    extractor().save_pretrained(folder)
    speech_tokenizer().save(str(folder / "tokenizer.json"))


def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=80, chunk_length=1)


def speech_tokenizer() -> Tokenizer:
    words = {f"word{index}": index for index in range(NO_TIMESTAMPS + 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word60"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [AddedToken(f"<|{0.02 * index:.2f}|>") for index in range(VOCAB - NO_TIMESTAMPS - 1)]
    tokenizer.add_tokens(marks)
    return tokenizer


def recording(num_samples: int, seed: int = 0) -> NDArray[np.float32]:
    """A rising tone and noise."""
    time = np.arange(num_samples) / RATE
    noise = np.random.default_rng(seed).normal(size=num_samples)
    tone = np.sin(2 * np.pi * (200 + 40 * seed + 300 * time) * time)
    return (0.3 * tone + 0.05 * noise).astype(np.float32)


def reference_features(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """What transformers makes of a recording, [M, F]."""
    found = extractor()(samples, sampling_rate=RATE)["input_features"]
    return np.asarray(found, np.float32)[0]

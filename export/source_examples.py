"""Sources that an encoder-decoder is compared on: texts of several lengths, or seeded features of recordings.

In: the encoder's configuration. Out: sources, and each as the module takes it. It runs nothing.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from graphport.export.certify import text_ids
from graphport.model_def.config import TransformerConfig
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.seeded_sources import Source, seeded_features


def example_sources(
    config: TransformerConfig, tokenizer_json: str | None, *, lengths: Sequence[int], seed: int
) -> list[Source]:
    """A source for each of `lengths`, cut to the encoder's positions; recordings are all as long as it reads."""
    if config.audio is not None:
        return list(seeded_features(config, len(lengths), seed=seed))
    return list(example_texts(config, tokenizer_json, lengths=lengths, seed=seed))


def example_texts(
    config: TransformerConfig, tokenizer_json: str | None, *, lengths: Sequence[int], seed: int
) -> tuple[tuple[int, ...], ...]:
    """Ids for each of `lengths`, cut to the encoder's positions, one after the other in the text that ships."""
    short = [min(length, config.max_positions) for length in lengths]
    ids = text_ids(PARITY_TEXT, config, tokenizer_json, length=sum(short), seed=seed)
    starts = itertools.accumulate(short, initial=0)
    return tuple(tuple(ids[start : start + length]) for start, length in zip(starts, short, strict=False))


def source_tensor(source: Source) -> torch.Tensor:
    """One source as `Transformer.encode` takes it: ids int64 [1, T], or features float32 [1, M, F]."""
    if isinstance(source, np.ndarray):
        return torch.from_numpy(source)[None]
    return torch.tensor([list(source)])

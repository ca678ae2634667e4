"""The sources that encoder-decoders are compared on: the ids of texts, or seeded features of recordings.

In: what a certificate feeds, or a seed. Out: sources, the same bits everywhere. It reads no files and runs nothing.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.audio_config import num_frames
from graphport.model_def.certified_inputs import SourceInputs
from graphport.model_def.config import TransformerConfig

Source = Sequence[int] | NDArray[np.float32]  # ids, or features [M, F]

_BITS = 24  # of a number, so that float32 holds it


def seeded_features(encoder: TransformerConfig, count: int, *, seed: int) -> list[NDArray[np.float32]]:
    """Features [M, F] of `count` recordings, uniform between -1 and 1 as log-mel features are, of the length read."""
    assert encoder.audio is not None
    shape = (count, encoder.audio.mel_bins, num_frames(encoder.max_positions))
    raw = np.random.PCG64(seed).random_raw(math.prod(shape))  # the same in every version of NumPy (NEP 19)
    units = (np.atleast_1d(raw) >> np.uint64(64 - _BITS)).astype(np.float64) / (1 << (_BITS - 1)) - 1.0
    return list(units.astype(np.float32).reshape(shape))


def certified_sources(config: TransformerConfig, inputs: SourceInputs) -> list[Source]:
    """The sources of a certificate of a model of `config`, which they must fit (`SourceInputs.problem`)."""
    assert config.encoder is not None
    if config.encoder.audio is None:
        return list(inputs.sources)
    return list(seeded_features(config.encoder, inputs.num_recordings, seed=inputs.seed))

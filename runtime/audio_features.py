"""Samples to the log-mel features that a model of recordings reads.

In: float32 samples at 16 kHz. Out: float32 [M, F]. The mel energies are kaldi-native-fbank's (extra `audio`), in the
form that Whisper was trained on; it checks no recording (see `recordings.py`).
"""

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.audio_config import HOP_LENGTH, SAMPLING_RATE, num_frames, num_samples
from graphport.runtime.recordings import INSTALL, Samples

Features = NDArray[np.float32]

# Mirrored sound at both ends, as torch.stft has it. kaldi-native-fbank centres frame i at i + 1/2 hops: after one hop
# and a half of it, frame 1 stands where frame 0 is wanted.
_MIRRORED = HOP_LENGTH + HOP_LENGTH // 2
_LEAST_ENERGY = 1e-10


def log_mel_features(samples: Samples, *, mel_bins: int, max_positions: int) -> Features:
    """Features [M, F] of samples [n], silence after them: log10 of the mel energies, at most 8 below the loudest.

    (`WhisperFeatureExtractor` of transformers: `(max(log10(mel), highest - 8) + 4) / 4`.) Raises ModuleNotFoundError
    with the command that installs kaldi-native-fbank.
    """
    try:
        import kaldi_native_fbank
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"features of recordings need kaldi-native-fbank: {INSTALL}; features are given as float32 arrays "
            f"[{mel_bins}, {num_frames(max_positions)}]"
        ) from error
    options = kaldi_native_fbank.WhisperFeatureOptions()
    options.dim = mel_bins
    whole = np.pad(samples, (0, num_samples(max_positions) - len(samples)))
    bank = kaldi_native_fbank.OnlineWhisperFbank(options)
    bank.accept_waveform(SAMPLING_RATE, np.pad(whole, _MIRRORED, mode="reflect"))
    bank.input_finished()
    energies = np.stack([bank.get_frame(frame) for frame in range(1, num_frames(max_positions) + 1)], axis=1)
    logarithms = np.log10(np.maximum(energies, _LEAST_ENERGY))
    features: Features = (np.maximum(logarithms, logarithms.max() - 8.0) + 4.0) / 4.0
    return features.astype(np.float32, copy=False)

"""What an encoder of recordings has beyond its blocks: how sound becomes frames, and how many it reads.

In: numbers. Out: a frozen record, validated at construction. Torch-free; the two convolutions stand in `frames.py`, the
features in `runtime/audio_features.py`.
"""

from dataclasses import dataclass

from graphport.model_def.position_config import require_count

SAMPLING_RATE = 16_000  # samples a second
WINDOW_LENGTH = 400  # samples of a frame
HOP_LENGTH = 160  # samples from one frame to the next
FRAMES_A_POSITION = 2  # the stride of the second convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    """Log-mel features of `mel_bins` bands (Radford et al. 2022, section 2.2), through two convolutions of width 3.

    A stack of `max_positions` P reads P * 2 frames, always: shorter sound is followed by silence.
    """

    mel_bins: int

    def __post_init__(self) -> None:
        require_count("mel_bins", self.mel_bins)


def num_frames(max_positions: int) -> int:
    """Frames that a stack of `max_positions` reads."""
    return max_positions * FRAMES_A_POSITION


def num_samples(max_positions: int) -> int:
    """Samples of the longest sound for a stack of `max_positions`."""
    return num_frames(max_positions) * HOP_LENGTH

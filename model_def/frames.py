"""Where an encoder of recordings begins: log-mel frames to the stream of its blocks, two convolutions and positions.

In: features [B, M, F]. Out: tokens [B, F / 2, W]. A convolution is a linear layer over three neighbouring frames: one
product, which needs no cuDNN and is rounded like every other.

Shapes: `B` recordings, `M` mel bands, `F` frames, `C` channels, `W` hidden size.
"""

import torch
from torch import Tensor, nn

from graphport.model_def.audio_config import FRAMES_A_POSITION, AudioConfig


class FrameEmbedding(nn.Module):
    """gelu(conv(gelu(conv(features)))) + positions; both of width 3 with a frame of zeros at either end.

    `first` and `second` hold a convolution's weight [W, C, 3] as [W, 3 * C], the earliest frame first.
    """

    def __init__(self, config: AudioConfig, max_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(3 * config.mel_bins, hidden_size)
        self.second = nn.Linear(3 * hidden_size, hidden_size)
        self.positions = nn.Parameter(torch.randn(max_positions, hidden_size) * 0.02)

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, M, F] to tokens [B, F / 2, W]."""
        frames = nn.functional.gelu(self.first(_neighbours(features.transpose(1, 2), 1)))
        tokens = nn.functional.gelu(self.second(_neighbours(frames, FRAMES_A_POSITION)))
        summed: Tensor = tokens + self.positions
        return summed


def _neighbours(frames: Tensor, stride: int) -> Tensor:
    """Every `stride`-th frame of [B, F, C] beside the ones before and after it, [B, F / stride, 3 * C]."""
    length = frames.shape[1]
    padded = nn.functional.pad(frames, (0, 0, 1, 1))
    return torch.cat([padded[:, place : place + length : stride] for place in range(3)], dim=-1)

"""Blocks conditioned on one vector a row, as diffusion transformers are: what it does to norms and to sub-blocks.

In: conditioning vectors [B, W]. Out: shifts, scales and gates. The block that they act on stands in `block.py`.

Shapes: `B` rows, `S` tokens, `W` hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from graphport.model_def.config import TransformerConfig
from graphport.model_def.seeded_conditions import seeded_conditions


class Modulation(NamedTuple):
    """What one sub-block reads is normed(x) * (1 + scale) + shift, and gate times its output is added; [B, 1, W]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor

    def read(self, normed: Tensor) -> Tensor:
        """Normed activations [B, S, W] as the sub-block reads them."""
        return modulate(normed, self.shift, self.scale)


class BlockModulation(NamedTuple):
    """Of a block's attention and its feed-forward."""

    attention: Modulation
    feed_forward: Modulation


class AdaptiveNorms(nn.Module):
    """Shift, scale and gate of both sub-blocks from silu(c), one projection: adaLN-zero. (Peebles and Xie 2023, 3.2)"""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.projection = nn.Linear(hidden_size, 6 * hidden_size)

    def forward(self, conditioning: Tensor) -> BlockModulation:
        """Vectors [B, W] to the modulation of a block; in the order shift, scale, gate, attention first."""
        parts = self.projection(nn.functional.silu(conditioning))[:, None].chunk(6, dim=-1)
        return BlockModulation(Modulation(*parts[:3]), Modulation(*parts[3:]))


class AdaptiveFinalNorm(nn.Module):
    """Shift and scale of what the last norm gives. (Peebles and Xie 2023, their final layer.)"""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.projection = nn.Linear(hidden_size, 2 * hidden_size)

    def forward(self, normed: Tensor, conditioning: Tensor) -> Tensor:
        """Normed activations [B, S, W] under vectors [B, W]."""
        shift, scale = self.projection(nn.functional.silu(conditioning))[:, None].chunk(2, dim=-1)
        return modulate(normed, shift, scale)


def seeded_conditioning(config: TransformerConfig, ids: Tensor) -> Tensor | None:
    """The vectors [B, W] of texts [B, S] that are compared or calibrated on; None where the model reads none."""
    if not config.conditioned:
        return None
    return torch.from_numpy(seeded_conditions(ids.tolist(), config.hidden_size))


def modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normed activations [B, S, W], scaled and shifted by [B, 1, W]."""
    return normed * (1 + scale) + shift

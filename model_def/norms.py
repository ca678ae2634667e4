"""LayerNorm and RMSNorm as modules, chosen by a NormConfig.

In: activations [..., W]. Out: the same shape and dtype. The weight is stored as the checkpoint stores it.
"""

import torch
from torch import Tensor, nn

from graphport.model_def.config import NormConfig
from graphport.model_def.ops import rms_norm


class Norm(nn.Module):
    """Normalise the last axis (width W); `unit_offset` multiplies by 1 + weight."""

    def __init__(self, config: NormConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(width) if config.unit_offset else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """X [..., W] to its normalised form."""
        weight = 1.0 + self.weight if self.config.unit_offset else self.weight
        if self.config.kind == "rms":
            normal: Tensor = rms_norm(x, weight, self.config.epsilon)
            return normal
        return nn.functional.layer_norm(x, weight.shape, weight, self.bias, self.config.epsilon)

"""LayerNorm and RMSNorm as modules, chosen by a NormConfig.

In: activations [..., W]. Out: the same shape and dtype. The weight is stored as the checkpoint stores it.
"""

import torch
from torch import Tensor, nn

from graphport.model_def.block_config import NormConfig
from graphport.model_def.ops import rms_norm


class Norm(nn.Module):
    """Normalise the last axis (width W); `unit_offset` multiplies by 1 + weight.

    With `num_heads` N the last two axes are [N, W] and every head has a weight (and bias) of its own.
    """

    def __init__(self, config: NormConfig, width: int, *, num_heads: int | None = None) -> None:
        super().__init__()
        self.config = config
        shape = (width,) if num_heads is None else (num_heads, width)
        self.weight = nn.Parameter(torch.zeros(shape) if config.unit_offset else torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """X [..., W] to its normalised form."""
        weight = 1.0 + self.weight if self.config.unit_offset else self.weight
        if weight.ndim > 1:
            return self._over_heads(x, weight)
        if self.config.kind == "rms":
            normal: Tensor = rms_norm(x, weight, self.config.epsilon)
            return normal
        return nn.functional.layer_norm(x, weight.shape, weight, self.bias, self.config.epsilon)

    def _over_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """The kernels of norms take one weight for all heads: those of the heads are multiplied on afterwards."""
        one = torch.ones(weight.shape[-1], dtype=weight.dtype)
        if self.config.kind == "rms":
            normal: Tensor = rms_norm(x, one, self.config.epsilon) * weight
            return normal
        scaled = nn.functional.layer_norm(x, one.shape, one, None, self.config.epsilon) * weight
        return scaled if self.bias is None else scaled + self.bias

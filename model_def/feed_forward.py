"""The feed-forward half of a block.

In: activations [B, S, W]. Out: the same shape. Plain or gated, one activation from a visible table.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphport.model_def.block_config import Activation, FeedForwardConfig

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # CLIP
}


class FeedForward(nn.Module):
    """down(act(up(x))) or, gated, down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: FeedForwardConfig, hidden_size: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate = nn.Linear(hidden_size, config.width, bias=config.bias) if config.gated else None
        self.up = nn.Linear(hidden_size, config.width, bias=config.bias)
        self.down = nn.Linear(config.width, hidden_size, bias=config.bias)

    @property
    def last(self) -> nn.Module:
        """What gives the output."""
        return self.down

    def forward(self, x: Tensor) -> Tensor:
        """X [B, S, W] to [B, S, W]."""
        up = self.up(x)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        output: Tensor = self.down(hidden)
        return output

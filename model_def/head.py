"""The vocabulary head: states to logits.

In: states [..., W]. Out: logits [..., V]. What picks tokens by them stands in the runtime.
"""

import torch
from torch import Tensor, nn

from graphport.model_def.config import TransformerConfig


class Head(nn.Module):
    """The vocabulary head: its own matrix or the embedding's, scale and cap."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.logit_scale, self.logit_softcap = config.logit_scale, config.logit_softcap
        is_tied = config.head == "tied"
        self.weight = (
            None if is_tied else nn.Parameter(torch.empty(config.vocab_size, config.id_width or config.hidden_size))
        )
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=config.hidden_size**-0.5)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """X [..., W] to logits [..., V]."""
        logits = nn.functional.linear(x, embedding if self.weight is None else self.weight, self.bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return logits

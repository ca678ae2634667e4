"""The head of an encoder that scores labels.

In: hidden states [B, S, W]. Out: logits, [B, L] of each text or [B, S, L] of each token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphport.model_def.readout_config import ClassifierConfig, Transform

TRANSFORMS: dict[Transform, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
}


class Classifier(nn.Module):
    """output(x), or output(transform(dense(x))), of the first token or of each."""

    def __init__(self, config: ClassifierConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(hidden_size, hidden_size) if config.transform else None
        self.output = nn.Linear(hidden_size, len(config.labels))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, S, W] to logits [B, L], or [B, S, L] per token."""
        x = hidden if self.config.per_token else hidden[:, 0]
        if self.dense is not None and self.config.transform is not None:
            x = TRANSFORMS[self.config.transform](self.dense(x))
        logits: Tensor = self.output(x)
        return logits

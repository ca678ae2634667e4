"""The heads of an encoder that score: labels of a text or of its tokens, or what stands in masked places.

In: hidden states [B, S, W]. Out: logits, [B, L] of each text, [B, S, L] of each token, or [..., V] over the vocabulary.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphport.model_def.block_config import NormConfig
from graphport.model_def.norms import Norm
from graphport.model_def.ops import pool
from graphport.model_def.readout_config import ClassifierConfig, MaskedHeadConfig, Transform

TRANSFORMS: dict[Transform, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}


class Classifier(nn.Module):
    """output(x), or output(norm(transform(dense(x)))), of the first token, of the mean, or of each token."""

    def __init__(self, config: ClassifierConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(hidden_size, hidden_size, bias=config.dense_bias) if config.transform else None
        self.norm = None
        if config.epsilon is not None:
            self.norm = Norm(NormConfig(kind="layer", epsilon=config.epsilon, bias=config.norm_bias), hidden_size)
        self.output = nn.Linear(hidden_size, len(config.labels))

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states [B, S, W] of texts of `lengths` int32 [B] to logits [B, L], or [B, S, L] per token."""
        x = hidden
        if not self.config.per_token:
            x = pool(hidden, lengths, "mean") if self.config.pooling == "mean" else hidden[:, 0]
        if self.dense is not None and self.config.transform is not None:
            x = TRANSFORMS[self.config.transform](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        logits: Tensor = self.output(x)
        return logits


class MaskedHead(nn.Module):
    """Scores over the vocabulary by the embeddings' matrix, or one of its own."""

    def __init__(self, config: MaskedHeadConfig, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.transform = TRANSFORMS[config.transform]
        self.dense = nn.Linear(hidden_size, config.width, bias=config.dense_bias)
        self.norm = Norm(NormConfig(kind="layer", epsilon=config.epsilon, bias=config.norm_bias), config.width)
        self.weight = None if config.tied else nn.Parameter(torch.empty(vocab_size, config.width))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.output_bias else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=config.width**-0.5)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Hidden states [..., W] and the embeddings [V, width] to logits [..., V]."""
        matrix = embedding if self.weight is None else self.weight
        return functional.linear(self.norm(self.transform(self.dense(x))), matrix, self.bias)

"""The two ends of an image encoder as modules: pixels to tokens, tokens to one vector.

In: pixels [B, C, h, w]; hidden states [B, S, W]. Out: tokens [B, S, W]; vectors [B, D]. The blocks between them are
those of every transformer.

Shapes: `B` images, `C` channels, `h`, `w` pixels, `P` patches, `S` tokens, `W` hidden size, `D` vector width.
"""

from typing import cast

import torch
from torch import Tensor, nn

from graphport.model_def.block_config import Activation, FeedForwardConfig, NormConfig
from graphport.model_def.classifier import TRANSFORMS
from graphport.model_def.feed_forward import FeedForward
from graphport.model_def.image_ops import image_patches, patch_positions, row_lengths
from graphport.model_def.norms import Norm
from graphport.model_def.ops import join_heads, pool, split_heads
from graphport.model_def.vision_config import AttentionPoolConfig, ImageConfig, ImageReadoutConfig


class PatchEmbedding(nn.Module):
    """Patches through one linear layer, positions added, class tokens before them.

    `prefix` holds the class tokens with their positions added already, for these depend on no image.
    """

    def __init__(self, config: ImageConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        height, width = config.patch_size
        self.projection = nn.Linear(config.channels * height * width, hidden_size, bias=config.patch_bias)
        self.positions = nn.Parameter(torch.randn(config.grid[0] * config.grid[1], hidden_size) * 0.02)
        self.prefix = nn.Parameter(torch.randn(config.prefix_tokens, hidden_size)) if config.prefix_tokens else None

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [B, C, h, w] to tokens [B, S, W]."""
        patches = self.projection(image_patches(pixels, *self.config.patch_size))
        patches = patches + patch_positions(self.positions, pixels, *self.config.patch_size, *self.config.grid)
        if self.prefix is None:
            return cast("Tensor", patches)
        return torch.cat([self.prefix.expand(pixels.shape[0], -1, -1), patches], dim=1)


class ImageReadout(nn.Module):
    """One vector, or the logits of the labels, from the last hidden states."""

    def __init__(self, config: ImageReadoutConfig, *, prefix_tokens: int, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.prefix_tokens = prefix_tokens
        width = hidden_size * (2 if "_and_" in config.select else 1)
        self.pool = AttentionPool(config.pool, hidden_size) if config.pool else None
        self.norm = None
        if config.norm_epsilon is not None:
            self.norm = Norm(NormConfig(kind="layer", epsilon=config.norm_epsilon, bias=True), width)
        self.linear = None if config.width is None else nn.Linear(width, config.width, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, S, W] to [B, D]."""
        x = self._select(hidden)
        if self.norm is not None:
            x = self.norm(x)
        if self.linear is not None:
            x = self.linear(x)
        return x if self.config.activation is None else TRANSFORMS[self.config.activation](x)

    def _select(self, hidden: Tensor) -> Tensor:
        if self.pool is not None:
            return cast("Tensor", self.pool(hidden))
        if self.config.select == "class":
            return hidden[:, 0]
        if self.config.select == "class_and_distillation":
            return torch.cat([hidden[:, 0], hidden[:, 1]], dim=-1)
        patches = hidden[:, self.prefix_tokens :]
        mean = pool(patches, row_lengths(patches), "mean")
        return mean if self.config.select == "patches" else torch.cat([hidden[:, 0], mean], dim=-1)


class AttentionPool(nn.Module):
    """A learned query over all tokens, then a feed-forward with its residual."""

    def __init__(self, config: AttentionPoolConfig, hidden_size: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.scale = (hidden_size // config.num_heads) ** -0.5
        self.probe = nn.Parameter(torch.randn(1, 1, hidden_size))
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.norm = Norm(NormConfig(kind="layer", epsilon=config.epsilon, bias=True), hidden_size)
        activation = cast("Activation", config.activation)  # checked by the record that it goes into
        self.feed_forward = FeedForward(
            FeedForwardConfig(width=config.feed_forward_width, activation=activation, gated=False, bias=True),
            hidden_size,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, S, W] to [B, W]."""
        query = split_heads(self.query(self.probe), self.num_heads)  # [1, N, 1, H]
        key, value = split_heads(self.key(hidden), self.num_heads), split_heads(self.value(hidden), self.num_heads)
        weights = torch.softmax(query @ key.transpose(-1, -2) * self.scale, dim=-1)  # [B, N, 1, S]
        attended = self.output(join_heads(weights @ value))  # [B, 1, W]
        pooled: Tensor = attended + self.feed_forward(self.norm(attended))
        return pooled[:, 0]

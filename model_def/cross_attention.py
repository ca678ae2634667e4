"""Attention from a decoder to the states of a source text, whose keys and values are computed once.

In: activations [B, S, W] of the decoder, hidden states [B, T, E] of the encoder. Out: activations [B, S, W]. It has no
positions and hides nothing but padding; the formula stands in `ops.py`.

Shapes: `B` rows, `S` new tokens, `T` source tokens, `W` width, `E` the encoder's, `N` heads, `H` head size.
"""

from torch import Tensor, nn

from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.ops import cross_attention, split_heads


class CrossAttention(nn.Module):
    """softmax(scale * Q K^T) V, queries from the decoder, keys and values from the source."""

    def __init__(self, config: AttentionConfig, hidden_size: int, source_size: int) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        self.query = nn.Linear(hidden_size, width, bias=config.qkv_bias)
        self.key = nn.Linear(source_size, width, bias=config.qkv_bias)
        self.value = nn.Linear(source_size, width, bias=config.qkv_bias)
        self.output = nn.Linear(width, hidden_size, bias=config.output_bias)

    def project_source(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, N, T, H] of hidden states [B, T, E]: all that later steps need of the source."""
        heads = self.config.num_heads
        return split_heads(self.key(hidden), heads).contiguous(), split_heads(self.value(hidden), heads).contiguous()

    def forward(self, x: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """x [B, S, W] over keys and values [B, N, T, H], of which a row's first `lengths` int32 [B] are real."""
        config = self.config
        attended = cross_attention(self.query(x), key, value, lengths, config.num_heads, config.softmax_scale)
        output: Tensor = self.output(attended)
        return output

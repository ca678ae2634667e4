"""The projections of multi-head latent attention: queries, keys and values by way of small vectors.

In: activations [B, S, W]. Out: queries, keys and values with all heads as wide as a query's, for the attention that
every family has (see `attention.py`). It caches nothing: keys and values are cached as they come out.

Shapes: `B` rows, `S` tokens, `W` width, `N` heads, `H` head size, `D` dimensions of it that rotate, `V` the values'.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from graphport.model_def.block_config import AttentionConfig, NormConfig
from graphport.model_def.norms import Norm


class LatentProjections(nn.Module):
    """Keys and values of all heads from one vector a token (DeepSeek-V2, equations 9 to 13 and 37 to 43).

    The dimensions that rotate come first in a head: products of queries and keys do not depend on the order, and the
    kernels rotate the first ones.
    """

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        assert config.rotary is not None
        self.num_heads, self.head_dim, self.value_dim = config.num_heads, config.head_dim, latent.value_dim
        self.rank, self.rotary_dim = latent.key_value_rank, config.rotary.rotary_dim(config.head_dim)
        norm = NormConfig(kind="rms", epsilon=latent.norm_epsilon)
        query_rank = latent.query_rank
        self.query_down = None if query_rank is None else nn.Linear(hidden_size, query_rank, bias=config.qkv_bias)
        self.query_norm = None if query_rank is None else Norm(norm, query_rank)
        self.query = nn.Linear(query_rank or hidden_size, config.num_heads * config.head_dim, bias=False)
        self.down = nn.Linear(hidden_size, self.rank + self.rotary_dim, bias=config.qkv_bias)
        self.norm = Norm(norm, self.rank)
        self.up = nn.Linear(
            self.rank, config.num_heads * (config.head_dim - self.rotary_dim + self.value_dim), bias=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """X [B, S, W] to query, key and value, each [B, S, N*H]; values have zeros behind their V dimensions."""
        down = x
        if self.query_down is not None and self.query_norm is not None:
            down = self.query_norm(self.query_down(x))
        latent, turning = self.down(x).split([self.rank, self.rotary_dim], dim=-1)
        passing_dim = self.head_dim - self.rotary_dim
        up = self.up(self.norm(latent)).reshape(*x.shape[:-1], self.num_heads, -1)
        passing, value = up.split([passing_dim, self.value_dim], dim=-1)  # [B, S, N, ...]
        shared = turning.unsqueeze(-2).expand(*passing.shape[:-1], -1)
        key = torch.cat((shared, passing), dim=-1)
        value = pad(value, (0, self.head_dim - self.value_dim))
        return self.query(down), key.flatten(-2), value.flatten(-2)

    def narrow(self, attended: Tensor) -> Tensor:
        """The heads joined [B, S, N*H] without what was put behind the values, [B, S, N*V]."""
        heads = attended.reshape(*attended.shape[:-1], self.num_heads, self.head_dim)
        return heads[..., : self.value_dim].flatten(-2)

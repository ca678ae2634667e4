"""Pairs of tokens as structure models have them: their representation, and the bias that attention takes from it.

In: embedded tokens. Out: pairs, biases of scores. Attention itself stands in `attention.py`.

Shapes: `B` rows, `S` tokens, `W` hidden size, `P` pair width, `N` heads.
"""

import torch
from torch import Tensor, nn

from graphport.model_def.block_config import NormConfig
from graphport.model_def.norms import Norm
from graphport.model_def.pair_config import PairConfig


class PairEmbedding(nn.Module):
    """The outer sum of two projections, and the distance of the two tokens. (Jumper et al. 2021, algorithms 3, 4.)"""

    def __init__(self, config: PairConfig, hidden_size: int) -> None:
        super().__init__()
        self.max_distance = config.max_distance
        self.left = nn.Linear(hidden_size, config.width, bias=False)
        self.right = nn.Linear(hidden_size, config.width, bias=False)
        self.distance = nn.Embedding(2 * config.max_distance + 1, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """X [B, S, W] to pairs [B, S, S, P]; row i, column j."""
        position = torch.arange(x.shape[1])
        distance = (position[None, :] - position[:, None]).clamp(-self.max_distance, self.max_distance)
        pairs: Tensor = self.left(x)[:, :, None] + self.right(x)[:, None] + self.distance(distance + self.max_distance)
        return pairs


class PairBias(nn.Module):
    """What pairs add to the scores of each head. (Jumper et al. 2021, algorithm 7, lines 3 and 5.)"""

    def __init__(self, config: PairConfig, num_heads: int) -> None:
        super().__init__()
        self.norm = Norm(NormConfig(kind="layer", epsilon=config.epsilon, bias=True), config.width)
        self.projection = nn.Linear(config.width, num_heads, bias=False)

    def forward(self, pairs: Tensor) -> Tensor:
        """Pairs [B, S, S, P] to [B, N, S, S]."""
        biases: Tensor = self.projection(self.norm(pairs))
        return biases.permute(0, 3, 1, 2)

"""One vector a text from an encoder's hidden states: pooled, and through a linear layer where the config has one.

In: hidden states, ids and lengths. Out: vectors. The formula of pooling stands in `ops.py`.

Shapes: `B` rows, `S` tokens, `W` hidden size, `D` vector width.
"""

import torch
from torch import Tensor, nn

from graphport.model_def.ops import pool
from graphport.model_def.readout_config import PoolingConfig


@torch.library.custom_op("graphport::end_lengths", mutates_args=())
def end_lengths(input_ids: Tensor, lengths: Tensor, ends_at: int) -> Tensor:
    """Tokens of each row up to the first `ends_at`, that included, int32 [B]; -1: up to the first of its highest id.

    input_ids int64 [B, S], lengths int32 [B]. What lies beyond a row's length is not looked at. A row without the id
    gives 1, as transformers takes its first token.
    """
    real = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
    marks = input_ids if ends_at < 0 else (input_ids == ends_at).to(torch.int64)
    return marks.masked_fill(~real, -1).argmax(dim=1).to(torch.int32) + 1


@end_lengths.register_fake
def _(input_ids: Tensor, lengths: Tensor, ends_at: int) -> Tensor:  # noqa: ARG001 - the op's own arguments
    return lengths.new_empty(lengths.shape)


class Pooling(nn.Module):
    """Pools hidden states, and projects what it pools."""

    def __init__(self, config: PoolingConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.projection = None if config.width is None else nn.Linear(hidden_size, config.width, bias=config.bias)

    def forward(self, hidden: Tensor, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Hidden [B, S, W], input_ids int64 [B, S], lengths int32 [B] to vectors [B, D]."""
        if self.config.ends_at is not None:
            lengths = end_lengths(input_ids, lengths, self.config.ends_at)
        vector = pool(hidden, lengths, self.config.kind)
        return vector if self.projection is None else self.projection(vector)  # type: ignore[no-any-return]  # as above

"""One layer of a transformer: attention, cross-attention where a source is read, feed-forward, residuals and norms.

In: the residual stream. Out: the residual stream. The stack stands in `transformer.py`, attention in `attention.py` and
`cross_attention.py`.

Shapes: `B` rows, `S` tokens, `T` source tokens, `W` hidden size, `E` the encoder's, `N` heads, `H` head size.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from graphport.model_def.attention import Attention, RotaryTables
from graphport.model_def.block_config import BlockConfig, FeedForwardConfig
from graphport.model_def.cross_attention import CrossAttention
from graphport.model_def.experts import Experts
from graphport.model_def.feed_forward import FeedForward
from graphport.model_def.modulation import BlockModulation
from graphport.model_def.norms import Norm


class Source(NamedTuple):
    """What a decoder reads beside its own text: hidden states [B, T, E] of an encoder, and their lengths int32 [B]."""

    hidden: Tensor
    lengths: Tensor


class Block(nn.Module):
    """Attention and feed-forward with residuals and norms in the order the config states.

    `source_size` is the width of the states that cross-attention reads, where there is one.
    """

    def __init__(self, config: BlockConfig, hidden_size: int, source_size: int = 0) -> None:
        super().__init__()
        self.norm_order, self.residual_scale = config.norm_order, config.residual_scale
        norms_inputs = config.norm_order != "output"
        norms_outputs = config.norm_order in ("sandwich", "output")

        def norm(*, is_there: bool) -> Norm | None:
            return Norm(config.norm, hidden_size) if is_there else None

        self.attention_norm = norm(is_there=norms_inputs and config.attention_norm)
        self.attention = Attention(config.attention, hidden_size)
        self.attention_output_norm = norm(is_there=norms_outputs)
        cross = config.cross_attention
        self.cross_attention_norm = norm(is_there=cross is not None)
        self.cross_attention = None if cross is None else CrossAttention(cross, hidden_size, source_size)
        self.feed_forward_norm = norm(is_there=norms_inputs and config.feed_forward_norm)
        self.feed_forward: FeedForward | Experts
        if isinstance(config.feed_forward, FeedForwardConfig):
            self.feed_forward = FeedForward(config.feed_forward, hidden_size)
        else:
            self.feed_forward = Experts(config.feed_forward, hidden_size)
        self.feed_forward_output_norm = norm(is_there=norms_outputs)

    def forward(
        self,
        x: Tensor,
        *,
        tables: RotaryTables | None = None,
        padding: Tensor | None = None,
        bias: Tensor | None = None,
        source: Source | None = None,
        modulation: BlockModulation | None = None,
    ) -> Tensor:
        """The residual stream [B, S, W] of whole texts after this block; see `Attention.forward`."""
        read = self.before_attention(x, modulation)
        attended = self.attention(read, tables=tables, padding=padding, bias=bias)
        if self.cross_attention is None:
            return self.after_attention(x, attended, modulation=modulation)
        assert source is not None
        pair = self.cross_attention.project_source(source.hidden)
        return self.after_attention(x, attended, self.reading(*pair, source.lengths))

    def reading(self, key: Tensor, value: Tensor, lengths: Tensor) -> Callable[[Tensor], Tensor]:
        """Cross-attention over a source's keys and values [B, N, T, H], of `lengths` [B], for `after_attention`."""
        assert self.cross_attention is not None
        cross = self.cross_attention
        return lambda x: cross(x, key, value, lengths)

    def before_attention(self, x: Tensor, modulation: BlockModulation | None = None) -> Tensor:
        """What attention reads, x [B, S, W]."""
        if self.norm_order == "post":
            return x
        normed = self._normed(self.attention_norm, x)
        return normed if modulation is None else modulation.attention.read(normed)

    def after_attention(
        self,
        x: Tensor,
        attended: Tensor,
        read_source: Callable[[Tensor], Tensor] | None = None,
        keep: Callable[[Tensor], Tensor] | None = None,
        modulation: BlockModulation | None = None,
    ) -> Tensor:
        """The rest of the block, given the residual stream x and the attention's output [B, S, W].

        `read_source` is the block's cross-attention, where it has one; after it, only the rows that `keep` takes go on.
        """
        if modulation is not None:
            return self._after_modulated(x, attended, modulation)
        keep = keep or keep_all
        if self.norm_order == "post":
            x = self._normed(self.attention_norm, x + self._scaled(attended))
            if read_source is not None:
                x = self._normed(self.cross_attention_norm, keep(x) + self._scaled(keep(read_source(x))))
            return self._normed(self.feed_forward_norm, x + self._scaled(self.feed_forward(x)))
        before = x
        x = x + self._scaled(self._normed(self.attention_output_norm, attended))
        if read_source is not None:
            x = keep(x) + self._scaled(keep(read_source(self._normed(self.cross_attention_norm, x))))
        hidden = self.feed_forward(self._before_feed_forward(before if self.norm_order == "parallel" else x))
        return x + self._scaled(self._normed(self.feed_forward_output_norm, hidden))

    def _after_modulated(self, x: Tensor, attended: Tensor, modulation: BlockModulation) -> Tensor:
        """As `after_attention`, of a conditioned block."""
        x = x + modulation.attention.gate * attended
        read = modulation.feed_forward.read(self._normed(self.feed_forward_norm, x))
        fed: Tensor = self.feed_forward(read)
        return x + modulation.feed_forward.gate * fed

    def _before_feed_forward(self, x: Tensor) -> Tensor:
        """What the feed-forward reads; a norm that it shares with attention is one node in a graph that was cleaned."""
        is_shared = self.norm_order == "parallel" and self.feed_forward_norm is None
        return self.before_attention(x) if is_shared else self._normed(self.feed_forward_norm, x)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    @staticmethod
    def _normed(norm: Norm | None, x: Tensor) -> Tensor:
        """X after `norm`, or as it is where there is none."""
        return x if norm is None else norm(x)


def keep_all(x: Tensor) -> Tensor:
    """All rows."""
    return x

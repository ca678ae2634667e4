"""The encoder half of an encoder-decoder as it is exported: source ids in, keys and values of every layer out.

In: padded ids and lengths, or the features of recordings. Out: what the decoder's cross-attention reads, computed once
a source. It has no weights of its own: the projections are those of the decoder's blocks.

Shapes: `B` rows, `T` tokens of the longest source, `N` heads, `H` head size.
"""

from typing import cast

from torch import Tensor, float32, nn

from graphport.model_def.cached_decoder import check_can_decode
from graphport.model_def.config import TransformerConfig
from graphport.model_def.cross_attention import CrossAttention
from graphport.model_def.encoder import Encoder, check_can_encode
from graphport.model_def.image_ops import row_lengths
from graphport.model_def.position_config import ConfigError
from graphport.model_def.transformer import Transformer


class SourceEncoder(nn.Module):
    """The encoder, and the key and value projections of the decoder's cross-attention. Raises ConfigError."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        assert model.encoder is not None
        if model.encoder.config.audio is not None:
            self.encoder: nn.Module = AudioEncoder(model.encoder)
        else:
            self.encoder = Encoder(model.encoder, max_length=model.encoder.config.max_positions)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"cross_attention": cast("CrossAttention", block.cross_attention)}) for block in model.layers
        )

    def forward(self, *source: Tensor) -> tuple[Tensor, ...]:
        """Ids int64 [B, T] and lengths int32 [B], or features, to key and value [B, N, T, H] of layer 0, 1, ..."""
        hidden = self.encoder(*source)[0]
        pairs: list[Tensor] = []
        for block in self.blocks:
            cross = cast("CrossAttention", cast("nn.ModuleDict", block)["cross_attention"])
            pairs += cross.project_source(hidden)
        return tuple(pairs)


class AudioEncoder(nn.Module):
    """A Transformer over recordings, whose frames are all real."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Features float32 [B, M, F] to hidden states float32 [B, F / 2, W]."""
        assert self.model.frames is not None
        x = self.model.frames(features)
        lengths = row_lengths(x)
        for block in self.model.layers:
            attended = block.attention.encode(block.before_attention(x), lengths, None, None)
            x = block.after_attention(x, attended)
        return (self.model.read_out(x).to(float32),)


def check_can_translate(config: TransformerConfig, max_length: int) -> None:
    """Raise ConfigError unless `config` can be exported as an encoder and a decoder of up to `max_length` tokens."""
    if config.encoder is None:
        raise ConfigError("an encoder-decoder has an encoder; this config is a stack alone")
    check_can_encode(config.encoder, config.encoder.max_positions)
    check_can_decode(config, max_length)

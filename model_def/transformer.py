"""The transformer: embedding, blocks, head; over whole texts. Steps over a cache stand in `cached_decoder.py`.

In: token ids. Out: logits (hidden states where there is no head). Reads no checkpoint and knows no ONNX.

Shapes: `B` rows, `S` tokens, `W` hidden size, `V` vocabulary, `R` rows of logits asked for.
"""

from typing import cast

import torch
from torch import Tensor, nn

from graphport.model_def.attention import RotaryTables
from graphport.model_def.block import Block, Source
from graphport.model_def.classifier import Classifier, MaskedHead
from graphport.model_def.config import TransformerConfig
from graphport.model_def.frames import FrameEmbedding
from graphport.model_def.head import Head
from graphport.model_def.modulation import AdaptiveFinalNorm, AdaptiveNorms, BlockModulation
from graphport.model_def.norms import Norm
from graphport.model_def.pairs import PairBias, PairEmbedding
from graphport.model_def.patches import ImageReadout, PatchEmbedding
from graphport.model_def.pooling import Pooling
from graphport.model_def.position_config import (
    AlibiBias,
    LearnedPosition,
    RelativeBias,
    SinusoidalPosition,
)
from graphport.model_def.positions import alibi_table, causal_buckets, relative_buckets, rotary_tables, sinusoidal_table


class Transformer(nn.Module):
    """The stack that a TransformerConfig describes; `forward` is the eager reference for whole texts."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embedding_width or config.hidden_size
        self.patches = PatchEmbedding(config.image, config.hidden_size) if config.image else None
        self.frames: FrameEmbedding | None = None
        if config.audio is not None:
            self.frames = FrameEmbedding(config.audio, config.max_positions, config.hidden_size)
        if self.patches is None and self.frames is None:
            self.embedding = nn.Embedding(config.vocab_size, config.id_width or width)
        self.id_projection: nn.Linear | None = None
        self.head_projection: nn.Linear | None = None
        if config.id_width is not None:
            self.id_projection = nn.Linear(config.id_width, config.hidden_size, bias=False)
            self.head_projection = nn.Linear(config.hidden_size, config.id_width, bias=False)
        self.position: nn.Embedding | None = None
        if isinstance(config.position, LearnedPosition):
            rows = config.position.max_positions + config.position.offset
            self.position = nn.Embedding(rows, width)
        self.relative_bias: nn.Embedding | None = None
        if isinstance(config.relative_bias, RelativeBias):
            self.relative_bias = nn.Embedding(config.relative_bias.num_buckets, config.blocks[0].attention.num_heads)
        self.token_type = nn.Embedding(config.token_types, width) if config.token_types else None
        self.embedding_norm = Norm(config.embedding_norm, width) if config.embedding_norm else None
        self.embedding_projection = nn.Linear(width, config.hidden_size) if config.embedding_width else None
        source_size = 0 if config.encoder is None else config.encoder.hidden_size
        self.blocks = nn.ModuleList(Block(block, config.hidden_size, source_size) for block in config.blocks)
        self.pair: PairEmbedding | None = None
        if config.pair is not None:
            self.pair = PairEmbedding(config.pair, config.hidden_size)
            heads = [block.attention.num_heads for block in config.blocks]
            self.pair_biases = nn.ModuleList(PairBias(config.pair, count) for count in heads)
        self.encoder = None if config.encoder is None else Transformer(config.encoder)
        self.final_norm = Norm(config.final_norm, config.hidden_size) if config.final_norm else None
        self.final_modulation: AdaptiveFinalNorm | None = None
        if config.conditioned:
            self.modulations = nn.ModuleList(AdaptiveNorms(config.hidden_size) for _ in config.blocks)
            self.final_modulation = AdaptiveFinalNorm(config.hidden_size)
        self.pooling = Pooling(config.pooling, config.hidden_size) if config.pooling else None
        self.classifier = Classifier(config.classifier, config.hidden_size) if config.classifier else None
        self.masked_head: MaskedHead | None = None
        if config.masked_head is not None:
            sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
            self.masked_head = MaskedHead(config.masked_head, **sizes)
        self.head: Head | None = Head(config) if config.head != "none" else None
        self.image_readout: ImageReadout | None = None
        if config.image is not None and config.image.readout is not None:
            self.image_readout = ImageReadout(
                config.image.readout, prefix_tokens=config.image.prefix_tokens, hidden_size=config.hidden_size
            )

    def forward(
        self,
        input_ids: Tensor,
        *,
        padding: Tensor | None = None,
        bias: Tensor | None = None,
        token_types: Tensor | None = None,
        source: Source | None = None,
        conditioning: Tensor | None = None,
    ) -> Tensor:
        """Whole texts input_ids int64 [B, S] to logits [B, S, V] (hidden states [B, S, W] without a head).

        Of an image encoder, pixels float [B, C, h, w] to hidden states; of recordings, features float [B, M, F].
        Otherwise:

        `padding` bool [B, S], True at real tokens; `bias` float, added to every layer's scores [B, N, S, S];
        `token_types` int64 [B, S], all 0 by default; `source`: what `encode` gives, for a decoder that reads one;
        `conditioning` float [B, W], for a conditioned stack.
        Learned and sinusoidal positions count the real tokens of each row; rotary ones are distances and need not.
        """
        states = self.run_blocks(
            input_ids, padding=padding, bias=bias, token_types=token_types, source=source, conditioning=conditioning
        )
        return self.read_out(states, conditioning)

    def encode(self, input_ids: Tensor, lengths: Tensor | None = None) -> Source:
        """The source texts input_ids int64 [B, T], of `lengths` [B] (by default all T), as the decoder reads them.

        Of an encoder of recordings, features float [B, M, F].
        """
        assert self.encoder is not None
        if self.encoder.frames is not None:
            hidden = self.encoder(input_ids)
            return Source(hidden, torch.full((hidden.shape[0],), hidden.shape[1], dtype=torch.int32))
        if lengths is None:
            lengths = torch.full((input_ids.shape[0],), input_ids.shape[1])
        padding = torch.arange(input_ids.shape[1]) < lengths[:, None]
        return Source(self.encoder(input_ids, padding=padding), lengths.to(torch.int32))

    def run_blocks(
        self,
        input_ids: Tensor,
        *,
        padding: Tensor | None = None,
        bias: Tensor | None = None,
        token_types: Tensor | None = None,
        source: Source | None = None,
        conditioning: Tensor | None = None,
    ) -> Tensor:
        """Whole texts input_ids int64 [B, S] to the residual stream [B, S, W] that `read_out` takes."""
        if self.patches is not None or self.frames is not None:
            x = self.embed_image(input_ids) if self.frames is None else self.frames(input_ids)
            for block in self.layers:
                x = block(x)
            return x
        length = input_ids.shape[1]
        positions = torch.arange(length) if padding is None else (padding.cumsum(dim=1) - 1).clamp(min=0)
        x = self.embed(input_ids, positions, token_types)
        relative = self.text_bias(length)
        if relative is not None:
            bias = relative if bias is None else bias + relative
        biases = self.with_pairs(x, [bias] * self.config.num_layers)
        layers = zip(self.layers, self.rotary_tables(length, length), biases, self.modulated(conditioning), strict=True)
        for block, tables, own, modulation in layers:
            x = block(x, tables=tables, padding=padding, bias=own, source=source, modulation=modulation)
        return x

    def modulated(self, conditioning: Tensor | None) -> list[BlockModulation | None]:
        """What `conditioning` [B, W] does to each layer; to none of a stack without adaptive norms."""
        if not self.config.conditioned:
            return [None] * self.config.num_layers
        if conditioning is None:
            raise ValueError("a conditioned stack reads a vector a text; give conditioning [B, W]")
        return [norms(conditioning) for norms in self.modulations]

    def with_pairs(self, x: Tensor, biases: list[Tensor | None]) -> list[Tensor | None]:
        """What is added to the scores of each layer, with what it takes from the pairs of embedded tokens [B, S, W]."""
        if self.pair is None:
            return biases
        pairs = self.pair(x)
        own = [pair_bias(pairs) for pair_bias in self.pair_biases]
        return [add if bias is None else bias + add for bias, add in zip(biases, own, strict=True)]

    def text_bias(self, length: int) -> Tensor | None:
        """What a text's `length` adds to every layer's scores; None where the config has no relative bias."""
        bias = self.config.relative_bias
        if bias is None:
            return None
        if isinstance(bias, AlibiBias) and bias.rounded:
            return self.distance_bias(length).T[None, :, None]
        if self.config.is_causal:
            distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
            return self.distance_bias(length)[distance].permute(2, 0, 1)[None]
        assert isinstance(bias, RelativeBias)
        return self.position_bias(relative_buckets(bias, length), length)

    def distance_bias(self, length: int) -> Tensor:
        """What is added to the scores of keys 0 .. length - 1 positions before the query [length, N].

        Of rounded ALiBi, to those of keys at these positions.
        """
        bias = self.config.relative_bias
        if isinstance(bias, AlibiBias):
            attention = self.config.blocks[0].attention
            return alibi_table(bias, attention.num_heads, length, scale=attention.softmax_scale)
        assert self.relative_bias is not None
        assert bias is not None
        biases: Tensor = self.relative_bias(causal_buckets(bias, length))
        return biases

    @property
    def layers(self) -> list[Block]:
        """The blocks, typed."""
        return cast("list[Block]", list(self.blocks))

    def embed(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Ids [B, S] at `positions` [S] or [B, S], of `token_types` [B, S] or 0, to the stream [B, S, W].

        Token types are added last: that sum and the norm after it are one kernel.
        """
        x = self.embedding(input_ids)
        if self.id_projection is not None:
            x = self.id_projection(x)
        if self.config.embedding_scale != 1.0:
            # the factor is rounded to the weights' precision, as the checkpoints were trained
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        if self.position is not None and isinstance(self.config.position, LearnedPosition):
            x = x + self.position(positions + self.config.position.offset)
        elif isinstance(self.config.position, SinusoidalPosition):
            position = self.config.position
            table = sinusoidal_table(position.max_positions, x.shape[-1], halves=position.halves)
            x = x + nn.functional.embedding(positions, table).to(x.dtype)
        if self.token_type is not None:
            x = x + (self.token_type.weight[0] if token_types is None else self.token_type(token_types))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.embedding_projection is not None:
            x = self.embedding_projection(x)
        return x  # type: ignore[no-any-return]  # nn.Module returns Any

    def embed_image(self, pixels: Tensor) -> Tensor:
        """Pixels [B, C, h, w] to the stream [B, S, W]."""
        assert self.patches is not None
        x: Tensor = self.patches(pixels)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def position_bias(self, buckets: Tensor, length: int) -> Tensor:
        """What is added to the scores of `length` S positions [1, N, S, S]; `buckets` [2 * P - 1], P at least S."""
        assert self.relative_bias is not None
        position = torch.arange(length)
        distance = position[None, :] - position[:, None] + (buckets.shape[0] - 1) // 2
        biases: Tensor = self.relative_bias(buckets[distance])  # [S, S, N]
        return biases.permute(2, 0, 1)[None]

    def read_out(self, x: Tensor, conditioning: Tensor | None = None) -> Tensor:
        """The residual stream [..., W] to logits [..., V], or to hidden states without a head."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.final_modulation is not None:
            x = self.final_modulation(x, conditioning)
        if self.head_projection is not None:
            x = self.head_projection(x)
        return x if self.head is None else self.head(x, self.embedding.weight)

    def rotary_tables(self, num_positions: int, total_length: int) -> list[RotaryTables | None]:
        """One pair of tables a layer; layers with equal settings share theirs."""
        made: dict[object, RotaryTables] = {}
        tables: list[RotaryTables | None] = []
        for block in self.config.blocks:
            rotary, head_dim = block.attention.rotary, block.attention.head_dim
            if rotary is None:
                tables.append(None)
                continue
            if (rotary, head_dim) not in made:
                pair = rotary_tables(rotary, head_dim, num_positions=num_positions, total_length=total_length)
                made[rotary, head_dim] = RotaryTables(*pair)
            tables.append(made[rotary, head_dim])
        return tables


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [R] of the flattened x [B, S, W], [R, W]; a lookup, because that exports as one Gather."""
    return nn.functional.embedding(rows, x.reshape(-1, x.shape[-1]))


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that a Transformer of this config has."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

"""A Transformer over a padded batch of whole texts: the module that is exported for encoders.

In: ids and lengths. Out: hidden states, and one vector a text where the config pools. It has no weights of its own;
the eager reference for one text at a time is `Transformer` itself.

Shapes: `B` rows, `S` tokens of the longest row, `W` hidden size.
"""

from torch import Tensor, arange, finfo, float32, nn, tensor, where

from graphport.model_def.attention import RotaryTables
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import ConfigError, RelativeBias, length_switch
from graphport.model_def.positions import relative_buckets
from graphport.model_def.transformer import Transformer, select_rows


class Encoder(nn.Module):
    """A Transformer without a cache, over rows whose real tokens come first.

    Raises ConfigError for decoders, for configs with a vocabulary head, and when `max_length` is beyond the
    positions or crosses the length at which a rotary scaling changes its frequencies.
    """

    def __init__(self, model: Transformer, *, max_length: int) -> None:
        super().__init__()
        check_can_encode(model.config, max_length)
        self.model = model
        for layer, tables in enumerate(model.rotary_tables(max_length, max_length)):
            if tables is not None:
                self.register_buffer(f"cos_{layer}", tables.cos, persistent=False)
                self.register_buffer(f"sin_{layer}", tables.sin, persistent=False)
        if isinstance(model.config.relative_bias, RelativeBias):
            self.register_buffer("buckets", relative_buckets(model.config.relative_bias, max_length), persistent=False)

    def forward(self, input_ids: Tensor, lengths: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """input_ids int64 [B, S], lengths int32 [B] to hidden states float32 [B, S, W].

        `others`: token_types int64 [B, S] where there are several, then conditioning float32 [B, W] of a conditioned
        stack, or logits_rows int64 [R] of a masked head.

        With pooling also embeddings float32 [B, D], not normalised; with a classifier logits float32 [B, L], or
        [B, S, L] per token; with a masked head logits float32 [R, V] of the rows of the flattened states. Hidden states
        and logits beyond a row's length are unspecified.
        """
        length = input_ids.shape[1]
        token_types = others[0] if others and self.model.config.token_types > 1 else None
        x = self.model.embed(input_ids, arange(length), token_types)
        biases = self.model.with_pairs(x, self._biases(length))
        conditioning = others[-1] if self.model.config.conditioned else None
        modulated = self.model.modulated(conditioning)
        for layer, block in enumerate(self.model.layers):
            read = block.before_attention(x, modulated[layer])
            attended = block.attention.encode(read, lengths, self._tables(layer), biases[layer])
            x = block.after_attention(x, attended, modulation=modulated[layer])
        x = self.model.read_out(x, conditioning)
        hidden = x.to(float32)
        if self.model.classifier is not None:
            return hidden, self.model.classifier(x, lengths).to(float32)
        if self.model.masked_head is not None:
            rows = select_rows(x, others[-1])
            return hidden, self.model.masked_head(rows, self.model.embedding.weight).to(float32)
        pooling = self.model.pooling
        return (hidden,) if pooling is None else (hidden, pooling(x, input_ids, lengths).to(float32))

    def _biases(self, length: int) -> list[Tensor | None]:
        """What is added to the scores of each layer [1, 1 or N, S, S]: the relative bias, and what a window hides."""
        has_relative = self.model.config.relative_bias is not None
        relative = self.model.position_bias(self.get_buffer("buckets"), length) if has_relative else None
        made: dict[int | None, Tensor | None] = {None: relative}
        position = arange(length)
        for block in self.model.config.blocks:
            window = block.attention.window
            if window is not None and window not in made:
                is_near = (position[None, :] - position[:, None]).abs() < window
                hidden = where(is_near, tensor(0.0), tensor(finfo(float32).min))[None, None]
                made[window] = hidden if relative is None else hidden + relative
        return [made[block.attention.window] for block in self.model.config.blocks]

    def _tables(self, layer: int) -> RotaryTables | None:
        if self.model.config.blocks[layer].attention.rotary is None:
            return None
        return RotaryTables(self.get_buffer(f"cos_{layer}"), self.get_buffer(f"sin_{layer}"))


def check_can_encode(config: TransformerConfig, max_length: int) -> None:
    """Raise ConfigError unless `config` can be exported as an encoder of texts up to `max_length` tokens."""
    if config.is_decoder:
        raise ConfigError("an encoder needs bidirectional attention or pooling; this config describes a decoder")
    if config.is_causal and config.relative_bias is not None:
        raise ConfigError("a causal encoder has no relative bias, whose buckets count both sides")
    if config.head != "none":
        raise ConfigError("an encoder gives hidden states and embeddings; leave its vocabulary head out (head='none')")
    if not 1 <= max_length <= config.max_positions:
        raise ConfigError(
            f"max_length ({max_length}) must lie in 1 .. max_positions ({config.max_positions}); "
            "choose it with --context"
        )
    is_filled = config.pooling is not None and config.pooling.filled_with is not None
    if is_filled and max_length != config.max_positions:
        raise ConfigError(
            f"texts are filled up to {config.max_positions} tokens, as the model was trained; max_length is "
            f"{max_length}: leave --context out"
        )
    for block in config.blocks:
        switch = None if block.attention.rotary is None else length_switch(block.attention.rotary)
        if switch is not None and max_length > switch:
            raise ConfigError(
                f"a rotary scaling changes its frequencies beyond {switch} positions; max_length is {max_length}: "
                f"export with --context {switch} or less"
            )

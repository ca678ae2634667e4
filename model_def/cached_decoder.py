"""A causal Transformer as one step over a KV cache: the module that is exported.

In: a Transformer, new ids and the caches before them. Out: logits of the rows asked for and the caches after. It keeps
no cache and chooses no ids.

Shapes: `B` rows, `S` new tokens, `W` hidden size, `V` vocabulary, `R` rows of logits asked for, `C` cache capacity.
"""

import functools

import torch
from torch import Tensor, nn

from graphport.model_def.attention import CacheStep, RotaryTables, ScoreBias
from graphport.model_def.block import keep_all
from graphport.model_def.cache_rows import past_lengths
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import AlibiBias, ConfigError, RelativeBias, length_switch
from graphport.model_def.positions import causal_buckets
from graphport.model_def.transformer import Transformer, select_rows


class CachedDecoder(nn.Module):
    """A causal Transformer seen as one step over a KV cache: the module that is exported.

    Raises ConfigError for bidirectional or headless configs, and when `max_length` crosses the length at which a
    scaling changes its frequencies (cached keys would keep the old ones).
    """

    def __init__(self, model: Transformer, *, max_length: int) -> None:
        super().__init__()
        check_can_decode(model.config, max_length)
        self.model = model
        self.max_length = max_length
        if isinstance(model.config.relative_bias, RelativeBias):
            buckets = causal_buckets(model.config.relative_bias, max_length)
            self.register_buffer("buckets", buckets, persistent=False)
        elif model.config.relative_bias is not None:
            self.register_buffer("alibi", model.distance_bias(max_length), persistent=False)
        for layer, tables in enumerate(model.rotary_tables(max_length, max_length)):
            if tables is not None:
                self.register_buffer(f"cos_{layer}", tables.cos, persistent=False)
                self.register_buffer(f"sin_{layer}", tables.sin, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        logits_rows: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        """One step; shapes as in `signature.decoder_signature`, `past` key and value of layer 0, 1, ...

        Of a decoder that reads a source, lengths, keys and values of that follow in `past`.

        Returns logits [R, V] float32 and the caches after the step in the order of `past`. After the last attention
        only the rows asked for go on.
        """
        num_new = input_ids.shape[1]
        step = CacheStep(seqlens_k, total_sequence_length)
        positions = past_lengths(seqlens_k, num_new)[:, None] + torch.arange(num_new)
        x = self.model.embed(input_ids, positions)
        present: list[Tensor] = []
        num_caches = 2 * self.model.config.num_layers
        bias = self._score_bias()
        for layer, block in enumerate(self.model.layers):
            pair = past[2 * layer], past[2 * layer + 1]
            attended, *caches = block.attention.step(block.before_attention(x), *pair, step, self._tables(layer), bias)
            present += caches
            is_last = layer == self.model.config.num_layers - 1
            if block.cross_attention is not None:
                lengths, *sources = past[num_caches:]
                read_source = block.reading(sources[2 * layer], sources[2 * layer + 1], lengths)
                keep = functools.partial(select_rows, rows=logits_rows) if is_last else keep_all
                x = block.after_attention(x, attended, read_source, keep)
                continue
            if is_last:
                x, attended = select_rows(x, logits_rows), select_rows(attended, logits_rows)
            x = block.after_attention(x, attended)
        return self.model.read_out(x).to(torch.float32), *present

    def _score_bias(self) -> ScoreBias | None:
        """What distances or positions add to the scores, where the config has a relative bias."""
        bias = self.model.config.relative_bias
        if isinstance(bias, AlibiBias):
            return ScoreBias(self.get_buffer("alibi"), by_key=bias.rounded)
        if self.model.relative_bias is None:
            return None
        return ScoreBias(self.model.relative_bias(self.get_buffer("buckets")), by_key=False)

    def _tables(self, layer: int) -> RotaryTables | None:
        if self.model.config.blocks[layer].attention.rotary is None:
            return None
        return RotaryTables(self.get_buffer(f"cos_{layer}"), self.get_buffer(f"sin_{layer}"))


def check_can_decode(config: TransformerConfig, max_length: int) -> None:
    """Raise ConfigError unless `config` can be decoded with a cache up to `max_length` positions."""
    if config.is_recurrent:
        raise ConfigError("a cached decoder needs softmax attention; linear attention has states, not a KV cache")
    if not config.is_decoder or config.head == "none":
        raise ConfigError("a cached decoder needs causal attention and a head; this config describes an encoder")
    if not 1 <= max_length <= config.max_positions:
        raise ConfigError(
            f"max_length ({max_length}) must lie in 1 .. max_positions ({config.max_positions}); "
            "choose it with --context"
        )
    for block in config.blocks:
        switch = None if block.attention.rotary is None else length_switch(block.attention.rotary)
        if switch is not None and max_length > switch:
            kind = type(block.attention.rotary.scaling).__name__ if block.attention.rotary else ""
            raise ConfigError(
                f"{kind} changes its frequencies beyond {switch} positions, and keys cached before would keep the "
                f"old ones; max_length is {max_length}: export with --context {switch} or less"
            )

"""Multi-head, grouped-query and multi-query attention as a module, over whole texts or over a cache.

In: activations [B, S, W]. Out: activations [B, S, W], and the caches on the cached path. Holds the projections;
the formula stands in `ops.py`.

Shapes: `B` rows, `S` tokens, `W` width, `N` query heads, `K` key/value heads, `H` head size, `C` cache capacity.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.latent_projections import LatentProjections
from graphport.model_def.linear_attention import LinearState, empty_state, linear_attention
from graphport.model_def.norms import Norm
from graphport.model_def.ops import (
    attend,
    biased_cached_attention,
    cached_attention,
    join_heads,
    padded_attention,
    split_heads,
)
from graphport.model_def.positions import rotate
from graphport.model_def.sink_ops import attend_with_sinks, sink_cached_attention


class CacheStep(NamedTuple):
    """What one cached step says of its rows; see `signature.decoder_signature`."""

    seqlens_k: Tensor
    total_sequence_length: Tensor


class RotaryTables(NamedTuple):
    """Cosines and sines [P, D/2]."""

    cos: Tensor
    sin: Tensor


class ScoreBias(NamedTuple):
    """What is added to scores [P, N]: by the distance of query and key, or by the key's position."""

    table: Tensor
    by_key: bool


class Attention(nn.Module):
    """softmax(scale * Q K^T) V with heads split and joined, optional rotary, q/k norm, window, cap and biases."""

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.latent = None if config.latent is None else LatentProjections(config, hidden_size)
        if self.latent is None:
            self.query = nn.Linear(hidden_size, width, bias=config.qkv_bias)
            self.key = nn.Linear(hidden_size, kv_width, bias=config.qkv_bias)
            self.value = nn.Linear(hidden_size, kv_width, bias=config.qkv_bias)
        self.output = nn.Linear(config.num_heads * config.value_dim, hidden_size, bias=config.output_bias)
        self.gate = nn.Linear(hidden_size, config.num_heads * config.value_dim) if config.gate else None
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None
        self.query_norm = _head_norm(config, config.num_heads) if config.qk_norm else None
        self.key_norm = _head_norm(config, config.num_kv_heads) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        *,
        tables: RotaryTables | None = None,
        padding: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attention within whole texts x [B, S, W], positions 0 .. S-1.

        `padding` bool [B, S] is True at real tokens; `bias` float broadcasts to [B, N, S, S].
        """
        config = self.config
        if config.linear:
            return self.recur(x, empty_state(len(x), config.num_heads, config.head_dim))[0]
        query, key, value = self._project(x)
        queries, keys = split_heads(query, config.num_heads), split_heads(key, config.num_kv_heads)
        if tables is not None:
            queries = rotate(queries, *tables, interleaved=self._is_interleaved())
            keys = rotate(keys, *tables, interleaved=self._is_interleaved())
        values, scale = split_heads(value, config.num_kv_heads), config.softmax_scale
        visible = self._visible(x.shape[1], padding)
        if self.sinks is not None:
            assert visible is not None
            attended = attend_with_sinks(queries, keys, values, self.sinks, visible=visible, scale=scale)
            return self._read_out(join_heads(attended), x)
        softcap = config.softcap or 0.0
        attended = attend(queries, keys, values, visible=visible, bias=bias, scale=scale, softcap=softcap)
        return self._read_out(join_heads(attended), x)

    def recur(self, x: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        """New tokens x [B, S, W] of linear attention over the state of those before; [B, S, W] and the state after."""
        heads = [split_heads(part, self.config.num_heads) for part in self._project(x)]
        attended, after = linear_attention(heads[0], heads[1], heads[2], state)
        return self._read_out(join_heads(attended), x), after

    def step(
        self,
        x: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        step: CacheStep,
        tables: RotaryTables | None,
        bias: ScoreBias | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New tokens x [B, S, W] over caches [B, K, C, H]; returns [B, S, W] and the caches after the step.

        `bias` is added to the scores.
        """
        config = self.config
        query, key, value = self._project(x)
        if bias is not None:
            heads = (config.num_heads, config.num_kv_heads, config.softmax_scale)
            caches = (past_key, past_value, *step)
            attended, *present = biased_cached_attention(query, key, value, *caches, bias.table, *heads, bias.by_key)
            return self._read_out(attended, x), *present
        if self.sinks is not None:
            assert tables is not None
            heads = (config.num_heads, config.num_kv_heads, config.softmax_scale)
            inputs = (query, key, value, past_key, past_value, *step, *tables, self.sinks)
            attended, *present = sink_cached_attention(*inputs, *heads, config.window or -1, self._is_interleaved())
            return self._read_out(attended, x), *present
        attended, present_key, present_value = cached_attention(
            query,
            key,
            value,
            past_key,
            past_value,
            step.seqlens_k,
            step.total_sequence_length,
            tables.cos if tables else None,
            tables.sin if tables else None,
            config.num_heads,
            config.num_kv_heads,
            config.softmax_scale,
            config.softcap or 0.0,
            config.window or -1,
            self._is_interleaved(),
        )
        return self._read_out(attended, x), present_key, present_value

    def encode(self, x: Tensor, lengths: Tensor, tables: RotaryTables | None, bias: Tensor | None) -> Tensor:
        """Attention within padded texts x [B, S, W] of `lengths` int32 [B]; returns [B, S, W].

        `bias` float [1 or B, 1 or N, S, S] is added to the scores; it carries the window too.
        """
        config = self.config
        attended = padded_attention(
            *self._project(x),
            lengths,
            tables.cos if tables else None,
            tables.sin if tables else None,
            bias,
            config.num_heads,
            config.num_kv_heads,
            config.softmax_scale,
            config.softcap or 0.0,
            self._is_interleaved(),
            config.causal,
        )
        return self._read_out(attended, x)

    def _read_out(self, attended: Tensor, x: Tensor) -> Tensor:
        """The heads joined [B, S, N*H], gated by what attention read, to activations [B, S, W]."""
        if self.latent is not None:
            attended = self.latent.narrow(attended)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(x))  # (Jumper et al. 2021, algorithm 7, lines 4 and 6)
        output: Tensor = self.output(attended)
        return output

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, S, N*H], key and value [B, S, K*H]."""
        if self.latent is not None:
            query, key, value = self.latent(x)
            return query, key, value
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is None or self.key_norm is None:
            return query, key, value
        if self.config.qk_norm_over == "width":
            query, key = self.query_norm(query), self.key_norm(key)
        else:
            head = (*x.shape[:2], -1, self.config.head_dim)
            query = self.query_norm(query.reshape(head)).flatten(-2)
            key = self.key_norm(key.reshape(head)).flatten(-2)
        return query, key, value

    def _visible(self, length: int, padding: Tensor | None) -> Tensor | None:
        """Bool mask that broadcasts to [B, N, S, S], or None when every position sees every other."""
        visible = None
        position = torch.arange(length)
        if self.config.causal:
            visible = position[None, :] <= position[:, None]
            if self.config.window is not None:
                visible = visible & (position[None, :] > position[:, None] - self.config.window)
        elif self.config.window is not None:
            visible = (position[None, :] - position[:, None]).abs() < self.config.window
        if padding is not None:
            real = padding[:, None, None, :]
            visible = real if visible is None else visible & real
        return visible

    def _is_interleaved(self) -> bool:
        return self.config.rotary is not None and self.config.rotary.interleaved


def _head_norm(config: AttentionConfig, num_heads: int) -> Norm:
    """The norm of query or key heads, as wide as the config says."""
    assert config.qk_norm is not None
    match config.qk_norm_over:
        case "head":
            return Norm(config.qk_norm, config.head_dim)
        case "each_head":
            return Norm(config.qk_norm, config.head_dim, num_heads=num_heads)
        case "width":
            return Norm(config.qk_norm, num_heads * config.head_dim)

"""Eager decoding over a KV cache whose rows are rounded when they are stored: the reference of quantised caches.

In: a model, scales a layer, ids in pieces, the rows that were stored. Out: logits. It shares no code with the exporter.
A value half way between two q may be stored as either (its computation differs by a last bit), so the reference checks
each stored q against its own value, and reads what was stored.

Shapes: `S` new tokens, `N` query heads, `K` key/value heads, `H` head size, `C` cache capacity.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor

from graphport.export.graph_runner import GraphRunner
from graphport.model_def.cache_rows import past_lengths
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.ops import attend, join_heads, split_heads
from graphport.model_def.positions import rotate
from graphport.model_def.transformer import Transformer

LEVELS = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}
LONGEST_SHORT_STEP = 8  # tokens of a step that reads its own rows rounded; longer ones read them as they are

HALF_WAY = 1e-3  # how far from half way between two q a value may be that is stored as the other one

Scales = list[tuple[Tensor, Tensor]]
Rows = list[NDArray[Any]]  # keys and values of layer 0, 1, ... as stored, [1, K, C, H], packed or not


def rounded_logits(
    model: Transformer, ids: Sequence[int], scales: Scales, cache: str, pieces: Sequence[int], stored: Rows
) -> NDArray[np.float32]:
    """Logits [len(ids), V] of `ids` fed in `pieces`, keys and values kept as `scale * q`; `stored` are the q found."""
    quantised = [torch.from_numpy(unpacked(rows)).to(torch.float32) for rows in stored]
    layers = itertools.cycle(zip(scales, zip(quantised[::2], quantised[1::2], strict=True), strict=True))
    parts = []

    def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _attention(*next(layers), LEVELS[cache], *arguments)

    start = 0
    past = [torch.full(rows.shape, torch.nan) for rows in quantised]
    decoder = CachedDecoder(model, max_length=model.config.max_positions)
    with mock.patch("graphport.model_def.attention.cached_attention", attention), torch.inference_mode():
        for size in pieces:
            end = start + size
            lengths = torch.tensor([end - 1], dtype=torch.int32), torch.tensor(end, dtype=torch.int32)
            logits, *past = decoder(torch.tensor([ids[start:end]]), *lengths, torch.arange(size), *past)
            parts.append(logits)
            start = end
    return torch.cat(parts).numpy()


def graph_logits(runner: GraphRunner, ids: Sequence[int], pieces: Sequence[int]) -> tuple[NDArray[np.float32], Rows]:
    """Logits of a graph fed in `pieces`, and the rows that it stored."""
    parts: dict[int, list[NDArray[Any]]] = {}

    def keep(index: int, rows: NDArray[Any]) -> NDArray[Any]:
        parts.setdefault(index, []).append(rows.copy())
        return rows

    logits = runner.logits(ids, chunks=pieces, store=keep)
    return logits, [np.concatenate(rows, axis=2) for _, rows in sorted(parts.items())]


def unpacked(rows: NDArray[Any]) -> NDArray[Any]:
    """The q of stored rows; a byte of uint8 rows holds two, the even one in its low nibble, plus 8."""
    if rows.dtype != np.uint8:
        return rows
    pairs = np.stack((rows & 15, rows >> 4), axis=-1).astype(np.int8) - 8
    return pairs.reshape(*rows.shape[:-1], -1)


def read_scales(graph: Path, num_layers: int) -> Scales:
    """The scales in a graph file, keys and values of layer 0, 1, ..."""
    names = [f"blocks.{layer}.attention.{which}_scale" for layer in range(num_layers) for which in ("key", "value")]
    model = onnx.load(graph)
    found = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    scales = [found[name] for name in names]
    return list(zip(scales[::2], scales[1::2], strict=True))


def _attention(
    scales: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    levels: tuple[float, float],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    _: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    softcap: float,
    window: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`graphport.model_def.ops.cached_attention` of one row, over rounded rows."""
    start = int(past_lengths(seqlens_k, query.shape[1])[0])
    end = start + query.shape[1]
    positions = torch.arange(start, end)
    queries, keys = split_heads(query, num_heads), split_heads(key, num_kv_heads)
    if cos is not None and sin is not None:
        queries = rotate(queries, cos[positions], sin[positions], interleaved=interleaved)
        keys = rotate(keys, cos[positions], sin[positions], interleaved=interleaved)
    new = [keys, split_heads(value, num_kv_heads)]
    rounded = [_rounded(x, s, q[:, :, start:end], levels) for x, s, q in zip(new, scales, stored, strict=True)]
    read = rounded if query.shape[1] <= LONGEST_SHORT_STEP else new
    pasts = (past_key, past_value)
    seen = [torch.cat((past[:, :, :start], rows), dim=2) for past, rows in zip(pasts, read, strict=True)]
    column = torch.arange(end)
    visible = column <= positions[:, None]
    if window > 0:
        visible &= column > positions[:, None] - window
    attended = attend(queries, *seen, visible=visible, bias=None, scale=scale, softcap=softcap)
    kept = [
        torch.cat((past[:, :, :start], rows, past[:, :, end:]), dim=2)
        for past, rows in zip(pasts, rounded, strict=True)
    ]
    return join_heads(attended), kept[0], kept[1]


def _rounded(x: Tensor, scale: Tensor, stored: Tensor, levels: tuple[float, float]) -> Tensor:
    """What is read back for `x`; fails unless the stored q is the nearest, or all but."""
    exact = torch.clamp(x / scale, *levels)
    distance = (stored - exact).abs().max()
    assert distance <= 0.5 + HALF_WAY, f"a stored value is {distance:.4f} steps away from what was computed"
    return stored * scale

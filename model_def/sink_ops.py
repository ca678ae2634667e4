"""Attention with sinks as PyTorch sees it: a score of its own for each head that takes weight and gives nothing.

In: tensors. Out: tensors. The ONNX side stands in `export/portable_sink_ops.py`, the other ops in `ops.py`.

Shapes: `B` rows, `S` new tokens, `T` all tokens, `N` query heads, `K` key/value heads, `H` head size, `C` cache
capacity, `P` rotary table positions, `D` rotary dimensions.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphport.model_def.cache_rows import check_room, past_lengths, write_cache
from graphport.model_def.ops import attend, join_heads, split_heads
from graphport.model_def.positions import rotate


@torch.library.custom_op("graphport::sink_cached_attention", mutates_args=())
def sink_cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos: Tensor,
    sin: Tensor,
    sinks: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`cached_attention` with rotation, without a cap, and with sinks [N]; see `attend_with_sinks`."""
    num_new, capacity = query.shape[1], past_key.shape[2]
    check_room(seqlens_k, total_sequence_length, num_new, capacity)
    past = past_lengths(seqlens_k, num_new)  # [B]
    positions = past[:, None] + torch.arange(num_new, device=past.device)  # [B, S]
    tables = cos[positions][:, None], sin[positions][:, None]  # [B, 1, S, D/2]
    queries = rotate(split_heads(query, num_heads), *tables, interleaved=interleaved)
    keys = rotate(split_heads(key, num_kv_heads), *tables, interleaved=interleaved)
    present_key = write_cache(past_key, keys, past)
    present_value = write_cache(past_value, split_heads(value, num_kv_heads), past)
    column = torch.arange(capacity, device=past.device)
    visible = column <= positions[:, :, None]  # [B, S, C]
    if window > 0:
        visible = visible & (column > positions[:, :, None] - window)
    written = (column <= positions[:, -1:])[:, None, :, None]
    attended = attend_with_sinks(
        queries,
        present_key.where(written, 0),
        present_value.where(written, 0),
        sinks,
        visible=visible[:, None],
        scale=scale,
    )
    return join_heads(attended), present_key.contiguous(), present_value.contiguous()


@sink_cached_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos: Tensor,
    sin: Tensor,
    sinks: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), past_key.new_empty(past_key.shape), past_value.new_empty(past_value.shape)


def attend_with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, *, visible: Tensor, scale: float
) -> Tensor:
    """Attention whose softmax runs over the scores and one more, the head's of `sinks` [N], which has no value.

    Shapes as in `attend`; `visible` bool broadcasts to [B, N, S, T]. A further key and value of zeros, whose score is
    raised to the sink, come to the same. (Xiao et al. 2023, equation 3, with a trained score as GPT-OSS has it.)
    """
    length = keys.shape[2]
    bias = pad(torch.zeros(1, 1, 1, length), (0, 1)).repeat(1, queries.shape[1], 1, 1)
    bias[..., -1] = sinks.to(torch.float32)[:, None]
    return attend(
        queries,
        pad(keys, (0, 0, 0, 1)),
        pad(values, (0, 0, 0, 1)),
        visible=pad(visible, (0, 1), value=True),
        bias=bias,
        scale=scale,
        softcap=0.0,
    )

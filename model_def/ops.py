"""The fused ops as PyTorch sees them: schema, fake kernel and eager reference of each.

In: tensors. Out: tensors. The ONNX side (node, function body, kernels) stands in `export/translations.py`.

Shapes: `B` rows, `S` new tokens, `N` query heads, `K` key/value heads, `H` head size, `C` cache capacity,
`P` rotary table positions, `D` rotary dimensions.
"""

import torch
from torch import Tensor

from graphport.model_def.positions import rotate


@torch.library.custom_op("graphport::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, statistics in float32 at least.

    x [..., W], weight [W]; returns x's shape and dtype. (Zhang and Sennrich 2019, equation 4.)
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (normal * weight.to(wide.dtype)).to(x.dtype)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphport::cached_attention", mutates_args=())
def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    softcap: float,
    window: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of new tokens over a cache that they are first written into.

    query [B, S, N*H]; key, value [B, S, K*H]; past_key, past_value [B, K, C, H]; seqlens_k int32 [B], a row's
    tokens after the step minus one; total_sequence_length int32 scalar, equal to S exactly when nothing is cached;
    cos, sin [P, D/2] or None. softcap 0 is off; window -1 is off, else position i sees (i - window, i].
    Returns the heads joined [B, S, N*H] and the caches after the step [B, K, C, H], contiguous.
    Semantics of ONNX Runtime's GroupQueryAttention with a static cache; rows beyond a row's length are unspecified
    there and attend like the others here. Raises ValueError when a row's tokens do not fit its cache.
    """
    num_new, capacity = query.shape[1], past_key.shape[2]
    check_room(seqlens_k, total_sequence_length, num_new, capacity)
    past = past_lengths(seqlens_k, num_new)  # [B]
    positions = past[:, None] + torch.arange(num_new, device=past.device)  # [B, S]
    queries = split_heads(query, num_heads)  # [B, N, S, H]
    keys = split_heads(key, num_kv_heads)
    if cos is not None and sin is not None:
        cos_rows, sin_rows = cos[positions][:, None], sin[positions][:, None]  # [B, 1, S, D/2]
        queries = rotate(queries, cos_rows, sin_rows, interleaved=interleaved)
        keys = rotate(keys, cos_rows, sin_rows, interleaved=interleaved)
    present_key = write_cache(past_key, keys, past)
    present_value = write_cache(past_value, split_heads(value, num_kv_heads), past)

    column = torch.arange(capacity, device=past.device)
    visible = column <= positions[:, :, None]  # [B, S, C]
    if window > 0:
        visible = visible & (column > positions[:, :, None] - window)
    # what lies beyond the text may be anything, NaN included: it must not reach a product with weight 0
    written = (column <= positions[:, -1:])[:, None, :, None]
    attended = attend(
        queries,
        present_key.where(written, 0),
        present_value.where(written, 0),
        visible=visible[:, None],
        bias=None,
        scale=scale,
        softcap=softcap,
    )
    return join_heads(attended), present_key.contiguous(), present_value.contiguous()


@cached_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    softcap: float,
    window: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), past_key.new_empty(past_key.shape), past_value.new_empty(past_value.shape)


@torch.library.custom_op("graphport::biased_cached_attention", mutates_args=())
def biased_cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    by_key: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`cached_attention` without rotation, cap and window, whose scores depend on distances too.

    table float [P, N], P at least C: `table[d]` is added to the scores of keys that stand d positions before the query,
    or at position d when `by_key`.
    """
    num_new, capacity = query.shape[1], past_key.shape[2]
    check_room(seqlens_k, total_sequence_length, num_new, capacity)
    past = past_lengths(seqlens_k, num_new)  # [B]
    positions = past[:, None] + torch.arange(num_new, device=past.device)  # [B, S]
    present_key = write_cache(past_key, split_heads(key, num_kv_heads), past)
    present_value = write_cache(past_value, split_heads(value, num_kv_heads), past)
    column = torch.arange(capacity, device=past.device)
    distance = positions[:, :, None] - column  # [B, S, C]
    written = (column <= positions[:, -1:])[:, None, :, None]
    attended = attend(
        split_heads(query, num_heads),
        present_key.where(written, 0),
        present_value.where(written, 0),
        visible=(distance >= 0)[:, None],
        bias=table[column.expand_as(distance) if by_key else distance.clamp(min=0)].permute(0, 3, 1, 2),
        scale=scale,
        softcap=0.0,
    )
    return join_heads(attended), present_key.contiguous(), present_value.contiguous()


@biased_cached_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    by_key: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), past_key.new_empty(past_key.shape), past_value.new_empty(past_value.shape)


@torch.library.custom_op("graphport::cross_attention", mutates_args=())
def cross_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, num_heads: int, scale: float) -> Tensor:
    """Attention of new tokens over a source, which lies before none of them: every token sees all of its row's.

    query [B, S, N*H]; key, value [B, N, T, H]; lengths int32 [B], a row's source tokens, which come first. Keys and
    values beyond them reach nothing, whatever they hold. Returns the heads joined [B, S, N*H].
    """
    real = torch.arange(key.shape[2], device=lengths.device) < lengths[:, None]  # [B, T]
    written = real[:, None, :, None]
    attended = attend(
        split_heads(query, num_heads),
        key.where(written, 0),
        value.where(written, 0),
        visible=real[:, None, None],
        bias=None,
        scale=scale,
        softcap=0.0,
    )
    return join_heads(attended).contiguous()


@cross_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, num_heads: int, scale: float) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("graphport::padded_attention", mutates_args=())
def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    softcap: float,
    interleaved: bool,
    causal: bool,
) -> Tensor:
    """Attention within rows of different lengths, bidirectional unless `causal`.

    query [B, S, N*H]; key, value [B, S, K*H]; lengths int32 [B], a row's real tokens, which come first; cos, sin
    [P, D/2] or None, for positions 0 .. S-1; bias float, broadcasts to [B, N, S, S], is added to
    the scores after the cap. softcap 0 is off. `causal`: position i sees 0 .. i. Returns the heads joined [B, S, N*H].
    Keys and values beyond a row's length reach nothing, whatever they hold; the output there is finite and otherwise
    unspecified.
    """
    length = query.shape[1]
    queries, keys = split_heads(query, num_heads), split_heads(key, num_kv_heads)
    if cos is not None and sin is not None:
        queries = rotate(queries, cos[:length], sin[:length], interleaved=interleaved)
        keys = rotate(keys, cos[:length], sin[:length], interleaved=interleaved)
    real = torch.arange(length, device=lengths.device) < lengths[:, None]  # [B, S]
    written = real[:, None, :, None]
    visible = real[:, None, None]
    if causal:
        position = torch.arange(length, device=lengths.device)
        visible = visible & (position <= position[:, None])
    attended = attend(
        queries.where(written, 0),
        keys.where(written, 0),
        split_heads(value, num_kv_heads).where(written, 0),
        visible=visible,
        bias=bias,
        scale=scale,
        softcap=softcap,
    )
    return join_heads(attended).contiguous()


@padded_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    softcap: float,
    interleaved: bool,
    causal: bool,
) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("graphport::pool", mutates_args=())
def pool(hidden: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """One vector a row [B, W] from hidden states [B, S, W] and lengths int32 [B]; kinds as in `PoolingConfig`.

    Computed in float32, returned in the dtype of `hidden`. What lies beyond a row's length may be anything. A row of
    length 0 gives zeros. (Reimers and Gurevych 2019, section 3.)
    """
    length = lengths[:, None]
    column = torch.arange(hidden.shape[1], device=hidden.device)
    chosen = {"cls": column < length.clamp(max=1), "last": column == length - 1}.get(kind, column < length)  # [B, S]
    wide = hidden.to(torch.float32)
    if kind == "max":
        largest = wide.masked_fill(~chosen[..., None], float("-inf")).amax(dim=1)
        return largest.masked_fill(length == 0, 0.0).to(hidden.dtype)
    total = wide.where(chosen[..., None], 0).sum(dim=1)
    count = length.clamp(min=1).to(torch.float32)
    divisor = {"mean": count, "mean_sqrt": count.sqrt()}.get(kind, torch.ones_like(count))
    return (total / divisor).to(hidden.dtype)


@pool.register_fake
def _(hidden: Tensor, lengths: Tensor, kind: str) -> Tensor:
    return hidden.new_empty((hidden.shape[0], hidden.shape[2]))


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """softmax(cap(scale * Q K^T) + bias, masked) V for queries [B, N, S, H], keys and values [B, K, T, H].

    `visible` bool and `bias` float broadcast to [B, N, S, T]. Order: scale, cap, bias, mask, softmax. A row that sees
    nothing gives 0. Statistics in float32 at least. (Vaswani et al. 2017, equation 1; the cap is Gemma 2's.)
    """
    group = queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = (queries @ keys.transpose(-1, -2)).to(torch.promote_types(queries.dtype, torch.float32)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    # a row of -inf alone has no softmax: it attends to nothing
    weights = weights.masked_fill((scores == float("-inf")).all(dim=-1, keepdim=True), 0.0)
    return weights.to(values.dtype) @ values


def past_lengths(seqlens_k: Tensor, num_new: int) -> Tensor:
    """Tokens cached before the step [B] int64: length - num_new, or 0 in a row that is padded to num_new.

    An arange turns the size into a tensor on the device: a copy from the host would forbid capture as a CUDA graph.
    """
    return (seqlens_k + torch.arange(1 - num_new, 2 - num_new, device=seqlens_k.device)).clamp(min=0)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, S, N*H] to [B, N, S, H]."""
    return x.reshape(*x.shape[:2], num_heads, x.shape[-1] // num_heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[B, N, S, H] to [B, S, N*H]."""
    return x.transpose(1, 2).flatten(2)


def check_room(seqlens_k: Tensor, total_sequence_length: Tensor, num_new: int, capacity: int) -> None:
    """Raise ValueError for a row that ends beyond the cache, or begins before it although it is no first prompt."""
    is_first = int(total_sequence_length) == num_new
    for row, last in enumerate(seqlens_k.tolist()):
        past = max(0, last + 1 - num_new) if is_first else last + 1 - num_new
        if not 0 <= past <= capacity - num_new:
            raise ValueError(
                f"row {row} has {past} tokens before a step of {num_new}; it needs at least 0 before and at most "
                f"{capacity} (the cache's capacity) after: correct seqlens_k or grow the cache"
            )


def write_cache(cache: Tensor, new: Tensor, past: Tensor) -> Tensor:
    """The cache [B, K, C, H] with `new` [B, K, S, H] at positions past .. past + S."""
    num_new = new.shape[2]
    source = torch.arange(cache.shape[2], device=past.device) - past[:, None]  # [B, C]: row of `new` for each slot
    fresh = (source >= 0) & (source < num_new)
    index = source.clamp(0, num_new - 1)[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])
    return torch.where(fresh[:, None, :, None], new.gather(2, index), cache)

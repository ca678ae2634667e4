"""What a step over a KV cache does to its rows: how many are cached, whether new ones fit, and where they go.

In: lengths, a cache [B, K, C, H], new keys or values. Out: a new cache. Attention over it stands in `ops.py`.

Shapes: `B` rows, `S` new tokens, `K` key/value heads, `H` head size, `C` cache capacity.
"""

import torch
from torch import Tensor


def past_lengths(seqlens_k: Tensor, num_new: int) -> Tensor:
    """Tokens cached before the step [B] int64: length - num_new, or 0 in a row that is padded to num_new.

    An arange turns the size into a tensor on the device: a copy from the host would forbid capture as a CUDA graph.
    """
    return (seqlens_k + torch.arange(1 - num_new, 2 - num_new, device=seqlens_k.device)).clamp(min=0)


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

"""Linear attention: a kernel in place of the softmax, whose sums over keys are a state of fixed size.

In: heads of new tokens, the state before them. Out: what the heads give, the state after them. The projections stand
in `attention.py`.

Shapes: `B` rows, `S` new tokens, `N` heads, `H` head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

_EPSILON = 1e-6  # as the authors' implementation has it: a feature may underflow to 0


class LinearState(NamedTuple):
    """What the tokens so far leave: sum of phi(k) v^T [B, N, H, H], and of phi(k) [B, N, H]; zeros before the first."""

    products: Tensor
    keys: Tensor


def linear_attention(query: Tensor, key: Tensor, value: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
    """Causal attention with weights phi(q) phi(k)^T over their sum, phi(x) = elu(x) + 1.

    query, key, value [B, N, S, H]; returns [B, N, S, H] and the state after the tokens. One token at a time is the
    recurrent form, a whole text from zeros the parallel one, pieces between are chunks. (Katharopoulos et al. 2020,
    equations 7 and 18 to 20.)
    """
    queries, keys = nn.functional.elu(query) + 1.0, nn.functional.elu(key) + 1.0
    position = torch.arange(query.shape[2])
    is_past = position[None, :] <= position[:, None]
    weights = (queries @ keys.transpose(-1, -2)) * is_past.to(query.dtype)  # [B, N, S, S]
    total = weights.sum(dim=-1, keepdim=True) + queries @ state.keys[..., None]
    attended = (weights @ value + queries @ state.products) / (total + _EPSILON)
    return attended, LinearState(state.products + keys.transpose(-1, -2) @ value, state.keys + keys.sum(dim=2))


def empty_state(rows: int, num_heads: int, head_dim: int) -> LinearState:
    """The state of `rows` B texts without a token."""
    return LinearState(torch.zeros(rows, num_heads, head_dim, head_dim), torch.zeros(rows, num_heads, head_dim))

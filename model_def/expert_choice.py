"""Routers that choose otherwise than by the largest softmax, brought into the form that every kernel takes.

In: a router's scores. Out: scores whose `num_chosen` largest are the experts chosen and whose softmax over those is
their normalised weights, and the factor of what they give. Made of standard ops, which export as they are.

Shapes: `E` experts, `G` groups of them.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from graphport.model_def.expert_config import ExpertsConfig

_HIDDEN = torch.finfo(torch.float32).min  # a score that is not chosen


def choose_experts(logits: Tensor, correction: Tensor | None, config: ExpertsConfig) -> tuple[Tensor, Tensor | float]:
    """Scores [..., E] of experts for `mixture_of_experts` with normalised weights, and the factor of its output.

    `correction` [E] is added for choosing alone. The scores of the chosen are the logarithms of their weights, all
    others the lowest number, so that the kernel chooses what was chosen here; the factor is `scaling`, times the sum
    [..., 1] of the weights unless they are `normalized`. (DeepSeek-V2, section 2.1.3; DeepSeek-V3, equations 12 to 16.)
    """
    router = config.router
    if router.scores == "sigmoid":
        weights, own = torch.sigmoid(logits), -softplus(-logits)
    else:
        weights, own = torch.softmax(logits, dim=-1), logits
    ranks = weights if correction is None else weights + correction
    if router.num_groups > 1:
        ranks = _in_best_groups(ranks, config)
    chosen = _largest(ranks, config.num_chosen)
    scores = own.masked_fill(~chosen, _HIDDEN)
    if config.normalized:
        return scores, router.scaling
    # a product, as sums over no tokens go wrong in ONNX Runtime 1.31
    total = weights.masked_fill(~chosen, 0.0) @ weights.new_ones(config.num_experts, 1)
    return scores, total * router.scaling


def _in_best_groups(ranks: Tensor, config: ExpertsConfig) -> Tensor:
    """Ranks [..., E], the lowest number outside the groups that may be chosen from."""
    router = config.router
    grouped = ranks.reshape(*ranks.shape[:-1], router.num_groups, -1)  # [..., G, E/G]
    best = grouped.topk(router.group_best, dim=-1).values
    sums = (best @ best.new_ones(router.group_best, 1)).flatten(-2)  # [..., G]
    allowed = _largest(sums, router.num_chosen_groups)
    return grouped.masked_fill(~allowed.unsqueeze(-1), _HIDDEN).flatten(-2)


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest of the last axis are, bool."""
    places = values.topk(count, dim=-1).indices
    return torch.zeros_like(values, dtype=torch.int64).scatter(-1, places, 1).to(torch.bool)

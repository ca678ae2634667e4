"""The mixture of experts as PyTorch sees it: schema, fake kernel and eager reference.

In: tensors. Out: tensors. The ONNX side stands in `export/portable_expert_ops.py`, the kernels in
`export/lower_experts.py`.

Shapes: `W` width of the stream, `E` experts, `F` width of an expert, `T` tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear


@torch.library.custom_op("graphport::mixture_of_experts", mutates_args=())
def mixture_of_experts(
    x: Tensor,
    router_logits: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    num_chosen: int,
    normalized: bool,
    alpha: float,
    up_offset: float,
    limit: float,
) -> Tensor:
    """What each token's `num_chosen` experts compute of it, weighed by the router's softmax.

    x [..., W]; router_logits [..., E]; gate, up [E, F, W], down [E, W, F], biases [E, F], [E, F], [E, W] all or none.
    `normalized`: the weights of the chosen add up to 1. limit 0 is off. Returns x's shape and dtype; see
    `ExpertsConfig`. (Shazeer et al. 2017, equation 1; Jiang et al. 2024, section 2.1.)
    """
    tokens = x.reshape(-1, x.shape[-1])
    wide = torch.promote_types(router_logits.dtype, torch.float32)
    scores = torch.softmax(router_logits.reshape(len(tokens), -1).to(wide), dim=-1)
    weights, chosen = scores.topk(num_chosen)  # [T, num_chosen]
    if normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    mixed = torch.zeros_like(tokens)
    for expert in sorted(set(chosen.flatten().tolist())):
        token, place = torch.where(chosen == expert)
        gates = linear(tokens[token], gate[expert], None if gate_bias is None else gate_bias[expert])
        ups = linear(tokens[token], up[expert], None if up_bias is None else up_bias[expert])
        if limit > 0:
            gates, ups = gates.clamp(max=limit), ups.clamp(min=-limit, max=limit)
        hidden = gates * torch.sigmoid(alpha * gates) * (ups + up_offset)
        output = linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
        mixed.index_add_(0, token, (output * weights[token, place, None]).to(x.dtype))
    return mixed.reshape(x.shape)


@mixture_of_experts.register_fake
def _(
    x: Tensor,
    router_logits: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    num_chosen: int,
    normalized: bool,
    alpha: float,
    up_offset: float,
    limit: float,
) -> Tensor:
    return x.new_empty(x.shape)

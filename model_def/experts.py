"""The mixture of experts as a module: router, experts, and the feed-forward that all tokens share.

In: activations [..., W]. Out: the same shape. Holds the matrices; the formula stands in `expert_ops.py`.

Shapes: `W` width of the stream, `E` experts, `F` width of an expert.
"""

import torch
from torch import Tensor, nn

from graphport.model_def.block_config import FeedForwardConfig
from graphport.model_def.expert_choice import choose_experts
from graphport.model_def.expert_config import ExpertsConfig
from graphport.model_def.expert_ops import mixture_of_experts
from graphport.model_def.feed_forward import FeedForward

# matrices of few rows that decide which experts run, and how much of the shared one counts
_DECIDING = ("feed_forward.router.weight", "feed_forward.shared_gate.weight")


def is_deciding(name: str) -> bool:
    """Whether the parameter `name` is a matrix that stays in floats whatever the others are rounded to."""
    return name.endswith(_DECIDING)


class ExpertMatrices(nn.Module):
    """One matrix an expert, weight [E, out, in] and perhaps bias [E, out]."""

    def __init__(self, num_experts: int, width_in: int, width_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, width_out, width_in))
        self.bias = nn.Parameter(torch.zeros(num_experts, width_out)) if bias else None
        nn.init.normal_(self.weight, std=width_in**-0.5)


class ExpertMixture(nn.Module):
    """The experts without their router."""

    def __init__(self, config: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        experts, width, bias = config.num_experts, config.width, config.bias
        self.gate = ExpertMatrices(experts, hidden_size, width, bias=bias)
        self.up = ExpertMatrices(experts, hidden_size, width, bias=bias)
        self.down = ExpertMatrices(experts, width, hidden_size, bias=bias)

    def forward(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """X [..., W] with scores [..., E] to [..., W]."""
        config = self.config
        mixed: Tensor = mixture_of_experts(
            x,
            router_logits,
            self.gate.weight,
            self.up.weight,
            self.down.weight,
            self.gate.bias,
            self.up.bias,
            self.down.bias,
            config.num_chosen,
            config.normalized or not config.router.is_plain,
            config.alpha,
            config.up_offset,
            config.limit or 0.0,
        )
        return mixed


class Experts(nn.Module):
    """The feed-forward half of a block whose experts a router chooses for each token."""

    def __init__(self, config: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(hidden_size, config.num_experts, bias=config.router_bias)
        self.correction = nn.Parameter(torch.zeros(config.num_experts)) if config.router.correction else None
        self.experts = ExpertMixture(config, hidden_size)
        self.shared: FeedForward | None = None
        if config.shared_width is not None:
            self.shared = FeedForward(FeedForwardConfig(width=config.shared_width), hidden_size)
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if config.shared_gate else None

    @property
    def last(self) -> nn.Module:
        """What gives the output, but for what is shared."""
        return self.experts

    def forward(self, x: Tensor) -> Tensor:
        """X [..., W] to [..., W]."""
        mixed = self._mix(x, self.router(x))
        if self.shared is None:
            return mixed
        shared: Tensor = self.shared(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return mixed + shared

    def _mix(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """What the chosen experts give of x [..., W], [..., W]."""
        factor: Tensor | float = self.config.router.scaling
        if not self.config.router.is_plain:
            router_logits, factor = choose_experts(router_logits, self.correction, self.config)
        mixed: Tensor = self.experts(x, router_logits)
        return mixed if isinstance(factor, float) and factor == 1.0 else mixed * factor

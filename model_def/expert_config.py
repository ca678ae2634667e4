"""What a mixture of experts is: how many feed-forwards, how many of them a token runs, how their outputs are weighed.

In: numbers. Out: a frozen record, validated at construction. Torch-free; the formula stands in `expert_ops.py`.
"""

from dataclasses import dataclass
from typing import Literal

from graphport.model_def.position_config import ConfigError, require_choice, require_count, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How a router's scores become a choice of experts and their weights (DeepSeek-V2 and V3).

    `scores`: the weight of an expert is its part of the softmax, or the sigmoid of its own score. With `correction` a
    vector is added to the weights for choosing alone. Experts lie in `num_groups` equal groups, of which a token may
    choose from the `num_chosen_groups` whose best `group_best` weights have the largest sum. `scaling` multiplies what
    the chosen give.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 1
    scaling: float = 1.0

    def __post_init__(self) -> None:
        require_choice("scores of the router", self.scores, ("softmax", "sigmoid"))
        for name in ("num_groups", "num_chosen_groups", "group_best"):
            require_count(f"{name} of the router", getattr(self, name))
        if self.num_chosen_groups > self.num_groups:
            raise ConfigError(
                f"a token chooses from {self.num_chosen_groups} groups of experts, of which there are {self.num_groups}"
            )
        require_positive("scaling of the router", self.scaling)

    @property
    def is_plain(self) -> bool:
        """Whether the largest scores are chosen and weighed by their softmax, which kernels do themselves."""
        return self.scores == "softmax" and not self.correction and self.num_groups == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Of `num_experts` gated feed-forwards each token runs the `num_chosen` that its router scores highest.

    Outputs are weighed by the softmax of all scores, or of the chosen ones alone when `normalized`; `router` says where
    it is otherwise. An expert computes
    down(g * sigmoid(alpha * g) * (u + up_offset)) with g = gate(x), u = up(x): alpha 1 and offset 0 are SiLU's.
    `limit` bounds g from above and u on both sides (GPT-OSS). `bias` is the experts', `router_bias` the router's.
    `shared_width`: a gated feed-forward of SiLU that every token runs besides, times the sigmoid of a linear layer with
    one output when `shared_gate` (Qwen 2).
    """

    num_experts: int
    num_chosen: int
    width: int
    normalized: bool = True
    bias: bool = False
    router_bias: bool = False
    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None
    router: RouterConfig = RouterConfig()
    shared_width: int | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_chosen", "width"):
            require_count(name, getattr(self, name))
        if self.num_chosen > self.num_experts:
            raise ConfigError(f"a token runs {self.num_chosen} experts, of which there are {self.num_experts}")
        self._check_groups(self.router)
        require_positive("alpha of the experts", self.alpha)
        if self.limit is not None:
            require_positive("limit of the experts", self.limit)
        if self.shared_width is not None:
            require_count("shared_width", self.shared_width)
        elif self.shared_gate:
            raise ConfigError("shared_gate needs a shared feed-forward; shared_width is None")

    def _check_groups(self, router: RouterConfig) -> None:
        if self.num_experts % router.num_groups:
            raise ConfigError(f"{self.num_experts} experts do not lie in {router.num_groups} equal groups")
        size = self.num_experts // router.num_groups
        if router.group_best > size:
            raise ConfigError(f"groups of {size} experts have no best {router.group_best}")
        if self.num_chosen > size * router.num_chosen_groups:
            raise ConfigError(
                f"a token runs {self.num_chosen} experts from {router.num_chosen_groups} groups of {size}; it needs as "
                "many in them"
            )

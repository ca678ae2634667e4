"""What a mixture of experts is: how many feed-forwards, how many of them a token runs, how their outputs are weighed.

In: numbers. Out: a frozen record, validated at construction. Torch-free; the formula stands in `expert_ops.py`.
"""

from dataclasses import dataclass

from graphport.model_def.position_config import ConfigError, require_count, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Of `num_experts` gated feed-forwards each token runs the `num_chosen` that its router scores highest.

    Outputs are weighed by the softmax of all scores, or of the chosen ones alone when `normalized`. An expert computes
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
    shared_width: int | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_chosen", "width"):
            require_count(name, getattr(self, name))
        if self.num_chosen > self.num_experts:
            raise ConfigError(f"a token runs {self.num_chosen} experts, of which there are {self.num_experts}")
        require_positive("alpha of the experts", self.alpha)
        if self.limit is not None:
            require_positive("limit of the experts", self.limit)
        if self.shared_width is not None:
            require_count("shared_width", self.shared_width)
        elif self.shared_gate:
            raise ConfigError("shared_gate needs a shared feed-forward; shared_width is None")

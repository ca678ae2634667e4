"""The mixtures of experts of a Hugging Face decoder: which layers have one, and what its config.json says of it.

In: the parsed config and what the model type says of experts. Out: a record a layer, None where it has none.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.expert_config import ExpertsConfig, RouterConfig
from graphport.model_def.huggingface_values import Values, or_default, read_flag, read_integer

# what trains the router, and what is printed of it
TRAINING_KEYS = ("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")

_ONLY_ACTIVATION = "silu"


class Switch(NamedTuple):
    """A true or false of config.json, and transformers' default."""

    key: str
    default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule:
    """What a model type says of experts.

    `count_keys` are the spellings of their number, of which one must be there. `normalized`: whether the weights of the
    chosen add up to 1, always or as a key says. `step_key` n: every n-th layer has experts; `dense_layers_key` lists
    layers that have none, `first_key` is the number of those at the beginning. `shared_count_key`: the shared
    feed-forward is as wide as that many experts, and has no gate. `router` is what the choice is beside its numbers:
    `group_keys` (groups, and those chosen from) and `scaling`. `alpha` and `limit` are GPT-OSS's, with their defaults.
    """

    count_keys: tuple[str, ...]
    chosen_key: str = "num_experts_per_tok"
    width_key: str = "intermediate_size"
    normalized: bool | Switch = True
    bias: bool = False
    router_bias: bool = False
    alpha: tuple[str, float] | None = None
    limit: tuple[str, float] | None = None
    up_offset: float = 0.0
    shared_width_key: str | None = None
    step_key: str | None = None
    dense_layers_key: str | None = None
    first_key: tuple[str, int] | None = None
    shared_count_key: str | None = None
    router: RouterConfig = RouterConfig()  # noqa: RUF009 - frozen
    group_keys: tuple[str, str] | None = None
    scaling: tuple[str, float] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The config keys that are read."""
        optional = (self.shared_width_key, self.step_key, self.dense_layers_key, self.shared_count_key)
        pairs = tuple(pair[0] for pair in (self.alpha, self.limit, self.first_key, self.scaling) if pair is not None)
        flag = (self.normalized.key,) if isinstance(self.normalized, Switch) else ()
        named = (*(key for key in optional if key is not None), *(self.group_keys or ()))
        return (*self.count_keys, self.chosen_key, self.width_key, *pairs, *flag, *named)


def read_experts(
    values: Values, rule: ExpertRule | None, num_layers: int, activation: str, notes: list[str]
) -> list[ExpertsConfig | None]:
    """The experts of each layer. Raises CheckpointError for values that do not fit."""
    if rule is None:
        return [None] * num_layers
    if activation != _ONLY_ACTIVATION:
        raise CheckpointError(
            f"config.json: hidden_act {activation!r} of a mixture of experts is not read; known is {_ONLY_ACTIVATION}"
        )
    normalized = rule.normalized
    if isinstance(normalized, Switch):
        normalized = read_flag(values, normalized.key, default=normalized.default)
    experts = ExpertsConfig(
        num_experts=_count(values, rule.count_keys),
        num_chosen=read_integer(values, rule.chosen_key),
        width=read_integer(values, rule.width_key),
        normalized=normalized,
        bias=rule.bias,
        router_bias=rule.router_bias,
        alpha=1.0 if rule.alpha is None else or_default(values, *rule.alpha, notes),
        up_offset=rule.up_offset,
        limit=None if rule.limit is None else or_default(values, *rule.limit, notes),
        router=_router(values, rule, notes),
        shared_width=_shared_width(values, rule),
        shared_gate=rule.shared_width_key is not None,
    )
    step = 1
    if rule.step_key is not None and values.get(rule.step_key) is not None:
        step = read_integer(values, rule.step_key)
    dense = _dense_layers(values, rule.dense_layers_key, num_layers)
    if rule.first_key is not None:
        key, _ = rule.first_key
        first = or_default(values, *rule.first_key, notes)
        dense = list(range(read_integer({key: first}, key, positive=False)))
    return [experts if (layer + 1) % step == 0 and layer not in dense else None for layer in range(num_layers)]


def _router(values: Values, rule: ExpertRule, notes: list[str]) -> RouterConfig:
    """How experts are chosen, with the numbers that config.json states."""
    groups, chosen = (1, 1) if rule.group_keys is None else (read_integer(values, key) for key in rule.group_keys)
    scaling = 1.0 if rule.scaling is None else or_default(values, *rule.scaling, notes)
    if isinstance(scaling, bool) or not isinstance(scaling, int | float):
        raise CheckpointError(
            f"config.json: {rule.scaling and rule.scaling[0]} must be a positive number, got {scaling!r:.80}"
        )
    best = 1 if groups == 1 else rule.router.group_best
    return dataclasses.replace(
        rule.router, scaling=float(scaling), num_groups=groups, num_chosen_groups=chosen, group_best=best
    )


def _shared_width(values: Values, rule: ExpertRule) -> int | None:
    """The width of the feed-forward that all tokens run."""
    if rule.shared_count_key is not None:
        return read_integer(values, rule.shared_count_key) * read_integer(values, rule.width_key)
    return None if rule.shared_width_key is None else read_integer(values, rule.shared_width_key)


def _count(values: Values, keys: tuple[str, ...]) -> int:
    """The number of experts in whichever spelling; raises CheckpointError where two disagree."""
    stated = {key: read_integer(values, key) for key in keys if values.get(key) is not None}
    if len(set(stated.values())) != 1:
        found = ", ".join(f"{key} {value}" for key, value in stated.items()) or "none"
        raise CheckpointError(f"config.json: the number of experts must be in {' or '.join(keys)}; found {found}")
    return next(iter(stated.values()))


def _dense_layers(values: Values, key: str | None, num_layers: int) -> list[int]:
    listed = None if key is None else values.get(key)
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        raise CheckpointError(f"config.json: {key} must list layers below {num_layers}; got {listed!r:.200}")
    return listed

"""The rotary part of a config.json, in every spelling that transformers has written.

In: the parsed config (`rope_theta` and `rope_scaling`, or `rope_parameters`, flat or nested a layer type). Out: one
`RotaryPosition` a layer type, and notes. The formulas are not here (see `positions.py`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.position_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryPosition,
    RotaryScaling,
    YarnScaling,
)

CONFIG_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)

_FLAGS_INTERVAL = 4  # SmolLM3Config's

_ORIGINAL = "original_max_position_embeddings"
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_OUTSIDE = ("rope_theta", "partial_rotary_factor", _ORIGINAL)

Values = Mapping[str, Any]  # parsed JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryRule:
    """What a model type says of rotation beyond the common keys.

    `theta` and `partial_factor` are transformers' defaults, `reads_partial` whether its classes read that key at all.
    `aliases`: its own names of common keys. `type_aliases`: its own names of rope types. `local_theta`: that of sliding
    layers whose key, `local_theta_key`, is absent; they have no scaling then. `flags_key`: a list of 0 and 1 a layer, 0
    without rotation; `flags_interval` names the key of n where every n-th layer goes without, 4 by default.
    """

    theta: float = 10_000.0  # RotaryEmbeddingConfigMixin.default_theta of transformers 5
    partial_factor: float = 1.0
    reads_partial: bool = False
    interleaved: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    type_aliases: Mapping[str, str] = field(default_factory=dict)
    local_theta: float | None = None
    local_theta_key: str | None = None
    flags_key: str | None = None
    flags_interval_key: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The config keys that are read."""
        own = (self.local_theta_key, self.flags_key, self.flags_interval_key)
        return (*CONFIG_KEYS, *self.aliases, *(key for key in own if key is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryType:
    """One `rope_type`: the keys it needs, those it may have, and the record it becomes."""

    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    build: Callable[[Values, int], RotaryScaling | None]


def read_rotary(
    config: Values, rule: RotaryRule, *, layer_types: tuple[str, ...], max_positions: int
) -> tuple[dict[str, RotaryPosition], list[str]]:
    """One record for each of `layer_types`, and notes on what was assumed.

    Raises CheckpointError when two spellings disagree, for an unknown type, and for keys the type does not have.
    """
    rotary: dict[str, RotaryPosition] = {}
    notes: list[str] = []
    for layer_type in dict.fromkeys(layer_types):
        rotary[layer_type], new_notes = _read_one(_gather(config, rule, layer_type), rule, max_positions)
        notes += [note for note in new_notes if note not in notes]
    return rotary, notes


def read_rotary_flags(config: Values, rule: RotaryRule, num_layers: int) -> list[bool]:
    """Whether each layer rotates; raises CheckpointError for a list that does not fit."""
    if rule.flags_key is None or rule.flags_interval_key is None:
        return [True] * num_layers
    listed = config.get(rule.flags_key)
    if listed is None:
        interval = config.get(rule.flags_interval_key, _FLAGS_INTERVAL)
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise CheckpointError(
                f"config.json: {rule.flags_interval_key} must be a positive integer, got {interval!r}"
            )
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or not all(item in (0, 1) for item in listed):
        raise CheckpointError(f"config.json: {rule.flags_key} must list {num_layers} of 0 and 1; got {listed!r:.200}")
    return [bool(item) for item in listed]


def _respell(config: Values, rule: RotaryRule) -> dict[str, Any]:
    """The config with a family's own key names turned into the common ones."""
    spelled = {key: value for key, value in config.items() if key not in rule.aliases}
    for alias, key in rule.aliases.items():
        if config.get(alias) is None:
            continue
        if spelled.get(key) not in (None, config[alias]):
            raise CheckpointError(
                f"config.json disagrees with itself: {alias} is {config[alias]!r} and {key} {spelled[key]!r}; keep "
                "the one the weights were trained with"
            )
        spelled[key] = config[alias]
    return spelled


def _gather(config: Values, rule: RotaryRule, layer_type: str) -> dict[str, Any]:
    """All spellings merged; `type` becomes `rope_type`."""
    if rule.local_theta is not None and layer_type == "sliding_attention" and not _is_nested(config):
        stated = None if rule.local_theta_key is None else config.get(rule.local_theta_key)
        return {"rope_theta": rule.local_theta if stated is None else stated}
    config = _respell(config, rule)
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    sources: list[tuple[str, Values]] = [
        ("config.json", {key: config[key] for key in _OUTSIDE if config.get(key) is not None})
    ]
    for name in ("rope_scaling", "rope_parameters"):
        sources.append((name, _flat(name, config.get(name), layer_type)))
    for name, values in sources:
        for key, value in values.items():
            spelled = "rope_type" if key == "type" else key
            if spelled in merged and merged[spelled] != value:
                raise CheckpointError(
                    f"config.json disagrees with itself: {spelled} is {merged[spelled]!r} in {origin[spelled]} "
                    f"and {value!r} in {name}; keep the one the weights were trained with"
                )
            merged[spelled], origin[spelled] = value, name
    if rule.local_theta is not None and layer_type == "sliding_attention":
        merged.setdefault("rope_theta", rule.local_theta)  # an entry of its own without one
    kind = merged.get("rope_type")
    if isinstance(kind, str):
        merged["rope_type"] = rule.type_aliases.get(kind, kind)
    if (
        merged.get("rope_type", "default") not in ("llama3", "yarn", "longrope")
        and origin.get(_ORIGINAL) == "config.json"
    ):
        del merged[_ORIGINAL]  # transformers reads this outer key for those three types only
    return merged


def _is_nested(config: Values) -> bool:
    values = config.get("rope_parameters")
    return isinstance(values, dict) and any(key.endswith("_attention") for key in values)


def _flat(name: str, values: object, layer_type: str) -> Values:
    """The entry for `layer_type` of a nested form, or the flat form itself."""
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise CheckpointError(f"config.json: {name} must be an object, got {values!r}")
    nested = [key for key in values if key.endswith("_attention")]
    if not nested:
        return values
    if others := sorted(set(values) - set(nested)):
        raise CheckpointError(f"config.json: {name} mixes layer types ({', '.join(nested)}) and {', '.join(others)}")
    if not isinstance(values.get(layer_type), dict):
        raise CheckpointError(f"config.json: {name} has no entry for {layer_type} layers, only {', '.join(nested)}")
    chosen: Values = values[layer_type]
    return chosen


def _read_one(values: dict[str, Any], rule: RotaryRule, max_positions: int) -> tuple[RotaryPosition, list[str]]:
    notes = []
    name = values.get("rope_type") or "default"
    if not isinstance(name, str) or name not in _TYPES:
        raise CheckpointError(f"config.json: rope_type {name!r} is not known; known are {', '.join(_TYPES)}")
    kind = _TYPES[name]
    if missing := [key for key in kind.needs if key not in values]:
        raise CheckpointError(f"config.json: rope_type {name} needs {', '.join(missing)}")
    if extra := sorted(set(values) - {*_COMMON, *kind.needs, *kind.may_have}):
        raise CheckpointError(f"config.json: rope_type {name} does not have {', '.join(extra)}")
    _check_values(values)
    if values.get("rope_theta") is None:
        notes.append(f"rope_theta is nowhere in config.json; transformers' default {rule.theta:g} was taken")
    if _ORIGINAL in kind.may_have and values.get(_ORIGINAL) is None:
        notes.append(f"{_ORIGINAL} is absent; max_position_embeddings {max_positions} was taken, as transformers does")
    partial = values.get("partial_rotary_factor")
    if partial is not None and partial != 1.0 and not rule.reads_partial:
        notes.append(f"partial_rotary_factor {partial} was applied; transformers' classes of this model type ignore it")
    rotary = RotaryPosition(
        theta=rule.theta if values.get("rope_theta") is None else values["rope_theta"],
        partial_factor=rule.partial_factor if partial is None else partial,
        interleaved=rule.interleaved,
        scaling=kind.build(values, max_positions),
    )
    return rotary, notes


def _check_values(values: Values) -> None:
    """Every value is a number (or null), except the two lists of numbers, the type and one flag."""
    for key, value in values.items():
        if key.endswith("_factor") and key.startswith(("short", "long")):
            is_right = isinstance(value, list) and all(_is_number(item) for item in value)
        elif key == "truncate":
            is_right = isinstance(value, bool)
        else:
            is_right = key == "rope_type" or value is None or _is_number(value)
        if not is_right:
            raise CheckpointError(f"config.json: the rotary value {key} = {value!r:.80} has the wrong type")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _original(values: Values, max_positions: int) -> int:
    original: int | None = values.get(_ORIGINAL)
    return max_positions if original is None else original


def _factor(values: Values, max_positions: int) -> float:
    """`factor`, or the ratio of both context lengths (transformers' yarn and longrope)."""
    factor: float | None = values.get("factor")
    return max_positions / _original(values, max_positions) if factor is None else factor


def _llama3(values: Values, max_positions: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=values["factor"],
        low_freq_factor=values["low_freq_factor"],
        high_freq_factor=values["high_freq_factor"],
        original_max_positions=_original(values, max_positions),
    )


def _yarn(values: Values, max_positions: int) -> YarnScaling:
    return YarnScaling(
        factor=_factor(values, max_positions),
        original_max_positions=_original(values, max_positions),
        beta_fast=values.get("beta_fast") or 32.0,
        beta_slow=values.get("beta_slow") or 1.0,
        attention_factor=values.get("attention_factor"),
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=values.get("truncate", True),
    )


def _longrope(values: Values, max_positions: int) -> LongRopeScaling:
    original = _original(values, max_positions)
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        factor = _factor(values, max_positions)
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=tuple(values["short_factor"]),
        long_factor=tuple(values["long_factor"]),
        original_max_positions=original,
        attention_factor=attention_factor,
    )


def _dynamic(values: Values, max_positions: int) -> DynamicScaling:
    if _original(values, max_positions) != max_positions:
        raise CheckpointError(
            f"config.json: rope_type dynamic with {_ORIGINAL} {values[_ORIGINAL]} and max_position_embeddings "
            f"{max_positions}: transformers scales from the latter; make both equal"
        )
    return DynamicScaling(factor=values["factor"], original_max_positions=max_positions)


_TYPES = {
    "default": RotaryType(needs=(), may_have=(), build=lambda _values, _positions: None),
    "linear": RotaryType(
        needs=("factor",), may_have=(), build=lambda values, _positions: LinearScaling(factor=values["factor"])
    ),
    "dynamic": RotaryType(needs=("factor",), may_have=(_ORIGINAL,), build=_dynamic),
    "llama3": RotaryType(needs=("factor", "low_freq_factor", "high_freq_factor"), may_have=(_ORIGINAL,), build=_llama3),
    "yarn": RotaryType(
        needs=("factor",),
        may_have=(_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        build=_yarn,
    ),
    "longrope": RotaryType(
        needs=("short_factor", "long_factor"), may_have=(_ORIGINAL, "factor", "attention_factor"), build=_longrope
    ),
}

"""The sliding window of each layer of a Hugging Face decoder, in every way that config.json says it.

In: the parsed config and what the model type says of windows. Out: a window a layer, None where it sees everything.
It reads no other key.
"""

from dataclasses import dataclass

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.huggingface_values import Values, or_default, read_flag, read_integer

_DEFAULT_MAX_WINDOW_LAYERS = 28  # of Qwen's configuration classes
_KNOWN = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule:
    """What a model type says of windows.

    `default` is taken where the key is absent. `needs_flag`: `use_sliding_window` switches it on. `first_key`: the
    first layer that slides, where no list says. `period` n: every n-th layer sees everything, `period_key` states n.
    Without flag and period the window is in every layer. `names_key` and `pattern_key`: GPT-Neo's lists of which layers
    are local, one name a layer, or names and how often they repeat; `size_key` is its window then.
    """

    default: int | None = None
    needs_flag: bool = False
    first_key: str | None = None
    period: int | None = None
    period_key: str | None = None
    size_key: str = "sliding_window"
    names_key: str | None = None
    pattern_key: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The config keys that are read."""
        if self.names_key is not None and self.pattern_key is not None:
            return (self.size_key, self.names_key, self.pattern_key)
        own = (self.first_key, self.period_key)
        common = ("sliding_window", "use_sliding_window", "layer_types")
        return (*common, *(key for key in own if key is not None))

    @property
    def is_mixed(self) -> bool:
        """Whether some layers may slide and others not."""
        return self.needs_flag or self.period is not None


def read_windows(
    values: Values, rule: WindowRule | None, model_type: str, num_layers: int, notes: list[str]
) -> list[int | None]:
    """The sliding window of each layer; None sees everything. Raises CheckpointError for values that do not fit."""
    if rule is None:
        return [None] * num_layers
    if rule.names_key is not None and rule.pattern_key is not None:
        size = read_integer({rule.size_key: or_default(values, rule.size_key, rule.default, notes)}, rule.size_key)
        names = _names(values, rule.names_key, rule.pattern_key, num_layers)
        return [size if name == "local" else None for name in names]
    window = _window(values, rule, model_type, notes)
    listed = values.get("layer_types")
    if listed is not None:
        return _listed(rule, model_type, listed, window=window, num_layers=num_layers)
    if window is None:
        return [None] * num_layers
    if rule.period is not None:
        period = rule.period
        if rule.period_key is not None and values.get(rule.period_key) is not None:
            period = read_integer(values, rule.period_key)
        return [window if (layer + 1) % period else None for layer in range(num_layers)]
    first = 0
    if rule.first_key is not None:
        stated = or_default(values, rule.first_key, _DEFAULT_MAX_WINDOW_LAYERS, notes)
        first = read_integer({rule.first_key: stated}, rule.first_key, positive=False)
    elif rule.needs_flag:
        raise CheckpointError(
            "config.json: use_sliding_window is true, but layer_types does not say which layers slide"
        )
    return [window if layer >= first else None for layer in range(num_layers)]


def _names(values: Values, names_key: str, pattern_key: str, num_layers: int) -> list[str]:
    """Global or local, a layer; both spellings must say the same."""
    spellings = []
    if values.get(names_key) is not None:
        spellings.append(values[names_key])
    if values.get(pattern_key) is not None:
        try:
            spellings.append([name for names, times in values[pattern_key] for _ in range(times) for name in names])
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"config.json: {pattern_key} must list names and how often they repeat; got {values[pattern_key]!r:.99}"
            ) from error
    for names in spellings:
        fits = isinstance(names, list) and len(names) == num_layers and set(names) <= {"global", "local"}
        if not fits or names != spellings[0]:
            raise CheckpointError(
                f"config.json: {names_key} and {pattern_key} must name {num_layers} layers global or local, and alike; "
                f"got {names!r:.200}"
            )
    if not spellings:
        raise CheckpointError(
            f"config.json: {names_key} or {pattern_key} must say which layers are local; neither does"
        )
    first: list[str] = spellings[0]
    return first


def _window(values: Values, rule: WindowRule, model_type: str, notes: list[str]) -> int | None:
    """The window that is switched on, if any."""
    is_silent = values.get("use_sliding_window") is None
    flag = not rule.needs_flag if is_silent else read_flag(values, "use_sliding_window")
    if (rule.needs_flag and not flag) or values.get("sliding_window", 0) is None:
        return None
    if rule.default is None and "sliding_window" not in values:
        return None
    window: int = or_default(values, "sliding_window", rule.default, notes)
    if not flag:
        raise CheckpointError(
            f"config.json: use_sliding_window is false, which model_type {model_type} does not read, and "
            f"sliding_window is {window}; set sliding_window to null or remove the flag"
        )
    return read_integer({"sliding_window": window}, "sliding_window")


def _listed(
    rule: WindowRule, model_type: str, listed: object, *, window: int | None, num_layers: int
) -> list[int | None]:
    if not isinstance(listed, list) or len(listed) != num_layers or not all(item in _KNOWN for item in listed):
        raise CheckpointError(
            f"config.json: layer_types must list {num_layers} of {', '.join(_KNOWN)}; got {listed!r:.200}"
        )
    if window is None and "sliding_attention" in listed:
        raise CheckpointError(
            "config.json: layer_types has sliding_attention, but sliding_window is null or switched off"
        )
    if not rule.is_mixed and window is not None and "full_attention" in listed:
        raise CheckpointError(
            f"config.json: model_type {model_type} uses sliding_window {window} in every layer, but layer_types "
            "lists full_attention"
        )
    return [window if item == "sliding_attention" else None for item in listed]

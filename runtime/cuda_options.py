"""Options of ONNX Runtime's CUDA provider: which a caller may give, which graphport sets itself, and their values.

In: options by name, as a caller gave them. Out: the strings that the provider takes. Names and kinds are those of
ONNX Runtime 1.31; it opens nothing.
"""

import difflib
from collections.abc import Mapping

import onnxruntime

OptionValue = str | int | bool

# Kind of value by name: bool, int, or the words allowed.
CALLER_OPTIONS: dict[str, type[bool] | type[int] | tuple[str, ...]] = {
    "cudnn_conv1d_pad_to_nc1d": bool,
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "cudnn_conv_use_max_workspace": bool,
    "enable_cudnn": bool,
    "enable_skip_layer_norm_strict_mode": bool,
    "external_data_loader_reading_threads": int,
    "fuse_conv_bias": bool,
    "prefer_nhwc": bool,
    "sdpa_kernel": int,
    "tunable_op_enable": bool,
    "tunable_op_max_tuning_duration_ms": int,
    "tunable_op_tuning_enable": bool,
    "use_ep_level_unified_stream": bool,
    "use_tf32": bool,
}

# Options that graphport sets, or leaves alone, for a reason of its own: what a caller does instead.
OWN_OPTIONS: dict[str, str] = {
    "arena_extend_strategy": "the arena holds workspace alone, and doubles (kNextPowerOfTwo)",
    "device_id": "give load(device_id=...)",
    "do_copy_in_default_stream": "graphport orders its copies with the steps",
    "enable_cuda_graph": "give load(cuda_graphs=...)",
    "gpu_external_alloc": "graphport plans the memory of the device",
    "gpu_external_empty_cache": "graphport plans the memory of the device",
    "gpu_external_free": "graphport plans the memory of the device",
    "gpu_mem_limit": "it follows from the memory plan: lower max_batch, max_length or prefill_chunk",
    "has_user_compute_stream": "give load(stream=...)",
    "user_compute_stream": "give load(stream=...)",
}

# TF32 rounds the factors of float32 products to 10 bits. PyTorch, which parity is measured against, does not unasked.
_DEFAULTS = {"use_tf32": "0"}

_LARGEST = 2**31 - 1  # the provider reads C ints

_BOOLS = {"0": "0", "1": "1", "false": "0", "true": "1"}


def checked_options(given: Mapping[str, OptionValue] | None) -> dict[str, str]:
    """`given` as strings, over graphport's defaults.

    Raises TypeError for what is no mapping of str to str, int or bool, ValueError for unknown names (with the nearest
    ones), names that graphport keeps to itself, and values that the option does not take.
    """
    if given is None:
        return _DEFAULTS
    if not isinstance(given, Mapping):
        raise TypeError(f"provider_options must be a dict of names and values, got {type(given).__name__}")
    return _DEFAULTS | {name: _checked_value(name, value) for name, value in given.items()}


def _checked_value(name: object, value: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"provider_options must have str names, got {name!r} ({type(name).__name__})")
    if name in OWN_OPTIONS:
        raise ValueError(f"provider option {name} is not for callers: {OWN_OPTIONS[name]}")
    if name not in CALLER_OPTIONS:
        raise ValueError(_unknown(name))
    if not isinstance(value, str | int):
        raise TypeError(f"provider option {name} must be str, int or bool, got {value!r} ({type(value).__name__})")
    return _as_text(name, value)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, [*CALLER_OPTIONS, *OWN_OPTIONS])
    advice = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(CALLER_OPTIONS)}"
    return f"CUDA of ONNX Runtime {onnxruntime.__version__} has no provider option {name!r}; {advice}"


def _as_text(name: str, value: str | int) -> str:
    kind = CALLER_OPTIONS[name]
    text = str(value)
    if isinstance(kind, tuple):
        if text in kind:
            return text
        raise ValueError(f"provider option {name} must be one of {', '.join(kind)}, got {value!r}")
    if kind is bool:
        if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
        raise ValueError(f"provider option {name} must be 0 or 1, got {value!r}")
    if text.isascii() and text.isdigit() and int(text) <= _LARGEST:
        return text
    raise ValueError(f"provider option {name} must be a whole number from 0 to {_LARGEST}, got {value!r}")

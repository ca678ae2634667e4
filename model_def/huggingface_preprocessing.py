"""preprocessor_config.json of a Hugging Face folder, key by key.

In: parsed JSON. Out: a `PreprocessingConfig` and notes. Every key is read, on a list of keys that change nothing, or
refused by name; `runtime/preprocessing.py` follows it.
"""

from typing import Any

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.huggingface_values import Values, check_keys, read_flag, read_integer
from graphport.model_def.vision_config import PreprocessingConfig, Size

_READ = (
    *("do_convert_rgb", "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale"),
    *("rescale_factor", "do_normalize", "image_mean", "image_std"),
)
_IGNORED = (
    *("image_processor_type", "feature_extractor_type", "processor_class", "default_to_square", "use_square_size"),
    *("return_tensors", "data_format", "input_data_format", "device", "disable_grouping", "image_seq_length"),
)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "do_pad": (None, False),
    "pad_size": (None,),
    "size_divisor": (None,),
    "do_color_quantize": (None, False),
    "auto_map": (None,),
}


def read_preprocessing(values: Values, notes: list[str]) -> PreprocessingConfig | None:
    """How pictures become pixels; None, and a note, for a file that is missing or asks for what is not understood."""
    if not values:
        notes.append("no preprocessor_config.json: the bundle takes pixels, not pictures")
        return None
    try:
        notes += check_keys(
            values,
            "of preprocessor_config.json",
            read=_READ,
            ignored=_IGNORED,
            neutral=_NEUTRAL,
        )
        return PreprocessingConfig(
            convert_rgb=read_flag(values, "do_convert_rgb"),
            resize=_resize(values) if read_flag(values, "do_resize") else None,
            resample=read_integer({"resample": values.get("resample", 2)}, "resample", positive=False),
            crop=_crop(values) if read_flag(values, "do_center_crop") else None,
            rescale=float(values.get("rescale_factor", 1 / 255)) if read_flag(values, "do_rescale") else None,
            mean=_numbers(values, "image_mean") if read_flag(values, "do_normalize") else None,
            std=_numbers(values, "image_std") if read_flag(values, "do_normalize") else None,
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"preprocessor_config.json: {error}") from error


def _resize(values: Values) -> Size | int:
    size: Any = values.get("size")
    if isinstance(size, int):  # written by old versions: both edges, but for those that keep the ratio
        return size if values.get("default_to_square") is False else (size, size)
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return read_integer(size, "shortest_edge")
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        return read_integer(size, "height"), read_integer(size, "width")
    raise CheckpointError(f"size must have height and width, or shortest_edge; got {size!r:.80}")


def _crop(values: Values) -> Size:
    size: Any = values.get("crop_size")
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        return read_integer(size, "height"), read_integer(size, "width")
    raise CheckpointError(f"crop_size must have height and width; got {size!r:.80}")


def _numbers(values: Values, key: str) -> tuple[float, ...]:
    numbers = values.get(key)
    if not isinstance(numbers, list) or not all(isinstance(number, int | float) for number in numbers):
        raise CheckpointError(f"{key} must be a list of numbers, got {numbers!r:.80}")
    return tuple(float(number) for number in numbers)

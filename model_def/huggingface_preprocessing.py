"""preprocessor_config.json of a Hugging Face folder, key by key.

In: parsed JSON. Out: a `PreprocessingConfig` and notes. Every key is read, on a list of keys that change nothing, or
refused by name; `runtime/preprocessing.py` follows it.
"""

from collections.abc import Mapping
from typing import Any

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.huggingface_values import Values, check_keys, read_flag, read_integer
from graphport.model_def.vision_config import PreprocessingConfig, Size

_READ = (
    *("do_convert_rgb", "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale"),
    *("rescale_factor", "do_normalize", "image_mean", "image_std", "default_to_square"),
    *("image_processor_type", "feature_extractor_type"),
)
_IGNORED = ("processor_class", "return_tensors", "data_format", "input_data_format", "device", "disable_grouping")
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "do_pad": (None, False),
    "pad_size": (None,),
    "size_divisor": (None,),
    "use_square_size": (None, False),
    "auto_map": (None,),
}

_HALVES = [0.5, 0.5, 0.5]
_STEPS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_CLIP: Mapping[str, Any] = {
    **_STEPS,
    "do_convert_rgb": True,
    "resample": 3,
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_VIT: Mapping[str, Any] = {
    **_STEPS,
    "resample": 2,
    "size": {"height": 224, "width": 224},
    "default_to_square": True,
    "image_mean": _HALVES,
    "image_std": _HALVES,
}
# What transformers' classes do where the file is silent: old files say little.
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "ViT": _VIT,
    "DeiT": {
        **_VIT,
        "resample": 3,
        "size": {"height": 256, "width": 256},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
    },
    "CLIP": _CLIP,
    "Bit": _CLIP,
    "Siglip": {**_VIT, "resample": 3, "default_to_square": False, "do_convert_rgb": True},
}
_SUFFIXES = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")


def read_preprocessing(values: Values, processor: str, notes: list[str]) -> PreprocessingConfig | None:
    """How pictures become pixels; None, and a note, where there is no file.

    `processor`: the class, by its name in `PROCESSORS`, that a file belongs to which does not say so. Raises
    CheckpointError.
    """
    if not values:
        notes.append("no preprocessor_config.json: the bundle takes pixels, not pictures")
        return None
    try:
        notes += check_keys(values, "of a preprocessor", read=_READ, ignored=_IGNORED, neutral=_NEUTRAL)
        stated = {key: value for key, value in values.items() if value is not None}
        steps = {**_defaults(stated, processor), **stated}
        return PreprocessingConfig(
            convert_rgb=read_flag(steps, "do_convert_rgb"),
            resize=_resize(steps) if read_flag(steps, "do_resize") else None,
            resample=read_integer(steps, "resample", positive=False),
            crop=_crop(steps) if read_flag(steps, "do_center_crop") else None,
            rescale=float(steps["rescale_factor"]) if read_flag(steps, "do_rescale") else None,
            mean=_numbers(steps, "image_mean") if read_flag(steps, "do_normalize") else None,
            std=_numbers(steps, "image_std") if read_flag(steps, "do_normalize") else None,
        )
    except (ValueError, TypeError) as error:
        reason = str(error).removeprefix("config.json: ")
        raise CheckpointError(f"preprocessor_config.json: {reason}") from error


def _defaults(values: Values, processor: str) -> Mapping[str, Any]:
    stated = values.get("image_processor_type") or values.get("feature_extractor_type")
    if stated is None:
        return PROCESSORS[processor]
    name = next((str(stated).removesuffix(end) for end in _SUFFIXES if str(stated).endswith(end)), str(stated))
    if name not in PROCESSORS:
        known = ", ".join(f"{known}ImageProcessor" for known in PROCESSORS)
        raise CheckpointError(f"image processor {stated!r} is not read; known are {known}")
    return PROCESSORS[name]


def _resize(values: Values) -> Size | int:
    size: Any = values["size"]
    if isinstance(size, int):  # as old versions wrote it
        edge = read_integer({"size": size}, "size")
        return (edge, edge) if read_flag(values, "default_to_square") else edge
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return read_integer(size, "shortest_edge")
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        return read_integer(size, "height"), read_integer(size, "width")
    raise CheckpointError(f"size must have height and width, or shortest_edge; got {size!r:.80}")


def _crop(values: Values) -> Size:
    size: Any = values.get("crop_size")
    if isinstance(size, int):
        size = {"height": size, "width": size}
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        return read_integer(size, "height"), read_integer(size, "width")
    raise CheckpointError(f"crop_size must have height and width; got {size!r:.80}")


def _numbers(values: Values, key: str) -> tuple[float, ...]:
    numbers = values[key]
    if not isinstance(numbers, list) or not all(isinstance(number, int | float) for number in numbers):
        raise CheckpointError(f"{key} must be a list of numbers, got {numbers!r:.80}")
    return tuple(float(number) for number in numbers)

"""What a model is run on before it is compiled: calibration texts or images, and what its activations reach there.

In: an opened source, a plan. Out: `Calibration`, activation ranges, or one line of refusal. It compiles nothing.
"""

from collections.abc import Callable

from graphport.export.calibrate import Ranges, activation_ranges, image_ranges
from graphport.export.calibration import Calibration, CalibrationError, calibration_ids
from graphport.export.export_limits import require_float16_range
from graphport.export.graph_pass import CompilePlan
from graphport.export.precision_choice import check_calibration
from graphport.export.source import SourceModel
from graphport.model_def.seeded_images import image_sizes, seeded_images


def check_range(opened: SourceModel, plan: CompilePlan, *, seed: int, progress: Callable[[str], None]) -> None:
    """Refuse activations that float16 cannot hold, where the plan has it. Raises TargetError."""
    if plan.precision.activations == "float16":
        progress("looking for activations beyond float16")
        require_float16_range(opened, plan.config, max_length=plan.max_length, seed=seed)


def calibration_of(opened: SourceModel, plan: CompilePlan, text: str | None, *, seed: int, name: str) -> Calibration:
    """What weights and caches are rounded on: `text`, called `name`, or what ships. Raises CalibrationError."""
    if text is not None:
        check_calibration(plan.precision, plan.cache)
    if plan.config.encoder is not None and text is not None:
        raise CalibrationError("weights of an encoder-decoder are rounded without a text; leave --calibration out")
    if plan.config.image is not None:
        if text is not None:
            raise CalibrationError("a calibration text is for models of text; an image encoder reads none")
        return Calibration(windows=(), held_out=())
    return calibration_ids(opened, text, max_length=plan.max_length, seed=seed, name=name)


def ranges_of(opened: SourceModel, plan: CompilePlan, calibration: Calibration, *, seed: int) -> Ranges:
    """Activation ranges for the smoothing that precedes weight quantisation; none for weights that stay as they are."""
    if plan.precision.weight_bits is None or plan.matrices or plan.config.encoder is not None:
        return {}
    if plan.config.image is not None:
        sizes = image_sizes(plan.config.image, max_length=plan.max_length)[:1]
        return image_ranges(opened.model, seeded_images(sizes, channels=plan.config.image.channels, seed=seed))
    return activation_ranges(opened.model, calibration.windows[:1])  # more text moved int8 by no more than noise

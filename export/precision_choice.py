"""Which precision an export has, and what must hold for it before any work is done.

In: an opened source, a target, what the user asked for. Out: the precision's name, the matrices that keep a GGUF
file's blocks, or one line of refusal. It compiles nothing.
"""

from collections.abc import Mapping

from graphport.export.gguf_matrices import REENCODED_BITS, KeptMatrix, keep_matrices, require_exact, require_half_scales
from graphport.export.graph_pass import CompilePlan
from graphport.export.source import SourceModel
from graphport.export.targets import CPU, CacheFormat, Precision, Target, TargetError
from graphport.model_def.gguf_blocks import FLOAT_TYPES

FLOAT_SOURCE_PRECISION = "int8"  # of sources whose weights are floats

_ACCURACY_LEVELS = (0, 4)


def default_precision(opened: SourceModel, target: Target) -> str:
    """The precision of a source when none is asked for: quantised blocks stay as they are where that is exact."""
    return "gguf" if _has_blocks(opened) and target is CPU else FLOAT_SOURCE_PRECISION


def _has_blocks(opened: SourceModel) -> bool:
    return any(matrix.kind not in FLOAT_TYPES for matrix in opened.stored.values())


def kept_matrices(opened: SourceModel, target: Target, precision: Precision) -> Mapping[str, KeptMatrix]:
    """The source's matrices for a precision that keeps them, empty for others.

    Precision auto chooses between them and fewer bits, where the source has quantised blocks and the target holds all
    forms. Raises TargetError when the source has none, or has some that the target cannot hold.
    """
    if precision.chooses_bits:
        return keep_matrices(opened.stored) if _has_blocks(opened) and target is CPU else {}
    if not precision.keeps_blocks:
        return {}
    if not opened.stored:
        others = ", ".join(row.name for row in target.precisions if not row.keeps_blocks)
        kind = opened.source.get("format", "no file")
        raise TargetError(f"precision gguf keeps the blocks of a GGUF file; this source is {kind}: choose {others}")
    matrices = keep_matrices(opened.stored)
    if precision.activations == "float16":
        require_half_scales(matrices, target)
    return matrices


def note_changed(matrices: Mapping[str, KeptMatrix]) -> tuple[str, ...]:
    """A line on the matrices that do not keep the file's values; none when all do."""
    changed = [matrix for matrix in matrices.values() if not matrix.is_exact]
    if not changed:
        return ()
    types = ", ".join(sorted({matrix.source for matrix in changed}))
    worst = max(matrix.max_error for matrix in changed)
    return (
        f"{len(changed)} of {len(matrices)} matrices are encoded anew at {REENCODED_BITS} bits: {types} has no exact "
        f"form; the largest change of a value is {worst:.3g}",
    )


def check_exact(plan: CompilePlan) -> None:
    """Raise TargetError unless every matrix of the plan keeps the values of its GGUF file."""
    if not plan.precision.keeps_blocks:
        raise TargetError(
            f"require_exact is for precision gguf; {plan.precision.name} does not keep a GGUF file's blocks: "
            "choose --precision gguf or leave --require-exact out"
        )
    require_exact(plan.matrices)


def check_calibration(precision: Precision, cache: CacheFormat | None) -> None:
    """Raise TargetError when nothing would read a calibration text."""
    if cache is None and (precision.weight_bits is None or precision.keeps_blocks):
        raise TargetError(
            f"a calibration text is for int8, int4, auto and quantised caches; precision {precision.name} with a float "
            "cache reads none: leave --calibration out"
        )


def check_accuracy_level(level: int | None, target: Target, precision: Precision) -> None:
    """Raise ValueError for a level that does not exist, TargetError for one that nothing would read."""
    if level is None:
        return
    if isinstance(level, bool) or level not in _ACCURACY_LEVELS:
        raise ValueError(f"accuracy_level must be 0 (exact activations) or 4 (8-bit activations), got {level!r}")
    if precision.weight_bits is None:
        raise TargetError(f"accuracy_level is for quantised matrices; precision {precision.name} has none")
    if target is not CPU:
        raise TargetError(f"accuracy_level is for the cpu target; kernels of {target.name} choose their arithmetic")

"""The matrices of a GGUF file as kernel operands that hold its own values, and the account of what was kept.

In: matrices as the file stores them. Out: one `KeptMatrix` a name, with the largest error measured against the gguf
package. Graph nodes are made in `block_kernels.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphport.export.quantize import BlockQuantized, pack_codes, quantize_blocks
from graphport.export.targets import Target, TargetError
from graphport.model_def.gguf_blocks import BLOCK_TYPES, FLOAT_TYPES, StoredMatrix

REENCODED_BITS = 8

_NAMED = 5  # tensors that an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMatrix:
    """A matrix of the file as the graph will hold it: `blocks`, or float32 where that is None.

    `source` is the file's type, `max_error` the largest absolute difference to the values the gguf package decodes.
    """

    source: str
    blocks: BlockQuantized | None
    max_error: float

    @property
    def is_exact(self) -> bool:
        """Whether every value is the file's."""
        return self.max_error == 0.0

    @property
    def form(self) -> str:
        """Bits, block size and minima: "4-bit/32 + minima"; matrices of one form can share a kernel."""
        if self.blocks is None:
            return "float32"
        minima = " + minima" if self.blocks.minima is not None else ""
        return f"{self.blocks.bits}-bit/{self.blocks.block_size}{minima}"


def keep_matrices(stored: Mapping[str, StoredMatrix]) -> dict[str, KeptMatrix]:
    """Operands for every matrix: its own integers and scales, float32, or 8 bits anew where the type has no form."""
    return {name: _keep(matrix) for name, matrix in stored.items()}


def require_exact(matrices: Mapping[str, KeptMatrix]) -> None:
    """Raise TargetError, naming tensors and types, unless every matrix keeps the file's values."""
    changed = [f"{name} ({matrix.source})" for name, matrix in matrices.items() if not matrix.is_exact]
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        exact = ", ".join(row.kind.name for row in BLOCK_TYPES)
        raise TargetError(
            f"{len(changed)} of {len(matrices)} matrices would be encoded anew: {', '.join(changed[:_NAMED])}{more}; "
            f"exact are {exact} and floats: export without --require-exact, or requantise the file to one of these"
        )


def require_half_scales(matrices: Mapping[str, KeptMatrix], target: Target) -> None:
    """Raise TargetError unless half-precision kernels can hold every matrix: scales of 11 bits, and no minima."""
    for name, matrix in matrices.items():
        if matrix.blocks is None:
            continue
        scales = matrix.blocks.scales
        if matrix.blocks.minima is not None:
            reason = "has minima, which need float32 sums"
        elif not np.array_equal(scales.astype(np.float16).astype(np.float32), scales):
            reason = "has scales of more bits than float16 holds"
        else:
            continue
        raise TargetError(
            f"precision gguf on target {target.name}: {name} of type {matrix.source} {reason}; its values cannot be "
            "kept there: choose another precision, or --target cpu"
        )


def stack_matrices(parts: Sequence[KeptMatrix]) -> BlockQuantized | None:
    """Matrices of one form, one below the other; None when they are float32."""
    blocks = [part.blocks for part in parts if part.blocks is not None]
    if not blocks:
        return None
    assert len({part.form for part in parts}) == 1
    first = blocks[0]
    has_zero_points = any(part.zero_points is not None for part in blocks)
    return dataclasses.replace(
        first,
        packed=np.concatenate([part.packed for part in blocks]),
        scales=np.concatenate([part.scales for part in blocks]),
        zero_points=np.concatenate([_zero_points(part) for part in blocks]) if has_zero_points else None,
        minima=None
        if first.minima is None
        else np.concatenate([part.minima for part in blocks if part.minima is not None]),
    )


def matrix_account(matrices: Mapping[str, KeptMatrix]) -> list[dict[str, Any]]:
    """JSON data, one row a matrix: name, source type, form, exact, max_error."""
    return [
        {
            "name": name,
            "source": matrix.source,
            "form": matrix.form,
            "exact": matrix.is_exact,
            "max_error": matrix.max_error,
        }
        for name, matrix in matrices.items()
    ]


def _keep(matrix: StoredMatrix) -> KeptMatrix:
    if matrix.kind in FLOAT_TYPES:
        return KeptMatrix(source=matrix.kind.name, blocks=None, max_error=0.0)
    blocks = quantize_blocks(matrix.dequantize(), REENCODED_BITS) if matrix.block_type is None else _exact(matrix)
    errors = [
        float(np.abs(_rows(blocks, part).dequantize() - matrix.dequantize(part)).max()) for part in matrix.parts()
    ]
    return KeptMatrix(source=matrix.kind.name, blocks=blocks, max_error=max(errors))


def _exact(matrix: StoredMatrix) -> BlockQuantized:
    integers = matrix.integers()
    return BlockQuantized(
        packed=pack_codes(integers.codes, bits=integers.bits, block_size=integers.block_size),
        scales=integers.scales,
        bits=integers.bits,
        width=matrix.shape[1],
        block_size=integers.block_size,
        zero_points=integers.zero_points,
        minima=integers.minima,
    )


def _rows(blocks: BlockQuantized, part: slice) -> BlockQuantized:
    return dataclasses.replace(
        blocks,
        packed=blocks.packed[part],
        scales=blocks.scales[part],
        zero_points=None if blocks.zero_points is None else blocks.zero_points[part],
        minima=None if blocks.minima is None else blocks.minima[part],
    )


def _zero_points(blocks: BlockQuantized) -> np.ndarray:
    if blocks.zero_points is not None:
        return blocks.zero_points
    return np.full(blocks.scales.shape, 2 ** (blocks.bits - 1), np.uint8)

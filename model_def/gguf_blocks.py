"""Quantised GGUF blocks as integers, scales and minima, without rounding anything again.

In: the bytes of a matrix's rows as the file stores them. Out: `IntegerBlocks`, whose values equal those of the gguf
package's `dequantize`. It builds no kernel operands (see `export/quantize.py`) and needs no torch.

Every block type stores w = d * a - e * b with half-precision d and e (or m in the place of -e * b) and small integers
a, b that are packed in some way. The value is linear in d and e, so the package's own decoder, given a copy of the
block with d = 1 and e = 0, returns the integers: no unpacking is repeated here. Layouts: ggml-common.h of llama.cpp.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_VALUES_AT_A_TIME = 1 << 20  # decoding takes several times a matrix's float32 size

# a is a whole number of eighths in every type (the smallest step is IQ1_S's delta)
_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """How a block type becomes integers of `bits` bits with one scale a `block_size` values.

    `scale_at`, `minimum_at`: byte offsets of the half-precision d and e (or m) in a block. `scaled_twice`: a is a
    product of a small scale and an integer. `middle` is subtracted from integers that start at 0; the minimum takes
    it up, so that kernels which round activations round them for values around 0.
    """

    kind: GGMLQuantizationType
    bits: int
    block_size: int
    scale_at: int
    minimum_at: int | None = None
    scaled_twice: bool = False
    middle: int = 0


_K = GGMLQuantizationType

# The integers of the K types have scales for 16 or 32 values, the others for 32 or more.
BLOCK_TYPES = (
    BlockType(kind=_K.Q4_0, bits=4, block_size=32, scale_at=0),
    BlockType(kind=_K.Q4_1, bits=4, block_size=32, scale_at=0, minimum_at=2, middle=8),
    BlockType(kind=_K.Q5_0, bits=8, block_size=32, scale_at=0),
    BlockType(kind=_K.Q5_1, bits=8, block_size=32, scale_at=0, minimum_at=2, middle=16),
    BlockType(kind=_K.Q8_0, bits=8, block_size=32, scale_at=0),
    BlockType(kind=_K.Q2_K, bits=4, block_size=16, scale_at=80, minimum_at=82, scaled_twice=True, middle=2),
    BlockType(kind=_K.Q3_K, bits=4, block_size=16, scale_at=108, scaled_twice=True),
    BlockType(kind=_K.Q4_K, bits=4, block_size=32, scale_at=0, minimum_at=2, scaled_twice=True, middle=8),
    BlockType(kind=_K.Q5_K, bits=8, block_size=32, scale_at=0, minimum_at=2, scaled_twice=True, middle=16),
    BlockType(kind=_K.Q6_K, bits=8, block_size=16, scale_at=208, scaled_twice=True),
    BlockType(kind=_K.IQ4_NL, bits=8, block_size=32, scale_at=0),
    BlockType(kind=_K.IQ4_XS, bits=8, block_size=32, scale_at=0, scaled_twice=True),
    BlockType(kind=_K.IQ3_S, bits=8, block_size=32, scale_at=0, scaled_twice=True),
    BlockType(kind=_K.IQ3_XXS, bits=8, block_size=32, scale_at=0, scaled_twice=True),
    BlockType(kind=_K.IQ2_S, bits=8, block_size=16, scale_at=0, scaled_twice=True),
    BlockType(kind=_K.IQ2_XS, bits=8, block_size=16, scale_at=0, scaled_twice=True),
    BlockType(kind=_K.IQ2_XXS, bits=8, block_size=32, scale_at=0, scaled_twice=True),
    BlockType(kind=_K.IQ1_S, bits=8, block_size=32, scale_at=0, scaled_twice=True),
    BlockType(kind=_K.TQ1_0, bits=4, block_size=32, scale_at=52),
    BlockType(kind=_K.TQ2_0, bits=4, block_size=32, scale_at=64),
)

FLOAT_TYPES = (_K.F32, _K.F16, _K.BF16)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerBlocks:
    """A matrix [N, K] as w = scales * (codes - zero_points) + minima, one scale and minimum a block of K.

    `codes` uint8 [N, K] below 2^bits; `scales` float32 [N, K / block_size]; `zero_points` uint8 and `minima` float32
    of the scales' shape, None where every one is 2^(bits - 1) and 0.
    """

    bits: int
    block_size: int
    codes: Bytes
    scales: Floats
    zero_points: Bytes | None
    minima: Floats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix as a GGUF file stores it: `data` uint8 [N, bytes a row], row i of the model being `rows[i]` of the file.

    `rows` None: the file's order is the model's.
    """

    kind: GGMLQuantizationType
    data: Bytes
    rows: NDArray[np.int64] | None = None

    @property
    def block_type(self) -> BlockType | None:
        """The row of BLOCK_TYPES for this matrix; None for floats and for types that have no integer form here."""
        return next((row for row in BLOCK_TYPES if row.kind == self.kind), None)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        values, size = GGML_QUANT_SIZES[self.kind]
        return len(self.data), self.data.shape[1] // size * values

    def dequantize(self, part: slice = slice(None)) -> Floats:
        """Rows `part` of the matrix, float32, as the gguf package decodes them."""
        values: Floats = dequantize(self._rows(part), self.kind)
        return values

    def integers(self) -> IntegerBlocks:
        """The matrix as integers, scales and minima.

        Raises ValueError for a type without an integer form and for scales that are not finite.
        """
        block_type = self.block_type
        if block_type is None:
            raise ValueError(f"blocks of type {self.kind.name} have no integer form")
        rows, width = self.shape
        blocks = (rows, width // block_type.block_size)
        codes, scales = np.empty((rows, width), np.uint8), np.empty(blocks, np.float32)
        zero_points, minima = np.empty(blocks, np.uint8), np.zeros(blocks, np.float32)
        for part in self.parts():
            codes[part], scales[part], zero_points[part], minima[part] = _decode(self._rows(part), block_type)
        is_plain = bool((zero_points == 1 << block_type.bits - 1).all())
        return IntegerBlocks(
            bits=block_type.bits,
            block_size=block_type.block_size,
            codes=codes,
            scales=scales,
            zero_points=None if is_plain else zero_points,
            minima=None if block_type.minimum_at is None else minima,
        )

    def parts(self) -> Iterator[slice]:
        """Slices of rows that are decoded at a time."""
        rows, width = self.shape
        step = max(1, _VALUES_AT_A_TIME // width)
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def _rows(self, part: slice) -> Bytes:
        return np.ascontiguousarray(self.data[part] if self.rows is None else self.data[self.rows[part]])


def _decode(rows: Bytes, block_type: BlockType) -> tuple[Bytes, Floats, Bytes, Floats]:
    """Codes [N, K], and scales, zero points and minima [N, K / block_size] of whole rows."""
    size = GGML_QUANT_SIZES[block_type.kind][1]
    per_scale = rows.shape[1] // size  # blocks of the file in a row
    blocks = rows.reshape(-1, size)
    d = _field(blocks, block_type.scale_at, block_type)
    products = _decoded(rows, block_type, scale=1, minimum=0)  # [blocks, sub-blocks, block_size]
    steps, codes = _common_steps(products, scaled_twice=block_type.scaled_twice)
    scales = d[:, None] * steps
    half = 1 << block_type.bits - 1
    zero_points = np.full(scales.shape, half, np.uint8)
    minima = np.zeros_like(scales)
    if block_type.minimum_at is not None:
        units = _decoded(rows, block_type, scale=0, minimum=1)[..., 0]
        minima = _field(blocks, block_type.minimum_at, block_type)[:, None] * units
        moved = minima + block_type.middle * scales.astype(np.float64)  # exact in float64
        # the kernels multiply scales by integers of at most `middle`, the largest odd one being middle - 1
        is_exact = _fits(moved) & _fits((block_type.middle - 1) * scales.astype(np.float64))
        minima = np.where(is_exact, moved, minima).astype(np.float32)
        codes = codes - block_type.middle * is_exact[..., None]
        if block_type.bits == 4:
            zero_points[~is_exact] = 0
    unsigned = (codes + zero_points[..., None]).astype(np.uint8)
    shape = (len(rows), per_scale * scales.shape[1])
    return (
        unsigned.reshape(len(rows), -1),
        scales.reshape(shape),
        zero_points.reshape(shape),
        minima.reshape(shape),
    )


def _fits(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each value is a float32."""
    fits: NDArray[np.bool_] = values == values.astype(np.float32)
    return fits


def _field(blocks: Bytes, offset: int, block_type: BlockType) -> Floats:
    """The half-precision number at a byte offset of every block, as float32; refuses what is not finite."""
    values = blocks[:, offset : offset + 2].copy().view(np.float16)[:, 0].astype(np.float32)
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"block {first} of type {block_type.kind.name} has the scale {values[first]}")
    return values


def _decoded(rows: Bytes, block_type: BlockType, *, scale: float, minimum: float) -> Floats:
    """What the gguf package makes of the blocks with other numbers for d and e, [blocks, sub-blocks, block_size]."""
    changed = rows.copy().reshape(-1, GGML_QUANT_SIZES[block_type.kind][1])
    for offset, value in ((block_type.scale_at, scale), (block_type.minimum_at, minimum)):
        if offset is not None:
            changed[:, offset : offset + 2] = np.array([value], np.float16).view(np.uint8)
    values: Floats = dequantize(changed.reshape(rows.shape), block_type.kind)  # row by row: blocks alone are slow
    return values.reshape(len(changed), -1, block_type.block_size)


def _common_steps(products: Floats, *, scaled_twice: bool) -> tuple[Floats, NDArray[np.int32]]:
    """Every sub-block as a step and integers: products = step * integers, the step the largest that divides all."""
    if not scaled_twice:
        return np.ones(products.shape[:2], np.float32), products.astype(np.int32)
    whole = (products * np.float32(_STEPS)).astype(np.int32)
    steps = np.gcd.reduce(whole, axis=-1)
    codes = whole // np.maximum(steps, 1)[..., None]
    return steps.astype(np.float32) / np.float32(_STEPS), codes

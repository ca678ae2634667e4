"""Random GGUF blocks of every type, for tests: any bytes, with half-precision scales as they are asked for.

gguf-py quantises to the older types only; blocks of the K and IQ types are drawn here.
"""

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from graphport.model_def.gguf_blocks import BLOCK_TYPES, BlockType, IntegerBlocks, StoredMatrix

BY_NAME = {block_type.kind.name: block_type for block_type in BLOCK_TYPES}


def with_scales(codes: np.ndarray, block_type: BlockType, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Bytes uint8 [N, bytes a row] of blocks whose half-precision numbers are set, cyclically, to the given ones."""
    changed = codes.copy().reshape(-1, GGML_QUANT_SIZES[block_type.kind][1])
    for offset, values in ((block_type.scale_at, scales), (block_type.minimum_at, minima)):
        if offset is not None:
            numbers = np.resize(np.asarray(values, np.float16), len(changed))
            changed[:, offset : offset + 2] = numbers[:, None].view(np.uint8)
    return changed.reshape(codes.shape)


def random_codes(kind: GGMLQuantizationType, rows: int, width: int, generator: np.random.Generator) -> np.ndarray:
    values, size = GGML_QUANT_SIZES[kind]
    assert width % values == 0
    return generator.integers(0, 256, (rows, width // values * size), dtype=np.uint8)


def random_matrix(kind: GGMLQuantizationType, rows: int, width: int, *, seed: int) -> np.ndarray:
    """Blocks [N, bytes a row] of a matrix whose values have a mean square of about 1 / width."""
    generator = np.random.default_rng(seed)
    codes, block_type = random_codes(kind, rows, width, generator), BY_NAME[kind.name]
    plain = with_scales(codes, block_type, np.ones(1), np.zeros(1))
    spread = float(np.sqrt((dequantize(plain, kind) ** 2).mean() * width))
    scales = generator.uniform(0.5, 1.5, 64) / spread
    middle = float(dequantize(plain, kind).mean()) / max(1.0, _mean_of_minima(codes, block_type))
    return with_scales(codes, block_type, scales, middle * scales)


def _mean_of_minima(codes: np.ndarray, block_type: BlockType) -> float:
    """Minus the mean of what the minima multiply: 1 for m, the small integers for e."""
    units = dequantize(with_scales(codes, block_type, np.zeros(1), np.ones(1)), block_type.kind)
    return -float(units.mean()) if block_type.minimum_at is not None else 1.0


def values_of(blocks: IntegerBlocks) -> np.ndarray:
    """The float32 matrix [N, K] of integer blocks, by the formula they are defined with."""

    def spread(numbers: np.ndarray) -> np.ndarray:
        return np.repeat(numbers, blocks.block_size, axis=1)

    half = np.full(blocks.scales.shape, 1 << blocks.bits - 1, np.uint8)
    zero_points = half if blocks.zero_points is None else blocks.zero_points
    values = spread(blocks.scales) * (blocks.codes.astype(np.float32) - spread(zero_points))
    return values if blocks.minima is None else values + spread(blocks.minima)


def stored(kind: GGMLQuantizationType, data: np.ndarray, rows: np.ndarray | None = None) -> StoredMatrix:
    return StoredMatrix(kind=kind, data=data, rows=rows)

"""Block-wise weight quantisation in the layout of MatMulNBits and GatherBlockQuantized.

In: a float matrix [N, K]. Out: unsigned integers, zero point in the middle of their range, and one scale a block of
32 along K. Symmetric, round to nearest; no graph here (see `lower_linear.py`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphport.export.targets import WEIGHT_BLOCK

_ELEMENTS_AT_A_TIME = 1 << 22  # the float copies of a whole table would take several times its size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockQuantized:
    """A matrix [N, K] as blocks of `block_size` along K, J = ceil(K / block_size) a row.

    w = (q - zero_point) * scale + minimum, with `packed` uint8 [N, J, block_size * bits / 8] and `scales` float32
    [N, J]; `zero_points` uint8 [N, J], None: all 2^(bits-1); `minima` float32 [N, J], None: all 0. 4-bit values lie two
    a byte, the even element in the low nibble. K is padded with zeros to whole blocks.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    width: int
    block_size: int = WEIGHT_BLOCK
    zero_points: NDArray[np.uint8] | None = None
    minima: NDArray[np.float32] | None = None

    @property
    def num_bytes(self) -> int:
        """What the matrix takes in a graph of float32 activations; 4-bit zero points lie two a byte."""
        parts = [self.packed.nbytes, self.scales.nbytes, 0 if self.minima is None else self.minima.nbytes]
        if self.zero_points is not None:
            parts.append(len(self.zero_points) * -(-self.zero_points.shape[1] * self.bits // 8))
        return sum(parts)

    def dequantize(self) -> NDArray[np.float32]:
        """The float32 matrix [N, K] that the kernels compute with."""
        values = self.packed
        if self.bits == 4:
            values = np.stack((values & 15, values >> 4), axis=-1).reshape(*values.shape[:2], -1)
        middle = np.full((1, 1), 2 ** (self.bits - 1)) if self.zero_points is None else self.zero_points
        blocks = (values.astype(np.float32) - middle[:, :, None].astype(np.float32)) * self.scales[:, :, None]
        if self.minima is not None:
            blocks += self.minima[:, :, None]
        return blocks.reshape(blocks.shape[0], -1)[:, : self.width]


def pack_codes(codes: NDArray[np.uint8], *, bits: int, block_size: int) -> NDArray[np.uint8]:
    """Codes [N, K], K whole blocks, in the layout of `BlockQuantized.packed`."""
    packed = pack_pairs(codes) if bits == 4 else codes
    return packed.reshape(len(codes), -1, block_size * bits // 8)


def pack_pairs(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Values below 16 [N, M], two a byte [N, ceil(M / 2)], the even one in the low nibble; an odd row ends in 0."""
    padded = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    return padded[:, 0::2] | np.left_shift(padded[:, 1::2], 4, dtype=np.uint8)


def quantize_blocks(weight: NDArray[np.float32], bits: int) -> BlockQuantized:
    """Round `weight` [N, K] to `bits` (4 or 8) bits, symmetric, one scale a block of 32.

    The scale maps the value of largest magnitude to the end of the range that it can reach exactly: -2^(bits-1) for
    4 bits (the sixteenth level is not wasted), 127 for 8 bits. Raises ValueError on non-finite weights.
    """
    if bits not in (4, 8):
        raise ValueError(f"weight bits must be 4 or 8, got {bits}")
    rows, width = weight.shape
    num_blocks = -(-width // WEIGHT_BLOCK)
    packed = np.empty((rows, num_blocks, WEIGHT_BLOCK * bits // 8), np.uint8)
    scales = np.empty((rows, num_blocks), np.float32)
    step = max(1, _ELEMENTS_AT_A_TIME // width)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        if not np.isfinite(weight[part]).all():
            raise ValueError(f"{int((~np.isfinite(weight)).sum())} of {weight.size} weights are not finite")
        packed[part], scales[part] = _quantize_rows(weight[part], bits)
    return BlockQuantized(packed=packed, scales=scales, bits=bits, width=width)


def quantized_bytes(rows: int, width: int, *, bits: int) -> int:
    """What `quantize_blocks` makes of a matrix [rows, width]."""
    return rows * -(-width // WEIGHT_BLOCK) * (WEIGHT_BLOCK * bits // 8 + 4)


def _quantize_rows(weight: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    rows, width = weight.shape
    padded = np.zeros((rows, -(-width // WEIGHT_BLOCK) * WEIGHT_BLOCK), np.float32)
    padded[:, :width] = weight
    blocks = padded.reshape(rows, -1, WEIGHT_BLOCK)
    half = 2 ** (bits - 1)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    scales = peak / np.float32(-half) if bits == 4 else np.abs(peak) / np.float32(half - 1)
    divisors = np.where(scales == 0, np.float32(1), scales)[..., None]  # not a reciprocal: 1/scale may overflow
    quantized = np.clip(np.rint(blocks / divisors), -half, half - 1) + half
    codes = quantized.astype(np.uint8).reshape(rows, -1)
    return pack_codes(codes, bits=bits, block_size=WEIGHT_BLOCK), scales.astype(np.float32)

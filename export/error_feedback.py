"""Rounding a matrix to blocks so that the errors of its channels cancel on the inputs that it will see (GPTQ).

In: a matrix [N, K] and the second moments [K, K] of its inputs. Out: `BlockQuantized`. It runs no model.

Channels are rounded one after the other; what a channel loses is taken from those that follow, in the proportion that
changes the product least (Frantar et al. 2023, "GPTQ", algorithm 1, without reordering, so that no g_idx is needed).
The scale of a block is searched when its turn comes, over weights that hold the errors before it.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from graphport.export.block_scales import divisors, search_scales
from graphport.export.quantize import BlockQuantized, pack_codes
from graphport.export.targets import WEIGHT_BLOCK

DAMPING = 0.3  # share of the mean moment added to each channel's; the paper has 0.01 for a hundred times our text

Floats = NDArray[np.float32]


def factor_moments(moments: Floats) -> Floats:
    """The upper triangular U [K, K] with U^T U = (moments + damping)^-1; raises ValueError unless they are finite."""
    if not np.isfinite(moments).all():
        raise ValueError("its inputs are not finite on the calibration text")
    damped = torch.from_numpy(moments).double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean() + float(np.finfo(np.float32).tiny))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Floats = torch.linalg.cholesky(inverse, upper=True).float().numpy()
    return upper


def round_with_feedback(weight: Floats, upper: Floats, *, bits: int, asymmetric: bool) -> BlockQuantized:
    """`weight` [N, K] in blocks of 32; `upper` [K, K] is `factor_moments` of the moments of its inputs.

    `asymmetric` blocks have zero points of their own. Raises ValueError on non-finite weights.
    """
    rows, width = weight.shape
    if not np.isfinite(weight).all():
        raise ValueError(f"{int((~np.isfinite(weight)).sum())} of {weight.size} weights are not finite")
    num_blocks = -(-width // WEIGHT_BLOCK)
    codes = np.empty((num_blocks * WEIGHT_BLOCK, rows), np.uint8)
    scales, zeros = np.empty((2, num_blocks, rows), np.float32)
    left = np.array(weight.T, np.float32, order="C")
    for index in range(num_blocks):
        start, stop = index * WEIGHT_BLOCK, min((index + 1) * WEIGHT_BLOCK, width)
        own = upper[start:stop, start:stop]
        scale, zero = search_scales(left[start:stop], own.diagonal() ** -2, bits=bits, asymmetric=asymmetric)
        codes[start:stop], errors = _round_block(left[start:stop], own, scale, zero, 2**bits - 1)
        left[stop:] -= upper[start:stop, stop:].T @ errors
        codes[stop : start + WEIGHT_BLOCK] = zero  # what pads the last block stands for 0
        scales[index], zeros[index] = scale, zero
    return BlockQuantized(
        packed=pack_codes(np.ascontiguousarray(codes.T), bits=bits, block_size=WEIGHT_BLOCK),
        scales=np.ascontiguousarray(scales.T),
        bits=bits,
        width=width,
        zero_points=np.ascontiguousarray(zeros.T.astype(np.uint8)) if asymmetric else None,
    )


def _round_block(
    block: Floats, upper: Floats, scales: Floats, zeros: Floats, top: int
) -> tuple[NDArray[np.uint8], Floats]:
    """Codes [B, N] of a block [B, N], which is changed, and each channel's error over its diagonal element of U."""
    codes, errors = np.empty(block.shape, np.uint8), np.empty_like(block)
    steps = divisors(scales)
    for channel, weights in enumerate(block):
        q = np.clip(np.rint(weights / steps) + zeros, 0, top)
        codes[channel] = q.astype(np.uint8)
        errors[channel] = (weights - (q - zeros) * scales) / upper[channel, channel]
        block[channel + 1 :] -= upper[channel, channel + 1 :, None] * errors[channel]
    return codes, errors

"""Matrices of experts that files hold in 4-bit floats with a power of two a block (MXFP4), widened exactly.

In: the names of two tensors a parameter. Out: float32. The format is Open Compute's microscaling, version 1.0, section
5.2: blocks of 32 numbers of 1, 2 and 1 bits for sign, exponent and fraction, times 2 to the power of a byte minus 127.

Shapes: `E` experts, `N` rows, `K` columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from graphport.model_def.checkpoint_record import CheckpointError, Shape, as_float32
from graphport.model_def.safetensors_files import WeightFiles

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # numbers with one scale

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_SCALE_BIAS = 127


class MicroscaledPart(NamedTuple):
    """Some rows (int64, None: all) of matrices [E, N, K], in tensors [E, N, K/32, 16] and [E, N, K/32] of bytes.

    The first of two numbers is in the low half of its byte.
    """

    name: str
    rows: Tensor | None = None

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shapes of both tensors for matrices of `shape`; raises CheckpointError for parts of blocks."""
        *outer, columns = shape
        if columns % BLOCK:
            raise CheckpointError(f"{self.name} has rows of {columns}, which are no whole blocks of {BLOCK}")
        blocks = (*outer, columns // BLOCK)
        return {f"{self.name}{BLOCKS}": (*blocks, BLOCK // 2), f"{self.name}{SCALES}": blocks}

    def read(self, files: WeightFiles) -> Tensor:
        """The matrices as float32; raises CheckpointError for scales that are no numbers."""
        blocks, scales = (files.tensors[f"{self.name}{kind}"].read() for kind in (BLOCKS, SCALES))
        if self.rows is not None:
            blocks, scales = blocks.index_select(1, self.rows), scales.index_select(1, self.rows)
        pairs = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)  # [E, N, K/32, 32]
        numbers = torch.tensor(_VALUES)[pairs.to(torch.int64)]
        widened = torch.ldexp(numbers, scales[..., None].to(torch.int32) - _SCALE_BIAS)
        return as_float32(self.name, widened.flatten(-2))

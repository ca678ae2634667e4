"""Where a parameter lies in a checkpoint's files: a tensor, some of its rows, perhaps transposed, or several stacked.

In: the names of our parameters with their shapes. Out: the shapes that the files must have, and float32 weights. It
knows no family (see `decoder_tensors.py`, `encoder_tensors.py`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from graphport.model_def.checkpoint_record import Shape
from graphport.model_def.microscaled_parts import MicroscaledPart
from graphport.model_def.safetensors_files import WeightFiles


class StoredPart(NamedTuple):
    """A parameter in the files: a tensor, which of its rows (int64, None: all), and whether it is stored [in, out].

    Rows are counted along `axis`; a stack of matrices [E, N, K] has them along 1 and may be stored [E, K, N].
    """

    name: str
    rows: Tensor | None = None
    is_transposed: bool = False
    axis: int = 0

    def read(self, files: WeightFiles) -> Tensor:
        """The parameter as float32."""
        tensor = files.read(self.name)
        if self.is_transposed:
            tensor = tensor.transpose(-2, -1)
        return (tensor if self.rows is None else tensor.index_select(self.axis, self.rows)).contiguous()


class StackedPart(NamedTuple):
    """A parameter of one axis more than the tensors in the files, one an index of its first."""

    names: tuple[str, ...]

    def read(self, files: WeightFiles) -> Tensor:
        """The parameter as float32."""
        return torch.stack([files.read(name) for name in self.names])


Part = StoredPart | StackedPart | MicroscaledPart


def needed_shapes(parts: Mapping[str, Part], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shape of every stored tensor, by its name, from the `shapes` of our parameters that it holds."""
    needed: dict[str, Shape] = {}
    for ours, part in parts.items():
        if isinstance(part, StackedPart):
            needed |= dict.fromkeys(part.names, shapes[ours][1:])
            continue
        if isinstance(part, MicroscaledPart):
            for name, (experts, rows, *rest) in part.shapes(shapes[ours]).items():
                before = needed[name][1] if name in needed else 0
                needed[name] = (experts, before + rows, *rest)
            continue
        shape = list(shapes[ours])
        if part.name in needed:
            shape[part.axis] += needed[part.name][part.axis]
        needed[part.name] = tuple(shape)
    transposed = {part.name for part in parts.values() if isinstance(part, StoredPart) and part.is_transposed}
    return {
        name: (*shape[:-2], shape[-1], shape[-2]) if name in transposed else shape for name, shape in needed.items()
    }

"""Where a parameter lies in a checkpoint's files: a tensor, some of its rows, perhaps transposed.

In: the names of our parameters with their shapes. Out: the shapes that the files must have, and float32 weights. It
knows no family (see `decoder_tensors.py`, `encoder_tensors.py`).
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from graphport.model_def.checkpoint_record import Shape
from graphport.model_def.safetensors_files import WeightFiles


class StoredPart(NamedTuple):
    """A parameter in the files: a tensor, which of its rows (int64, None: all), and whether it is stored [in, out]."""

    name: str
    rows: Tensor | None = None
    is_transposed: bool = False

    def read(self, files: WeightFiles) -> Tensor:
        """The parameter as float32."""
        tensor = files.read(self.name)
        if self.is_transposed:
            tensor = tensor.T
        return (tensor if self.rows is None else tensor[self.rows]).contiguous()


def needed_shapes(parts: Mapping[str, StoredPart], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shape of every stored tensor, by its name, from the `shapes` of our parameters that it holds."""
    rows: dict[str, int] = {}
    for ours, part in parts.items():
        rows[part.name] = rows.get(part.name, 0) + shapes[ours][0]
    needed = {part.name: (rows[part.name], *shapes[ours][1:]) for ours, part in parts.items()}
    transposed = {part.name for part in parts.values() if part.is_transposed}
    return {name: shape[::-1] if name in transposed else shape for name, shape in needed.items()}

"""The linear layers of a model as 4-bit matrices that lose little on a calibration text.

In: an exported graph, its module and windows of ids. Out: `RoundedGroup`s, one a set of layers that read one input.
Tables are not rounded here, and nothing is compiled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.error_feedback import factor_moments, round_with_feedback
from graphport.export.gguf_matrices import KeptMatrix
from graphport.export.graph_pass import CompilePlan, name_site
from graphport.export.second_moments import InputMoments, second_moments
from graphport.export.smoothed_matrices import SmoothedMatrix, smoothed_matrices
from graphport.export.targets import Target
from graphport.model_def.experts import is_deciding
from graphport.model_def.transformer import Transformer

LOW_BITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedGroup:
    """Linear layers that read one input, by weight name: as the graph will hold them, and as the module would."""

    matrices: Mapping[str, KeptMatrix]
    smoothed: Mapping[str, SmoothedMatrix]

    @property
    def layer(self) -> int:
        """The block that the layers belong to."""
        return int(next(iter(self.matrices)).split(".")[1])

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """The rounded matrices [N, K] in the module's own scale, before smoothing."""
        return {
            name: self.smoothed[name].undo(matrix.blocks.dequantize())
            for name, matrix in self.matrices.items()
            if matrix.blocks is not None
        }


def round_groups(
    exported: ir.Model, plan: CompilePlan, model: Transformer, windows: Sequence[Sequence[int]]
) -> Iterator[RoundedGroup]:
    """Round the smoothed matrices of every linear layer of the blocks, in the order of the blocks.

    Raises ValueError, naming the layer, where weights or activations are not finite.
    """
    smoothed = smoothed_matrices(exported, plan)
    for moments in second_moments(model, windows):
        # a matrix that the module shares with another layer has one name in the graph, and is lowered under that
        group = {name: smoothed[name] for name in moments.names if name in smoothed and not is_deciding(name)}
        if group:
            yield RoundedGroup(matrices=_round(moments, group, plan.target), smoothed=group)


def _round(moments: InputMoments, group: Mapping[str, SmoothedMatrix], target: Target) -> dict[str, KeptMatrix]:
    name = next(iter(group))
    try:
        upper = factor_moments(group[name].moments(moments.matrix))  # one input, so one set of factors
        rounded = {}
        for name, matrix in group.items():
            weight = matrix.weight()
            blocks = round_with_feedback(weight, upper, bits=LOW_BITS, asymmetric=target.takes_zero_points)
            change = float(np.abs(blocks.dequantize() - weight).max())
            rounded[name] = KeptMatrix(source="float32", blocks=blocks, max_error=change)
    except ValueError as error:
        raise ValueError(f"{name_site(name)}: {error}") from error
    return rounded

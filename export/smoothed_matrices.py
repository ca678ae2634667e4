"""The matrices that a smoothed graph will hold, and the way back to the module's own.

In: an exported graph and a plan. Out: one `SmoothedMatrix` a linear layer, by weight name. The graph stays as it is.

Shapes: `N` outputs, `K` input channels.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.clean_graph import clean_graph
from graphport.export.graph_pass import CompilePlan, static_dims
from graphport.export.portable_ops import DOMAIN
from graphport.export.smooth_activations import CHANNELS, ROWS, smooth_activations

Floats = NDArray[np.float32]

_ONE = np.ones(1, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothedMatrix:
    """A matrix [N, K] whose rows were divided by `rows` [N] and whose channels were multiplied by `channels` [K].

    Its inputs are the module's divided by `channels`. Factors of length 1 stand for all.
    """

    tensor: ir.TensorProtocol
    rows: Floats
    channels: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return static_dims(self.tensor)

    def weight(self) -> Floats:
        """The matrix in float32."""
        return self.tensor.numpy().astype(np.float32, copy=False)

    def moments(self, matrix: Floats) -> Floats:
        """Second moments [K, K] of the module's inputs as those of the smoothed inputs."""
        return matrix / self.channels / self.channels[:, None]

    def undo(self, weight: Floats) -> Floats:
        """A matrix that stands for this one, in the module's own scale."""
        return weight / self.channels * self.rows[:, None]


def smoothed_matrices(exported: ir.Model, plan: CompilePlan) -> dict[str, SmoothedMatrix]:
    """The matrix of every linear layer with a constant weight as `smooth_activations` leaves it, by weight name."""
    model = exported.clone()
    clean_graph(model, plan)
    smooth_activations(model, plan)
    weights = [node.inputs[1] for node in model.graph if (node.domain, node.op_type) == (DOMAIN, "Linear")]
    return {
        weight.name or "": SmoothedMatrix(
            tensor=weight.const_value,
            rows=weight.meta.get(ROWS, _ONE),
            channels=weight.meta.get(CHANNELS, _ONE),
        )
        for weight in weights
        if weight is not None and weight.const_value is not None
    }

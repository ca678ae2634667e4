"""The graph in half precision: weights, activations, caches; logits, an encoder's outputs, pixels, sound stay float32.

Before: every float tensor float32
After:  every float tensor float16 or bfloat16, Cast at those outputs and inputs; norms keep float32 statistics
(stash_type)
"""

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.graph_pass import CompilePlan, PassReport, static_dims
from graphport.export.targets import TargetError
from graphport.model_def.signature import EMBEDDINGS, HIDDEN_STATES, INPUT_FEATURES, LOGITS, PIXEL_VALUES

_NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_WIDE_OUTPUTS = (LOGITS, HIDDEN_STATES, EMBEDDINGS)
_WIDE_INPUTS = (PIXEL_VALUES, INPUT_FEATURES)


def convert_floats(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Convert a float32 graph to the plan's activation type; refuses weights that overflow it."""
    activations = plan.precision.activations
    if activations == "float32":
        return PassReport(rule="half_precision")
    dtype = ir.DataType.from_numpy(_NUMPY[activations])
    for value in list(model.graph.initializers.values()):
        if value.dtype == ir.DataType.FLOAT and value.const_value is not None:
            value.const_value = _converted(value.const_value, dtype, _NUMPY[activations])
            value.type = ir.TensorType(dtype)  # not value.dtype: values, and clones of a graph, share their type
    for value in [*model.graph.inputs, *(out for node in model.graph for out in node.outputs)]:
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(dtype)
    _widen_outputs(model.graph, dtype)
    _widen_inputs(model.graph, dtype)
    return PassReport(rule="half_precision", fused=(f"float32 to {activations}",))


def _widen_inputs(graph: ir.Graph, dtype: ir.DataType) -> None:
    for wide in graph.inputs:
        if wide.name not in _WIDE_INPUTS:
            continue
        cast = ir.node("Cast", [wide], {"to": int(dtype)}, name=f"{wide.name}_to_{dtype.name.lower()}")
        narrow = cast.outputs[0]
        narrow.type, narrow.shape = ir.TensorType(dtype), wide.shape
        ir.convenience.replace_all_uses_with(wide, narrow)
        cast.replace_input_with(0, wide)
        graph.insert_before(next(iter(graph)), cast)
        wide.type = ir.TensorType(ir.DataType.FLOAT)


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType, numpy_dtype: np.dtype[np.generic]) -> ir.LazyTensor:
    """`tensor` narrowed when it is written; its range is checked now, so that the error is not the writer's."""
    wide = _lowered(tensor.numpy(), numpy_dtype)
    peak = np.array(max(wide.max(initial=0), -wide.min(initial=0)))
    with np.errstate(over="ignore"):
        overflows = np.isinf(peak.astype(numpy_dtype).astype(np.float32))
    if overflows:
        raise TargetError(f"{tensor.name} reaches {peak:.4g}, beyond {dtype.name}; export it with --precision bf16")

    def convert() -> ir.TensorProtocol:
        return ir.Tensor(_lowered(tensor.numpy(), numpy_dtype).astype(numpy_dtype), dtype=dtype, name=tensor.name)

    return ir.LazyTensor(convert, dtype, ir.Shape(static_dims(tensor)), name=tensor.name)


def _lowered(wide: NDArray[Any], dtype: np.dtype[np.generic]) -> NDArray[Any]:
    """`wide` with float32's lowest number, which hides a score, become that of `dtype`."""
    lowest = np.finfo(np.float32).min
    return np.where(wide == lowest, np.float32(ir.DataType.from_numpy(dtype).min), wide) if lowest in wide else wide


def _widen_outputs(graph: ir.Graph, dtype: ir.DataType) -> None:
    for index, narrow in enumerate(graph.outputs):
        name = narrow.name or ""
        if name not in _WIDE_OUTPUTS:
            continue
        narrow.name = f"{name}_{dtype.name.lower()}"
        cast = ir.node("Cast", [narrow], {"to": int(ir.DataType.FLOAT)}, name=f"{name}_to_float32")
        graph.append(cast)
        wide = cast.outputs[0]
        wide.name, wide.dtype, wide.shape = name, ir.DataType.FLOAT, narrow.shape
        graph.outputs[index] = wide

"""Bodies of the `graphport` ops in a model: an exported graph carries those of the ops that it uses.

In: a model and the name of an op. Out: the model with the body, and those of what it calls, among its functions. The
bodies themselves stand in `portable_ops.py` and the other `portable_*_ops.py`.
"""

import onnx_ir as ir

from graphport.export.portable_encoder_ops import ENCODER_FUNCTIONS
from graphport.export.portable_expert_ops import EXPERT_FUNCTIONS
from graphport.export.portable_image_ops import IMAGE_FUNCTIONS
from graphport.export.portable_ops import DOMAIN, FUNCTIONS
from graphport.export.portable_sink_ops import SINK_FUNCTIONS
from graphport.export.portable_source_ops import SOURCE_FUNCTIONS

_FUNCTIONS = (
    *(*FUNCTIONS, *ENCODER_FUNCTIONS, *EXPERT_FUNCTIONS, *IMAGE_FUNCTIONS, *SINK_FUNCTIONS, *SOURCE_FUNCTIONS),
)
_BODIES = {function.name: function for function in _FUNCTIONS}


def attach_function(model: ir.Model, name: str) -> None:
    """Add the body of `graphport::name`, and of what it calls, to the model's functions."""
    function = ir.from_proto(_BODIES[name].to_function_proto())
    assert isinstance(function, ir.Function)
    if function.identifier() in model.functions:
        return
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = 1
    for node in function:
        if node.domain == DOMAIN:
            attach_function(model, node.op_type)

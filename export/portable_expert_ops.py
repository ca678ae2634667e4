# ruff: noqa: N802  # a function's name here is the name of the ONNX op
"""The mixture of experts as ONNX functions made of standard ops (opset 23), like the other `graphport` ops.

In: the op's inputs and attributes. Out: the op's output, equal to `model_def/expert_ops.py`. Every token runs every
expert, and those that it did not choose weigh nothing: slow, and the same on any runtime.

Shapes: `W` width of the stream, `E` experts, `F` width of an expert, `T` tokens.
"""

from onnxscript import FLOAT, script
from onnxscript import opset23 as op

from graphport.export.portable_ops import GRAPHPORT


@script(GRAPHPORT, default_opset=op)
def ExpertWeights(router_logits: FLOAT, num_chosen: int, normalized: int) -> FLOAT:
    """Weights [T, E, 1] of scores [..., E]: the softmax, 0 but for the `num_chosen` largest."""
    last = op.Constant(value_ints=[-1])
    flat = op.Reshape(router_logits, op.Concat([-1], op.Shape(router_logits, start=-1), axis=0))
    scores = op.Softmax(op.Cast(flat, to=1), axis=-1)
    largest, chosen = op.TopK(scores, op.Unsqueeze(op.Constant(value_int=num_chosen), [0]), axis=-1)
    is_normalized = op.Cast(op.Constant(value_int=normalized), to=9)
    shares = op.Where(is_normalized, largest / op.ReduceSum(largest, last, keepdims=1), largest)
    return op.Unsqueeze(op.ScatterElements(scores * 0.0, chosen, shares, axis=-1), last)


@script(GRAPHPORT, default_opset=op)
def GateExperts(gates: FLOAT, ups: FLOAT, alpha: float, up_offset: float, limit: float) -> FLOAT:
    """g * sigmoid(alpha * g) * (u + up_offset), g and u bounded by `limit` unless that is 0."""
    bound = op.CastLike(op.Constant(value_float=limit), gates)
    is_bounded = op.Constant(value_float=limit) > 0.0
    g = op.Where(is_bounded, op.Min(gates, bound), gates)
    u = op.Where(is_bounded, op.Max(op.Min(ups, bound), op.Neg(bound)), ups)
    factor = op.CastLike(op.Constant(value_float=alpha), gates)
    return g * op.Sigmoid(factor * g) * (u + op.CastLike(op.Constant(value_float=up_offset), gates))


@script(GRAPHPORT, default_opset=op)
def RunExperts(x: FLOAT, matrices: FLOAT) -> FLOAT:
    """Tokens [1 or E, T, in] times the matrix [E, out, in] of each expert, [E, T, out]."""
    return op.MatMul(x, op.Transpose(matrices, perm=[0, 2, 1]))


@script(GRAPHPORT, default_opset=op)
def MixExperts(outputs: FLOAT, weights: FLOAT, x: FLOAT) -> FLOAT:
    """Outputs [E, T, W] weighed by [T, E, 1], in the shape of `x`; a product, as sums over no tokens go wrong."""
    by_token = op.Transpose(outputs, perm=[1, 2, 0])
    return op.Reshape(op.MatMul(by_token, op.CastLike(weights, outputs)), op.Shape(x))


@script(GRAPHPORT, default_opset=op)
def Experts(
    x: FLOAT,
    router_logits: FLOAT,
    gate: FLOAT,
    up: FLOAT,
    down: FLOAT,
    num_chosen: int,
    normalized: int,
    alpha: float,
    up_offset: float,
    limit: float,
) -> FLOAT:
    """Mixture of experts without biases; see `model_def.expert_ops.mixture_of_experts`."""
    tokens = op.Unsqueeze(op.Reshape(x, op.Concat([-1], op.Shape(x, start=-1), axis=0)), [0])
    weights = ExpertWeights(router_logits, num_chosen=num_chosen, normalized=normalized)
    gates, ups = RunExperts(tokens, gate), RunExperts(tokens, up)
    hidden = GateExperts(gates, ups, alpha=alpha, up_offset=up_offset, limit=limit)
    return MixExperts(RunExperts(hidden, down), weights, x)


@script(GRAPHPORT, default_opset=op)
def BiasedExperts(
    x: FLOAT,
    router_logits: FLOAT,
    gate: FLOAT,
    up: FLOAT,
    down: FLOAT,
    gate_bias: FLOAT,
    up_bias: FLOAT,
    down_bias: FLOAT,
    num_chosen: int,
    normalized: int,
    alpha: float,
    up_offset: float,
    limit: float,
) -> FLOAT:
    """Experts with biases [E, F], [E, F] and [E, W]."""
    tokens = op.Unsqueeze(op.Reshape(x, op.Concat([-1], op.Shape(x, start=-1), axis=0)), [0])
    weights = ExpertWeights(router_logits, num_chosen=num_chosen, normalized=normalized)
    gates = RunExperts(tokens, gate) + op.Unsqueeze(gate_bias, [1])
    ups = RunExperts(tokens, up) + op.Unsqueeze(up_bias, [1])
    hidden = GateExperts(gates, ups, alpha=alpha, up_offset=up_offset, limit=limit)
    return MixExperts(RunExperts(hidden, down) + op.Unsqueeze(down_bias, [1]), weights, x)


EXPERT_FUNCTIONS = (Experts, BiasedExperts, ExpertWeights, GateExperts, RunExperts, MixExperts)

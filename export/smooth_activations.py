"""Even out the channels that share a quantisation block, without changing what is computed.

Before: x = Norm(h) * g;      y = Linear(x, W)
After:  x = Norm(h) * (g / c); y = Linear(x, W * c)

8-bit kernels round activations in blocks of 32 channels to the largest of them, so one large channel costs its
neighbours their precision. c moves that size into the weights (SmoothQuant, Xiao et al. 2023, equation 4). It is taken
from the norm's weight, or from the rows of the layer that makes x: the up projection before down, the value
projection before the attention's output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.graph_pass import CompilePlan, Miss, PassReport, name_site, only_node, static_dims
from graphport.export.pack_projections import ATTENTION_OPS, Projection, as_projection
from graphport.export.portable_ops import DOMAIN
from graphport.export.targets import WEIGHT_BLOCK

RULE = "smoothed"
STRENGTH = 0.5  # share of a channel's size that moves into the weights; measured for SmolLM2 in DECISIONS.md

CHANNELS, ROWS = "smoothed_channels", "smoothed_rows"  # factors, in the metadata of a constant

Factors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """What makes an activation: constants whose rows are its channels, and how channels map to rows.

    `passed` are the values between the constants and the activation, which change with the factors.
    """

    constants: tuple[ir.Value, ...]
    passed: tuple[ir.Value, ...] = ()
    shared_by: int = 1  # channels that read one row: query heads of one value head
    head_dim: int = 0


def smooth_activations(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Smooth the input of every group of linear layers that the plan has activation ranges for."""
    groups: dict[ir.Value, list[ir.Node]] = {}
    for node in model.graph:
        if (node.domain, node.op_type) == (DOMAIN, "Linear") and node.inputs[0] is not None:
            groups.setdefault(node.inputs[0], []).append(node)
    fused, missed = [], []
    for x, linears in groups.items():
        weights = [node.inputs[1] for node in linears]
        known = [w for w in weights if w is not None and w.name in plan.activation_ranges]
        if not known:
            continue
        site = name_site(known[0].name or "")
        maker = _find_maker(x)
        obstacle = _find_obstacle(x, weights, maker)
        if obstacle is None:
            ranges = np.max([plan.activation_ranges[w.name or ""] for w in known], axis=0)
            obstacle = _find_fault(ranges, num_known=len(known), num_linears=len(linears))
        if maker is None or obstacle is not None:
            check, found = obstacle or ("the activation is made by a norm or a linear layer", _made_by_what(x))
            missed.append(Miss(site=site, check=check, found=found))
            continue
        rows, channels = _factors(ranges, maker)
        for constant in maker.constants:
            _rescale(constant, _dividing(rows))
            constant.meta[ROWS] = rows
        for weight in known:
            _rescale(weight, _multiplying(channels))
            weight.meta[CHANNELS] = channels
        fused.append(site)
    return PassReport(rule=RULE, fused=tuple(fused), missed=tuple(missed))


def _find_maker(x: ir.Value) -> _Maker | None:
    node = x.producer()
    if node is None:
        return None
    if node.op_type in ("RMSNorm", "LayerNormalization"):
        return _Maker(constants=tuple(v for v in node.inputs[1:] if v is not None))
    if node.domain == DOMAIN and node.op_type in ATTENTION_OPS:
        value = as_projection(node.inputs[2])
        if value is None:
            return None
        heads, kv_heads = node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int()
        head_dim = static_dims(value.weight)[0] // kv_heads
        return _made_by(value, shared_by=heads // kv_heads, head_dim=head_dim)
    if node.op_type == "Mul" and only_node(node.inputs[1], "Sigmoid") is None:
        up = as_projection(node.inputs[1])
        return None if up is None else _made_by(up)
    if node.op_type == "Relu":  # relu(x / c) = relu(x) / c
        up = as_projection(node.inputs[0])
        return None if up is None else _made_by(up)
    return None


def _made_by(projection: Projection, *, shared_by: int = 1, head_dim: int = 0) -> _Maker:
    constants = tuple(value for value in (projection.weight, projection.bias) if value is not None)
    passed = (projection.linear.outputs[0], projection.output)
    return _Maker(constants=constants, passed=passed, shared_by=shared_by, head_dim=head_dim)


def _made_by_what(x: ir.Value) -> str:
    node = x.producer()
    return "a graph input" if node is None else node.op_type


def _find_obstacle(x: ir.Value, weights: Sequence[ir.Value | None], maker: _Maker | None) -> tuple[str, str] | None:
    if maker is None:
        return None
    if x.is_graph_output() or len(x.uses()) != len(weights):
        return "linear layers alone read the activation", f"{len(x.uses())} readers, {len(weights)} linear layers"
    for constant in (*weights, *maker.constants):
        if constant is None or not constant.is_initializer() or len(constant.uses()) != 1:
            name, uses = (None, 0) if constant is None else (constant.name, len(constant.uses()))
            return "every weight is a constant used once", f"{name} has {uses} uses"
    rows = static_dims(maker.constants[0])[0]
    for constant in maker.constants:
        if static_dims(constant)[0] != rows:
            return "a bias has one value an output", f"{constant.name} is {list(static_dims(constant))} for {rows}"
    for value in maker.passed:
        if len(value.uses()) != 1 or value.is_graph_output():
            return "what makes the activation is read once", f"{value.name} has other readers"
    return None


def _find_fault(ranges: NDArray[np.float32], *, num_known: int, num_linears: int) -> tuple[str, str] | None:
    if num_known != num_linears:
        return "every linear layer has an activation range", f"{num_known} of {num_linears} have one"
    if not np.isfinite(ranges).all():
        return "activation ranges are finite", f"{int((~np.isfinite(ranges)).sum())} of {ranges.size} are not"
    return None


def _factors(ranges: NDArray[np.float32], maker: _Maker) -> tuple[Factors, Factors]:
    """Factors for the rows that make the activation and for its channels; geometric mean 1 in every block of rows.

    Channels of all zeros count as a millionth of the largest: ranges that are all 0 give factors of 1.
    """
    sizes = ranges
    if maker.shared_by > 1:  # one value head feeds several query heads: they share its factors
        sizes = ranges.reshape(-1, maker.shared_by, maker.head_dim).max(axis=1).reshape(-1)
    logs = STRENGTH * np.log(np.maximum(sizes, 1e-6 * max(float(sizes.max()), 1e-30)).astype(np.float64))
    for start in range(0, len(logs), WEIGHT_BLOCK):
        block = logs[start : start + WEIGHT_BLOCK]
        block -= block.mean()
    rows = np.exp(logs).astype(np.float32)
    if maker.shared_by == 1:
        return rows, rows
    heads = np.repeat(rows.reshape(-1, 1, maker.head_dim), maker.shared_by, axis=1)
    return rows, heads.reshape(-1)


def _dividing(factors: Factors) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    return lambda rows: rows / factors.reshape(-1, *[1] * (rows.ndim - 1))


def _multiplying(factors: Factors) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    return lambda matrix: matrix * factors


def _rescale(constant: ir.Value, scaled: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
    """Replace an initialiser's tensor by a scaled one that is made when it is read."""
    tensor = constant.const_value
    assert tensor is not None
    shape = ir.Shape(static_dims(tensor))
    constant.const_value = ir.LazyTensor(
        lambda: ir.tensor(scaled(tensor.numpy()), name=constant.name), tensor.dtype, shape, name=constant.name
    )

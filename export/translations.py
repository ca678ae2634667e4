"""How PyTorch ops become nodes: the fused ops as `graphport` nodes, linear layers as one node each.

In: the values torch.onnx hands to a translation. Out: onnx_ir values. The function bodies of the nodes stand in
`portable_ops.py` and its neighbours; they are attached after export because torch.onnx inlines the functions
it knows.
"""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript import opset23 as op
from onnxscript.values import Op

from graphport.export import portable_ops

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]


def _op(name: str, *, inputs: str, outputs: str, floats: str = "", ints: str = "") -> Op:
    """The node type `graphport::name`; an input or output written `name:i32` is int32, all others float."""

    def parameters(names: str) -> list[OpSchema.FormalParameter]:
        pairs = [(*text.split(":"), "T")[:2] for text in names.split()]
        return [OpSchema.FormalParameter(text, "tensor(int32)" if kind == "i32" else kind) for text, kind in pairs]

    attributes = [
        OpSchema.Attribute(text, kind, "", required=True)
        for names, kind in ((floats, OpSchema.AttrType.FLOAT), (ints, OpSchema.AttrType.INT))
        for text in names.split()
    ]
    schema = OpSchema(
        name,
        portable_ops.DOMAIN,
        1,
        inputs=parameters(inputs),
        outputs=parameters(outputs),
        type_constraints=[("T", _FLOATS, "")],
        attributes=attributes,
    )
    return Op(portable_ops.GRAPHPORT, name, schema)


_ATTENTION_INPUTS = "query key value past_key past_value seqlens_k:i32 total_sequence_length:i32"
_ATTENTION_OUTPUTS = "output present_key present_value"
_ATTENTION_INTS = "num_heads kv_num_heads local_window_size"

_RMS_NORM = _op("RMSNorm", inputs="x weight", outputs="y", floats="epsilon")
_LINEAR = _op("Linear", inputs="x weight", outputs="y")
_CACHED_ATTENTION = _op(
    "CachedAttention",
    inputs=_ATTENTION_INPUTS,
    outputs=_ATTENTION_OUTPUTS,
    floats="scale softcap",
    ints=_ATTENTION_INTS,
)
_ROTARY_CACHED_ATTENTION = _op(
    "RotaryCachedAttention",
    inputs=f"{_ATTENTION_INPUTS} cos sin",
    outputs=_ATTENTION_OUTPUTS,
    floats="scale softcap",
    ints=f"{_ATTENTION_INTS} rotary_interleaved",
)


_BIASED_CACHED_ATTENTION = _op(
    "BiasedCachedAttention",
    inputs=f"{_ATTENTION_INPUTS} table",
    outputs=_ATTENTION_OUTPUTS,
    floats="scale",
    ints="num_heads kv_num_heads by_key",
)
_SINK_CACHED_ATTENTION = _op(
    "SinkCachedAttention",
    inputs=f"{_ATTENTION_INPUTS} cos sin sinks",
    outputs=_ATTENTION_OUTPUTS,
    floats="scale",
    ints=f"{_ATTENTION_INTS} rotary_interleaved",
)
_CROSS_ATTENTION = _op(
    "CrossAttention", inputs="query key value lengths:i32", outputs="output", floats="scale", ints="num_heads"
)
_PADDED_ATTENTION = _op(
    "PaddedAttention",
    inputs="query key value lengths:i32",
    outputs="output",
    floats="scale softcap",
    ints="num_heads kv_num_heads",
)
_ROTARY_PADDED_ATTENTION = _op(
    "RotaryPaddedAttention",
    inputs="query key value lengths:i32 cos sin",
    outputs="output",
    floats="scale softcap",
    ints="num_heads kv_num_heads rotary_interleaved",
)
_BIASED_PADDED_ATTENTION = _op(
    "BiasedPaddedAttention",
    inputs="query key value lengths:i32 bias",
    outputs="output",
    floats="scale softcap",
    ints="num_heads kv_num_heads",
)
_BIASED_ROTARY_PADDED_ATTENTION = _op(
    "BiasedRotaryPaddedAttention",
    inputs="query key value lengths:i32 cos sin bias",
    outputs="output",
    floats="scale softcap",
    ints="num_heads kv_num_heads rotary_interleaved",
)
_POOLS = {
    kind: _op(name, inputs="hidden lengths:i32", outputs="pooled")
    for kind, name in (
        ("mean", "PoolMean"),
        ("mean_sqrt", "PoolMeanSqrt"),
        ("cls", "PoolCls"),
        ("last", "PoolLast"),
        ("max", "PoolMax"),
    )
}


_IMAGE_PATCHES = _op("ImagePatches", inputs="pixels", outputs="patches", ints="patch_height patch_width")
_PATCH_POSITIONS = _op(
    "PatchPositions", inputs="table pixels", outputs="positions", ints="patch_height patch_width rows columns"
)
_EXPERT_FLOATS, _EXPERT_INTS = "alpha up_offset limit", "num_chosen normalized"
_EXPERTS = _op("Experts", inputs="x router_logits gate up down", outputs="y", floats=_EXPERT_FLOATS, ints=_EXPERT_INTS)
_BIASED_EXPERTS = _op(
    "BiasedExperts",
    inputs="x router_logits gate up down gate_bias up_bias down_bias",
    outputs="y",
    floats=_EXPERT_FLOATS,
    ints=_EXPERT_INTS,
)
_ROW_LENGTHS = _op("RowLengths", inputs="x", outputs="lengths:i32")


def _rms_norm(x: ir.Value, weight: ir.Value, epsilon: float) -> Any:  # noqa: ANN401 - torch.onnx takes what ops return
    return _RMS_NORM(x, weight, epsilon=epsilon)


def _linear(x: ir.Value, weight: ir.Value, bias: ir.Value | None = None) -> Any:  # noqa: ANN401
    product = _LINEAR(x, weight)
    return product if bias is None else op.Add(product, bias)


def _cached_attention(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    past_key: ir.Value,
    past_value: ir.Value,
    seqlens_k: ir.Value,
    total_sequence_length: ir.Value,
    cos: ir.Value | None,
    sin: ir.Value | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    softcap: float,
    window: int,
    interleaved: bool,
) -> Any:  # noqa: ANN401
    inputs = (query, key, value, past_key, past_value, seqlens_k, total_sequence_length)
    attributes = {
        "num_heads": num_heads,
        "kv_num_heads": num_kv_heads,
        "scale": scale,
        "softcap": softcap,
        "local_window_size": window,
    }
    if cos is None:
        return _CACHED_ATTENTION(*inputs, **attributes)
    return _ROTARY_CACHED_ATTENTION(*inputs, cos, sin, **attributes, rotary_interleaved=int(interleaved))


def _biased_cached_attention(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    past_key: ir.Value,
    past_value: ir.Value,
    seqlens_k: ir.Value,
    total_sequence_length: ir.Value,
    table: ir.Value,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    by_key: bool,
) -> Any:  # noqa: ANN401
    inputs = (query, key, value, past_key, past_value, seqlens_k, total_sequence_length, table)
    heads = {"num_heads": num_heads, "kv_num_heads": num_kv_heads}
    return _BIASED_CACHED_ATTENTION(*inputs, **heads, scale=scale, by_key=int(by_key))


def _sink_cached_attention(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    past_key: ir.Value,
    past_value: ir.Value,
    seqlens_k: ir.Value,
    total_sequence_length: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    sinks: ir.Value,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    interleaved: bool,
) -> Any:  # noqa: ANN401
    inputs = (query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos, sin, sinks)
    heads = {"num_heads": num_heads, "kv_num_heads": num_kv_heads, "local_window_size": window}
    return _SINK_CACHED_ATTENTION(*inputs, **heads, scale=scale, rotary_interleaved=int(interleaved))


def _cross_attention(
    query: ir.Value, key: ir.Value, value: ir.Value, lengths: ir.Value, num_heads: int, scale: float
) -> Any:  # noqa: ANN401
    return _CROSS_ATTENTION(query, key, value, lengths, num_heads=num_heads, scale=scale)


def _padded_attention(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    lengths: ir.Value,
    cos: ir.Value | None,
    sin: ir.Value | None,
    bias: ir.Value | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    softcap: float,
    interleaved: bool,
) -> Any:  # noqa: ANN401
    inputs = (query, key, value, lengths)
    attributes = {"num_heads": num_heads, "kv_num_heads": num_kv_heads, "scale": scale, "softcap": softcap}
    if cos is None and bias is None:
        return _PADDED_ATTENTION(*inputs, **attributes)
    if cos is None:
        return _BIASED_PADDED_ATTENTION(*inputs, bias, **attributes)
    turning = attributes | {"rotary_interleaved": int(interleaved)}
    if bias is None:
        return _ROTARY_PADDED_ATTENTION(*inputs, cos, sin, **turning)
    return _BIASED_ROTARY_PADDED_ATTENTION(*inputs, cos, sin, bias, **turning)


def _pool(hidden: ir.Value, lengths: ir.Value, kind: str) -> Any:  # noqa: ANN401
    return _POOLS[kind](hidden, lengths)


def _image_patches(pixels: ir.Value, patch_height: int, patch_width: int) -> Any:  # noqa: ANN401
    return _IMAGE_PATCHES(pixels, patch_height=patch_height, patch_width=patch_width)


def _patch_positions(
    table: ir.Value, pixels: ir.Value, patch_height: int, patch_width: int, rows: int, columns: int
) -> Any:  # noqa: ANN401
    sizes = {"patch_height": patch_height, "patch_width": patch_width, "rows": rows, "columns": columns}
    return _PATCH_POSITIONS(table, pixels, **sizes)


def _row_lengths(x: ir.Value) -> Any:  # noqa: ANN401
    return _ROW_LENGTHS(x)


def _mixture_of_experts(
    x: ir.Value,
    router_logits: ir.Value,
    gate: ir.Value,
    up: ir.Value,
    down: ir.Value,
    gate_bias: ir.Value | None,
    up_bias: ir.Value | None,
    down_bias: ir.Value | None,
    num_chosen: int,
    normalized: bool,
    alpha: float,
    up_offset: float,
    limit: float,
) -> Any:  # noqa: ANN401
    inputs = (x, router_logits, gate, up, down)
    attributes = {
        "num_chosen": num_chosen,
        "normalized": int(normalized),
        "alpha": alpha,
        "up_offset": up_offset,
        "limit": limit,
    }
    if gate_bias is None:
        return _EXPERTS(*inputs, **attributes)
    return _BIASED_EXPERTS(*inputs, gate_bias, up_bias, down_bias, **attributes)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.graphport.rms_norm.default: _rms_norm,
    torch.ops.graphport.cached_attention.default: _cached_attention,
    torch.ops.graphport.biased_cached_attention.default: _biased_cached_attention,
    torch.ops.graphport.sink_cached_attention.default: _sink_cached_attention,
    torch.ops.graphport.cross_attention.default: _cross_attention,
    torch.ops.graphport.padded_attention.default: _padded_attention,
    torch.ops.graphport.pool.default: _pool,
    torch.ops.graphport.image_patches.default: _image_patches,
    torch.ops.graphport.patch_positions.default: _patch_positions,
    torch.ops.graphport.mixture_of_experts.default: _mixture_of_experts,
    torch.ops.graphport.row_lengths.default: _row_lengths,
    torch.ops.aten.linear.default: _linear,
}

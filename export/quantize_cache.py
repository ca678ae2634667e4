"""The KV cache in 8 or 4 bits: attention reads it as it lies and rounds the rows that it appends.

Before: GroupQueryAttention(qkv, , , past_k, past_v, seqlens, total, ...), caches in the activations' type
After:  GroupQueryAttention(qkv, , , past_k, past_v, seqlens, total, ..., k_scale, v_scale), int8, uint8 or float8

Where the target reads a quantised cache slowly, long steps take another way (see `float_prefill.py`). The scales are
found elsewhere (see `calibrate_cache.py`).
"""

import onnx_ir as ir

from graphport.export.float_prefill import add_float_prefill
from graphport.export.graph_pass import (
    CONTRIB,
    CompilePlan,
    PassReport,
    add_constant,
    new_node,
    remove_nodes,
    replace_value,
)
from graphport.export.targets import CacheFormat
from graphport.model_def.signature import past_key, past_value

RULE = "kv_cache"

KEY_SCALE, VALUE_SCALE = 12, 13  # inputs of GroupQueryAttention

_TYPES = {
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "float8e4m3fn": ir.DataType.FLOAT8E4M3FN,
}


def quantize_cache(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Give every GroupQueryAttention a cache of the plan's format; a plan without one changes nothing."""
    if plan.cache is None:
        return PassReport(rule=RULE)
    inputs = {value.name: value for value in model.graph.inputs}
    fused = []
    quantised: list[ir.Node] = []
    for layer, scales in enumerate(plan.cache_scales):
        past = inputs[past_key(layer)], inputs[past_value(layer)]
        kernel = next((use.node for use in past[0].uses() if use.node.op_type == "GroupQueryAttention"), None)
        if kernel is None:
            continue
        names = f"blocks.{layer}.attention.key_scale", f"blocks.{layer}.attention.value_scale"
        key, value = (
            add_constant(model.graph, name, ir.tensor(scale, name=name))
            for name, scale in zip(names, scales, strict=True)
        )
        for cache in past:
            _retype(cache, plan.cache)
        quantised.append(_quantize(kernel, plan.cache, key, value))
        fused.append(f"layer {layer} attention")
    if plan.target.float_prefill:
        add_float_prefill(model, quantised, plan.cache)
    return PassReport(rule=RULE, fused=tuple(fused))


def _retype(value: ir.Value, cache: CacheFormat) -> None:
    """Give a cache input or output the format's type, and the width of packed values."""
    value.type = ir.TensorType(_TYPES[cache.dtype])
    assert value.shape is not None
    *dims, width = value.shape
    assert isinstance(width, int)
    value.shape = ir.Shape([*dims, width * cache.bits // 8])


def _quantize(kernel: ir.Node, cache: CacheFormat, key_scale: ir.Value, value_scale: ir.Value) -> ir.Node:
    granularity = "PER_CHANNEL" if cache.per_channel else "PER_TENSOR"
    inputs = list(kernel.inputs)
    inputs += [None] * (VALUE_SCALE + 1 - len(inputs))
    inputs[KEY_SCALE], inputs[VALUE_SCALE] = key_scale, value_scale
    attributes: dict[str, int | float | str | list[int]] = {
        **{name: attribute.value for name, attribute in kernel.attributes.items()},
        "k_quant_type": granularity,
        "v_quant_type": granularity,
        "kv_cache_bit_width": cache.bits,
    }
    new = new_node(
        kernel, kernel.op_type, inputs, attributes, domain=CONTRIB, num_outputs=3, name=kernel.name or "attention"
    )
    for old, value in zip(kernel.outputs, new.outputs, strict=True):
        replace_value(old, value)
    for value in new.outputs[1:]:
        _retype(value, cache)
    remove_nodes(kernel)
    return new

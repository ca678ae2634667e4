# ruff: noqa: N802  # a function's name here is the name of the ONNX op
"""Attention with sinks as ONNX functions made of standard ops (opset 23), like the other `graphport` ops.

In: the op's inputs and attributes. Out: the op's outputs, equal to `model_def/sink_ops.py`; see `portable_ops.py`.

Shapes: `B` rows, `S` new tokens, `N` query heads, `K` key/value heads, `G` = N/K, `H` head size, `C` cache capacity.
"""

from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset23 as op

from graphport.export.portable_ops import GRAPHPORT, PastLengths, Rotate, SplitHeads, WriteCache


@script(GRAPHPORT, default_opset=op)
def SinkAttend(
    queries: FLOAT,
    keys: FLOAT,
    values: FLOAT,
    positions: INT64,
    sinks: FLOAT,
    scale: float,
    local_window_size: int,
) -> FLOAT:
    """Queries [B, N, S, H] at `positions` [B, S] over caches [B, K, C, H], sinks [N]; returns [B, S, N*H]."""
    num_new = op.Shape(queries, start=2, end=3)
    kv_heads = op.Shape(keys, start=1, end=2)
    capacity = op.Shape(keys, start=2, end=3)
    column = op.Range(0, op.Squeeze(capacity), 1)
    row = op.Unsqueeze(positions, [2])
    window = op.Constant(value_int=local_window_size)
    visible = op.Unsqueeze(op.And(column <= row, op.Or(window <= 0, column > row - window)), [1, 2])
    # what lies beyond the text may be anything, NaN included: it must not reach a product with weight 0
    written = op.Unsqueeze(column <= op.ReduceMax(positions, [1], keepdims=1), [1, 3])
    clean_keys = op.Unsqueeze(op.Where(written, keys, op.CastLike(0.0, keys)), [2])
    clean_values = op.Unsqueeze(op.Where(written, values, op.CastLike(0.0, values)), [2])
    grouped = op.Reshape(queries, op.Concat([0], kv_heads, [-1], num_new, op.Shape(queries, start=3), axis=0))
    scores = op.Cast(op.MatMul(grouped, op.Transpose(clean_keys, perm=[0, 1, 2, 4, 3])), to=1) * scale
    masked = op.Where(visible, scores, op.Constant(value_float=float("-inf")))
    by_group = op.Reshape(op.Cast(sinks, to=1), op.Concat([1], kv_heads, [-1], [1], [1], axis=0))
    column_of_sinks = op.Expand(by_group, op.Concat(op.Shape(masked, end=4), [1], axis=0))
    weights = op.Softmax(op.Concat(masked, column_of_sinks, axis=-1), axis=-1)
    of_keys = op.Slice(weights, [0], capacity, [-1])
    attended = op.MatMul(op.CastLike(of_keys, values), clean_values)  # [B, K, G, S, H]
    joined = op.Transpose(op.Reshape(attended, op.Shape(queries)), perm=[0, 2, 1, 3])
    return op.Reshape(joined, [0, 0, -1])


@script(GRAPHPORT, default_opset=op)
def SinkCachedAttention(
    query: FLOAT,
    key: FLOAT,
    value: FLOAT,
    past_key: FLOAT,
    past_value: FLOAT,
    seqlens_k: INT32,
    total_sequence_length: INT32,
    cos: FLOAT,
    sin: FLOAT,
    sinks: FLOAT,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    local_window_size: int,
    rotary_interleaved: int,
) -> tuple[FLOAT, FLOAT, FLOAT]:
    """RotaryCachedAttention with sinks [N]; see `model_def.sink_ops.sink_cached_attention`."""
    num_new = op.Squeeze(op.Shape(query, start=1, end=2))
    past = PastLengths(seqlens_k, num_new)
    positions = op.Unsqueeze(past, [1]) + op.Range(0, num_new, 1)
    cos_rows = op.Unsqueeze(op.Gather(cos, positions), [1])
    sin_rows = op.Unsqueeze(op.Gather(sin, positions), [1])
    queries = Rotate(SplitHeads(query, heads=num_heads), cos_rows, sin_rows, rotary_interleaved=rotary_interleaved)
    keys = Rotate(SplitHeads(key, heads=kv_num_heads), cos_rows, sin_rows, rotary_interleaved=rotary_interleaved)
    present_key = WriteCache(past_key, keys, past)
    present_value = WriteCache(past_value, SplitHeads(value, heads=kv_num_heads), past)
    output = SinkAttend(
        queries,
        present_key,
        present_value,
        positions,
        sinks,
        scale=scale,
        local_window_size=local_window_size,
    )
    return output, present_key, present_value


SINK_FUNCTIONS = (SinkCachedAttention, SinkAttend)

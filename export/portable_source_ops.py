# ruff: noqa: N802  # a function's name here is the name of the ONNX op
"""The `graphport` ops of encoder-decoders as ONNX functions made of standard ops (opset 23).

In: the op's inputs and attributes. Out: the op's outputs, equal to `model_def/ops.py`; see `portable_ops.py`.

Shapes: `B` rows, `S` new tokens, `T` source tokens, `N` query heads, `K` key/value heads, `H` head size, `C` capacity.
"""

from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset23 as op

from graphport.export.portable_ops import GRAPHPORT, PastLengths, SplitHeads, WriteCache


@script(GRAPHPORT, default_opset=op)
def CrossAttention(query: FLOAT, key: FLOAT, value: FLOAT, lengths: INT32, num_heads: int, scale: float) -> FLOAT:
    """New tokens over keys and values [B, N, T, H] of sources; see `model_def.ops.cross_attention`."""
    column = op.Range(0, op.Squeeze(op.Shape(key, start=2, end=3)), 1)
    real = column < op.Unsqueeze(op.Cast(lengths, to=7), [1])  # [B, T]
    # padding may be anything, NaN included: it must not reach a product with weight 0
    written = op.Unsqueeze(real, [1, 3])
    clean_keys = op.Where(written, key, op.CastLike(0.0, key))
    clean_values = op.Where(written, value, op.CastLike(0.0, value))
    queries = SplitHeads(query, heads=num_heads)
    scores = op.Cast(op.MatMul(queries, op.Transpose(clean_keys, perm=[0, 1, 3, 2])), to=1) * scale
    # the lowest number and not -inf: a row without a token has a softmax too
    masked = op.Where(op.Unsqueeze(real, [1, 2]), scores, op.Constant(value_float=-3.4028234663852886e38))
    attended = op.MatMul(op.CastLike(op.Softmax(masked, axis=-1), value), clean_values)  # [B, N, S, H]
    return op.Reshape(op.Transpose(attended, perm=[0, 2, 1, 3]), [0, 0, -1])


@script(GRAPHPORT, default_opset=op)
def DistanceBias(table: FLOAT, positions: INT64, columns: INT64, by_key: int) -> FLOAT:
    """What is added to the scores [B, N, S, C] of keys 0 .. columns - 1, from a table [P, N] by distance.

    Queries stand at `positions` [B, S]. Of keys behind a query, which it does not see, that of distance 0. `by_key`:
    the table is by the position of the key.
    """
    column = op.Range(0, columns, 1)
    distance = op.Unsqueeze(positions, [2]) - column
    before = op.Max(distance, op.CastLike(0, distance))
    place = op.Where(op.Cast(op.Constant(value_int=by_key), to=9), column, before)
    return op.Transpose(op.Gather(table, place), perm=[0, 3, 1, 2])


@script(GRAPHPORT, default_opset=op)
def BiasedCachedAttention(
    query: FLOAT,
    key: FLOAT,
    value: FLOAT,
    past_key: FLOAT,
    past_value: FLOAT,
    seqlens_k: INT32,
    total_sequence_length: INT32,
    table: FLOAT,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    by_key: int,
) -> tuple[FLOAT, FLOAT, FLOAT]:
    """CachedAttention whose scores depend on distances too; see `model_def.ops.biased_cached_attention`."""
    num_new = op.Squeeze(op.Shape(query, start=1, end=2))
    past = PastLengths(seqlens_k, num_new)
    positions = op.Unsqueeze(past, [1]) + op.Range(0, num_new, 1)  # [B, S]
    present_key = WriteCache(past_key, SplitHeads(key, heads=kv_num_heads), past)
    present_value = WriteCache(past_value, SplitHeads(value, heads=kv_num_heads), past)
    queries = SplitHeads(query, heads=num_heads)
    capacity = op.Squeeze(op.Shape(past_key, start=2, end=3))
    column = op.Range(0, capacity, 1)
    written = op.Unsqueeze(column <= op.ReduceMax(positions, [1], keepdims=1), [1, 3])
    clean_keys = op.Unsqueeze(op.Where(written, present_key, op.CastLike(0.0, present_key)), [2])
    clean_values = op.Unsqueeze(op.Where(written, present_value, op.CastLike(0.0, present_value)), [2])
    kv_heads = op.Shape(present_key, start=1, end=2)
    length = op.Shape(queries, start=2, end=3)
    grouped = op.Reshape(queries, op.Concat([0], kv_heads, [-1], length, op.Shape(queries, start=3), axis=0))
    scores = op.Cast(op.MatMul(grouped, op.Transpose(clean_keys, perm=[0, 1, 2, 4, 3])), to=1) * scale
    bias = op.Cast(DistanceBias(table, positions, capacity, by_key=by_key), to=1)
    by_head = op.Reshape(scores, op.Shape(bias)) + bias  # [B, N, S, C]
    visible = op.Unsqueeze(column <= op.Unsqueeze(positions, [2]), [1])
    masked = op.Where(visible, by_head, op.Constant(value_float=float("-inf")))
    weights = op.Reshape(op.CastLike(op.Softmax(masked, axis=-1), value), op.Shape(scores))
    attended = op.MatMul(weights, clean_values)  # [B, K, G, S, H]
    joined = op.Transpose(op.Reshape(attended, op.Shape(queries)), perm=[0, 2, 1, 3])
    return op.Reshape(joined, [0, 0, -1]), present_key, present_value


SOURCE_FUNCTIONS = (CrossAttention, DistanceBias, BiasedCachedAttention)

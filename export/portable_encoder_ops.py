# ruff: noqa: N802  # a function's name here is the name of the ONNX op
"""The `graphport` ops of encoders as ONNX functions made of standard ops (opset 23).

In: the op's inputs and attributes. Out: the op's outputs, equal to `model_def/ops.py`; see `portable_ops.py`.

Shapes: `B` rows, `S` tokens, `N` query heads, `K` key/value heads, `H` head size, `W` width.
"""

from onnxscript import BOOL, FLOAT, INT32, INT64, script
from onnxscript import opset23 as op

from graphport.export.portable_ops import GRAPHPORT, Rotate, SplitHeads


@script(GRAPHPORT, default_opset=op)
def Real(x: FLOAT, lengths: INT32) -> BOOL:
    """Which of the tokens of x [B, S, W] lie within their row's length, [B, S]."""
    column = op.Range(0, op.Squeeze(op.Shape(x, start=1, end=2)), 1)
    return column < op.Unsqueeze(op.Cast(lengths, to=7), [1])


@script(GRAPHPORT, default_opset=op)
def AttendPadded(
    queries: FLOAT, keys: FLOAT, values: FLOAT, real: BOOL, bias: FLOAT, scale: float, softcap: float, causal: int
) -> FLOAT:
    """Heads [B, N, S, H] over keys and values [B, K, S, H], real tokens alone; returns [B, S, N*H].

    `bias` broadcasts to [B, N, S, S].
    """
    kv_heads = op.Shape(keys, start=1, end=2)
    length = op.Shape(queries, start=2, end=3)
    # padding may be anything, NaN included: it must not reach a product with weight 0
    written = op.Unsqueeze(real, [1, 3])
    clean_queries = op.Where(written, queries, op.CastLike(0.0, queries))
    clean_keys = op.Unsqueeze(op.Where(written, keys, op.CastLike(0.0, keys)), [2])
    clean_values = op.Unsqueeze(op.Where(written, values, op.CastLike(0.0, values)), [2])
    grouped = op.Reshape(clean_queries, op.Concat([0], kv_heads, [-1], length, op.Shape(queries, start=3), axis=0))
    scores = op.Cast(op.MatMul(grouped, op.Transpose(clean_keys, perm=[0, 1, 2, 4, 3])), to=1) * scale
    cap = op.Constant(value_float=softcap)
    safe_cap = op.Where(cap > 0.0, cap, 1.0)
    capped = op.Where(cap > 0.0, safe_cap * op.Tanh(scores / safe_cap), scores)
    by_head = op.Reshape(capped, op.Concat([0, -1], length, length, axis=0)) + op.Cast(bias, to=1)  # [B, N, S, S]
    position = op.Range(0, op.Squeeze(length), 1)
    sees_later = op.Constant(value_int=causal) == 0
    not_later = op.Or(op.Unsqueeze(position, [0]) <= op.Unsqueeze(position, [1]), sees_later)  # [S, S]
    visible = op.And(op.Unsqueeze(real, [1, 2]), not_later)
    # the lowest number and not -inf: a row without a token has a softmax too
    masked = op.Where(visible, by_head, op.Constant(value_float=-3.4028234663852886e38))
    weights = op.Reshape(op.CastLike(op.Softmax(masked, axis=-1), values), op.Shape(scores))
    attended = op.MatMul(weights, clean_values)  # [B, K, G, S, H]
    joined = op.Transpose(op.Reshape(attended, op.Shape(queries)), perm=[0, 2, 1, 3])
    return op.Reshape(joined, [0, 0, -1])


@script(GRAPHPORT, default_opset=op)
def PaddedAttention(
    query: FLOAT,
    key: FLOAT,
    value: FLOAT,
    lengths: INT32,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float,
    causal: int,
) -> FLOAT:
    """Attention within rows of `lengths`; see `model_def.ops.padded_attention`."""
    queries = SplitHeads(query, heads=num_heads)
    keys = SplitHeads(key, heads=kv_num_heads)
    values = SplitHeads(value, heads=kv_num_heads)
    return AttendPadded(
        queries,
        keys,
        values,
        Real(query, lengths),
        op.Constant(value_float=0.0),
        scale=scale,
        softcap=softcap,
        causal=causal,
    )


@script(GRAPHPORT, default_opset=op)
def RotaryPaddedAttention(
    query: FLOAT,
    key: FLOAT,
    value: FLOAT,
    lengths: INT32,
    cos: FLOAT,
    sin: FLOAT,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float,
    causal: int,
    rotary_interleaved: int,
) -> FLOAT:
    """PaddedAttention with queries and keys rotated by tables [P, D/2] first."""
    length = op.Shape(query, start=1, end=2)
    cos_rows = op.Unsqueeze(op.Slice(cos, [0], length, [0]), [0, 1])
    sin_rows = op.Unsqueeze(op.Slice(sin, [0], length, [0]), [0, 1])
    queries = Rotate(SplitHeads(query, heads=num_heads), cos_rows, sin_rows, rotary_interleaved=rotary_interleaved)
    keys = Rotate(SplitHeads(key, heads=kv_num_heads), cos_rows, sin_rows, rotary_interleaved=rotary_interleaved)
    values = SplitHeads(value, heads=kv_num_heads)
    return AttendPadded(
        queries,
        keys,
        values,
        Real(query, lengths),
        op.Constant(value_float=0.0),
        scale=scale,
        softcap=softcap,
        causal=causal,
    )


@script(GRAPHPORT, default_opset=op)
def BiasedPaddedAttention(
    query: FLOAT,
    key: FLOAT,
    value: FLOAT,
    lengths: INT32,
    bias: FLOAT,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float,
    causal: int,
) -> FLOAT:
    """PaddedAttention with a bias [1, 1 or N, S, S] added to the scores."""
    queries = SplitHeads(query, heads=num_heads)
    keys = SplitHeads(key, heads=kv_num_heads)
    values = SplitHeads(value, heads=kv_num_heads)
    return AttendPadded(queries, keys, values, Real(query, lengths), bias, scale=scale, softcap=softcap, causal=causal)


@script(GRAPHPORT, default_opset=op)
def BiasedRotaryPaddedAttention(
    query: FLOAT,
    key: FLOAT,
    value: FLOAT,
    lengths: INT32,
    cos: FLOAT,
    sin: FLOAT,
    bias: FLOAT,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float,
    causal: int,
    rotary_interleaved: int,
) -> FLOAT:
    """BiasedPaddedAttention with queries and keys rotated by tables [P, D/2] first."""
    length = op.Shape(query, start=1, end=2)
    cos_rows = op.Unsqueeze(op.Slice(cos, [0], length, [0]), [0, 1])
    sin_rows = op.Unsqueeze(op.Slice(sin, [0], length, [0]), [0, 1])
    queries = Rotate(SplitHeads(query, heads=num_heads), cos_rows, sin_rows, rotary_interleaved=rotary_interleaved)
    keys = Rotate(SplitHeads(key, heads=kv_num_heads), cos_rows, sin_rows, rotary_interleaved=rotary_interleaved)
    values = SplitHeads(value, heads=kv_num_heads)
    return AttendPadded(queries, keys, values, Real(query, lengths), bias, scale=scale, softcap=softcap, causal=causal)


@script(GRAPHPORT, default_opset=op)
def SumChosen(hidden: FLOAT, chosen: BOOL) -> FLOAT:
    """The sum [B, W] float32 of the chosen [B, S] of hidden states [B, S, W].

    A product, because a ReduceSum over a middle axis needs cuDNN.
    """
    wide = op.Where(op.Unsqueeze(chosen, [2]), op.Cast(hidden, to=1), 0.0)
    weights = op.Unsqueeze(op.Cast(chosen, to=1), [1])
    return op.Squeeze(op.MatMul(weights, wide), [1])


@script(GRAPHPORT, default_opset=op)
def Count(lengths: INT32) -> FLOAT:
    """Lengths as float32 [B, 1], at least 1."""
    return op.Max(op.Cast(op.Unsqueeze(lengths, [1]), to=1), 1.0)


@script(GRAPHPORT, default_opset=op)
def PoolMean(hidden: FLOAT, lengths: INT32) -> FLOAT:
    """The mean of each row's tokens."""
    return op.CastLike(SumChosen(hidden, Real(hidden, lengths)) / Count(lengths), hidden)


@script(GRAPHPORT, default_opset=op)
def PoolMeanSqrt(hidden: FLOAT, lengths: INT32) -> FLOAT:
    """The sum of each row's tokens by the square root of their number."""
    return op.CastLike(SumChosen(hidden, Real(hidden, lengths)) / op.Sqrt(Count(lengths)), hidden)


@script(GRAPHPORT, default_opset=op)
def PoolCls(hidden: FLOAT, lengths: INT32) -> FLOAT:
    """Each row's first token."""
    return op.CastLike(SumChosen(hidden, Real(hidden, op.Min(lengths, op.CastLike(1, lengths)))), hidden)


@script(GRAPHPORT, default_opset=op)
def PoolLast(hidden: FLOAT, lengths: INT32) -> FLOAT:
    """Each row's last token."""
    before = Real(hidden, lengths - op.CastLike(1, lengths))
    return op.CastLike(SumChosen(hidden, op.Xor(before, Real(hidden, lengths))), hidden)


@script(GRAPHPORT, default_opset=op)
def PoolMax(hidden: FLOAT, lengths: INT32) -> FLOAT:
    """The largest value of each channel over the row's tokens; TopK, because ReduceMax needs cuDNN."""
    real = op.Unsqueeze(Real(hidden, lengths), [2])
    wide = op.Where(real, op.Cast(hidden, to=1), op.Constant(value_float=-3.4028234663852886e38))
    largest, _ = op.TopK(op.Transpose(wide, perm=[0, 2, 1]), op.Constant(value_ints=[1]), axis=-1)
    has_tokens = op.Unsqueeze(lengths, [1]) > op.CastLike(0, lengths)
    return op.CastLike(op.Where(has_tokens, op.Squeeze(largest, [2]), 0.0), hidden)


@script(GRAPHPORT, default_opset=op)
def EndLengths(input_ids: INT64, lengths: INT32, ends_at: int) -> INT32:
    """Tokens up to each row's first `ends_at`, or of its highest id; TopK takes the first of equals, in integers."""
    column = op.Unsqueeze(op.Range(0, op.Squeeze(op.Shape(input_ids, start=1, end=2)), 1), [0])
    real = column < op.Unsqueeze(op.Cast(lengths, to=7), [1])
    end = op.Constant(value_int=ends_at)
    marks = op.Where(end < 0, input_ids, op.Cast(input_ids == end, to=7))
    _, place = op.TopK(op.Where(real, marks, -1), op.Constant(value_ints=[1]), axis=-1)
    return op.Cast(op.Squeeze(place, [1]) + 1, to=6)


ENCODER_FUNCTIONS = (
    Real,
    AttendPadded,
    PaddedAttention,
    RotaryPaddedAttention,
    BiasedPaddedAttention,
    BiasedRotaryPaddedAttention,
    SumChosen,
    Count,
    PoolMean,
    PoolMeanSqrt,
    PoolCls,
    PoolLast,
    PoolMax,
    EndLengths,
)
